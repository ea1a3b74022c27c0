"""Map the decoder's weights to their names in earlier checkpoints and in exported files.

The decoder's own names are those of transformers. Checkpoints of earlier versions have other names,
with q, k and v as one parameter, and gate and up as another. Initial weights are still drawn as
rows of those fused parameters, so that a seed gives the same model as before.

Source: `modeling_*.py` of llama, mistral, qwen2 and qwen3 and `conversion_mapping.py` in
transformers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import NamedTuple

from isp.core.layers.module import RowsOf
from model.config import ModelConfig
from model.huggingface import MIXTRAL

__all__ = ["ParameterRows", "earlier_names", "exported_rows"]

# By the name of a parameter in earlier versions, its name now.
_EARLIER_ENDS = {
    "embedding.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
# The same for the parameters of a block. The rows of one of several names now are consecutive rows
# of the earlier parameter, in this order.
_EARLIER_BLOCK: dict[str, tuple[str, ...]] = {
    "attention_norm.weight": ("input_layernorm.weight",),
    "attention.wqkv.weight": tuple(f"self_attn.{x}_proj.weight" for x in "qkv"),
    "attention.wqkv.bias": tuple(f"self_attn.{x}_proj.bias" for x in "qkv"),
    "attention.q_norm.weight": ("self_attn.q_norm.weight",),
    "attention.k_norm.weight": ("self_attn.k_norm.weight",),
    "attention.wo.weight": ("self_attn.o_proj.weight",),
    "ffn_norm.weight": ("post_attention_layernorm.weight",),
    "feed_forward.w13.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "feed_forward.w2.weight": ("mlp.down_proj.weight",),
}
_MIXTRAL_EXPERT = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
"""Mixtral's names of an expert's matrices, by those of the other model types."""


def earlier_names(model: ModelConfig) -> dict[str, RowsOf]:
    """Return by name of a parameter its name and rows in checkpoints of earlier versions.

    Includes parameters that only some models have, such as biases.
    """
    found = {name: RowsOf(earlier) for earlier, name in _EARLIER_ENDS.items()}
    q, kv = model.num_heads * model.head_size, model.kv_heads * model.head_size
    rows_of = {2: (model.intermediate_size,) * 2, 3: (q, kv, kv)}
    for index in range(model.num_layers):
        for earlier, names in _EARLIER_BLOCK.items():
            sizes, first = rows_of.get(len(names), (0,)), 0
            for name, rows in zip(names, sizes, strict=True):
                whole = RowsOf(f"layers.{index}.{earlier}", first, sum(sizes) or None)
                found[f"model.layers.{index}.{name}"] = whole
                first += rows
    return found


class ParameterRows(NamedTuple):
    """The rows of a parameter that form one tensor in an exported folder."""

    name: str
    start: int
    stop: int


def exported_rows(
    model: ModelConfig, family: str, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, ParameterRows]:
    """Return by name of a tensor in an exported folder the rows of a parameter that it contains.

    `family`: the folder's model type. `shapes`: the shapes of all parameters, by name. Experts have
    separate tensors for gate, up and down in the folder; the decoder has one parameter for all
    gates and ups, and one for all downs, whose first two dims are flattened to count rows.
    """
    found: dict[str, ParameterRows] = {}
    for name, shape in shapes.items():
        if ".mlp.experts." in name:
            found |= dict(_experts(model, family, name, prod(shape[:-1])))
        else:
            theirs = name
            if family == MIXTRAL:
                theirs = name.replace(".mlp.gate.weight", ".block_sparse_moe.gate.weight")
            found[theirs] = ParameterRows(name, 0, shape[0])
    return found


def _experts(
    model: ModelConfig, family: str, name: str, rows: int
) -> Iterator[tuple[str, ParameterRows]]:
    """Yield the exported name and the rows of each expert's matrices in the parameter `name`.

    `rows`: the number of rows of the parameter [E, .., ..] with the first two dims flattened.
    """
    block, _, local = name.partition("mlp.experts.")
    parts = ("down_proj",) if local.endswith("down_proj") else ("gate_proj", "up_proj")
    size, start = rows // model.num_experts // len(parts), 0
    for index in range(model.num_experts):
        for part in parts:
            own, outer = part, "mlp"
            if family == MIXTRAL:
                own, outer = _MIXTRAL_EXPERT[part], "block_sparse_moe"
            theirs = f"{block}{outer}.experts.{index}.{own}.weight"
            yield theirs, ParameterRows(name, start, start + size)
            start += size
