"""Modules whose own forward mixes tokens by code of its own, and what runs in its place.

B batch, S' the tokens of this rank
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from isp.traced.indexers import COMPRESSORS, INDEXERS
from isp.traced.own_attention import OWN_FORWARDS, OWN_METHODS
from isp.traced.own_mixers import OWN_MIXERS

__all__ = ["register_mixer", "use_registered_mixers"]

_PLACE = "transformers.models."

_forwards: dict[str, Callable[..., Any]] = {
    _PLACE + name: forward
    for name, forward in (OWN_FORWARDS | OWN_MIXERS | INDEXERS | COMPRESSORS).items()
}
"""By the name of the class: its modules need not be imported."""

_methods = {_PLACE + name: instead for name, instead in OWN_METHODS.items()}


def register_mixer(module_class: type[nn.Module], forward: Callable[..., Any]) -> None:
    """Let `forward(module, ...)` take the place of a class's forward in parallelised models.

    It takes what the class's own forward takes, of this rank's tokens [B, S', ..], and mixes them
    by `isp.attention`, `isp.causal_conv1d`, `isp.gated_delta_rule` and `isp.state_space_scan`
    alone. For subclasses, too. Other models of the process keep their own forward.
    """
    _forwards[_name(module_class)] = forward


def use_registered_mixers(model: nn.Module) -> bool:
    """Give modules of registered classes what was registered, in place; whether there are any."""
    found = False
    for module in model.modules():
        for method, registered in (("forward", _forwards), ("_attn", _methods)):
            names = (_name(cls) for cls in type(module).__mro__)
            instead = next((registered[name] for name in names if name in registered), None)
            if instead is not None:
                setattr(module, method, partial(instead, module))
                found = True
    return found


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
