"""The names of the decoder's weights: those of Hugging Face, with two exceptions.

InternLM2's files have others, and so have the checkpoints of earlier versions, in which q, k and v
are one parameter, and gate and up another. Random numbers are drawn as these are cut.

[Note: InternLM2's fused projection] The rows of its `wqkv` lie by KV group: the q heads of the
group, its k head, its v head, then the next group. Ours are all q, all k, all v. So a parameter
here is a row of `SourceRows`s, whatever the family.

[Note: Experts one by one] In files each expert has matrices of its own, gate, up and down. Ours are
one parameter [E, .., ..] of gates and ups, and one of downs: rows of these are counted as if the
first two dims were one.

Source: `modeling_*.py` of llama, mistral, qwen2 and qwen3 and `conversion_mapping.py` in
transformers; of InternLM2, the file that is published beside its weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import NamedTuple

from isp.layers.module import RowsOf
from model.config import ModelConfig
from model.huggingface import INTERNLM2
from model.huggingface_experts import MIXTRAL

__all__ = ["SourceRows", "WeightTable", "earlier_names"]

_EARLIER_ENDS = {
    "embedding.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
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
_INTERNLM2 = {
    "model.embed_tokens.weight": "model.tok_embeddings.weight",
    "model.norm.weight": "model.norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm.weight": "attention_norm.weight",
    "self_attn.q_proj.weight": "attention.wqkv.weight",
    "self_attn.k_proj.weight": "attention.wqkv.weight",
    "self_attn.v_proj.weight": "attention.wqkv.weight",
    "self_attn.o_proj.weight": "attention.wo.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "mlp.gate_proj.weight": "feed_forward.w1.weight",
    "mlp.up_proj.weight": "feed_forward.w3.weight",
    "mlp.down_proj.weight": "feed_forward.w2.weight",
}
"""Its names by ours, without that of the block."""
_MIXTRAL_EXPERT = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def earlier_names(model: ModelConfig) -> dict[str, RowsOf]:
    """Of each parameter, the rows that it is of one in checkpoints of earlier versions.

    Also of parameters that only other models of the family have.
    """
    found = {name: RowsOf(earlier) for earlier, name in _EARLIER_ENDS.items()}
    for index in range(model.num_layers):
        for earlier in _EARLIER_BLOCK:
            parts, first = _parts(model, f"layers.{index}.{earlier}", 0), 0
            whole = sum(rows for _, rows in parts) or None
            for name, rows in parts:
                found[name] = RowsOf(f"layers.{index}.{earlier}", first, whole)
                first += rows
    return found


def _parts(model: ModelConfig, earlier: str, rows: int) -> list[tuple[str, int]]:
    """The parameters of which an earlier one of so many rows is made, and the rows of each."""
    if earlier in _EARLIER_ENDS:
        return [(_EARLIER_ENDS[earlier], rows)]
    _, index, local = earlier.split(".", 2)
    names = [f"model.layers.{index}.{name}" for name in _EARLIER_BLOCK[local]]
    q, kv = model.num_heads * model.head_size, model.kv_heads * model.head_size
    sizes = {1: [rows], 2: [model.intermediate_size] * 2, 3: [q, kv, kv]}[len(names)]
    return list(zip(names, sizes, strict=True))


class SourceRows(NamedTuple):
    """Rows of a tensor of theirs, as they lie one after another in a parameter of ours."""

    name: str
    start: int
    rows: int


class WeightTable:
    """The rows of a folder's tensors that make up each parameter of ours, and the other way round.

    `shapes` are those of all parameters, by name.
    """

    def __init__(
        self, model: ModelConfig, family: str, shapes: Mapping[str, tuple[int, ...]]
    ) -> None:
        shapes = {name: _as_matrix(shape) for name, shape in shapes.items()}
        self.pieces = {
            name: tuple(_pieces(model, family, name, shape[0])) for name, shape in shapes.items()
        }
        self.rows: dict[str, list[tuple[int, str, int, int]]] = {}
        for ours, pieces in self.pieces.items():
            first = 0
            for name, start, rows in pieces:
                self.rows.setdefault(name, []).append((start, ours, first, first + rows))
                first += rows
        """Of each tensor of theirs, which of its rows begin rows (start, stop) of what of ours."""
        self.shapes = {
            theirs: (sum(b - a for _, _, a, b in rows), *shapes[rows[0][1]][1:])
            for theirs, rows in self.rows.items()
        }
        """The shape of each tensor of theirs, by name."""
        self.aliases = tuple(_aliases(model, family))
        """Tensors that a folder may have and nobody reads."""

    def parts_of(self, theirs: str) -> list[tuple[str, int, int]]:
        """The rows (start, stop) of our parameters that make up a tensor of theirs, in order."""
        return [(ours, start, stop) for _, ours, start, stop in sorted(self.rows[theirs])]


def _as_matrix(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a parameter by rows [Note: Experts one by one]."""
    return (prod(shape[:-1]), shape[-1]) if len(shape) > 2 else shape


