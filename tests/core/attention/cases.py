"""Rows, sequence splits and expected results, for tests of attention over head and context
ranks.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from isp.core.attention.backends.cpu import CpuAttention
from isp.core.attention.backends.explicit import ExplicitAttention
from isp.core.attention.context_parallel.attention import ContextAttention
from isp.core.attention.local import LocalAttention
from isp.core.attention.mask import AttentionMask
from isp.core.attention.ulysses import DistributedAttention
from isp.core.comm import Channel
from isp.core.mesh.sequence_split import SequenceSplit, Slice
from tests.core.attention.reference import attend, make_mask, random_inputs, visible

LENGTH = 48
SCALE = 0.4
STRADDLING = [5, 20, 1, 1, 14, 7]


def random_plan(lengths: Sequence[int], sizes: Sequence[int], seed: int) -> SequenceSplit:
    """Return a split of documents that are cut at random places; rank i has `sizes[i]` tokens."""
    draw = random.Random(seed)
    whole = []
    for document, length in enumerate(lengths):
        cuts = sorted({0, length, *draw.choices(range(length + 1), k=draw.randrange(6))})
        whole += [Slice(document, a, b) for a, b in pairwise(cuts)]
    draw.shuffle(whole)
    slices: list[list[Slice]] = []
    for size in sizes:
        slices.append([])
        while size:
            document, begin, end = whole.pop()
            middle = min(end, begin + size)
            slices[-1].append(Slice(document, begin, middle))
            size -= middle - begin
            if middle < end:
                whole.append(Slice(document, middle, end))
    assert not whole
    return SequenceSplit(tuple(lengths), tuple(tuple(sorted(of_rank)) for of_rank in slices))


@dataclass(frozen=True, eq=False)
class Case:
    """One row, or a batch of equal rows, and the attention over it."""

    documents: list[int] | None = None
    heads: tuple[int, int] = (4, 2)
    batch: int = 1
    window: int | None = None
    causal: bool = True
    explicit: bool = False
    """Use `ExplicitAttention`, as is always done for softcap and sinks."""
    softcap: float | None = None
    sinks: bool = False
    value_size: int = 4
    seed: int | None = 0
    """Seed of a random split; None: the balanced split."""
    sizes: tuple[int, ...] = ()
    """Tokens of each rank; empty: equally many."""
    stripes: int | None = None
    ring: bool = False
    local: Callable[[], LocalAttention] = CpuAttention
    together: int = 1 << 40
    """Up to this many bytes q, k and v are exchanged as one message."""

    @property
    def attention(self) -> LocalAttention:
        """The local attention that one device would use."""
        if self.explicit or self.sinks or self.softcap is not None:
            return ExplicitAttention(scale=SCALE, softcap=self.softcap)
        return self.local()

    @property
    def mask(self) -> AttentionMask:
        return make_mask(self.documents, self.causal, self.window, self.batch)

    @property
    def lengths(self) -> list[int]:
        return [LENGTH] if self.documents is None else self.documents

    def split_of(self, lengths: Sequence[int], num_ranks: int, *_: Any) -> SequenceSplit:
        if self.seed is None:
            return SequenceSplit.of(lengths, num_ranks)
        sizes = self.sizes or [sum(lengths) // num_ranks] * num_ranks
        return random_plan(lengths, sizes, self.seed)

    @cached_property
    def solved(self) -> tuple[list[Tensor], Tensor, list[Tensor]]:
        """The inputs (q, k, v and perhaps sinks), the output's gradient, and the output with all
        gradients.
        """
        inputs, dout = random_inputs(self.batch, sum(self.lengths), *self.heads)
        inputs[2] = inputs[2].detach()[..., : self.value_size].clone().requires_grad_()
        dout = dout[..., : self.value_size].contiguous()
        options: dict[str, Any] = {}
        if isinstance(self.attention, ExplicitAttention):
            options = {"scale": SCALE, "softcap": self.softcap}
        if self.sinks:
            inputs.append(torch.linspace(-1, 1, self.heads[0]).double().requires_grad_())
            options["sinks"] = inputs[3]
        out = attend(*inputs[:3], self.mask, **options)
        return inputs, dout, [out.detach(), *torch.autograd.grad(out, inputs, dout)]

    def result(self, attention: LocalAttention, leaves: list[Tensor], dout: Tensor) -> list[Tensor]:
        """Return the output and all gradients that `attention` computes from `leaves`."""
        sinks = {"sinks": leaves[3]} if self.sinks else {}
        out = attention(*leaves[:3], mask=self.mask, **sinks)
        return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


class Channels(NamedTuple):
    """The channels of the head group and the context group."""

    head: Channel
    context: Channel

    @classmethod
    def of(cls, h: int, c: int) -> Channels | None:
        """Return the channels of the first h c ranks: rank i h + j is context rank i and head rank
        j.
        """
        rank, mine = dist.get_rank(), []
        of_heads = [[i * h + j for j in range(h)] for i in range(c)]
        of_contexts = [[i * h + j for i in range(c)] for j in range(h)]
        for name, groups in (("head", of_heads), ("context", of_contexts)):
            for ranks in groups:
                group = dist.new_group(ranks) if len(ranks) > 1 else None
                if rank in ranks:
                    mine.append(Channel(group, name=name))
        return cls(*mine) if mine else None


def own_tokens(plan: SequenceSplit, channels: Channels) -> Tensor:
    """Return the positions in the row of this rank's tokens."""
    tokens = torch.cat([_places(plan, s) for s in plan.slices[channels.context.rank]] or [_NONE])
    return tokens.chunk(channels.head.size)[channels.head.rank]


