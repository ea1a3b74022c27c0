"""The floating-point operations that a step of training needs, whoever does them.

[Note: FLOP rule] Forward and backward of the matrix products, nothing else:

    6 x matmul parameters x tokens  +  12 x layers x heads x head size x sum of len^2 / 2

A parameter of a product is multiplied and added for each token once forward and twice backward. The
embedding is a lookup and has no products; the head has, also where it uses the embedding's table.
In attention a pair of tokens costs 4 x head size forward (scores, then values) and twice that
backward; a document has len^2 / 2 pairs where each token attends to those before it, so a packed
row counts what its documents really attend to. With a sliding window of W, a document longer than
W has W x len - W^2 / 2 pairs. What is computed again in backward is not counted: the rule measures
the work that has to be done, and does not reward doing it twice.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from model.config import ModelConfig

__all__ = ["FLOP_RULE", "flops_per_step", "matmul_parameters"]

FLOP_RULE = (
    "6 x matmul parameters x tokens + 12 x layers x heads x head size x half the square of each"
    " document's length, recomputation not counted"
)
"""The rule in words, for the log."""


def matmul_parameters(config: ModelConfig) -> int:
    """Parameters of the model that are a factor of a matrix product, the head's included."""
    q, kv = config.num_heads * config.head_size, config.kv_heads * config.head_size
    block = config.hidden_size * (2 * q + 2 * kv + 3 * config.intermediate_size)
    return config.num_layers * block + config.vocab_size * config.hidden_size


def flops_per_step(config: ModelConfig, document_lengths: Iterable[int]) -> int:
    """FLOPs of forward and backward over documents of these lengths, in tokens: see FLOP rule.

    The documents of a packed row are `cu_seqlens.diff().tolist()`; a row that is not packed is one
    document. Sums over micro-batches and data ranks are sums of the results.
    """
    tokens = pairs_doubled = 0
    for length in document_lengths:
        assert length >= 0
        reach = length if config.sliding_window is None else min(length, config.sliding_window)
        tokens += length
        pairs_doubled += reach * (2 * length - reach)
    heads = config.num_layers * config.num_heads * config.head_size
    return 6 * matmul_parameters(config) * tokens + 6 * heads * pairs_doubled
