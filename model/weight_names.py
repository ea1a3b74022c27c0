"""The names of the decoder's weights in folders of Hugging Face, one table for both directions.

[Note: InternLM2's fused projection] The rows of its `wqkv` lie by KV group: the q heads of the
group, its k head, its v head, then the next group. Ours are all q, all k, all v. So a parameter
here is a row of `Piece`s, whatever the family.

Source: `modeling_*.py` of llama, mistral, qwen2 and qwen3 in transformers; of InternLM2, the file
that is published beside its weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from model.config import ModelConfig
from model.huggingface import INTERNLM2

__all__ = ["Piece", "WeightTable"]

_ENDS = {
    "embedding.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
_BLOCK: dict[str, tuple[str, ...]] = {
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
_INTERNLM2_ENDS = {
    "embedding.weight": "model.tok_embeddings.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "output.weight",
}
_INTERNLM2_BLOCK = {
    "attention_norm.weight": ("attention_norm.weight",),
    "attention.wqkv.weight": ("attention.wqkv.weight",),
    "attention.wo.weight": ("attention.wo.weight",),
    "ffn_norm.weight": ("ffn_norm.weight",),
    "feed_forward.w13.weight": ("feed_forward.w1.weight", "feed_forward.w3.weight"),
    "feed_forward.w2.weight": ("feed_forward.w2.weight",),
}


class Piece(NamedTuple):
    """Rows of a tensor of theirs, as they lie one after another in a parameter of ours."""

    name: str
    start: int
    rows: int


class WeightTable:
    """Which rows of their tensors make up each parameter of ours.

    `shapes` are those of all parameters, by name. No tensor of theirs is in two of ours.
    """

    def __init__(
        self, model: ModelConfig, family: str, shapes: Mapping[str, tuple[int, ...]]
    ) -> None:
        self.pieces = {
            name: tuple(_pieces(model, family, name, shape[0])) for name, shape in shapes.items()
        }
        self.shapes = {
            theirs: (sum(p.rows for p in pieces if p.name == theirs), *shapes[ours][1:])
            for ours, pieces in self.pieces.items()
            for theirs in dict.fromkeys(piece.name for piece in pieces)
        }
        """The shape of each tensor of theirs, by name."""
        self.aliases = tuple(_aliases(model, family))
        """Tensors that a folder may have and nobody reads."""

    def rows_of(self, ours: str) -> dict[str, list[tuple[int, int]]]:
        """What each tensor of theirs takes from parameter `ours`: (start, stop), in its order."""
        found: dict[str, list[tuple[int, int, int]]] = {}
        first = 0
        for name, start, rows in self.pieces[ours]:
            found.setdefault(name, []).append((start, first, first + rows))
            first += rows
        return {name: [(a, b) for _, a, b in sorted(runs)] for name, runs in found.items()}


def _pieces(model: ModelConfig, family: str, ours: str, rows: int) -> Iterator[Piece]:
    internlm2 = family == INTERNLM2
    ends, blocks = (_INTERNLM2_ENDS, _INTERNLM2_BLOCK) if internlm2 else (_ENDS, _BLOCK)
    if ours in ends:
        yield Piece(ends[ours], 0, rows)
        return
    _, index, local = ours.split(".", 2)
    names = [f"model.layers.{index}.{name}" for name in blocks[local]]
    q, kv = model.num_heads * model.head_size, model.kv_heads * model.head_size
    if local.startswith("attention.wqkv") and internlm2:
        yield from _grouped(names[0], model)
        return
    sizes = [rows]
    if local.startswith("attention.wqkv"):
        sizes = [q, kv, kv]
    elif local.startswith("feed_forward.w13"):
        sizes = [rows // 2, rows // 2]
    for name, size in zip(names, sizes, strict=True):
        yield Piece(name, 0, size)


def _grouped(name: str, model: ModelConfig) -> Iterator[Piece]:
    """All q, all k, all v from rows that lie by KV group: see the note."""
    d, shared = model.head_size, model.num_heads // model.kv_heads
    for start, heads in ((0, shared), (shared, 1), (shared + 1, 1)):
        for group in range(model.kv_heads):
            yield Piece(name, (group * (shared + 2) + start) * d, heads * d)


def _aliases(model: ModelConfig, family: str) -> Iterator[str]:
    internlm2 = family == INTERNLM2
    if model.tie_embeddings:
        yield (_INTERNLM2_ENDS if internlm2 else _ENDS)["head.weight"]
    for index in range(model.num_layers):  # older folders keep what is computed from rope_theta
        attention = "attention" if internlm2 else "self_attn"
        yield f"model.layers.{index}.{attention}.rotary_emb.inv_freq"
