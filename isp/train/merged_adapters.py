"""Adapters of PEFT in the weights of the model below them, by PEFT's own arithmetic."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

__all__ = ["merged"]


def merged(model: Any, shape: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Whole weights of a block of `model`, a PeftModel, as its base model has them, by its names.

    `shape` is the model without memory; `weights` are used up. Raises ValueError for an adapter
    on a tied weight.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import ModulesToSaveWrapper

    found = dict(weights)
    for name, layer in model.named_modules():
        if isinstance(layer, ModulesToSaveWrapper):
            own = _taken(found, name)
            for prefix in (f"{name}.modules_to_save.{active}" for active in layer.active_adapters):
                saved = _taken(own, prefix)
                found |= {key.replace(prefix, name, 1): weight for key, weight in saved.items()}
        elif isinstance(layer, BaseTunerLayer) and (own := _taken(found, name)):
            found |= _layer_merged(name, layer, shape.get_submodule(name), own)
    inner = model.get_base_model()
    prefix = next(name for name, module in model.named_modules() if module is inner)
    return {name.removeprefix(f"{prefix}."): weight for name, weight in found.items()}


def _layer_merged(
    name: str, layer: Any, shape: nn.Module, own: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    values: dict[int, Any] = {}
    for local, parameter in shape.named_parameters():
        if f"{name}.{local}" not in own:
            raise ValueError(f"{name}.{local} is tied to another weight: PEFT cannot merge into it")
        values[id(parameter)] = nn.Parameter(own[f"{name}.{local}"], requires_grad=False)
    twin: Any = copy.deepcopy(shape, values)
    if hasattr(layer, "scaling"):
        twin.scaling = layer.scaling
    twin.merge()
    return {f"{name}.{local}": p.data for local, p in twin.get_base_layer().named_parameters()}


def _taken(weights: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    """The weights of a module and those in it, which are taken out."""
    return {key: weights.pop(key) for key in [*weights] if key.startswith(f"{name}.")}
