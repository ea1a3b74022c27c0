"""The ways to compute one layer's attention over all ranks that `bench_context` compares."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from bench_balance import received, zigzag
from paced import Link
from torch import Tensor
from torch.distributed.tensor.experimental._context_parallel import _attention as torchs

from isp.core.attention.backends.cpu import CpuAttention
from isp.core.attention.context_parallel.attention import ContextAttention
from isp.core.attention.mask import AttentionMask
from isp.core.attention.ulysses import DistributedAttention
from isp.core.comm import Channel, CommLog, Pending
from isp.core.comm.tag import UNNAMED, Tag
from isp.core.mesh.sequence_split import SequenceSplit, Slice

__all__ = ["BothWaysChannel", "BothWaysLink", "Heads", "PacedAttention", "Way", "Ways", "pairs"]

_BACKWARD = 2.5
"""Time of attention's backward divided by its forward: 5 matmuls, since kernels compute the scores
again, and 2."""


@dataclass(frozen=True)
class Heads:
    """The shape of attention: query heads H, KV heads K, head size d."""

    query: int
    kv: int
    size: int


class PacedAttention(CpuAttention):
    """Attention that sleeps `seconds_a_pair` for each pair of a query and a key that it sees, and
    for each head. It computes nothing; outputs and gradients only have the right shapes."""

    def __init__(self, seconds_a_pair: float) -> None:
        super().__init__()
        self.seconds_a_pair = seconds_a_pair

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, mask: AttentionMask) -> Tensor:
        out: Tensor = _Slept.apply(q, k, v, self._seconds(q, mask))
        return out

    def with_lse(
        self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask
    ) -> tuple[Tensor, Tensor]:
        time.sleep(self._seconds(q.unsqueeze(0), mask))
        return q.clone(), q.new_zeros(q.shape[:2])

    def gradients(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        time.sleep(_BACKWARD * self._seconds(q.unsqueeze(0), rest[-1]))
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)

    def _seconds(self, q: Tensor, mask: AttentionMask) -> float:
        """Return for how many seconds a forward with `q` [B, S, H, d] sleeps."""
        rows = [q.shape[1]] * q.shape[0]
        packed = mask.cu_seqlens is not None
        lengths, keys = (mask.lengths, mask.key_lengths) if packed else (rows, rows)
        return self.seconds_a_pair * q.shape[2] * pairs(lengths, keys, causal=mask.causal)


def pairs(lengths: Sequence[int], key_lengths: Sequence[int], *, causal: bool = True) -> int:
    """Return the number of pairs of a query and a key that it sees, summed over documents.

    A document has n = `lengths[i]` queries and m = `key_lengths[i]` keys. If `causal`, the last
    query sees all m keys and each one before it sees one key less.
    """
    return sum(
        n * m - causal * (n * (n - 1) // 2) for n, m in zip(lengths, key_lengths, strict=True)
    )


class _Slept(torch.autograd.Function):
    """The autograd function of `PacedAttention`: returns a copy of q.

    The forward sleeps for `seconds`, the backward `_BACKWARD` times as long.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, seconds: float) -> Tensor:
        ctx.save_for_backward(k, v)
        ctx.seconds = seconds
        time.sleep(seconds)
        return q.clone()

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        k, v = ctx.saved_tensors
        time.sleep(_BACKWARD * ctx.seconds)
        return dout, torch.zeros_like(k), torch.zeros_like(v), None


class BothWaysLink(Link):
    """A modelled link on which a transfer lasts as long as the larger of its two directions.

    `Link` itself counts only the bytes that this rank sends.
    """

    more_comes = 0
    """Bytes that the next transfer receives beyond those that it sends."""

    def book(self, num_bytes: int) -> float:
        more, self.more_comes = self.more_comes, 0
        return super().book(num_bytes + more)


