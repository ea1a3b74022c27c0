"""`Channel`, the one door to what `torch.distributed` sends.

[Note: Names that torch changed]
torch 2.13 renamed `all_gather_into_tensor` / `reduce_scatter_tensor` to `all_gather_single` /
`reduce_scatter_single`; 2.11 has only the old names. They are chosen here, once.

[Note: Reduce-scatter by all-to-all]
gloo's reduce-scatter is an all-reduce inside and moves twice the bytes. An all-to-all followed by a
local sum in rank order moves the right amount, adds in float32 (float64 stays float64), and gives
the same bits whatever the timing. It is what `reduce_scatter` does on gloo.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from isp.comm import streams
from isp.comm.cargo import UNNAMED, Cargo
from isp.comm.link import Link
from isp.comm.log import BETWEEN_TWO, CommLog, DeviceClock, Transfer
from isp.comm.pending import Pending

__all__ = ["Channel", "CollectiveError", "Place"]

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Place(NamedTuple):
    """One collective of a group, or transfer between two of its ranks, for people."""

    kind: str
    """As in `Transfer`."""
    label: str
    """The cargo."""
    channel: str
    ranks: list[int]
    """The group's, in the world; of a send or recv the sender and the receiver."""
    number: int
    """Of those that its channel has launched in the group; the same on all its ranks."""

    @property
    def group(self) -> str:
        """The group's name."""
        if self.kind in BETWEEN_TWO:
            return f"{self.channel} line from rank {self.ranks[0]} to rank {self.ranks[1]}"
        return f"{self.channel} group {self.ranks}"

    def __str__(self) -> str:
        of = f" of {self.label}" if self.label else ""
        return f"{self.kind}{of} in the {self.group} (number {self.number} there)"


class CollectiveError(RuntimeError):
    """A transfer failed: the backend's words, and which it was."""

    def __init__(self, place: Place, reason: str) -> None:
        super().__init__(f"{place}: {reason}")
        self.place = place


