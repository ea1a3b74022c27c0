"""Adapters of PEFT on stacks of experts (`target_parameters`): W + B A of each, as PEFT has it.

PEFT puts W + B A in the place of W around a call, which a rank does not have. Here the factors go
with the call, and are added where the experts read their whole weights. Every rank has the factors
of all experts; where these are spread it reads those of its own, and gradients are summed.

E experts
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from isp.core.torch_private import reparametrized
from isp.models.roles import holds_experts

__all__ = ["hand_on_factors"]


def hand_on_factors(model: nn.Module) -> None:
    """Let the adapters in `model`, of PEFT, hand their factors to the experts, in place.

    Raises ValueError for one on a parameter that is no stack of experts.
    """
    from peft.tuners.lora.layer import ParamWrapper

    for name, module in model.named_modules():
        if not isinstance(module, ParamWrapper) or hasattr(type(module), "hands_on_factors"):
            continue
        experts: Any = module.get_base_layer()
        if not holds_experts(experts) or module.get_param().dim() != 3:
            raise ValueError(
                f"target_parameters adapts {module.parameter_name} of {name}, which is not a stack"
                f" of experts: use target_modules for linear layers"
            )
        module.__class__ = _handing_on(type(module))
        kind: Any = type(experts)
        experts.__class__ = kind if hasattr(kind, "takes_factors") else _taking(kind)


@cache
def _handing_on(kind: Any) -> Any:
    """A class that is `kind`, PEFT's, and gives its factors to the module below."""

    def forward(self: Any, *args: Any, factors: Any = None, **kwargs: Any) -> Any:
        own = dict[str, tuple[Tensor, Tensor]](factors or {})
        names = () if self.disable_adapters or self.merged else self.active_adapters
        here = [name for name in names if name in self.lora_A]
        if here:  # [E, .., r] and [E, r, ..], of several as of one with all their ranks
            left, right, scales = zip(*map(self.get_delta_factors, here), strict=True)
            left = tuple(x * scale for x, scale in zip(left, scales, strict=True))
            own[self.parameter_name] = torch.cat(left, -1), torch.cat(right, 1)
        return self.base_layer(*args, factors=own, **kwargs)

    return type(kind.__name__, (kind,), {"forward": forward, "hands_on_factors": True})


@cache
def _taking(kind: Any) -> Any:
    """A class that is `kind`, and adds the product of factors to its weights where it is called."""

    def forward(self: Any, *args: Any, factors: Any = None, **kwargs: Any) -> Any:
        changed = {
            name: torch.baddbmm(getattr(self, name), lhs, rhs)
            for name, (lhs, rhs) in (factors or {}).items()
        }
        with reparametrized(self, changed):
            return kind.forward(self, *args, **kwargs)

    names = {"forward": forward, "takes_factors": True, "__module__": kind.__module__}
    return type(kind.__name__, (kind,), names)
