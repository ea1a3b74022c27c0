"""PEFT adapters on stacks of experts (`target_parameters`): each expert computes with W + B A.

PEFT replaces W by W + B A around a call, for which a rank would need the whole W. Here the call
passes the factors on, and their product is added where the experts read their gathered weights.
All ranks hold the factors of all experts; with expert parallelism a rank reads those of its own
experts, and the gradients are summed.

E experts, r rank of an adapter
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
    """Make PEFT's adapters in `model` pass their factors to the experts, in place.

    Raises ValueError for an adapter on a parameter that is not a stack of experts.
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
    """Return a subclass of PEFT's `kind` whose forward passes its factors to the wrapped module."""

    def forward(self: Any, *args: Any, factors: Any = None, **kwargs: Any) -> Any:
        own = dict[str, tuple[Tensor, Tensor]](factors or {})
        names = () if self.disable_adapters or self.merged else self.active_adapters
        here = [name for name in names if name in self.lora_A]
        # [E, .., r] and [E, r, ..]; several adapters act as one whose rank is the sum of theirs.
        if here:
            left, right, scales = zip(*map(self.get_delta_factors, here), strict=True)
            left = tuple(x * scale for x, scale in zip(left, scales, strict=True))
            own[self.parameter_name] = torch.cat(left, -1), torch.cat(right, 1)
        return self.base_layer(*args, factors=own, **kwargs)

    return type(kind.__name__, (kind,), {"forward": forward, "hands_on_factors": True})


@cache
def _taking(kind: Any) -> Any:
    """Return a subclass of `kind` whose forward adds the products of factors to its weights."""

    def forward(self: Any, *args: Any, factors: Any = None, **kwargs: Any) -> Any:
        changed = {
            name: torch.baddbmm(getattr(self, name), lhs, rhs)
            for name, (lhs, rhs) in (factors or {}).items()
        }
        with reparametrized(self, changed):
            return kind.forward(self, *args, **kwargs)

    names = {"forward": forward, "takes_factors": True, "__module__": kind.__module__}
    return type(kind.__name__, (kind,), names)
