"""A small model of the same structure as a large one of transformers, for checks on a CPU."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

__all__ = ["kept_in_float64", "tiny_config"]

_HEAD = 16

_AT_MOST = {
    "vocab_size": 160,
    "intermediate_size": 48,
    "max_position_embeddings": 1024,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "sliding_window": 24,
    "first_k_dense_replace": 1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Sizes that no structure depends on, by transformers' names."""


def tiny_config(config: Any) -> Any:
    """A copy of a model's configuration with few and narrow layers, one of each kind at least.

    Query heads still share KV heads as they did, if up to 8 of them share one.
    """
    tiny = copy.deepcopy(config)
    for name, limit in _AT_MOST.items():
        value = getattr(tiny, name, None)
        if isinstance(value, int) and not isinstance(value, bool) and value > limit:
            setattr(tiny, name, limit)
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    shared, kept = min(heads // kv_heads, 8), min(kv_heads, 2 if kv_heads < heads else 4)
    tiny.num_attention_heads = shared * kept
    if getattr(config, "num_key_value_heads", None) is not None:
        tiny.num_key_value_heads = kept
    tiny.hidden_size = _HEAD * shared * kept
    if getattr(config, "head_dim", None) is not None:
        latent = getattr(config, "kv_lora_rank", None) is not None
        tiny.head_dim = _AT_MOST["qk_rope_head_dim"] if latent else _HEAD
    layers = _one_of_each_kind(config)
    tiny.num_hidden_layers = len(layers)
    if getattr(config, "layer_types", None) is not None:
        tiny.layer_types = [config.layer_types[index] for index in layers]
    return tiny


def _one_of_each_kind(config: Any) -> list[int]:
    """The first layer of each kind, and a further one of the last kind if that is the only one."""
    kinds = list(getattr(config, "layer_types", None) or ["full"] * config.num_hidden_layers)
    dense = getattr(config, "first_k_dense_replace", None)
    if dense is not None:
        kinds = [f"{kind}, {i < dense}" for i, kind in enumerate(kinds)]
    first = [kinds.index(kind) for kind in dict.fromkeys(kinds)]
    rest = [index for index in range(len(kinds)) if index not in first]
    return sorted(first + rest[: max(0, 2 - len(first))])


class _Widened(TorchFunctionMode):
    """Makes float64 of what is cast to float32."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is Tensor.float:
            func = Tensor.double
        wide = {name: _wide(value) for name, value in (kwargs or {}).items()}
        return func(*map(_wide, args), **wide)


def _wide(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


def kept_in_float64(model: nn.Module) -> nn.Module:
    """`model`, whose own casts to float32 (of norms, angles, softmax) give float64, in place.

    Otherwise no comparison of its gradients goes below 1e-7, in whatever layout.
    """
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList)]
    for module in (model, *(entry for entries in lists for entry in entries)):
        module.__class__ = _widened(type(module))
    return model.double()


def _widened(kind: type[nn.Module]) -> type[nn.Module]:
    """A class that is `kind`, whose forward runs in `_Widened`."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with _Widened():
            return kind.forward(self, *args, **kwargs)

    return type(kind.__name__, (kind,), {"forward": forward})
