"""Models of transformers made of their configuration; of those that see, the part that reads text.

A vision-language model is made whole, as its files name and convert all of it, and what a forward
of tokens alone does not call (its tower and projector) is then taken out.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

__all__ = ["leave_alone", "made", "on_meta", "parameters_on_meta", "sees", "take_out_tower"]

logger = logging.getLogger(__name__)


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """In this context parameters lose their memory as modules take them; buffers keep theirs."""
    register = nn.Module.register_parameter

    def without_memory(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            grad = parameter.requires_grad
            parameter = nn.Parameter(parameter.detach().to("meta"), requires_grad=grad)
        register(module, name, parameter)

    setattr(nn.Module, "register_parameter", without_memory)  # noqa: B010
    try:
        yield
    finally:
        setattr(nn.Module, "register_parameter", register)  # noqa: B010


def on_meta(model: nn.Module) -> nn.Module:
    """A copy of `model` without memory for its parameters and buffers."""
    empty: dict[int, Any] = {id(b): torch.empty_like(b, device="meta") for b in model.buffers()}
    for parameter in model.parameters():
        value = torch.empty_like(parameter, device="meta")
        empty[id(parameter)] = nn.Parameter(value, requires_grad=parameter.requires_grad)
    return copy.deepcopy(model, empty)


def leave_alone(model: nn.Module, shape: nn.Module, unused: Iterable[str]) -> None:
    """Freeze the `unused` parameters, which torch's optimizers would not change either.

    In `model`, and in `shape`, the same without memory.
    """
    trained = [name for name in unused if model.get_parameter(name).requires_grad]
    for name in trained:
        model.get_parameter(name).requires_grad_(False)
        shape.get_parameter(name).requires_grad_(False)
    if trained:
        logger.warning(
            "%d parameters of %s get no gradient from a forward of tokens and are not trained (%s)",
            len(trained),
            type(model).__name__,
            ", ".join(trained[:3]) + ", ..." * (len(trained) > 3),
        )


def sees(config: Any) -> bool:
    """Whether a configuration is of a vision-language model."""
    from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    composite = config.get_text_config(decoder=True) is not config
    return composite and type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING


def made(config: Any, dtype: torch.dtype | None = None) -> Any:
    """The model of a configuration, a vision-language one whole; without code of a folder's."""
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        AutoModelForSequenceClassification,
    )

    kind: Any = AutoModelForImageTextToText if sees(config) else AutoModelForCausalLM
    if any(name.endswith("ForSequenceClassification") for name in config.architectures or ()):
        kind = AutoModelForSequenceClassification
    return kind.from_config(config, dtype=dtype, trust_remote_code=False)


def take_out_tower(model: Any) -> tuple[str, ...]:
    """Take out of a vision-language model, in place, all but what reads text.

    Gives the names of the modules that were taken out; none of another model.
    """
    config = getattr(model, "config", None)
    if config is None or not sees(config):
        return ()
    read = {model.get_decoder(), model.get_input_embeddings(), model.get_output_embeddings()}
    return tuple(_take_out(model, "", read - {None}))


def _take_out(module: nn.Module, prefix: str, read: set[Any]) -> Iterator[str]:
    for local, child in list(module.named_children()):
        if child in read:
            continue
        if read & set(child.modules()):
            yield from _take_out(child, f"{prefix}{local}.", read)
        elif any(True for _ in child.parameters()):
            setattr(module, local, None)
            yield f"{prefix}{local}"
