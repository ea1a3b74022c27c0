"""Make transformers models from their configuration, without weights.

A vision-language model is made with all of its parts, because the names and conversions of its
files are those of the whole model. Then the modules that a forward of text does not call are
removed: vision tower and projector.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from isp.utils.files import check_regular_files
from isp.utils.limits import limited

__all__ = [
    "folder_config",
    "is_vision_language",
    "limited_model",
    "new_model",
    "take_out_tower",
    "without_implementations",
]

_CONFIG_SECONDS, _CONFIG_BYTES = 60.0, 2**30
"""Limits for reading a config.json: some types make a list with an entry for each layer, whose
number comes from the file."""
_GPU_ADDRESSES = 2**46
"""The limit in bytes of address space on a machine with a GPU: a library may start the GPU driver,
which reserves much of it."""
_MODEL_SECONDS, _MODEL_BYTES = 1200.0, 2**35
"""Limits for making and tracing a model: its modules, buffers such as tables of angles, and the
activations of the probe's backward (4 GB for 70B parameters). `limited_model` also limits memory to
half of the machine's memory."""


def is_vision_language(config: Any) -> bool:
    """Return whether a configuration is that of a vision-language model."""
    from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    composite = config.get_text_config(decoder=True) is not config
    return composite and type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING


def folder_config(folder: str | Path) -> Any:
    """Read the configuration of a local folder as transformers' class; run no code of the folder.

    Errors of transformers pass through. Raises OSError or ValueError for files that are not
    regular, such as pipes and devices.
    """
    from transformers import AutoConfig

    check_regular_files(folder)
    what = str(Path(folder) / "config.json")
    addresses = _GPU_ADDRESSES if torch.cuda.is_available() else None
    with limited(what, seconds=_CONFIG_SECONDS, most_bytes=_CONFIG_BYTES, address_bytes=addresses):
        # Without trust_remote_code transformers asks at the terminal, on every rank.
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    return without_implementations(config)


@contextmanager
def limited_model(folder: str) -> Iterator[None]:
    """Limit time and memory in this context, in which a folder's model is made without weights.

    Without limits, sizes in a damaged or hostile config.json could use up the machine.
    """
    # A parameter is allocated, though not written, before it moves to the meta device. So address
    # space may be as large as the machine's memory, and memory half of that.
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    addresses = max(physical, 2**36)
    if torch.cuda.is_available():
        addresses = _GPU_ADDRESSES
    with limited(
        f"the model of {Path(folder) / 'config.json'}",
        seconds=_MODEL_SECONDS,
        most_bytes=min(_MODEL_BYTES, physical // 2),
        address_bytes=addresses,
    ):
        yield


def without_implementations(config: Any) -> Any:
    """Reset the implementations of attention and experts in `config` and its parts, in place.

    transformers then chooses implementations itself. Without this, a folder could name a kernel on
    the hub (`_attn_implementation: OWNER/NAME@COMMIT`), which transformers would download and run
    when it makes the model.
    """
    from transformers import PretrainedConfig

    config._attn_implementation_internal = None
    config._experts_implementation_internal = None
    # Look at all attributes, because `sub_configs` of a class may leave out one of its parts.
    for part in vars(config).values():
        if isinstance(part, PretrainedConfig):
            without_implementations(part)
    return config


def new_model(config: Any, dtype: torch.dtype | None = None) -> Any:
    """Make the model of a configuration, with all parts; run no code of the model's folder."""
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        AutoModelForSequenceClassification,
    )

    kind: Any = AutoModelForImageTextToText if is_vision_language(config) else AutoModelForCausalLM
    if any(name.endswith("ForSequenceClassification") for name in config.architectures or ()):
        kind = AutoModelForSequenceClassification
    config = without_implementations(config)
    return kind.from_config(config, dtype=dtype, trust_remote_code=False)


def take_out_tower(model: Any) -> tuple[str, ...]:
    """Remove from a vision-language model, in place, the modules that text does not use.

    Returns the names of the removed modules; for any other model, none.
    """
    config = getattr(model, "config", None)
    if config is None or not is_vision_language(config):
        return ()
    read = {model.get_decoder(), model.get_input_embeddings(), model.get_output_embeddings()}
    return tuple(_take_out(model, "", read - {None}))


def _take_out(module: nn.Module, prefix: str, read: set[Any]) -> Iterator[str]:
    """Remove submodules that have parameters and are not in `read`; yield their names."""
    for local, child in list(module.named_children()):
        if child in read:
            continue
        if read & set(child.modules()):
            # The child contains a module of `read`: keep it, and look at its own children.
            yield from _take_out(child, f"{prefix}{local}.", read)
        elif any(True for _ in child.parameters()):
            setattr(module, local, None)
            yield f"{prefix}{local}"
