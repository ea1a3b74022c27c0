"""Models of transformers that compute entirely in float64."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from isp.models.huggingface.tiny import kept_in_float64
from model.config import ModelConfig
from model.huggingface import config_json

__all__ = ["in_float64", "loaded", "of_decoder"]


def of_decoder(keys: ModelConfig, context: int) -> Any:
    """Return the model of transformers for a decoder, with random weights."""
    import transformers

    described = config_json(keys, dtype="float64", context=context)
    torch.manual_seed(1)
    config = transformers.AutoConfig.for_model(**described)
    model = transformers.AutoModelForCausalLM.from_config(config).double()
    with torch.no_grad():
        # none is 0 or 1, so that biases and norms have an effect
        for parameter in model.parameters():
            parameter.copy_(0.2 * torch.randn_like(parameter) + (parameter.dim() == 1))
    return in_float64(model)


def loaded(folder: Path) -> Any:
    """Return the model that transformers loads from a folder, entirely in float64."""
    import transformers

    return in_float64(transformers.AutoModelForCausalLM.from_pretrained(folder))


def in_float64(model: Any) -> Any:
    """Return the model in float64; tokens [B, S] -> logits [B, S, V]."""
    rotary = model.model.rotary_emb
    model.model.rotary_emb = kept_in_float64(_Made())(type(rotary), model.config)
    kept_in_float64(model).train(False)
    return _LogitsOnly(model)


class _Made(nn.Module):
    def forward(self, kind: Callable[..., nn.Module], *args: Any) -> nn.Module:
        """Return a module whose rotary angles are not rounded either."""
        return kind(*args)


class _LogitsOnly(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.model(ids, use_cache=False).logits
        return logits