def _pieces(model: ModelConfig, family: str, ours: str, rows: int) -> Iterator[SourceRows]:
    block, local = _block_and_local(ours)
    if local.startswith("mlp.experts."):
        yield from _experts(model, family, block, local, rows)
        return
    if family == MIXTRAL and local == "mlp.gate.weight":
        yield SourceRows(f"{block}block_sparse_moe.gate.weight", 0, rows)
        return
    earlier = not ours.startswith(("model.", "lm_head."))
    for name, size in _parts(model, ours, rows) if earlier else [(ours, rows)]:
        if family != INTERNLM2:
            yield SourceRows(name, 0, size)
            continue
        block, local = _block_and_local(name)
        kind = local.removeprefix("self_attn.").partition("_proj.")[0]
        if kind in ("q", "k", "v"):
            yield from _grouped(block + _INTERNLM2[local], model, kind)
        else:
            yield SourceRows(block + _INTERNLM2[local], 0, size)


def _block_and_local(name: str) -> tuple[str, str]:
    """A parameter's name, cut behind that of its block; outside of blocks all is local."""
    if not name.startswith("model.layers."):
        return "", name
    _, _, index, local = name.split(".", 3)
    return f"model.layers.{index}.", local


def _experts(
    model: ModelConfig, family: str, block: str, local: str, rows: int
) -> Iterator[SourceRows]:
    """The matrices of experts, one by one: see the note."""
    names = ("down_proj",) if local.endswith("down_proj") else ("gate_proj", "up_proj")
    size = rows // model.num_experts // len(names)
    for index in range(model.num_experts):
        for name in names:
            own, outer = name, "mlp"
            if family == MIXTRAL:
                own, outer = _MIXTRAL_EXPERT[name], "block_sparse_moe"
            yield SourceRows(f"{block}{outer}.experts.{index}.{own}.weight", 0, size)


def _grouped(name: str, model: ModelConfig, kind: str) -> Iterator[SourceRows]:
    """All q, k or v from rows that lie by KV group: see the note."""
    d, shared = model.head_size, model.num_heads // model.kv_heads
    start, heads = {"q": (0, shared), "k": (shared, 1), "v": (shared + 1, 1)}[kind]
    for group in range(model.kv_heads):
        yield SourceRows(name, (group * (shared + 2) + start) * d, heads * d)


def _aliases(model: ModelConfig, family: str) -> Iterator[str]:
    internlm2, head = family == INTERNLM2, "lm_head.weight"
    if model.tie_embeddings:
        yield _INTERNLM2[head] if internlm2 else head
    for index in range(model.num_layers):  # older folders keep what is computed from rope_theta
        attention = "attention" if internlm2 else "self_attn"
        yield f"model.layers.{index}.{attention}.rotary_emb.inv_freq"
