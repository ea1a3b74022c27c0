"""Start and end of the processes of a run (`World`), and their process groups (`Mesh`)."""

from __future__ import annotations

import json
import logging
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from isp.core.comm import cuda, streams
from isp.core.comm.channel import Channel
from isp.core.comm.transfer_log import CommLog
from isp.core.mesh.topology import Axis, Topology
from isp.core.torch_private import (
    FileStore,
    PrefixStore,
    Store,
    TCPStore,
    set_group_timeout,
    set_options_timeout,
)
from isp.utils.environment import rank_and_size

__all__ = ["RENDEZVOUS_FILE", "Channels", "Mesh", "World", "decided_by_rank_0", "use_loopback"]

logger = logging.getLogger(__name__)

RENDEZVOUS_FILE = "ISP_RENDEZVOUS_FILE"
"""Environment variable: path of a private file for a rendezvous on one machine, without a port."""

_CONNECT = timedelta(seconds=5)
"""Timeout of a connection to an address that may be of an earlier, dead rank 0."""

_FAULT_READ_SECONDS = 60.0
"""How long ranks wait at most, before they end, until all have read an error of rank 0."""

_SERIALIZATION_WARNING = "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING"
"""Environment variable for torch's warning that sends of one group are serialized. Our pipelines
expect that, so it is set to false."""


def use_loopback() -> None:
    """Bind the sockets of this process and of ranks it starts to the loopback interface.

    Call this if all ranks are on one machine: otherwise backends bind to the address of the host
    name, which other machines can reach. Interfaces that the user has set are kept.
    """
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
    if loopback is not None:
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(variable, loopback)


@dataclass
class World:
    """The processes of a run and the rank of this one; a context in which collectives work.

    Reads torchrun's environment (RANK, WORLD_SIZE, LOCAL_RANK). A world of one process starts no
    process group. `expands_segments`: see `cuda.expand_segments`.
    """

    device: torch.device
    timeout_seconds: float = 600.0
    expands_segments: bool = True
    rank: int = field(default_factory=lambda: rank_and_size()[0])
    size: int = field(default_factory=lambda: rank_and_size()[1])
    store: Store | None = None
    """Store that `decided_by_rank_0` returned, by which the ranks have already met; None: they meet
    when the context is entered."""

    def __post_init__(self) -> None:
        # Set here and not in __enter__: code between the two may ask for the device's memory, which
        # initializes CUDA, and CUDA reads the number of connections only then.
        if self.device.type == "cuda":
            cuda.use_more_connections()
            if self.rank == 0 and (warning := cuda.few_connections(self.size)):
                logger.warning("%s", warning)

    @property
    def backend(self) -> str:
        """Return the backend of process groups for tensors on the device."""
        return "nccl" if self.device.type == "cuda" else "gloo"

    def __enter__(self) -> World:
        if self.device.type == "cuda":
            if self.expands_segments:
                cuda.expand_segments()
            torch.cuda.set_device(self.device)
        if self.size > 1:
            timeout, device_options = timedelta(seconds=self.timeout_seconds), {}
            if self.device.type == "cuda":
                options = streams.nccl_options()
                set_options_timeout(options, timeout)
                # With device_id NCCL connects now, on this device, not in the first collective.
                device_options = {"device_id": self.device, "pg_options": options}
                os.environ.setdefault(_SERIALIZATION_WARNING, "false")
            dist.init_process_group(
                self.backend,
                store=self.store or _rendezvous_store(timeout),
                rank=self.rank,
                world_size=self.size,
                timeout=timeout,
                **device_options,
            )
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # After an error other ranks may be gone, and destroying the group could hang.
        if kind is None and dist.is_initialized():
            dist.destroy_process_group()


