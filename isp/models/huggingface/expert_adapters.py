"""Run PEFT adapters on stacks of experts (`target_parameters`), which compute with W + B A.

PEFT replaces W by W + B A around a call, for which a rank would need the whole W. Here the adapter
passes the factors B and A to the experts, which add their product to the weights after these are
gathered. All ranks have the factors of all experts. With expert parallelism a rank reads the
factors of its own experts, and gradients are summed over ranks.

E experts, r rank of an adapter
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from isp.core.torch_private import reparametrized
from isp.models.roles import holds_experts

__all__ = ["pass_factors"]


def pass_factors(model: nn.Module) -> None:
    """Change PEFT's adapters on stacks of experts, in place: the experts apply their factors.

    PEFT's own code would change the whole stack, of which a rank may have only a part. Instead the
    experts' forward gets the factors B and A, and adds their product to the weights that it has.

    Raises ValueError for an adapter on a parameter that is not a stack of experts.
    """
    from peft.tuners.lora.layer import ParamWrapper

    for name, module in model.named_modules():
        if not isinstance(module, ParamWrapper) or hasattr(type(module), "passes_factors"):
            continue
        experts: Any = module.get_base_layer()
        if not holds_experts(experts) or module.get_param().dim() != 3:
            raise ValueError(
                f"target_parameters adapts {module.parameter_name} of {name}, which is not a stack"
                f" of experts: use target_modules for linear layers"
            )
        module.__class__ = _passing_factors(type(module))
        kind: Any = type(experts)
        # Two adapters on one module of experts share it: replace its class once.
        experts.__class__ = kind if hasattr(kind, "takes_factors") else _taking_factors(kind)


@cache
def _passing_factors(kind: Any) -> Any:
    """Return a subclass of PEFT's class `kind` whose forward passes on its factors B and A.

    It calls its base layer with them, which is the module of experts or another adapter around it.
    """

    def forward(self: Any, *args: Any, factors: Any = None, **kwargs: Any) -> Any:
        own = dict[str, tuple[Tensor, Tensor]](factors or {})
        names = () if self.disable_adapters or self.merged else self.active_adapters
        here = [name for name in names if name in self.lora_A]
        # `left` is B [E, .., r] and `right` A [E, r, ..] of each active adapter. Concatenated along
        # r, they act as the factors of one adapter.
        if here:
            left, right, scales = zip(*map(self.get_delta_factors, here), strict=True)
            left = tuple(x * scale for x, scale in zip(left, scales, strict=True))
            own[self.parameter_name] = torch.cat(left, -1), torch.cat(right, 1)
        return self.base_layer(*args, factors=own, **kwargs)

    return type(kind.__name__, (kind,), {"forward": forward, "passes_factors": True})


@cache
def _taking_factors(kind: Any) -> Any:
    """Return a subclass of experts `kind` whose forward adds the factors' products to its weights.

    `factors`: by name of a stack, the factors B and A of the adapters on it.
    """

    def forward(self: Any, *args: Any, factors: Any = None, **kwargs: Any) -> Any:
        changed = {
            name: torch.baddbmm(getattr(self, name), lhs, rhs)
            for name, (lhs, rhs) in (factors or {}).items()
        }
        with reparametrized(self, changed):
            return kind.forward(self, *args, **kwargs)

    names = {"forward": forward, "takes_factors": True, "__module__": kind.__module__}
    return type(kind.__name__, (kind,), names)
