"""What a forward keeps for its backward, in bytes, tensor by tensor as autograd saves them.

T tokens that a rank's linears multiply, T' tokens that it holds between them, D hidden size,
Q = H d and K features of the queries and of the keys, F MLP size, V vocabulary, f feature parts

    norm        x [T', D], and on CPU, where it is not one kernel, x / rms(x) too, both wide
    wqkv        its input: [T', D], or what was gathered of it, [T, D] (msp)
    attention   q, k, v, out and the logarithm of the sums; on CPU in float32 at least
    wo          the heads' outputs [T, Q/f], if they are not what attention has kept already
    w13, w2     their inputs, gate and up [T, 2F/f], and silu(gate) [T, F/f]
    loss        the softmax, wide [T, V/f]

On CPU this equals what is counted on real runs. On CUDA, kernels that are one node (norm, flash
attention) keep their inputs, outputs and statistics in their own dtype; that has not been counted.
"""

from __future__ import annotations

from typing import NamedTuple

from isp.attention.heads import HeadPlan
from isp.parallel import Mode
from isp.planner.case import Case, Place

__all__ = [
    "Saved",
    "logits",
    "saved_by_block",
    "saved_by_ends",
    "saved_by_loss",
    "saved_if_recomputed",
    "saved_rotary",
]


class Saved(NamedTuple):
    """Bytes of a micro-batch, by who keeps them."""

    activations: int = 0
    attention: int = 0

    @property
    def total(self) -> int:
        """Both."""
        return self.activations + self.attention


def saved_by_block(case: Case, place: Place) -> Saved:
    """What one block keeps that is not recomputed."""
    model, item = case.model, case.item_bytes
    inside, between = _inside(case), _between(case)
    hidden, inner = between * model.hidden_size, inside * model.intermediate_size
    inner //= case.feature_parts
    norms = 2 * (_norm(case, hidden, between) + _linear_input(case))
    mlp = (2 + 1 + 1) * inner * item
    if model.checkpoint_norm_outputs:
        gathered = _linear_input(case) if case.mode is Mode.MSP and case.topology.tensor > 1 else 0
        norms = 2 * (hidden * item + gathered)
    if model.checkpoint_mlp_activation:
        mlp = 2 * inner * item
    heads = _heads(case)
    return Saved(norms + heads.activations + mlp, _attention(case, place) + heads.attention)


def saved_if_recomputed(case: Case, place: Place) -> Saved:
    """What a recomputed block keeps until its backward."""
    model, item = case.model, case.item_bytes
    kept = _between(case) * model.hidden_size * item
    if model.checkpoint_distribute_activations:
        kept //= case.topology.tensor
    if not model.checkpoint_keeps_attention:
        return Saved(kept)
    if model.checkpoint_distribute_activations:
        kept *= 2  # each of the two recomputed parts keeps its own
    output = 0 if _shares_output(case) else _inside(case) * _query_size(case) * item
    return Saved(kept + output, _attention(case, place))


def saved_by_ends(case: Case, *, is_first: bool, is_last: bool) -> int:
    """What embedding, last norm and head keep besides the batch; without the softmax."""
    kept = 0
    if is_first and case.feature_parts > 1:
        kept += case.rows * case.tokens_inside * (8 + 1)  # its own ids, and which are not
    if is_last:
        between = _between(case)
        kept += _norm(case, between * case.model.hidden_size, between) + _linear_input(case)
    return kept


def saved_by_loss(case: Case) -> int:
    """The softmax, and where the targets are in it."""
    tokens = case.rows * (case.tokens if case.splits_logits else case.tokens_inside)
    return logits(case) * case.wide_bytes + tokens * (8 + 1 + 1) + 4


def logits(case: Case) -> int:
    """Logits of a micro-batch on a rank after they have been exchanged, in numbers."""
    size = case.model.vocab_size
    if case.mode.facts.splits_features:
        size = -(-size // case.topology.tensor)
    return _inside(case) * size


def saved_rotary(case: Case) -> int:
    """cos and sin, which all blocks share."""
    return 2 * _inside(case) * (case.model.head_size // 2) * case.wide_bytes


# -- inside ----------------------------------------------------------------------------------


def _inside(case: Case) -> int:
    return case.rows * case.tokens_inside


def _between(case: Case) -> int:
    return case.rows * case.tokens_between


def _query_size(case: Case) -> int:
    return case.model.num_heads * case.model.head_size // case.feature_parts


def _key_size(case: Case) -> int:
    return case.model.kv_heads * case.model.head_size // case.feature_parts


def _norm(case: Case, numbers: int, rows: int) -> int:
    """What RMSNorm keeps of so many numbers in so many rows, besides what it gives."""
    if not case.on_cpu:
        return numbers * case.item_bytes + rows * 4
    return (2 * numbers + rows) * case.wide_bytes


def _linear_input(case: Case) -> int:
    """What a column linear keeps of its input."""
    tokens = _inside(case) if case.mode is Mode.MSP else _between(case)
    return tokens * case.model.hidden_size * case.item_bytes


def _exchanges(case: Case) -> bool:
    return not case.mode.facts.splits_features and case.topology.tensor > 1


def _widens(case: Case) -> bool:
    """Whether attention computes in a wider dtype than it is given."""
    return case.on_cpu and case.item_bytes < 4


def _shares_output(case: Case) -> bool:
    """Whether what attention gives is what the output projection multiplies."""
    return not _exchanges(case) and not _widens(case)


def _attention(case: Case, place: Place) -> int:
    """q, k, v, the output and the sums."""
    model, tokens = case.model, case.rows * case.tokens
    item = case.wide_bytes if case.on_cpu else case.item_bytes
    head = tokens * model.head_size * item
    sums = tokens * (case.wide_bytes if case.on_cpu else 4)
    if not _exchanges(case):
        query, key = _query_size(case) // model.head_size, _key_size(case) // model.head_size
        # v is a view of what wqkv gave, which is kept as a whole
        value = key if _widens(case) else query + 2 * key
        return head * (query + key + value + query) + sums * query
    plan = HeadPlan.of(model.num_heads, model.kv_heads, case.topology.tensor)
    query, key = len(plan.query[place.tensor]), len(plan.kv[place.tensor])
    repeated = plan.repeated_kv(place.tensor)
    received, index = query + 2 * key, 0
    if repeated is not None:
        received = (query if _widens(case) else received) + 2 * len(repeated)
        index = 8 * len(repeated)
    return head * (received + query) + sums * query + index


def _heads(case: Case) -> Saved:
    """What stands between attention and the linears around it."""
    model, item, tokens = case.model, case.item_bytes, _inside(case)
    query, key = _query_size(case), _key_size(case)
    output = 0 if _shares_output(case) else tokens * query * item
    if not model.qk_norm:
        return Saved(output)
    num_heads = (query + key) // model.head_size
    if not case.on_cpu:
        fused = tokens * (query + 2 * key) * item if _exchanges(case) else 0
        return Saved(output + fused + tokens * num_heads * 4)
    kept = (query + key + num_heads) * tokens * case.wide_bytes
    if _widens(case):
        kept += (query + key) * tokens * case.wide_bytes
    elif _exchanges(case):
        kept += (query + 2 * key) * tokens * item
    return Saved(output + kept)
