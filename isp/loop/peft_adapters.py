"""PEFT adapters: merge them into the base model's weights by PEFT's code, or turn them off."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

__all__ = ["merged", "turned_off"]


def merged(model: Any, shape: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of a block of `model`, a PeftModel, with its adapters merged into them.

    `weights` are the full weights of the block, with their names in the PeftModel; the result has
    the names of the base model. `shape` is the PeftModel on the meta device. Raises ValueError for
    an adapter on a tied weight.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import ModulesToSaveWrapper

    found = dict(weights)
    for name, layer in model.named_modules():
        if isinstance(layer, ModulesToSaveWrapper):
            # PEFT's modules_to_save: a trained copy of the module replaces the original module.
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
    """Return the weights of a layer with adapters after the merge, by names in the base model.

    `own` are the full weights of the base layer and the adapters; `shape` is the layer on the meta
    device.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    # Make a copy of the layer whose parameters are the full weights: deepcopy takes an object that
    # is in its memo from there, so each meta parameter becomes the weight of the same name.
    values: dict[int, Any] = {}
    for local, parameter in shape.named_parameters():
        if f"{name}.{local}" not in own:
            raise ValueError(f"{name}.{local} is tied to another weight: PEFT cannot merge into it")
        values[id(parameter)] = nn.Parameter(own[f"{name}.{local}"], requires_grad=False)
    twin: Any = copy.deepcopy(shape, values)
    for own_layer, part in zip(layer.modules(), twin.modules(), strict=True):
        # `shape` has the scaling factors of adapters at the time of the trace. The user may have
        # changed them since then.
        if hasattr(own_layer, "scaling"):
            part.scaling = own_layer.scaling
        # Experts have a PEFT layer for each stacked parameter, one inside another: merge them all.
        if isinstance(part, BaseTunerLayer):
            part.merge()
    return {f"{name}.{local}": p.data for local, p in twin.get_base_layer().named_parameters()}


def _taken(weights: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    """Remove the weights of a module and its submodules from `weights`, and return them."""
    return {key: weights.pop(key) for key in [*weights] if key.startswith(f"{name}.")}


@contextmanager
def turned_off(model: Any) -> Iterator[None]:
    """Scale the adapters of `model` by 0 in this context, so that they add nothing.

    They are still called, so that modules run and weights are gathered in the order of the trace.
    Raises ValueError if a scale of 0 would not give the base model's output.
    """
    from peft.tuners.lora import LoraLayer
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    if not hasattr(model, "peft_config"):
        raise ValueError(f"run.adapters_off(): {type(model).__name__} has no adapters of PEFT")
    layers: list[Any] = [m for m in model.modules() if isinstance(m, BaseTunerLayer)]
    replaced = any(isinstance(module, AuxiliaryTrainingWrapper) for module in model.modules())
    biases = any(getattr(c, "bias", "none") != "none" for c in model.peft_config.values())
    if replaced or biases or any(not isinstance(m, LoraLayer) or m.lora_variant for m in layers):
        raise ValueError(
            "run.adapters_off() supports only plain LoRA, which adds to the base model's output:"
            " with other adapters, modules_to_save or trained biases, parallelize a second,"
            " frozen model as the reference"
        )
    before = [layer.scaling for layer in layers]
    for layer in layers:
        layer.scaling = dict.fromkeys(layer.scaling, 0.0)
    try:
        yield
    finally:
        for layer, scaling in zip(layers, before, strict=True):
            layer.scaling = scaling
