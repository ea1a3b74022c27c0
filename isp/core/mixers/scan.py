"""Scans over sequences that are split over ranks, by heads or by state.

p ranks, T tokens in all, T' on this rank, H heads, h of this rank, n slices of documents

by heads   of_heads [T', H, ..]  --all-to-all-->  [T, h, ..]  scan of whole documents
                                                  [T, h, V]   --all-to-all-->  [T', H, V]
by state   summaries of own slices [n, F]  --all-to-all-->  summaries of all earlier slices, which
           give the state before each own slice [n, H, ..]  scan from these states  [T', H, V]

By heads, a rank computes what one process computes for these heads. By state, a rank first computes
the summary of each slice whose document continues on another rank, and then scans each slice from
its true initial state. Only summaries are sent, in float32 or wider.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from isp.core.attention.all_to_all import Cut, Exchange, exchanged
from isp.core.attention.context_parallel.route import KeyExchange
from isp.core.attention.heads import HeadSplit
from isp.core.autograd import joined
from isp.core.comm import pinned_memory
from isp.core.comm.tag import Purpose, Tag
from isp.core.mesh.config import SequenceScan
from isp.core.mixers.placement import Placement
from isp.core.mixers.recurrence import Inputs, Recurrence

__all__ = ["cheaper_way", "received_bytes", "scan_by_heads", "scan_by_state"]


def received_bytes(
    recurrence: Recurrence, inputs: Inputs, placement: Placement
) -> dict[SequenceScan, int]:
    """Return, by heads and by state, the bytes that the rank with most receives in a forward.

    Backward sends the same number in the other direction. The result is equal on all ranks.
    """
    size, tokens, total = placement.channel.size, placement.sizes, placement.ends[-1]
    split = HeadSplit.of(inputs.num_heads, inputs.num_groups, size)
    xs = [(_bytes(x), split.query) for x in inputs.of_heads]
    xs += [(_bytes(x), split.kv) for x in inputs.of_groups]
    out = _bytes(inputs.of_heads[0])
    # A rank receives the inputs of its heads for the tokens of other ranks. After the scan it
    # receives, for its own tokens, the results of the heads of other ranks.
    by_heads = max(
        (total - tokens[rank]) * sum(len(heads[rank]) * each for each, heads in xs)
        + tokens[rank] * (inputs.num_heads - len(split.query[rank])) * out
        for rank in range(size)
    )
    state = torch.promote_types(inputs.of_heads[0].dtype, torch.float32).itemsize
    by_state = recurrence.summary_size(inputs) * state * placement.states.most_received
    return {SequenceScan.HEADS: by_heads, SequenceScan.STATE: by_state}


def cheaper_way(recurrence: Recurrence, inputs: Inputs, placement: Placement) -> SequenceScan:
    """Return HEADS or STATE, whichever receives fewer bytes; the same on all ranks."""
    found = received_bytes(recurrence, inputs, placement)
    return min(found, key=lambda way: found[way])


def scan_by_heads(recurrence: Recurrence, inputs: Inputs, placement: Placement) -> Tensor:
    """Return this rank's results [T', H, V]; each rank scans all tokens of some heads."""
    channel, lengths = placement.channel, placement.split.lengths
    if channel.size == 1:
        return recurrence.scan(inputs, lengths, None)[0]
    rank, xs = channel.rank, (*inputs.of_heads, *inputs.of_groups)
    split = HeadSplit.of(inputs.num_heads, inputs.num_groups, channel.size)
    heads = [split.query] * len(inputs.of_heads)
    gathered = _to_heads(xs, (*heads, *[split.kv] * len(inputs.of_groups)), placement)
    of_heads, of_groups = gathered[: len(heads)], gathered[len(heads) :]
    own = split.query[rank]
    constants = tuple(None if x is None else x[own.start : own.stop] for x in inputs.constants)
    if len(own):
        if (repeated := split.repeated_kv(rank)) is not None:
            index = pinned_memory.send(torch.tensor(repeated), of_groups[0].device)
            of_groups = tuple(x.index_select(1, index) for x in of_groups)
        out, _ = recurrence.scan(Inputs(of_heads, of_groups, constants), lengths, None)
    else:
        # Without heads nothing is scanned. But the exchange in backward is a collective, so its
        # inputs are joined to the result: backward then reaches it on this rank, too.
        out = joined(*gathered, *constants)
    return _to_tokens(out, split.query, placement)


def scan_by_state(recurrence: Recurrence, inputs: Inputs, placement: Placement) -> Tensor:
    """Return this rank's results [T', H, V]; each rank scans its own slices."""
    lengths = placement.segments
    x, others = inputs.of_heads[0], (*inputs.of_heads[1:], *inputs.of_groups, *inputs.constants)
    if placement.is_whole and lengths:
        return recurrence.scan(inputs, lengths, None)[0]
    if placement.is_whole:
        return joined(x, *others)
    route, summaries = placement.states, _summaries(recurrence, inputs, placement)
    tag = Tag(Purpose.STATES, tensor="scan.states")
    exchange = KeyExchange(placement.channel, route.on(summaries.device), tag)
    # Summaries of zeros have no autograd graph. Join the inputs to them, so that backward reaches
    # the exchange, a collective, on every rank.
    (seen,) = exchanged(exchange, joined(summaries, x, *others))
    if not lengths:
        return joined(x, seen)
    before = [
        # The last summary is left out: it belongs to the slice itself.
        _state_after(recurrence, inputs, of_slice[:-1])
        for of_slice in seen.split(route.mask.key_lengths)
    ]
    # If no slice has an earlier one, the kernel is called without initial states.
    zeros = next((torch.zeros_like(s) for s in before if s is not None), None)
    initial = None if zeros is None else torch.stack([zeros if s is None else s for s in before])
    # `seen` is unused if no slice has an earlier one. It is joined to the result so that backward
    # reaches its exchange nevertheless.
    return joined(recurrence.scan(inputs, lengths, initial)[0], seen)


def _summaries(recurrence: Recurrence, inputs: Inputs, placement: Placement) -> Tensor:
    """Return the summaries [n, F] of this rank's slices; zeros for the last slice of a document."""
    lengths, continued = placement.segments, placement.continued
    x = inputs.of_heads[0]
    dtype = torch.promote_types(x.dtype, torch.float32)
    rows = x.new_zeros(len(lengths), recurrence.summary_size(inputs), dtype=dtype)
    if not continued:
        return rows

    def of_continued(x: Tensor) -> Tensor:
        segments = x.split(lengths)
        parts = [segments[i] for i in continued]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    found = recurrence.summary(inputs.of_tokens(of_continued), [lengths[i] for i in continued])
    index = pinned_memory.send(torch.tensor(continued), x.device)
    return rows.index_copy(0, index, found)


