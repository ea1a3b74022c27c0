"""A small model of the same structure as a large one of transformers, for checks on a CPU."""

from __future__ import annotations

import copy
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

__all__ = ["kept_in_float64", "tiny_config", "tiny_model"]

_HEAD = 8

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
    "n_group": 2,
    "topk_group": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "sliding_window": 9,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Sizes that no structure depends on, by transformers' names."""


def tiny_model(config: Any) -> nn.Module:
    """The causal language model of `tiny_config(config)`, for comparisons to 1e-9.

    In float64, its own casts included; with random weights of which none is so small, and no
    vector so uniform, that a gradient would be zero for that. Raises ValueError where transformers
    cannot build it.
    """
    from transformers import AutoModelForCausalLM

    try:
        model = AutoModelForCausalLM.from_config(tiny_config(config))
    except Exception as error:  # somebody else's code: anything may come
        raise ValueError(
            f"transformers cannot build a small model of type {config.model_type}:"
            f" {' '.join(str(error).split())[:300]}"
        ) from error
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() < 2:
                parameter += 0.1 * torch.randn_like(parameter)
            else:
                parameter *= 3
    return kept_in_float64(model).train()


def tiny_config(config: Any) -> Any:
    """A copy of a model's configuration with few and narrow layers, one of each kind at least.

    Query heads still share KV heads as they did, if up to 8 of them share one. Without dropout.
    """
    tiny = copy.deepcopy(config)
    for name, value in vars(config).items():
        if name.endswith(("dropout", "pdrop")) and value:
            setattr(tiny, name, 0.0)
        elif name in _AT_MOST and type(value) in (int, list) and value:
            many = isinstance(value, list)  # several ends of a text
            setattr(tiny, name, _AT_MOST[name] if many else min(value, _AT_MOST[name]))
    _narrow(tiny, config)
    _keep_one_of_each_kind(tiny, config)
    return tiny


def _narrow(tiny: Any, config: Any) -> None:
    """Set the heads, and what follows from them."""
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


def _keep_one_of_each_kind(tiny: Any, config: Any) -> None:
    """Keep the first layer of each kind, and a further one of the last kind if it is the only one.

    A layer's kind is what lists with an entry a layer say of it, and whether its MLP is dense.
    """
    number = config.num_hidden_layers
    lists = {
        name: value
        for name, value in vars(config).items()
        if isinstance(value, list | tuple)
        and len(value) == number
        and list(value) != list(range(number))  # numbers of layers: of all of them
    }
    dense = [_is_dense(config, index) for index in range(number)]
    kinds = [str([dense[i], *(value[i] for value in lists.values())]) for i in range(number)]
    first = [kinds.index(kind) for kind in dict.fromkeys(kinds)]
    rest = [index for index in range(number) if index not in first]
    layers = sorted(first + rest[: max(0, 2 - len(first))])
    tiny.num_hidden_layers = len(layers)
    for name, value in lists.items():
        setattr(tiny, name, [value[index] for index in layers])
    if getattr(config, "first_k_dense_replace", None) is not None:
        tiny.first_k_dense_replace = sum(dense[index] for index in layers)
    if getattr(config, "decoder_sparse_step", None) is not None:
        tiny.decoder_sparse_step = 1
        tiny.mlp_only_layers = [place for place, index in enumerate(layers) if dense[index]]


def _is_dense(config: Any, index: int) -> bool:
    """Whether a layer of a model with experts has none, by the rules that are in use."""
    before = getattr(config, "first_k_dense_replace", None) or 0
    step = getattr(config, "decoder_sparse_step", None) or 1
    named = getattr(config, "mlp_only_layers", None) or ()
    return index < before or index in named or (index + 1) % step != 0


_widening: ContextVar[bool] = ContextVar("widening", default=False)
"""Whether a forward runs in `_Widened`: one inside of another would do all again."""


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

    Otherwise no comparison of its gradients goes below 1e-7, in whatever layout. Experts are
    computed one by one, as transformers' other ways have no float64.
    """
    whole: Any = model
    if hasattr(model, "set_experts_implementation"):
        whole.set_experts_implementation("eager")
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList)]
    for module in (model, *(entry for entries in lists for entry in entries)):
        module.__class__ = _widened(type(module))
    return model.double()


def _widened(kind: type[nn.Module]) -> type[nn.Module]:
    """A class that is `kind`, whose forward runs in `_Widened`."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if _widening.get():  # a block in a model; where it is recomputed, it comes alone
            return kind.forward(self, *args, **kwargs)
        token = _widening.set(True)
        try:
            with _Widened():
                return kind.forward(self, *args, **kwargs)
        finally:
            _widening.reset(token)

    # With its module, too, by which transformers knows its own.
    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})
