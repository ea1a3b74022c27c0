"""Process groups for a topology, made in one place, and the start and end of a run's world."""

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
"""Variable naming a private file through which the ranks of one machine meet, without a port."""

_CONNECT = timedelta(seconds=5)
"""Time to find out that nobody answers at the address of an earlier rank 0."""

_FAULT_READ_SECONDS = 60.0
"""Time that ranks wait, before they end, until all have read a fault of rank 0."""

_TOLD_OF_SENDS = "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING"
"""Whether torch tells that sends of a group pass one after the other: pipelines allow for it."""


def use_loopback() -> None:
    """Bind the sockets of ranks that start from here to the loopback interface.

    For ranks of one machine: backends otherwise bind to the address of the machine's name, where
    any other machine can connect. Interfaces that the user chose stay.
    """
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
    if loopback is not None:
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(variable, loopback)


@dataclass
class World:
    """This process among all processes of the run; a context in which collectives work.

    Reads torchrun's environment (RANK, WORLD_SIZE, LOCAL_RANK). A world of one process that was
    not launched by torchrun starts nothing. `expands_segments`: see `cuda.expand_segments`.
    """

    device: torch.device
    timeout_seconds: float = 600.0
    expands_segments: bool = True
    rank: int = field(default_factory=lambda: rank_and_size()[0])
    size: int = field(default_factory=lambda: rank_and_size()[1])
    store: Store | None = None
    """Where the ranks have met before, as in `decided_by_rank_0`; None: they meet on entering."""

    def __post_init__(self) -> None:
        if self.device.type == "cuda":  # here: before it is entered, sizes of devices are read
            cuda.use_more_connections()
            if self.rank == 0 and (warning := cuda.few_connections(self.size)):
                logger.warning("%s", warning)

    @property
    def backend(self) -> str:
        """The backend of process groups for tensors of the device."""
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
                device_options = {"device_id": self.device, "pg_options": options}
                os.environ.setdefault(_TOLD_OF_SENDS, "false")
            dist.init_process_group(
                self.backend,
                store=self.store or _meeting_place(timeout),
                rank=self.rank,
                world_size=self.size,
                timeout=timeout,
                **device_options,
            )
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # After an error the others may be gone: leaving politely could hang, exiting does not.
        if kind is None and dist.is_initialized():
            dist.destroy_process_group()


def decided_by_rank_0(
    decide: Callable[[], list[str]], timeout_seconds: float
) -> tuple[list[str], Store | None]:
    """Call `decide` on rank 0; return its result on all ranks, and the store to meet in later.

    Needed before the world starts, where the files of machines may differ. A ValueError or OSError
    of rank 0 is raised on all ranks, on the others as ValueError; they also raise ValueError after
    `timeout_seconds`, which is comm.init_timeout_seconds.
    """
    rank, size = rank_and_size()
    if size == 1:
        return decide(), None
    store, key = _meeting_place(timedelta(seconds=timeout_seconds)), "isp/decided_by_rank_0"
    if rank == 0:
        try:
            decided = decide()
        except (ValueError, OSError) as error:
            store.set(key, json.dumps([None, str(error)]))
            _wait_for_readers(store, key, size, timeout_seconds)
            raise
        store.set(key, json.dumps([decided, ""]))
        return decided, store
    try:
        found = store.get(key)
    except dist.DistStoreError as error:
        raise ValueError(
            f"rank {rank} has waited comm.init_timeout_seconds={timeout_seconds:g} for what rank 0"
            " chooses for all ranks: set it higher if rank 0 is still searching"
        ) from error
    decided, fault = json.loads(found)
    if fault:
        # Acknowledge it: rank 0 must not end, and its store with it, before all ranks have read it.
        store.set(f"{key}/{rank}", "")
        _wait_for_readers(store, key, size, timeout_seconds)
        raise ValueError(fault)
    return decided, store


def _wait_for_readers(store: Store, key: str, size: int, timeout_seconds: float) -> None:
    """Wait until all ranks but rank 0 have read its fault, for a minute at most.

    The store may end with rank 0, and torchrun ends rank 0 when a neighbor fails: ranks of other
    machines, which may start later, read the fault before any rank raises it.
    """
    patience = timedelta(seconds=min(timeout_seconds, _FAULT_READ_SECONDS))
    with suppress(dist.DistError):
        store.wait([f"{key}/{other}" for other in range(1, size)], patience)