def _state_after(recurrence: Recurrence, inputs: Inputs, summaries: Tensor) -> Tensor | None:
    """Return the state after consecutive slices with these summaries; None if there are none."""
    state = None
    for summary in summaries.unbind():
        state = recurrence.after(summary, state, inputs)
    return state


def _to_heads(
    xs: Sequence[Tensor], heads: Sequence[tuple[range, ...]], placement: Placement
) -> tuple[Tensor, ...]:
    """Exchange xs [T', H, ..] -> [T, h, ..], with tokens in the order of documents.

    `heads`: for each x, the heads of each rank. Tensors of one dtype are sent as one message.
    """
    rank, found = placement.channel.rank, dict[int, Tensor]()
    for dtype in dict.fromkeys(x.dtype for x in xs):
        of_dtype = [i for i, x in enumerate(xs) if x.dtype is dtype]
        transfer = partial(_exchange, placement)
        cuts = [(heads[i], _width(xs[i])) for i in of_dtype]
        there = exchanged(transfer(cuts, "inputs"), *(xs[i].flatten(1) for i in of_dtype))
        for i, x in zip(of_dtype, there, strict=True):
            if placement.inverse is not None:
                x = x.index_select(0, pinned_memory.send(placement.inverse, x.device))
            found[i] = x.reshape(len(x), len(heads[i][rank]), *xs[i].shape[2:])
    return tuple(found[i] for i in range(len(xs)))


def _to_tokens(y: Tensor, heads: tuple[range, ...], placement: Placement) -> Tensor:
    """Exchange y [T, h, V], with tokens in the order of documents -> [T', H, V]."""
    flat = y.flatten(1) if y.dim() > 2 else y
    if placement.order is not None:
        flat = flat.index_select(0, pinned_memory.send(placement.order, y.device))
    transfer = _exchange(placement, [(heads, _width(y))], "out")
    (out,) = exchanged(transfer, flat, reverse=True)
    return out.unflatten(1, (heads[-1].stop, *y.shape[2:])) if y.dim() > 2 else out


def _width(x: Tensor) -> int:
    """Return the number of elements of one token in one head."""
    return x.shape[2:].numel()


def _bytes(x: Tensor) -> int:
    """Return the number of bytes of one token in one head."""
    return _width(x) * x.element_size()


def _exchange(
    placement: Placement, cuts: Sequence[tuple[tuple[range, ...], int]], what: str
) -> Exchange:
    """Return the exchange that shards the heads of tensors [.., H * width] and gathers all tokens.

    `cuts` has for each tensor: the heads of each rank, and its elements of a token in one head.
    """
    spread = tuple(
        Cut(1, tuple(range(r.start * width, r.stop * width) for r in heads))
        for heads, width in cuts
    )
    join = Cut(0, tuple(range(a, b) for a, b in pairwise(placement.ends)))
    tag = Tag(Purpose.SCAN_HEADS, tensor=f"scan.{what}")
    return Exchange(placement.channel, spread, join, tag)
