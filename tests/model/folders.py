"""Folders of small models as transformers writes them, with the models that it computes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from isp.models.tiny import kept_in_float64
from tests.model.internlm2 import AS_LLAMA, save_as_internlm2

__all__ = ["FAMILIES", "Logits", "in_float64", "loaded", "make_folder"]

Logits = Callable[[Tensor], Tensor]

_SIZES = {
    "vocab_size": 264,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 40,
    "max_position_embeddings": 64,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_slow": 0.5,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 2.0,
    "original_max_position_embeddings": 32,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
_EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"rope_parameters": _LLAMA3}),
    "llama, tied": ("Llama", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "mistral": ("Mistral", {"sliding_window": 7, "head_dim": 6}),
    "qwen2": ("Qwen2", {"rope_parameters": _YARN}),
    "qwen2, tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": (
        "Qwen3",
        {
            "head_dim": 16,
            "use_sliding_window": True,
            "sliding_window": 9,
            "max_window_layers": 0,
            "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 300.0},
        },
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 3, "sliding_window": 7, "head_dim": 6}),
    "qwen2_moe": (
        "Qwen2Moe",
        {**_EXPERTS, "shared_expert_intermediate_size": 12, "mlp_only_layers": [0]},
    ),
    "qwen3_moe": ("Qwen3Moe", {**_EXPERTS, "norm_topk_prob": True, "head_dim": 16}),
}
"""Of transformers, by a name; InternLM2 is not in it."""


def make_folder(name: str, folder: Path) -> Logits:
    """Write a model of `FAMILIES`, or internlm2, with random weights; what gives its logits."""
    import transformers

    torch.manual_seed(1)
    prefix, changes = ("Llama", AS_LLAMA) if name == "internlm2" else FAMILIES[name]
    config = getattr(transformers, f"{prefix}Config")(**{**_SIZES, **changes})
    model = transformers.AutoModelForCausalLM.from_config(config).double()
    with torch.no_grad():
        for parameter in model.parameters():  # none is 0 or 1: biases and norms count too
            parameter.copy_(0.2 * torch.randn_like(parameter) + (parameter.dim() == 1))
    if name == "internlm2":
        save_as_internlm2(model, folder)
        return in_float64(model)
    model.save_pretrained(folder)
    return loaded(folder)


def loaded(folder: Path) -> Any:
    """What transformers makes of a folder, in float64 throughout."""
    import transformers

    return in_float64(transformers.AutoModelForCausalLM.from_pretrained(folder))


def in_float64(model: Any) -> Any:
    """The model in float64; tokens [B, S] -> logits [B, S, V]."""
    rotary = model.model.rotary_emb
    model.model.rotary_emb = kept_in_float64(_Made())(type(rotary), model.config)
    kept_in_float64(model).train(False)
    return _LogitsOnly(model)


class _Made(nn.Module):
    def forward(self, kind: Callable[..., nn.Module], *args: Any) -> nn.Module:
        """A module whose angles are not rounded, either."""
        return kind(*args)


class _LogitsOnly(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.model(ids, use_cache=False).logits
        return logits