def decided_by_rank_0(
    decide: Callable[[], list[str]], timeout_seconds: float
) -> tuple[list[str], Store | None]:
    """Call `decide` on rank 0; return its result on all ranks, and the store for `World`.

    Use it before the world starts, for decisions that depend on files: these may differ between
    machines. A ValueError or OSError of rank 0 is raised on all ranks, on the others as ValueError.
    The other ranks also raise ValueError after `timeout_seconds` (comm.init_timeout_seconds).
    """
    rank, size = rank_and_size()
    if size == 1:
        return decide(), None
    store, key = _rendezvous_store(timedelta(seconds=timeout_seconds)), "isp/decided_by_rank_0"
    if rank == 0:
        try:
            decided = decide()
        except (ValueError, OSError) as error:
            store.set(key, json.dumps([None, str(error)]))
            _wait_for_readers(store, key, size, timeout_seconds)
            raise
        store.set(key, json.dumps([decided, ""]))  # the result, and no fault
        return decided, store
    try:
        found = store.get(key)
    except dist.DistStoreError as error:
        raise ValueError(
            f"rank {rank} has waited comm.init_timeout_seconds={timeout_seconds:g} for rank 0 to"
            " decide for all ranks: set it higher if rank 0 needs more time to read files"
        ) from error
    decided, fault = json.loads(found)
    if fault:
        # Acknowledge the fault: rank 0, with the store, must not end before all have read it.
        store.set(f"{key}/{rank}", "")
        _wait_for_readers(store, key, size, timeout_seconds)
        raise ValueError(fault)
    return decided, store


def _wait_for_readers(store: Store, key: str, size: int, timeout_seconds: float) -> None:
    """Wait until all other ranks have read the fault of rank 0, for a minute at most.

    The store may end with rank 0, and torchrun ends rank 0 when another rank of its machine fails.
    So all ranks wait here before they raise: ranks of other machines may start later.
    """
    patience = timedelta(seconds=min(timeout_seconds, _FAULT_READ_SECONDS))
    with suppress(dist.DistError):
        store.wait([f"{key}/{other}" for other in range(1, size)], patience)


def _rendezvous_store(timeout: timedelta) -> Store:
    """Return the store by which the ranks of this start meet.

    Ranks started by `isp .. --nproc` use its private file, all others the store of torchrun, or of
    MASTER_ADDR and MASTER_PORT. torchrun of torch 2.13 keeps its store when it restarts ranks, and
    these may then read the addresses of dead ranks. So on one machine each start has keys of its
    own. On several machines, which count restarts differently, rank 0 opens a new store, which ends
    with rank 0 (`_store_of_this_start`). Raises ValueError if the port is in use.
    """
    if file := os.environ.get(RENDEZVOUS_FILE):
        private = FileStore(file, int(os.environ["WORLD_SIZE"]))
        private.set_timeout(timeout)
        return private
    try:
        store, rank, _ = next(rendezvous("env://", timeout=timeout))
    except dist.DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        raise ValueError(
            f"MASTER_PORT={os.environ['MASTER_PORT']} is already in use on this machine: set"
            f" another port, the same for all ranks, or stop the process that uses it"
        ) from error
    store.set_timeout(timeout)
    one_machine = os.environ.get("GROUP_WORLD_SIZE") == "1"  # torchrun's number of machines
    if not one_machine and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return _store_of_this_start(store, rank, timeout)
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if one_machine else "any"
    return PrefixStore(f"start_{start}", store)


def _store_of_this_start(kept: Store, rank: int, timeout: timedelta) -> Store:
    """Return a new store of rank 0, whose address the others read from `kept`, torchrun's store.

    A rank that has read the address of an earlier rank 0 gets no connection, and reads it again.
    Raises DistNetworkError or DistStoreError if there is no connection before `timeout`.
    """
    place, end = "isp/store_of_rank_0", time.monotonic() + timeout.total_seconds()
    if rank == 0:
        # Find an address of this machine that other machines can reach. MASTER_ADDR may be another
        # machine, so take the local address of a connection to it. If MASTER_ADDR is this machine,
        # that would be the loopback address: then take MASTER_ADDR itself.
        main = os.environ["MASTER_ADDR"]
        with socket.create_connection((main, int(os.environ["MASTER_PORT"]))) as connection:
            own = connection.getsockname()[0]
        own = main if own.startswith("127.") or own == "::1" else own
        opened = TCPStore(own, 0, is_master=True, timeout=timeout, wait_for_workers=False)
        kept.set(place, f"{own} {opened.port}")
        return opened
    while True:
        host, port = kept.get(place).decode().split()
        try:
            found = TCPStore(host, int(port), is_master=False, timeout=_CONNECT)
        except (dist.DistNetworkError, dist.DistStoreError):
            if time.monotonic() > end:
                raise
        else:
            found.set_timeout(timeout)
            return found


class Channels(Protocol):
    """A mapping from each axis to this rank's channel along it, such as a `Mesh` or a dict."""

    def __getitem__(self, axis: Axis, /) -> Channel: ...


