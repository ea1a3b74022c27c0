"""`Channel`, the one door to what `torch.distributed` sends.

[Note: Straight to the group]
What a layer does many times a step is asked of the process group itself: the functions of
`torch.distributed` check, log and look for a coalescing context first, which takes as long as the
launch. torch 2.13 has public names for these methods, 2.11 only the old ones.

[Note: Reduce-scatter by all-to-all]
gloo's reduce-scatter is an all-reduce inside and moves twice the bytes. An all-to-all followed by a
local sum in rank order moves the right amount, adds in float32 (float64 stays float64), and gives
the same bits whatever the timing. It is what `reduce_scatter` does on gloo.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from isp.core.comm import streams
from isp.core.comm.pending import Pending
from isp.core.comm.tag import UNNAMED, CollectiveCall, CollectiveError, Tag, Transfer
from isp.core.comm.transfer_log import CommLog
from isp.core.torch_private import (
    all_gather_single,
    all_to_all_single,
    group_timeout,
    reduce_scatter_single,
)

__all__ = ["Channel", "DryChannel", "Listener", "check_channel", "join_ranks"]


class Channel:
    """A process group, with collectives that return a `Pending`, and a log of its transfers.

        Channel.from_group(group)               # a torch ProcessGroup
        Channel.from_mesh(device_mesh, "dim")   # a dimension of a torch DeviceMesh
        Channel.solo()                          # one rank

    A channel of one rank needs no process group: its collectives return the tensor itself, log
    nothing and cost nothing. `sum_locally` is about [Note: Reduce-scatter by all-to-all]; None: on
    gloo.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        *,
        name: str = "",
        log: CommLog | None = None,
        sum_locally: bool | None = None,
        device: str | None = None,
    ) -> None:
        if group is not None:
            _check_group(group)
        self.group = group
        self.name = name
        self.size = 1 if group is None else group.size()
        self.rank = 0 if group is None else group.rank()
        self.log = CommLog() if log is None else log
        self.arrival: Callable[[int], float] | None = None
        """Hook for tools that slow transfers: called at the launch of each with its bytes, returns
        the earliest end of its wait (`time.perf_counter`). Not called for tensors on CUDA."""
        if sum_locally is None:
            sum_locally = group is not None and streams.backend_name(group, device) == "gloo"
        self._launched: Counter[tuple[int, ...]] = Counter()
        """Transfers so far, by the sender and receiver of those between two; of all ranks: ()."""
        self._on_streams = group is not None and streams.serve(group, device)
        self._ends: streams.Stream | None = None
        """See `CommLog.timed_on_device`."""
        self.sums_locally = sum_locally
        """Whether reduce-scatters receive the ranks' parts and add them up here."""

    @classmethod
    def from_group(
        cls,
        group: dist.ProcessGroup,
        *,
        name: str = "",
        log: CommLog | None = None,
        device: str | None = None,
    ) -> Channel:
        """Return the channel of a process group that this rank is in, such as `dist.group.WORLD`.

        `name` appears in errors and logs; channels that share a `log` are measured together.
        `device` ("cpu", "cuda") of the tensors, for groups that serve both; None: CUDA then.
        Raises TypeError if `group` is no ProcessGroup, ValueError if this rank is not in it or it
        has no backend for the device.
        """
        _check_group(group)  # also of None, with which the constructor makes a channel of one rank
        return cls(group, name=name, log=log, device=device)

    @classmethod
    def from_mesh(
        cls, mesh: DeviceMesh, dim: str | int | None = None, *, log: CommLog | None = None
    ) -> Channel:
        """Return the channel of this rank's group along `dim` of a torch DeviceMesh.

        `dim` is the name or number of the dimension; None: the only one. The channel has its name.
        Raises TypeError if `mesh` is no DeviceMesh, ValueError if it has no such dimension or `dim`
        is needed.
        """
        if not isinstance(mesh, DeviceMesh):
            raise TypeError(
                f"mesh must be a torch DeviceMesh, got {_described(mesh)}: make one with"
                " init_device_mesh, or pass a process group to Channel.from_group(group)"
            )
        names = mesh.mesh_dim_names or ()
        if dim is None and mesh.ndim == 1:
            dim = 0
        if mesh.get_coordinate() is None:
            raise ValueError(f"this rank is not in {mesh}: make the channel on its ranks only")
        try:
            if dim is None:
                raise KeyError("several dimensions")
            group = mesh.get_group(dim)  # also of dimensions that were flattened, by name
        except (KeyError, IndexError, RuntimeError) as error:
            raise ValueError(
                f"dim={dim!r} is no dimension of {mesh}: pass one of"
                f" {', '.join(map(repr, names or range(mesh.ndim)))}"
            ) from error
        name = dim if isinstance(dim, str) else names[dim] if names else ""
        return cls.from_group(group, name=name, log=log, device=mesh.device_type)

    @classmethod
    def solo(cls, name: str = "") -> Channel:
        """Return a channel of one rank, which needs no process group."""
        return cls(None, name=name)

    def progress(self) -> dict[str, int]:
        """The number of transfers launched so far, by the group's name (see `CollectiveCall`)."""
        launched = [
            self._collective("send" if pair else "", "", pair, number)
            for pair, number in self._launched.items()
        ]
        return {collective.group: collective.number for collective in launched}

    # -- collectives along a dimension -------------------------------------------------------

    def all_gather(self, x: Tensor, dim: int = 0, *, tag: Tag = UNNAMED) -> Pending:
        """Join the ranks' slices: x [.., N/p, ..] -> [.., N, ..], split along `dim`."""
        if self.size == 1:
            return Pending.ready(x)
        x = x.contiguous()
        out = x.new_empty(self.size, *x.shape)
        pending = self.all_gather_into(out, x, tag=tag)
        return pending.then(lambda out: join_ranks(out, dim))

    def reduce_scatter(self, x: Tensor, dim: int = 0, *, tag: Tag = UNNAMED) -> Pending:
        """Sum over the ranks and keep this rank's slice: x [.., N, ..] -> [.., N/p, ..].

        Raises ValueError if N is not a multiple of the channel's size.
        """
        if self.size == 1:
            return Pending.ready(x)
        chunks = self._split(x, dim)  # [p, .., N/p, ..]
        out = torch.empty_like(chunks[0])
        return self.reduce_scatter_into(out, chunks, tag=tag)

    def all_to_all(self, x: Tensor, *, scatter: int, gather: int, tag: Tag = UNNAMED) -> Pending:
        """Split dim `scatter` over the ranks and join dim `gather`, which was split before.

        x [.., N, .., M/p, ..] -> [.., N/p, .., M, ..]; its dual swaps the two dims.
        Raises ValueError if N is not a multiple of the channel's size.
        """
        if self.size == 1:
            return Pending.ready(x)
        chunks = self._split(x, scatter)  # [p, .., N/p, .., M/p, ..]
        out = torch.empty_like(chunks)
        pending = self.all_to_all_into(out, chunks, tag=tag)
        return pending.then(lambda out: join_ranks(out, gather))

    def all_reduce(self, x: Tensor, *, op: str = "sum", tag: Tag = UNNAMED) -> Pending:
        """The sum (or `op="max"`) over the ranks, in a new tensor of the shape of x."""
        if self.size == 1:
            return Pending.ready(x)
        return self.all_reduce_(x.clone(memory_format=torch.contiguous_format), op=op, tag=tag)

    # -- collectives into given buffers ------------------------------------------------------

    def all_gather_into(self, out: Tensor, x: Tensor, *, tag: Tag = UNNAMED) -> Pending:
        """Write the ranks' x [n, ..], joined in rank order, into `out` [p n, ..] or [p, n, ..]."""
        if self.size == 1:
            return Pending.ready(out.copy_(x.view_as(out)) if out is not x else out)
        joined = out if out.dim() == x.dim() else out.flatten(0, 1)
        return self._launch(
            "all_gather",
            tag,
            x.nbytes * (self.size - 1),
            partial(all_gather_single, self.group, joined, x),
            out,
            keep=(x, out),
        )

    def reduce_scatter_into(
        self, out: Tensor, x: Tensor, *, received: Tensor | None = None, tag: Tag = UNNAMED
    ) -> Pending:
        """Write this rank's slice of the sum of x [p n, ..] or [p, n, ..] into `out` [n, ..].

        `out` may have a wider dtype than x, and then sums in it. Sums on gloo as the note
        [Reduce-scatter by all-to-all] says; `received`, like x, is a buffer for that, which is in
        use until the wait, as `out` is.
        """
        if self.size == 1:
            return Pending.ready(out.copy_(x.view_as(out)))
        if self.sums_locally:
            parts = torch.empty_like(x) if received is None else received
            return self._launch(
                "reduce_scatter",
                tag,
                x.nbytes // self.size * (self.size - 1),
                partial(all_to_all_single, self.group, parts, x, [], []),
                parts,
                keep=(x, parts, out),
            ).then(lambda parts: _sum_in_rank_order(parts.view(self.size, *out.shape), out))
        wide = x if x.dim() == out.dim() else x.flatten(0, 1)
        if wide.dtype != out.dtype:  # to torch, `to` is an operator even then
            wide = wide.to(out.dtype)
        return self._launch(
            "reduce_scatter",
            tag,
            wide.nbytes // self.size * (self.size - 1),
            partial(reduce_scatter_single, self.group, out, wide),
            out,
            keep=(wide, out),
        )

    def all_to_all_into(
        self,
        out: Tensor,
        x: Tensor,
        *,
        out_rows: Sequence[int] | None = None,
        in_rows: Sequence[int] | None = None,
        tag: Tag = UNNAMED,
    ) -> Pending:
        """Send slice i of dim 0 of x to rank i, and write what rank i sends into slice i of `out`.

        Slices are equal, or `in_rows[i]` and `out_rows[i]` rows long.
        """
        if self.size == 1:
            return Pending.ready(out.copy_(x))
        own = x.nbytes // self.size
        if in_rows is not None:
            own = x.nbytes // max(1, x.shape[0]) * in_rows[self.rank]
        return self._launch(
            "all_to_all",
            tag,
            x.nbytes - own,
            partial(
                all_to_all_single, self.group, out, x, list(out_rows or ()), list(in_rows or ())
            ),
            out,
            keep=(x, out),
        )

    def all_reduce_(self, x: Tensor, *, op: str = "sum", tag: Tag = UNNAMED) -> Pending:
        """Replace x by the sum (or `op="max"`) over the ranks."""
        if self.size == 1:
            return Pending.ready(x)
        reduce_op = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}[op]
        sent = x.nbytes * 2 * (self.size - 1) // self.size
        return self._launch(
            "all_reduce",
            tag,
            sent,
            lambda: dist.all_reduce(x, op=reduce_op, group=self.group, async_op=True),
            x,
            keep=(x,),
        )

    def broadcast_(self, x: Tensor, *, source: int = 0, tag: Tag = UNNAMED) -> Pending:
        """Replace x by that of the channel's rank `source`."""
        if self.size == 1:
            return Pending.ready(x)
        sent = x.nbytes if self.rank == source else 0
        return self._launch(
            "broadcast",
            tag,
            sent,
            lambda: dist.broadcast(x, group=self.group, group_src=source, async_op=True),
            x,
            keep=(x,),
        )

    # -- between two ranks -------------------------------------------------------------------

    def send(self, x: Tensor, target: int, *, tag: Tag = UNNAMED) -> Pending:
        """Send x to the channel's rank `target`, which receives as often as this one sends."""
        x = x.contiguous()
        return self._launch(
            "send",
            tag,
            x.nbytes,
            lambda: dist.isend(x, group=self.group, group_dst=target),
            x,
            keep=(x,),
            pair=(self.rank, target),
        )

    def recv(self, out: Tensor, source: int, *, tag: Tag = UNNAMED) -> Pending:
        """Replace `out`, which is contiguous, by what the channel's rank `source` sends."""
        return self._launch(
            "recv",
            tag,
            0,
            lambda: dist.irecv(out, group=self.group, group_src=source),
            out,
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
        tag: Tag,
        sent_bytes: int,
        start: Callable[[], dist.Work | None],
        out: Tensor,
        *,
        keep: tuple[Tensor, ...],
        pair: tuple[int, ...] = (),
    ) -> Pending:
        """`out` on its way; `keep` is all that travels, and `pair` as in `_launched`."""
        self._launched[pair] += 1
        wait: Callable[[], object]
        if self._on_streams and not self.log.listens:
            work = start()
            assert work is not None, "this rank is in its group"
            wait = work.wait
        else:
            wait = self._start(Transfer(kind, self.name, tag, sent_bytes), start, pair)
        return Pending(wait, result=out, keep=keep)

    def _start(
        self, of: Transfer, start: Callable[[], dist.Work | None], pair: tuple[int, ...]
    ) -> Callable[[], object]:
        """Start a transfer; what is returned waits for it, and the log has its times."""
        transfer = self.log.start(*of)
        if not self._on_streams:
            arrival = 0.0 if self.arrival is None else self.arrival(of.sent_bytes)
            work = _ours(start())
            wait = partial(self._wait_on_host, work, of, pair, self._launched[pair])
            return transfer.timed_on_host(work, wait, arrival, listens=self.log.listens)
        if self.log.clock is not None:
            self._ends = self._ends or streams.new(self.log.clock.device)
        return self.log.timed_on_device(transfer, lambda: _ours(start()), self._ends)

    def _wait_on_host(
        self, work: dist.Work, transfer: Transfer, pair: tuple[int, ...], number: int
    ) -> None:
        try:
            if pair:  # gloo counts their time from here, and has to be told how long
                work.wait(self._timeout())
            else:
                work.wait()
        except RuntimeError as error:
            collective = self._collective(transfer.kind, str(transfer.tag), pair, number)
            raise CollectiveError(collective, str(error)) from error

    def _collective(
        self, kind: str, label: str, pair: tuple[int, ...], number: int
    ) -> CollectiveCall:
        assert self.group is not None
        ranks = dist.get_process_group_ranks(self.group)
        ranks = [ranks[rank] for rank in pair] if pair else ranks
        return CollectiveCall(kind, label, self.name, ranks, number)

    def _timeout(self) -> timedelta:
        """The time a transfer of the group may take now."""
        assert self.group is not None
        return group_timeout(self.group)