def _meeting_place(timeout: timedelta) -> Store:
    """The store through which the ranks find each other: torchrun's.  ValueError: its port is used.

    torch 2.13 keeps it when it starts ranks again, which then may read the addresses of dead ones.
    So on one machine each start has keys of its own; on several, where torchrun counts starts
    differently on each, rank 0 opens another store, which ends with it (`_store_of_this_start`).
    Ranks that `isp .. --nproc` starts meet through its private file.
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
    one_machine = os.environ.get("GROUP_WORLD_SIZE") == "1"
    if not one_machine and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return _store_of_this_start(store, rank, timeout)
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if one_machine else "any"
    return PrefixStore(f"start_{start}", store)


def _store_of_this_start(kept: Store, rank: int, timeout: timedelta) -> Store:
    """A store of rank 0's, whose address the others read from the one that torchrun has `kept`.

    They may read that of an earlier rank 0, where nobody answers any more: then they read again.
    Raises DistNetworkError or DistStoreError if there is none in time.
    """
    place, end = "isp/store_of_rank_0", time.monotonic() + timeout.total_seconds()
    if rank == 0:
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
    """Lookup of a channel for every axis asked for: a `Mesh`, or a dict."""

    def __getitem__(self, axis: Axis, /) -> Channel: ...


class Mesh:
    """This rank's channels, one for each axis of a topology.

    Needs the default process group, unless the world is one rank. It serves `Axis.WORLD`, unless
    it is somebody else's: then all groups are made beside it, of `backend`. Every rank must make
    the same meshes and `open` the same channels in the same order.
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
        """The ranks of each channel of more than one, by its name."""
        self.opened: list[Channel] = []
        """Every channel of this mesh."""
        self._groups: dict[Axis, dist.ProcessGroup | None] = {}
        own = {
            axis: self._add(axis, axis.value, self._shared_group(axis))
            for axis in Axis
            if topology.channel_axis(axis) is axis
        }
        self._channels = {axis: own[topology.channel_axis(axis)] for axis in Axis}
        self.host = self.open_host(Axis.WORLD, "host")
        """All ranks, for values in CPU memory whatever the device."""

    def __getitem__(self, axis: Axis) -> Channel:
        """The channel of this rank's group along `axis`."""
        return self._channels[axis]

    def open_host(self, axis: Axis, name: str) -> Channel:
        """The ranks of `axis`, for values in CPU memory: the axis' own channel if it takes those.

        Every axis whose groups are all of one size will do.
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
        """A further channel along `axis`, whose transfers do not queue behind the first one's."""
        return self._add(axis, name, self._make_group(axis, name), sum_locally=sum_locally)

    def _add(
        self,
        axis: Axis,
        name: str,
        group: dist.ProcessGroup | None,
        *,
        sum_locally: bool | None = None,
    ) -> Channel:
        channel = Channel(group, name=name, log=self.log, sum_locally=sum_locally)
        self.opened.append(channel)
        if group is not None:
            self.members[name] = tuple(self.topology.group_of(axis, self.rank))
        return channel

    def _shared_group(self, axis: Axis) -> dist.ProcessGroup | None:
        """The process group of `axis`, made for the first of those that share it."""
        home = self.topology.group_axis(axis)
        if home not in self._groups:
            names = "+".join(self.topology.process_groups.get(home, ()))
            self._groups[home] = self._make_group(home, names)
        return self._groups[home]

    def _make_group(self, axis: Axis, name: str) -> dist.ProcessGroup | None:
        """This rank's process group along `axis`, `name` in torch's messages; None if alone."""
        groups = self.topology.groups(axis)
        if all(len(ranks) == 1 for ranks in groups):
            return None
        if axis is Axis.WORLD and self._backend is None:
            assert dist.get_world_size() == self.topology.world_size
            return dist.group.WORLD
        # [Note: Local groups] Only the members make a group: a world of 1,024 ranks has over 500
        # groups along some axes, and each rank is in one of them. torch names a group by how many
        # there are before it, so a rank on its own has to make one as well.
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
        """Limit how long collectives launched from now on may take."""
        for group in {channel.group for channel in self.opened if channel.group is not None}:
            set_group_timeout(timedelta(seconds=seconds), group)
