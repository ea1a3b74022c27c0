"""`Channel`, the process group by which all collectives, sends and receives of a run are launched.

All-gathers, reduce-scatters and all-to-alls call methods of the process group, which takes half the
time of the functions of `torch.distributed`.
See [Note: Straight to the group] in docs/design/notes/communication.md.
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
    """A process group with asynchronous collectives, each of which returns a `Pending`.

        Channel.from_group(group)               # a torch ProcessGroup
        Channel.from_mesh(device_mesh, "dim")   # a dimension of a torch DeviceMesh
        Channel.solo()                          # one rank

    A channel of one rank needs no process group: its collectives return the tensor itself (or copy
    it into the tensor given) and log nothing. `log` records the transfers while it collects or is
    observed. `sum_locally`: a reduce-scatter is an all-to-all and a local sum; None: on gloo only.
    See [Note: Reduce-scatter by all-to-all] in docs/design/notes/communication.md.
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
        """Hook of tools that simulate a slow network: called at each launch with the bytes sent, it
        returns the time (`time.perf_counter`) before which no wait ends. Not called on CUDA."""
        if sum_locally is None:
            sum_locally = group is not None and streams.backend_name(group, device) == "gloo"
        self._launched: Counter[tuple[int, ...]] = Counter()
        """Number of transfers launched so far: by (sender, receiver) for sends and receives, by ()
        for collectives. All ranks of a transfer count the same, so its number identifies it."""
        self._on_streams = group is not None and streams.serve(group, device)
        self._ends: streams.Stream | None = None
        """Stream that only waits for this channel's transfers, to time their ends; created when a
        log first times them (`CommLog.timed_on_device`)."""
        self.sums_locally = sum_locally
        """True if a reduce-scatter is an all-to-all and a local sum of the ranks' parts."""

    @classmethod
    def from_group(
        cls,
        group: dist.ProcessGroup,
        *,
        name: str = "",
        log: CommLog | None = None,
        device: str | None = None,
    ) -> Channel:
        """Return a channel over a process group that this rank is in, such as `dist.group.WORLD`.

        `name` appears in errors and logs; channels that share a `log` are measured together.
        `device`: type of the tensors' device, "cpu" or "cuda"; None: CUDA if the group supports it.
        Raises TypeError if `group` is not a ProcessGroup, ValueError if this rank is not in it or
        it has no backend for the device.
        """
        # Refuse None, for which the constructor would make a channel of one rank.
        _check_group(group)
        return cls(group, name=name, log=log, device=device)

    @classmethod
    def from_mesh(
        cls, mesh: DeviceMesh, dim: str | int | None = None, *, log: CommLog | None = None
    ) -> Channel:
        """Return a channel over this rank's group along `dim` of a torch DeviceMesh.

        `dim` is the name or index of a dimension; None: the only one of a 1-D mesh. The channel
        takes the dimension's name. Raises TypeError if `mesh` is not a DeviceMesh, ValueError if
        this rank is not in it, it has no such dimension, or has several and `dim` is None.
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
            group = mesh.get_group(dim)  # also finds flattened dimensions, by their names
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
        """Return the number of transfers launched so far, by `CollectiveCall.group`."""
        launched = [
            self._collective("send" if pair else "", "", pair, number)
            for pair, number in self._launched.items()
        ]
        return {collective.group: collective.number for collective in launched}

    # -- collectives along a dimension -------------------------------------------------------

    def all_gather(self, x: Tensor, dim: int = 0, *, tag: Tag = UNNAMED) -> Pending:
        """Launch the all-gather of slices along `dim`: x [.., N/p, ..] -> [.., N, ..]."""
        if self.size == 1:
            return Pending.ready(x)
        x = x.contiguous()
        # Backends concatenate along dim 0 only; slices are joined along `dim` after the wait.
        out = x.new_empty(self.size, *x.shape)
        pending = self.all_gather_into(out, x, tag=tag)
        return pending.then(lambda out: join_ranks(out, dim))

    def reduce_scatter(self, x: Tensor, dim: int = 0, *, tag: Tag = UNNAMED) -> Pending:
        """Launch the reduce-scatter: sum x over the ranks and keep this rank's slice of `dim`.

        x [.., N, ..] -> [.., N/p, ..].
        Raises ValueError if N is not a multiple of the channel's size.
        """
        if self.size == 1:
            return Pending.ready(x)
        chunks = self._split(x, dim)  # [p, .., N/p, ..]
        out = torch.empty_like(chunks[0])
        return self.reduce_scatter_into(out, chunks, tag=tag)

    def all_to_all(self, x: Tensor, *, scatter: int, gather: int, tag: Tag = UNNAMED) -> Pending:
        """Launch the all-to-all that shards dim `scatter` over the ranks and gathers dim `gather`.

        x [.., N, .., M/p, ..] -> [.., N/p, .., M, ..]; the inverse swaps the two dims.
        Raises ValueError if N is not a multiple of the channel's size.
        """
        if self.size == 1:
            return Pending.ready(x)
        chunks = self._split(x, scatter)  # [p, .., N/p, .., M/p, ..]
        out = torch.empty_like(chunks)
        pending = self.all_to_all_into(out, chunks, tag=tag)
        return pending.then(lambda out: join_ranks(out, gather))

    def all_reduce(self, x: Tensor, *, op: str = "sum", tag: Tag = UNNAMED) -> Pending:
        """Launch the all-reduce of x by "sum" or "max" into a new tensor."""
        if self.size == 1:
            return Pending.ready(x)
        return self.all_reduce_(x.clone(memory_format=torch.contiguous_format), op=op, tag=tag)

    # -- collectives into given buffers ------------------------------------------------------

    def all_gather_into(self, out: Tensor, x: Tensor, *, tag: Tag = UNNAMED) -> Pending:
        """Launch the all-gather of x [n, ..], in rank order, into `out` [p n, ..] or [p, n, ..]."""
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
        """Launch the reduce-scatter of x [p n, ..] or [p, n, ..] into `out` [n, ..].

        If `out` has a wider dtype than x, the sum is computed in that dtype. If the channel sums
        locally [Note: Reduce-scatter by all-to-all], the parts arrive in `received`, a buffer like
        x, or in a new one. All buffers are in use until the wait.
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
        # Widen x first, because the backend sums in the dtype of its input.
        wide = x if x.dim() == out.dim() else x.flatten(0, 1)
        if wide.dtype != out.dtype:  # a `to` that converts nothing still costs a dispatch
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
        """Launch the all-to-all along dim 0: slice i of x is sent to rank i.

        Slice i of `out` is received from rank i. Slices have equal length, or `in_rows[i]` rows
        in x and `out_rows[i]` rows in `out`.
        """
        if self.size == 1:
            return Pending.ready(out.copy_(x))
        own = x.nbytes // self.size  # the slice that stays here does not count as sent
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
        """Launch the all-reduce of x by "sum" or "max", in place."""
        if self.size == 1:
            return Pending.ready(x)
        reduce_op = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}[op]
        sent = x.nbytes * 2 * (self.size - 1) // self.size  # as a reduce-scatter and an all-gather
        return self._launch(
            "all_reduce",
            tag,
            sent,
            lambda: dist.all_reduce(x, op=reduce_op, group=self.group, async_op=True),
            x,
            keep=(x,),
        )

    def broadcast_(self, x: Tensor, *, source: int = 0, tag: Tag = UNNAMED) -> Pending:
        """Launch the broadcast of x from rank `source` of the channel, in place."""
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
        """Launch the send of x to rank `target` of the channel, which must call `recv` for it."""
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
        """Launch the receive into `out` (contiguous) from rank `source` of the channel."""
        return self._launch(
            "recv",
            tag,
            0,  # the sender counts the bytes
            lambda: dist.irecv(out, group=self.group, group_src=source),
            out,
            keep=(out,),
            pair=(source, self.rank),
        )

    # -- private -----------------------------------------------------------------------------

    def _split(self, x: Tensor, dim: int) -> Tensor:
        """Return the ranks' chunks of dim `dim`: x [.., N, ..] -> contiguous [p, .., N/p, ..].

        Copies x unless its chunks are contiguous already. Raises ValueError if N is not a
        multiple of p.
        """
        if x.shape[dim] % self.size:
            raise ValueError(
                f"dim {dim} of shape {tuple(x.shape)} is not divisible by the {self.size} ranks"
                f" of the {self.name or 'channel'} group: pad it"
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
        """Count the transfer, start it, and return a `Pending` of `out`.

        `keep`: tensors that the transfer reads and writes, kept alive until the wait
        [Note: Lifetime of tensors in flight]. `pair`: (sender, receiver) of a send or recv, by
        which such transfers are counted; empty for a collective.
        """
        self._launched[pair] += 1
        wait: Callable[[], object]
        # The fast path, without a record and without events: nothing listens to the log.
        if self._on_streams and not self.log.listens:
            work = start()
            assert work is not None, "this rank is in its group"
            wait = work.wait
        else:
            wait = self._start(Transfer(kind, self.name, tag, sent_bytes), start, pair)
        return Pending(wait, result=out, keep=keep)

    def _start(
        self, transfer: Transfer, start: Callable[[], dist.Work | None], pair: tuple[int, ...]
    ) -> Callable[[], object]:
        """Start a transfer, and return a function that waits for it and logs its times."""
        timed = self.log.start(*transfer)
        if not self._on_streams:
            arrival = 0.0 if self.arrival is None else self.arrival(transfer.sent_bytes)
            work = _own_work(start())
            wait = partial(self._wait_on_host, work, transfer, pair, self._launched[pair])
            return timed.timed_on_host(work, wait, arrival, listens=self.log.listens)
        if self.log.clock is not None:
            self._ends = self._ends or streams.new(self.log.clock.device)
        return self.log.timed_on_device(timed, lambda: _own_work(start()), self._ends)

    def _wait_on_host(
        self, work: dist.Work, transfer: Transfer, pair: tuple[int, ...], number: int
    ) -> None:
        """Block until `work` is done. Raises CollectiveError if the backend reports a failure."""
        try:
            # For a send or receive, gloo counts the time from the wait on, and the timeout must be
            # an argument of the wait.
            if pair:
                work.wait(self._timeout())
            else:
                work.wait()
        except RuntimeError as error:
            collective = self._collective(transfer.kind, str(transfer.tag), pair, number)
            raise CollectiveError(collective, str(error)) from error

    def _collective(
        self, kind: str, label: str, pair: tuple[int, ...], number: int
    ) -> CollectiveCall:
        """Return what identifies transfer `number` of this channel on all its ranks."""
        assert self.group is not None
        ranks = dist.get_process_group_ranks(self.group)
        ranks = [ranks[rank] for rank in pair] if pair else ranks
        return CollectiveCall(kind, label, self.name, ranks, number)

    def _timeout(self) -> timedelta:
        """Return the group's current timeout, which `Mesh.set_timeout` may have changed."""
        assert self.group is not None
        return group_timeout(self.group)


class Listener(Protocol):
    """Receiver of the transfers that a `DryChannel`, which sends nothing, would have sent."""

    def launched(self, transfer: Transfer) -> Callable[[], object]:
        """Record the launch of a transfer, and return a function to call at its wait."""


class DryChannel(Channel):
    """A channel without a process group, as rank `rank` of `size`, for tensors on the meta device.

    Code runs with it unchanged: results have the right shape, and no values. A rehearsal uses it to
    record which transfers a real step launches.
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
        # Overwrite the size, which is 1 without a process group: with size 1, collectives would
        # return x and launch nothing.
        self.size = size
        self.rank = rank
        self.listener = listener

    def _start(self, transfer: Transfer, *_: object) -> Callable[[], object]:
        return (lambda: None) if self.listener is None else self.listener.launched(transfer)


def check_channel(name: str, given: object) -> None:
    """Raise TypeError, naming the argument `name`, unless `given` is a `Channel`."""
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
    """Raise TypeError unless `group` is a ProcessGroup, ValueError if this rank is not in it."""
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
    """Return the type of `given` for an error text, with its value where that is short."""
    if given is None:
        return "None"
    if isinstance(given, type) or callable(given):
        kind = "class" if isinstance(given, type) else type(given).__name__
        return f"the {kind} {given.__name__}" if hasattr(given, "__name__") else f"a {kind}"
    if isinstance(given, int | float | str | bool):
        return f"{type(given).__name__} {given!r}"
    return f"a {type(given).__name__}"


def _own_work(work: dist.Work | None) -> dist.Work:
    """Return `work`; torch returns None only to a rank that is not in the group."""
    assert work is not None, "this rank is in its group"
    return work


def join_ranks(out: Tensor, dim: int) -> Tensor:
    """Join the ranks' slices of `dim`: out [p, .., N/p, ..] -> [.., N, ..].

    A view if all dims before `dim` have size 1, else a copy.
    """
    dim = dim % (out.dim() - 1)
    joined: Tensor = out.movedim(0, dim).flatten(dim, dim + 1)
    return joined


def _sum_in_rank_order(received: Tensor, out: Tensor) -> Tensor:
    """Sum received [p, ..] over p into `out`, in rank order and at least in float32."""
    dtype = torch.promote_types(out.dtype, torch.float32)
    total = out if out.dtype == dtype else torch.empty_like(out, dtype=dtype)
    parts = list(received)
    if received.dtype == dtype and len(parts) > 1:
        torch.add(parts.pop(0), parts.pop(0), out=total)  # both at once: `total` is not read
    else:
        total.copy_(parts.pop(0))
    for part in parts:
        total += part
    return out if total is out else out.copy_(total)
