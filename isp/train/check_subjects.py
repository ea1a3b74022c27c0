"""Small models for `isp check`: of a Hugging Face configuration, or of the decoder's keys."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from isp.traced.folder import read_json
from isp.traced.model import TracedModel
from isp.traced.tiny import tiny_model

__all__ = ["HuggingFaceSubject", "read_folder"]


class HuggingFaceSubject:
    """A small model of the same structure as a large one of transformers."""

    def __init__(self, config: Any) -> None:
        self.name: str = config.model_type
        self._model: Any = tiny_model(config)
        self.vocab_size: int = self._model.config.vocab_size

    def plain(self) -> _PlainHuggingFace:
        return _PlainHuggingFace(copy.deepcopy(self._model))

    def driven(self, checkpoint: float) -> TracedModel:
        return TracedModel(copy.deepcopy(self._model), checkpoint=checkpoint)


class _PlainHuggingFace:
    """The model as transformers runs it, with its own attention in plain tensor operations."""

    def __init__(self, model: Any) -> None:
        self._model = model
        model.set_attn_implementation("eager")

    def logits(self, ids: Tensor, positions: Tensor) -> Tensor:
        logits: Tensor = self._model(input_ids=ids, position_ids=positions, use_cache=False).logits
        return logits

    def parameters(self) -> dict[str, nn.Parameter]:
        return dict(self._model.named_parameters())

    def modules(self) -> dict[str, nn.Module]:
        return dict(self._model.named_modules())


def read_folder(folder: Path) -> Any:
    """The configuration of the model in a Hugging Face folder; no weights are read.

    Raises ValueError for a folder without one, or one that transformers does not know.
    """
    kind = read_json(folder / "config.json").get("model_type")
    try:
        from transformers import AutoConfig
    except ImportError:
        raise ValueError(
            f"{folder} needs the package transformers, which is not installed:"
            f" bash tools/setup_env.sh hf (or pip install transformers)"
        ) from None
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (KeyError, OSError, TypeError, ValueError) as error:
        raise ValueError(
            f"{folder / 'config.json'} (model_type {kind!r}) cannot be read by transformers:"
            f" {' '.join(str(error).split())[:300]}"
        ) from error
    return config