class BothWaysChannel(Channel):
    """A channel whose link counts both directions, with the transfers of the rings."""

    def __init__(
        self, group: dist.ProcessGroup | None, *, name: str, log: CommLog, link: BothWaysLink | None
    ) -> None:
        super().__init__(group, name=name, log=log)
        self.link = link
        if link is not None:
            link.slow([self])

    def all_to_all_into(
        self,
        out: Tensor,
        x: Tensor,
        *,
        out_rows: Sequence[int] | None = None,
        in_rows: Sequence[int] | None = None,
        tag: Tag = UNNAMED,
    ) -> Pending:
        if out_rows is not None and self.link is not None:
            # What this rank sends to itself is in `out` and in `x`, so the difference is only of
            # what the link carries.
            self.link.more_comes = max(0, out.nbytes - x.nbytes)
        return super().all_to_all_into(out, x, out_rows=out_rows, in_rows=in_rows, tag=tag)

    def permute(self, x: Tensor) -> Pending:
        """Send `x` to the next rank, and return the `x` of the rank before, by an all-to-all.

        The ring of torch's `context_parallel` does so by default.
        """
        # Two lists: the number of rows received from each rank, and of rows sent to each rank.
        rows = [[0] * self.size for _ in range(2)]
        rows[0][self.rank - 1] = rows[1][(self.rank + 1) % self.size] = x.shape[0]
        return self.all_to_all_into(torch.empty_like(x), x, out_rows=rows[0], in_rows=rows[1])

    def rotate(self, x: Tensor) -> Pending:
        """Send `x` to the next rank, and return the `x` of the rank before, by send and recv."""
        sent = self.send(x, (self.rank + 1) % self.size)
        coming = self.recv(torch.empty_like(x), (self.rank - 1) % self.size)

        def arrived(out: Tensor) -> Tensor:
            sent.wait()
            return out

        return coming.then(arrived)


@dataclass(frozen=True)
class Way:
    """One way to compute attention over all ranks: a row of the table."""

    name: str
    tokens: Tensor
    """Indices in the row of this rank's tokens [S/p]."""
    attend: Callable[[Tensor, Tensor, Tensor], Tensor]
    """Computes attention of this rank's S/p tokens to the whole row, with H query heads and K KV
    heads: q [1, S/p, H, d], k and v [1, S/p, K, d] of this rank -> [1, S/p, H, d]."""
    least_elements: int
    """The fewest elements that all ranks together send in forward and backward with this split."""


