"""Modules whose own forward mixes tokens by code of its own, and what runs in its place.

B batch, S' the tokens of this rank
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from isp.models.indexers import COMPRESSORS, INDEXERS, PLACE, class_names
from isp.models.own_attention import OWN_FORWARDS, OWN_METHODS
from isp.models.own_mixers import OWN_MIXERS

__all__ = ["register_mixer", "use_registered_mixers"]

_forwards: dict[str, Callable[..., Any]] = {
    PLACE + name: forward
    for name, forward in (OWN_FORWARDS | OWN_MIXERS | INDEXERS | COMPRESSORS).items()
}
"""By the name of the class: its modules need not be imported."""

_methods = {PLACE + name: instead for name, instead in OWN_METHODS.items()}


def register_mixer(module_class: type[nn.Module], forward: Callable[..., Any]) -> None:
    """Let `forward(module, ...)` take the place of a class's forward in parallelised models.

    It takes what the class's own forward takes, of this rank's tokens [B, S', ..], and mixes them
    by `isp.attention`, `isp.causal_conv1d`, `isp.gated_delta_rule` and `isp.state_space_scan`
    alone. For subclasses, too. Other models of the process keep their own forward.
    """
    _forwards[f"{module_class.__module__}.{module_class.__qualname__}"] = forward


def use_registered_mixers(model: nn.Module) -> bool:
    """Give modules of registered classes what was registered, in place; whether there are any."""
    found = False
    for module in model.modules():
        for method, registered in (("forward", _forwards), ("_attn", _methods)):
            names = (name for name in class_names(module) if name in registered)
            instead = next((registered[name] for name in names), None)
            if instead is not None:
                setattr(module, method, partial(instead, module))
                found = True
    return found