class Channel:
    """A process group, and the log of what crossed it.

    Collectives return a `Pending`. A channel of one rank needs no process group: its collectives
    hand the tensor straight back, log nothing and cost nothing. `sum_locally` is about
    [Note: Reduce-scatter by all-to-all]; None: on gloo.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        *,
        name: str = "",
        log: CommLog | None = None,
        link: Link | None = None,
        sum_locally: bool | None = None,
    ) -> None:
        self.group = group
        self.name = name
        self.size = 1 if group is None else group.size()
        self.rank = 0 if group is None else group.rank()
        self.log = CommLog() if log is None else log
        self.link = link
        if sum_locally is None:
            sum_locally = group is not None and dist.get_backend(group) == "gloo"
        self._launched: Counter[tuple[int, ...]] = Counter()
        """Transfers so far, by the sender and receiver of those between two; of all ranks: ()."""
        self._on_streams = group is not None and streams.serve(group)
        self._ends: streams.Stream | None = None
        self.sums_locally = sum_locally
        """Whether reduce-scatters receive the ranks' parts and add them up here."""

    @classmethod
    def solo(cls, name: str = "") -> Channel:
        """A channel of one rank."""
        return cls(None, name=name)

    def progress(self) -> dict[str, int]:
        """The number of transfers launched so far, by the group's name (see `Place`)."""
        places = [self._place("send" if p else "", "", p, n) for p, n in self._launched.items()]
        return {place.group: place.number for place in places}

    def _place(self, kind: str, label: str, pair: tuple[int, ...], number: int) -> Place:
        assert self.group is not None
        ranks = dist.get_process_group_ranks(self.group)
        return Place(kind, label, self.name, [ranks[r] for r in pair] if pair else ranks, number)

    # -- collectives along a dimension -------------------------------------------------------

    def all_gather(self, x: Tensor, dim: int = 0, *, cargo: Cargo = UNNAMED) -> Pending:
        """Join the ranks' slices: x [.., N/p, ..] -> [.., N, ..], split along `dim`."""
        if self.size == 1:
            return Pending.ready(x)
        x = x.contiguous()
        out = x.new_empty(self.size, *x.shape)
        pending = self.all_gather_into(out, x, cargo=cargo)
        return pending.then(lambda out: _join(out, dim))

    def reduce_scatter(self, x: Tensor, dim: int = 0, *, cargo: Cargo = UNNAMED) -> Pending:
        """Sum over the ranks and keep this rank's slice: x [.., N, ..] -> [.., N/p, ..].

        Raises ValueError if N is not a multiple of the channel's size.
        """
        if self.size == 1:
            return Pending.ready(x)
        chunks = self._split(x, dim)  # [p, .., N/p, ..]
        out = torch.empty_like(chunks[0])
        return self.reduce_scatter_into(out, chunks, cargo=cargo)

    def all_to_all(
        self, x: Tensor, *, scatter: int, gather: int, cargo: Cargo = UNNAMED
    ) -> Pending:
        """Split dim `scatter` over the ranks and join dim `gather`, which was split before.

        x [.., N, .., M/p, ..] -> [.., N/p, .., M, ..]; its dual swaps the two dims.
        Raises ValueError if N is not a multiple of the channel's size.
        """
        if self.size == 1:
            return Pending.ready(x)
        chunks = self._split(x, scatter)  # [p, .., N/p, .., M/p, ..]
        out = torch.empty_like(chunks)
        pending = self.all_to_all_into(out, chunks, cargo=cargo)
        return pending.then(lambda out: _join(out, gather))

    def all_reduce(self, x: Tensor, *, op: str = "sum", cargo: Cargo = UNNAMED) -> Pending:
        """The sum (or `op="max"`) over the ranks, in a new tensor of the shape of x."""
        if self.size == 1:
            return Pending.ready(x)
        return self.all_reduce_(x.clone(memory_format=torch.contiguous_format), op=op, cargo=cargo)

    # -- collectives into given buffers ------------------------------------------------------

    def all_gather_into(self, out: Tensor, x: Tensor, *, cargo: Cargo = UNNAMED) -> Pending:
        """Write the ranks' x [n, ..], joined in rank order, into `out` of p times its elements."""
        if self.size == 1:
            return Pending.ready(out.copy_(x.view_as(out)) if out is not x else out)
        sent = _num_bytes(x) * (self.size - 1)
        return self._launch(
            "all_gather",
            cargo,
            sent,
            lambda: _all_gather(out.view(-1), x.view(-1), group=self.group, async_op=True),
            lambda: out,
            keep=(x, out),
        )

    def reduce_scatter_into(
        self, out: Tensor, x: Tensor, *, received: Tensor | None = None, cargo: Cargo = UNNAMED
    ) -> Pending:
        """Write the sum of the ranks' x [p, *out.shape], this rank's slice of it, into `out`.

        `out` may have a wider dtype than x, and then sums in it. Sums on gloo as the note
        [Reduce-scatter by all-to-all] says; `received`, like x, is a buffer for that, which is in
        use until the wait, as `out` is.
        """
        if self.size == 1:
            return Pending.ready(out.copy_(x.view_as(out)))
        if self.sums_locally:
            sent = _num_bytes(x) // self.size * (self.size - 1)
            parts = torch.empty_like(x) if received is None else received
            return self._launch(
                "reduce_scatter",
                cargo,
                sent,
                lambda: dist.all_to_all_single(parts, x, group=self.group, async_op=True),
                lambda: _sum_in_rank_order(parts.view(self.size, *out.shape), out),
                keep=(x, parts, out),
            )
        wide = x if x.dtype == out.dtype else x.to(out.dtype)
        sent = _num_bytes(wide) // self.size * (self.size - 1)
        return self._launch(
            "reduce_scatter",
            cargo,
            sent,
            lambda: _reduce_scatter(out.view(-1), wide.view(-1), group=self.group, async_op=True),
            lambda: out,
            keep=(wide, out),
        )

    def all_to_all_into(
        self,
        out: Tensor,
        x: Tensor,
        *,
        out_rows: Sequence[int] | None = None,
        in_rows: Sequence[int] | None = None,
        cargo: Cargo = UNNAMED,
    ) -> Pending:
        """Send slice i of dim 0 of x to rank i, and write what rank i sends into slice i of `out`.

        Slices are equal, or `in_rows[i]` and `out_rows[i]` rows long.
        """
        if self.size == 1:
            return Pending.ready(out.copy_(x))
        own = _num_bytes(x) // self.size
        if in_rows is not None:
            own = _num_bytes(x) // max(1, x.shape[0]) * in_rows[self.rank]
        return self._launch(
            "all_to_all",
            cargo,
            _num_bytes(x) - own,
            lambda: dist.all_to_all_single(
                out,
                x,
                None if out_rows is None else list(out_rows),
                None if in_rows is None else list(in_rows),
                group=self.group,
                async_op=True,
            ),
            lambda: out,
            keep=(x, out),
        )

    def all_reduce_(self, x: Tensor, *, op: str = "sum", cargo: Cargo = UNNAMED) -> Pending:
        """Replace x by the sum (or `op="max"`) over the ranks."""
        if self.size == 1:
            return Pending.ready(x)
        reduce_op = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}[op]
        sent = _num_bytes(x) * 2 * (self.size - 1) // self.size
        return self._launch(
            "all_reduce",
            cargo,
            sent,
            lambda: dist.all_reduce(x, op=reduce_op, group=self.group, async_op=True),
            lambda: x,
            keep=(x,),
        )

    def broadcast_(self, x: Tensor, *, source: int = 0, cargo: Cargo = UNNAMED) -> Pending:
        """Replace x by that of the channel's rank `source`."""
        if self.size == 1:
            return Pending.ready(x)
        sent = _num_bytes(x) if self.rank == source else 0
        return self._launch(
            "broadcast",
            cargo,
            sent,
            lambda: dist.broadcast(x, group=self.group, group_src=source, async_op=True),
            lambda: x,
            keep=(x,),
        )

    # -- between two ranks -------------------------------------------------------------------

    def send(self, x: Tensor, target: int, *, cargo: Cargo = UNNAMED) -> Pending:
        """Send x to the channel's rank `target`, which receives as often as this one sends."""
        x = x.contiguous()
        return self._launch(
            "send",
            cargo,
            _num_bytes(x),
            lambda: _ours(dist.isend(x, group=self.group, group_dst=target)),
            lambda: x,
            keep=(x,),
            pair=(self.rank, target),
        )

    def recv(self, out: Tensor, source: int, *, cargo: Cargo = UNNAMED) -> Pending:
        """Replace `out`, which is contiguous, by what the channel's rank `source` sends."""
        return self._launch(
            "recv",
            cargo,
            0,
            lambda: _ours(dist.irecv(out, group=self.group, group_src=source)),
            lambda: out,
            keep=(out,),
            pair=(source, self.rank),
        )

    # -- inside ------------------------------------------------------------------------------

    def _split(self, x: Tensor, dim: int) -> Tensor:
        """x [.., N, ..] -> contiguous [p, .., N/p, ..]; copies only if it has to."""
        if x.shape[dim] % self.size:
            raise ValueError(
                f"dim {dim} of shape {tuple(x.shape)} does not divide by the {self.size} ranks"
                f" of the {self.name or 'channel'} group"
            )
        chunks: Tensor = x.unflatten(dim, (self.size, -1)).movedim(dim % x.dim(), 0)
        return chunks.contiguous()

    def _launch(
        self,
        kind: str,
        cargo: Cargo,
        sent_bytes: int,
        start: Callable[[], dist.Work],
        result: Callable[[], Tensor],
        keep: tuple[Tensor, ...],
        pair: tuple[int, ...] = (),
    ) -> Pending:
        self._launched[pair] += 1
        transfer = self.log.start(kind, self.name, cargo, sent_bytes)
        arrival = 0.0 if self.link is None else self.link.book(sent_bytes)
        if not self._on_streams:
            wait = self._wait_on_host(transfer, start(), result, arrival, pair)
        elif self.log.clock is None:
            wait = self._wait_on_device(transfer, start(), result)
        else:
            wait = self._time_on_device(transfer, start, result, self.log.clock)
        return Pending(wait, keep=keep)

    def _wait_on_device(
        self, transfer: Transfer, work: dist.Work, result: Callable[[], Tensor]
    ) -> Callable[[], Tensor]:
        """A wait makes the stream that is current then wait, and not the host."""

        def wait() -> Tensor:
            work.wait()
            transfer.waited = True
            return result()

        return wait

    def _time_on_device(
        self,
        transfer: Transfer,
        start: Callable[[], dist.Work],
        result: Callable[[], Tensor],
        clock: DeviceClock,
    ) -> Callable[[], Tensor]:
        """As `_wait_on_device`, with events around the transfer and the wait.

        A transfer ends where a stream that does nothing but wait for this channel's ends: they
        follow each other there as they do on the wire, and hold up nothing else. So it must be
        none of those that gathers and NCCL run on.
        """
        launch, work = clock.mark(), start()
        self._ends = self._ends or streams.new(clock.device, priority=-1)
        with streams.on(self._ends):
            work.wait()
            end = clock.mark()

        def wait() -> Tensor:
            begin = finish = clock.mark()
            work.wait()
            if streams.current(clock.device) == clock.compute:
                finish = clock.mark()
            transfer.waited = True
            self.log.defer(transfer, launch, end, begin, finish)
            return result()

        return wait

    def _wait_on_host(
        self,
        transfer: Transfer,
        work: dist.Work,
        result: Callable[[], Tensor],
        arrival: float,
        pair: tuple[int, ...],
    ) -> Callable[[], Tensor]:
        number = self._launched[pair]

        def note_end(_: object) -> None:
            transfer.ended = max(time.perf_counter(), arrival)

        # gloo's own reduce-scatter, send and recv have no future: the wait ends them
        with suppress(RuntimeError):
            work.get_future().add_done_callback(note_end)

        def wait() -> Tensor:
            begin = transfer.wait_began = time.perf_counter()
            try:
                if pair:  # gloo counts their time from here, and has to be told how long
                    work.wait(self._timeout())
                else:
                    work.wait()
            except RuntimeError as error:
                place = self._place(transfer.kind, transfer.label, pair, number)
                raise CollectiveError(place, str(error)) from error
            if (left := arrival - time.perf_counter()) > 0:
                time.sleep(left)
            transfer.exposed = time.perf_counter() - begin
            transfer.ended = transfer.ended or begin + transfer.exposed
            transfer.waited = True
            return result()

        return wait

    def _timeout(self) -> timedelta:
        """The time a transfer of the group may take now."""
        assert self.group is not None
        found: timedelta = self.group._get_backend(torch.device("cpu")).options._timeout
        return found


def _ours(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this rank is in its group"
    return work


def _num_bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


def _join(out: Tensor, dim: int) -> Tensor:
    """[p, .., N/p, ..] -> [.., N, ..]; a view if all dims before `dim` are 1."""
    dim = dim % (out.dim() - 1)
    joined: Tensor = out.movedim(0, dim).flatten(dim, dim + 1)
    return joined


def _sum_in_rank_order(received: Tensor, out: Tensor) -> Tensor:
    """Sum received [p, ..] over p into `out`, in float32 at least."""
    dtype = torch.promote_types(out.dtype, torch.float32)
    total = out if out.dtype == dtype else torch.empty_like(out, dtype=dtype)
    parts = list(received)
    if received.dtype == dtype and len(parts) > 1:
        torch.add(parts.pop(0), parts.pop(0), out=total)  # one pass over memory instead of two
    else:
        total.copy_(parts.pop(0))
    for part in parts:
        total += part
    return out if total is out else out.copy_(total)