class Mesh:
    """This rank's channels, one for each axis of a topology.

    Needs the default process group, unless the world is one rank. Without `backend`, `Axis.WORLD`
    uses the default group. With `backend`, which is for a default group that user code has made,
    all groups are new and use that backend. All ranks must make the same meshes and `open` the same
    channels in the same order.
    """

    def __init__(
        self,
        topology: Topology,
        rank: int,
        *,
        log: CommLog | None = None,
        backend: str | None = None,
    ) -> None:
        self.topology = topology
        self.rank = rank
        self.log = CommLog() if log is None else log
        self._backend = backend
        self.members: dict[str, tuple[int, ...]] = {}
        """World ranks of each channel of more than one rank, by the channel's name."""
        self.opened: list[Channel] = []
        """All channels of this mesh."""
        self._groups: dict[Axis, dist.ProcessGroup | None] = {}
        # Axes with the same ranks and purpose share a channel. Axes with the same ranks and other
        # purposes have channels of their own, over one shared process group.
        own = {
            axis: self._add(axis, axis.value, self._shared_group(axis))
            for axis in Axis
            if topology.channel_axis(axis) is axis
        }
        self._channels = {axis: own[topology.channel_axis(axis)] for axis in Axis}
        self.host = self.open_host(Axis.WORLD, "host")
        """Channel of all ranks for values in CPU memory, whatever the device."""

    def __getitem__(self, axis: Axis) -> Channel:
        """Return the channel of this rank's group along `axis`."""
        return self._channels[axis]

    def open_host(self, axis: Axis, name: str) -> Channel:
        """Return a channel along `axis` for values in CPU memory.

        It is the channel of the axis if that uses gloo, else a new one over a new gloo group. All
        groups of the axis must have the same size.
        """
        own = self[axis]
        if own.group is None or dist.get_backend(own.group) == "gloo":
            return own
        ranks = dist.get_process_group_ranks(own.group)
        group = dist.new_group(
            ranks, backend="gloo", use_local_synchronization=True, group_desc=name
        )
        self.members[name] = tuple(ranks)
        self.opened.append(Channel(group, name=name, log=self.log))
        return self.opened[-1]

    def open(self, axis: Axis, name: str, *, sum_locally: bool | None = None) -> Channel:
        """Open another channel along `axis`, over a new process group.

        Its transfers do not queue after transfers of the axis's first channel.
        """
        return self._add(axis, name, self._make_group(axis, name), sum_locally=sum_locally)

    def _add(
        self,
        axis: Axis,
        name: str,
        group: dist.ProcessGroup | None,
        *,
        sum_locally: bool | None = None,
    ) -> Channel:
        """Return a new channel over `group`, and record it and its members."""
        channel = Channel(group, name=name, log=self.log, sum_locally=sum_locally)
        self.opened.append(channel)
        if group is not None:
            self.members[name] = tuple(self.topology.group_of(axis, self.rank))
        return channel

    def _shared_group(self, axis: Axis) -> dist.ProcessGroup | None:
        """Return the process group that `axis` uses, and may share with other axes."""
        home = self.topology.group_axis(axis)
        if home not in self._groups:
            names = "+".join(self.topology.process_groups.get(home, ()))
            self._groups[home] = self._make_group(home, names)
        return self._groups[home]

    def _make_group(self, axis: Axis, name: str) -> dist.ProcessGroup | None:
        """Return a new process group of this rank along `axis`; None if it has one rank.

        `name` is its name in torch's messages.
        """
        groups = self.topology.groups(axis)
        if all(len(ranks) == 1 for ranks in groups):
            return None
        if axis is Axis.WORLD and self._backend is None:
            assert dist.get_world_size() == self.topology.world_size
            return dist.group.WORLD
        # A group is made by its members only (`use_local_synchronization`), because along some axes
        # 1,024 ranks have over 500 groups. torch names a group by the number of groups
        # that a rank has made, and this number must be equal on all members. So if any group of the
        # axis has several ranks, a rank that is alone in its group makes a process group of one.
        own = next(ranks for ranks in groups if self.rank in ranks)
        backend = self._backend or dist.get_backend()
        made = dist.new_group(
            own,
            backend=backend,
            use_local_synchronization=True,
            pg_options=streams.nccl_options() if backend == "nccl" else None,
            group_desc=name,
        )
        return made if len(own) > 1 else None

    def set_timeout(self, seconds: float) -> None:
        """Set the timeout of all collectives that are launched from now on."""
        for group in {channel.group for channel in self.opened if channel.group is not None}:
            set_group_timeout(timedelta(seconds=seconds), group)