class Ways:
    """Makes the ways to compute attention of one row, on this rank."""

    def __init__(
        self,
        lengths: tuple[int, ...],
        heads: Heads,
        local: CpuAttention,
        *,
        log: CommLog,
        link: BothWaysLink | None,
    ) -> None:
        self.lengths, self.heads, self.local, self.log, self.link = lengths, heads, local, log, link
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.mask = AttentionMask.of_documents(lengths)
        self.all = BothWaysChannel(dist.group.WORLD, name="all", log=log, link=link)

    def __call__(self) -> list[Way]:
        """Return all ways. All ranks must call this: each way makes process groups."""
        sizes = [c for c in range(1, self.world + 1) if self.world % c == 0]
        ways = [self._ours(self.world // c, c) for c in sizes]
        ways.append(self._ours(1, self.world, ring=True))
        ways.append(self._plain_ring())
        if len(self.lengths) == 1:
            ways.append(self._torchs_ring())
        return ways

    def _ours(self, h: int, c: int, *, ring: bool = False) -> Way:
        """Return ISP's attention over `h` * `c` ranks.

        h ranks exchange tokens for heads, c ranks exchange keys and values: in a ring if `ring`.
        """
        head = self._channel("head", [[i * h + j for j in range(h)] for i in range(c)])
        context = self._channel("context", [[i * h + j for i in range(c)] for j in range(h)])
        plan = SequenceSplit.of(self.lengths, c)
        inner = ContextAttention(self.local, context, ((None, 1),), ring=ring)
        attention = DistributedAttention(inner if c > 1 else self.local, head)
        # If there are fewer KV heads than ranks, each head is sent to several ranks.
        kv = max(h, self.heads.kv)
        # By all-to-all, q, k, v and the output are sent once each. Keys and values also go to each
        # context rank whose queries see them. The backward sends as much again.
        on_heads = 2 * (self.heads.query + kv) * sum(self.lengths) * (h - 1) // h
        least = 2 * self.heads.size * (on_heads + 2 * kv * received(plan))
        name = f"{h} x {c}, ring" if ring else f"{h} x {c}" if c > 1 else "Ulysses alone"
        return Way(
            name,
            self._own(plan),
            lambda q, k, v: attention(q, k, v, mask=self.mask),
            least,
        )

    def _plain_ring(self) -> Way:
        """Return the ring in which every block of keys and values visits every rank."""
        plan = zigzag(self.lengths, self.world)
        ring = _Ring(self.all, plan, self.local)
        least = 4 * self.heads.kv * self.heads.size * received(plan)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out: Tensor = _RingAttention.apply(q[0], torch.stack((k[0], v[0]), 1), ring)
            return out.unsqueeze(0)

        return Way("p2p ring", self._own(plan), attend, least)

    def _torchs_ring(self) -> Way:
        """Return the ring of torch's `context_parallel`."""
        plan = zigzag(self.lengths, self.world)
        ring = _TorchsRing(self.all, self.local, self.heads)
        least = 4 * self.heads.kv * self.heads.size * received(plan)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out: Tensor = _TorchsRingAttention.apply(*(x.transpose(1, 2) for x in (q, k, v)), ring)
            return out.transpose(1, 2)

        return Way("torch's ring", self._own(plan), attend, least)

    def _own(self, plan: SequenceSplit) -> Tensor:
        return torch.from_numpy(plan.order).chunk(self.world)[self.rank]

    def _channel(self, name: str, groups: list[list[int]]) -> Channel:
        """Return the channel of this rank's group; all ranks make all groups, as torch requires."""
        made = [dist.new_group(ranks) if len(ranks) > 1 else None for ranks in groups]
        (own,) = (g for g, ranks in zip(made, groups, strict=True) if self.rank in ranks)
        return BothWaysChannel(own, name=name, log=self.log, link=self.link)


class _Ring:
    """The plan of a ring in which each block of keys and values visits every rank.

    Source: ring-flash-attention.
    """

    def __init__(self, channel: BothWaysChannel, plan: SequenceSplit, kernel: CpuAttention) -> None:
        self.channel, self.plan, self.kernel = channel, plan, kernel

    @cached_property
    def steps(self) -> list[tuple[Tensor, Tensor, AttentionMask] | None]:
        """Blocks that this rank computes at each step of the ring, in order.

        At step s it has the block of keys and values of the rank s places before it. A step is a
        tuple: indices of the queries that see keys of the block, indices of these keys in the
        block, mask. It is None if no query sees any. A slice of queries sees the slices of its
        document that end no later than the slice itself.
        """
        size, rank = self.channel.size, self.channel.rank
        return [self._step((rank - step) % size) for step in range(size)]

    def _step(self, source: int) -> tuple[Tensor, Tensor, AttentionMask] | None:
        queries, keys = [], []
        block = list(_rows(self.plan.slices[source]))
        for slice_, rows in _rows(self.plan.slices[self.channel.rank]):
            seen = [k for s, k in block if s.document == slice_.document and s.end <= slice_.end]
            if seen:
                queries.append(rows)
                keys.append(torch.cat(seen))
        if not queries:
            return None
        counts = ([len(x) for x in queries], [len(x) for x in keys])
        mask = AttentionMask.of_documents(*counts, causal=source == self.channel.rank)
        return torch.cat(queries), torch.cat(keys), mask


def _rows(held: Sequence[Slice]) -> list[tuple[Slice, Tensor]]:
    """Return each slice with the indices of its tokens among the rank's tokens."""
    found, first = [], 0
    for s in held:
        found.append((s, torch.arange(first, first := first + s.end - s.begin)))
    return found


class _RingAttention(torch.autograd.Function):
    """Attention by `_Ring`: q [T, H, d] and kv [T, 2, K, d] of T tokens -> [T, H, d]."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, kv: Tensor, ring: _Ring) -> Tensor:
        total, lse = torch.zeros_like(q), q.new_full(q.shape[:2], -torch.inf)
        block = kv
        for number, step in enumerate(ring.steps):
            coming = ring.channel.rotate(block) if number + 1 < len(ring.steps) else None
            if step is not None:
                rows, keys, mask = step
                k, v = block[keys].unbind(1)
                out, part = ring.kernel.with_lse(q[rows], k, v, mask)
                # Merge two softmaxes over different keys: weight each by exp(own lse - joint lse).
                before = lse[rows]
                lse[rows] = after = torch.logaddexp(before, part)
                total[rows] = total[rows] * (before - after).exp().unsqueeze(-1)
                total[rows] += out * (part - after).exp().unsqueeze(-1)
            if coming is not None:
                block = coming.wait()
        ctx.save_for_backward(q, kv, total, lse)
        ctx.ring = ring
        return total

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, kv, out, lse = ctx.saved_tensors
        ring: _Ring = ctx.ring
        dq, block = torch.zeros_like(q), kv
        returning: Pending | None = None
        for number, step in enumerate(ring.steps):
            coming = ring.channel.rotate(block) if number + 1 < len(ring.steps) else None
            own = torch.zeros_like(kv)
            if step is not None:
                rows, keys, mask = step
                k, v = block[keys].unbind(1)
                given = [x[rows] for x in (dout, q)]
                d_rows, *d_keys = ring.kernel.gradients(*given, k, v, out[rows], lse[rows], mask)
                dq[rows] += d_rows
                own.index_add_(0, keys, torch.stack(d_keys, 1))
            # A block's gradient travels one rank after the block, and gathers each rank's part;
            # after the last step it is back at the rank that owns the block.
            if returning is not None:
                own += returning.wait()
            returning = ring.channel.rotate(own)
            if coming is not None:
                block = coming.wait()
        assert returning is not None, "a ring has a step"
        return dq, returning.wait(), None


class _TorchsRing:
    """The ring of torch's `context_parallel`, called through private functions of torch.

    The public `context_parallel` fails on CPU, where `F.scaled_dot_product_attention` dispatches to
    an operator for which it has no strategy. The functions inside of it take any operator. Their
    transfers go through `channel`, so that all ways share one link and one log.
    """

    def __init__(self, channel: BothWaysChannel, local: CpuAttention, heads: Heads) -> None:
        self.local, self.heads, self.group = local, heads, channel.group

        class Rotater:
            def __init__(self, *_: object) -> None:
                self.coming: Pending | None = None

            def exchange_buffers(self, buffer: Tensor) -> None:
                self.coming = channel.permute(buffer)

            def next_buffer(self) -> Tensor:
                assert self.coming is not None
                return self.coming.wait()

        torchs._create_rotater = lambda *_, **__: Rotater()
        # Without this torch would merge the outputs in float32, and the comparison is in float64.
        torchs._cp_options.convert_to_f32 = False

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool
    ) -> tuple[Tensor, Tensor]:
        """Return the output [B, H, S, d] and its log-sum-exp [B, H, S], B being 1."""
        q, k, v = (x.transpose(1, 2)[0] for x in (query, key, value))
        out, lse = self.local.with_lse(q, k, v, self._mask(q, k, is_causal))
        return out.transpose(0, 1).unsqueeze(0), lse.transpose(0, 1).unsqueeze(0)

    def backward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        logsumexp: Tensor,
        *,
        is_causal: bool,
        grad_out: Tensor,
    ) -> tuple[Tensor, ...]:
        """Return the gradients of query, key and value, each [B, H or K, S, d]."""
        given = (x.transpose(1, 2)[0] for x in (grad_out, query, key, value, out))
        dout, q, k, v, out = given
        mask = self._mask(q, k, is_causal)
        grads = self.local.gradients(dout, q, k, v, out, logsumexp[0].transpose(0, 1), mask)
        return tuple(grad.transpose(0, 1).unsqueeze(0) for grad in grads)

    def _mask(self, q: Tensor, k: Tensor, is_causal: bool) -> AttentionMask:
        return AttentionMask.of_documents([len(q)], [len(k)], causal=is_causal)


class _TorchsRingAttention(torch.autograd.Function):
    """Attention by torch's ring: q [1, H, T, d], k and v [1, K, T, d] -> [1, H, T, d]."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ring: _TorchsRing) -> Tensor:
        out, lse = torchs._templated_ring_attention(
            ring.group, 2, ring.forward, q, k, v, is_causal=True
        )
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.ring = ring
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        ring: _TorchsRing = ctx.ring
        grads = torchs._templated_ring_attention_backward(
            ring.group, 2, ring.backward, dout, "grad_out", q, k, v, out, lse, is_causal=True
        )
        return (*grads, None)