_NONE = torch.zeros(0, dtype=torch.int64)


def _places(plan: SequenceSplit, piece: Slice) -> Tensor:
    document, begin, end = piece
    return torch.arange(begin, end) + sum(plan.lengths[:document])


def keys_sent(case: Case, num_ranks: int) -> list[tuple[int, int]]:
    """Return the keys that each context rank must send and receive, given what its tokens attend
    to.
    """
    plan = case.split_of(case.lengths, num_ranks)
    starts = [sum(plan.lengths[:i]) for i in range(len(plan.lengths))]
    held = [{int(t) for s in of_rank for t in _places(plan, s)} for of_rank in plan.slices]
    seen: list[set[int]] = []
    for of_rank in plan.slices:
        seen.append(set())
        for document, begin, end in of_rank:
            length = plan.lengths[document]
            keys = visible(length, length, case.causal, case.window)[begin:end].any(0).nonzero()
            seen[-1] |= {starts[document] + int(key) for key in keys}
    return [
        (
            case.batch * sum(len(held[r] & seen[s]) for s in range(num_ranks) if s != r),
            case.batch * len(seen[r] - held[r]),
        )
        for r in range(num_ranks)
    ]


def make_attention(case: Case, channels: Channels) -> DistributedAttention:
    """Return the distributed attention for `case`."""
    options = {"stripes": case.stripes, "ring": case.ring, "split_of": case.split_of}
    inner = ContextAttention(case.attention, channels.context, (), **options)
    return DistributedAttention(inner, channels.head, together_below_bytes=case.together)


def leaves_of(case: Case, channels: Channels) -> tuple[list[Tensor], Tensor, list[Tensor]]:
    """Return this rank's part of `Case.solved` as leaves; sinks and their gradient are whole."""
    inputs, dout, expected = case.solved
    tokens = own_tokens(case.split_of(case.lengths, channels.context.size), channels)
    leaves = [x.detach()[:, tokens].clone().requires_grad_() for x in inputs[:3]]
    leaves += [x.detach().clone().requires_grad_() for x in inputs[3:]]
    return leaves, dout[:, tokens], [*(x[:, tokens] for x in expected[:4]), *expected[4:]]


def result_of(case: Case, channels: Channels) -> list[Tensor]:
    """Return the output and all gradients on this rank; gradients of sinks are summed over the
    ranks.
    """
    leaves, dout, _ = leaves_of(case, channels)
    found = case.result(make_attention(case, channels), leaves, dout)
    for grad in found[4:]:
        for channel in channels:
            grad.copy_(channel.all_reduce(grad).wait())
    return found


def wrong_on_ranks(
    rank: int, plans: list[tuple[tuple[int, int], dict[str, Case]]], tolerance: float
) -> list[str]:
    """Return the errors of cases on splits into h head ranks x c context ranks."""
    wrong = []
    for split, cases in plans:
        channels = Channels.of(*split)
        if channels is not None:
            for name, case in cases.items():
                wrong += _wrong(f"{name} on {split}", case, channels, tolerance)
    return wrong


def _wrong(name: str, case: Case, channels: Channels, tolerance: float) -> list[str]:
    channels.context.log.collect()
    found = result_of(case, channels)
    sent = [t for t in channels.context.log.take() if t.label.startswith("attention.kv")]
    again = result_of(case, channels)
    wrong = []
    error = error_of(found, leaves_of(case, channels)[2])
    if not error < tolerance:
        wrong.append(f"{name}: error {error}")
    if not all(torch.equal(a, b) for a, b in zip(found, again, strict=True)):
        wrong.append(f"{name}: other bits")
    if channels.head.size == 1:
        there, back = keys_sent(case, channels.context.size)[channels.context.rank]
        planned = 2 * case.heads[1] * 4 * 8 * (there * (2 if case.ring else 1) + back)
        if sum(t.sent_bytes for t in sent) != planned:
            wrong.append(f"{name}: {sum(t.sent_bytes for t in sent)} bytes for {planned}")
    return wrong


def error_of(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the largest difference in norm, or NaN if any difference is NaN."""
    return max(float((a - b).norm()) for a, b in zip(found, expected, strict=True))