class Listener(Protocol):
    """A listener to what dry channels do."""

    def launched(self, transfer: Transfer) -> Callable[[], object]:
        """A transfer sets off; what is returned is called when it is waited for."""


class DryChannel(Channel):
    """Rank `rank` of `size`, without a process group: for tensors on the meta device.

    Code that runs over it does all that it does over a real one, and what arrives has the right
    shape and no contents.
    """

    def __init__(
        self,
        name: str,
        size: int,
        rank: int,
        listener: Listener | None = None,
        *,
        sum_locally: bool = False,
    ) -> None:
        super().__init__(None, name=name, sum_locally=sum_locally)
        self.size = size
        self.rank = rank
        self.listener = listener

    def _start(self, transfer: Transfer, *_: object) -> Callable[[], object]:
        return (lambda: None) if self.listener is None else self.listener.launched(transfer)


def check_channel(name: str, given: object) -> None:
    """Raise TypeError, naming the argument `name`, if what was given is no `Channel`."""
    if isinstance(given, Channel):
        return
    if isinstance(given, dist.ProcessGroup):
        instead = "pass isp.Channel.from_group(group)"
    elif isinstance(given, DeviceMesh):
        instead = 'pass isp.Channel.from_mesh(device_mesh, "dim")'
    else:
        instead = (
            "pass isp.Channel.from_group(process_group), isp.Channel.from_mesh(device_mesh,"
            ' "dim"), or isp.Channel.solo() for one rank'
        )
    raise TypeError(f"{name} must be an isp.Channel, got {_described(given)}: {instead}")


def _check_group(group: object) -> None:
    """Raise if `group` is no process group that this rank is in."""
    if isinstance(group, int) and group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            "this rank is not in the group: make the channel on the ranks of the group only"
        )
    if not isinstance(group, dist.ProcessGroup):
        if group is None:
            instead = "call init_process_group first, or use Channel.solo() for one rank"
        elif isinstance(group, DeviceMesh):
            instead = 'pass Channel.from_mesh(device_mesh, "dim")'
        else:
            instead = "pass one of dist.new_group, device_mesh.get_group() or dist.group.WORLD"
        raise TypeError(f"group must be a torch ProcessGroup, got {_described(group)}: {instead}")


def _described(given: object) -> str:
    """Return the type of `given` in words, and its value where that is short."""
    if given is None:
        return "None"
    if isinstance(given, type) or callable(given):
        kind = "class" if isinstance(given, type) else type(given).__name__
        return f"the {kind} {given.__name__}" if hasattr(given, "__name__") else f"a {kind}"
    if isinstance(given, int | float | str | bool):
        return f"{type(given).__name__} {given!r}"
    return f"a {type(given).__name__}"


def _ours(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this rank is in its group"
    return work


def join_ranks(out: Tensor, dim: int) -> Tensor:
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
