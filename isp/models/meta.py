"""Models on the meta device, which have no memory, and fast copies of models."""

from __future__ import annotations

import copy
import logging
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

__all__ = ["copied", "freeze_unused", "on_meta", "parameters_on_meta"]

logger = logging.getLogger(__name__)


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Put each parameter on the meta device when a module registers it in this context.

    Buffers keep their values: only the code that built the model could compute them again.
    """

    def without_memory(_: nn.Module, __: str, parameter: nn.Parameter) -> nn.Parameter | None:
        if parameter.is_meta:
            # With None, torch registers the given parameter unchanged.
            return None
        grad = parameter.requires_grad
        return nn.Parameter(parameter.detach().to("meta"), requires_grad=grad)

    # The hook sees all modules of the process while the context lasts. torch documents that it may
    # return a parameter to register in place of the given one, but does not annotate it so.
    handle = register_module_parameter_registration_hook(without_memory)  # type: ignore[arg-type]
    try:
        yield
    finally:
        handle.remove()


def on_meta(model: nn.Module) -> nn.Module:
    """Return a copy of `model` with all parameters and buffers on the meta device."""
    empty: dict[int, Any] = {id(b): torch.empty_like(b, device="meta") for b in model.buffers()}
    for parameter in model.parameters():
        value = torch.empty_like(parameter, device="meta")
        empty[id(parameter)] = nn.Parameter(value, requires_grad=parameter.requires_grad)
    return copied(model, empty)


def copied(model: nn.Module, instead: dict[int, Any]) -> nn.Module:
    """Return a deep copy of a model in which some objects are replaced.

    `instead`: the replacements, by `id` of the object, as `copy.deepcopy` takes them (its memo).
    Each module has a dozen empty dicts for hooks, which `copy.deepcopy` is slow to copy:
    replacements for these are added to `instead`, and make the copy two to four times as fast.
    """
    for module in model.modules():
        for value in vars(module).values():
            if type(value) in (dict, OrderedDict) and not value:
                instead.setdefault(id(value), type(value)())
    return copy.deepcopy(model, instead)


def freeze_unused(shape: nn.Module, unused: Iterable[str]) -> None:
    """Freeze the `unused` parameters of `shape`, and warn about those that were trainable.

    They get no gradient, so torch's optimizers would not change them either. `shape` is a model on
    the meta device; `TracedModel.build` freezes the same parameters of the real model.
    """
    trained = [name for name in unused if shape.get_parameter(name).requires_grad]
    for name in trained:
        shape.get_parameter(name).requires_grad_(False)
    if trained:
        logger.warning(
            "%d parameters of %s get no gradient and are not trained: a forward of tokens does not"
            " read them, or reads them only to choose keys (%s)",
            len(trained),
            type(shape).__name__,
            ", ".join(trained[:3]) + ", ..." * (len(trained) > 3),
        )
