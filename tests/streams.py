"""A simulated device with streams: checks the order of memory accesses on the CPU.

Inside `Device` the project queues its work on streams as on CUDA, and gloo's transfers take the
place of NCCL's. All work runs at once and in order, so results are right even if the code forgets
to wait. The order on a device is tracked separately: each stream counts its queued work, and a
stream that waits for another takes over its counts (a vector clock). Recorded are (1) a tensor read
before its write has ended, or written before its reads have ended; (2) memory freed while its
allocator could reuse it too early: for the stream it was allocated on, if that has not waited for
all accesses.

Sources: Lamport 1978; the memory rules are those of torch's CUDACachingAllocator, the transfer
rules those of ProcessGroupNCCL, which keeps tensors in flight until something waits for them.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Self
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from isp.core.comm import streams
from tests.planner.live import tensors_in

__all__ = ["Device"]

Counts = dict["Stream", int]
"""For each stream, the number of its last operation that is known to have ended."""

_ALLOCATE_ONLY = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided")
_OF_HOST = ("_local_scalar_dense", "equal", "is_nonzero", "nonzero", "_unique2")
"""Operations that return a value to the host, and so wait for the current stream."""
_TRANSFERS = {
    "_allgather_base": 1,
    "all_gather_single": 1,
    "_reduce_scatter_base": 1,
    "reduce_scatter_single": 1,
    "alltoall_base": 1,
    "all_to_all_single": 1,
    "allreduce": 1,
    "all_reduce": 1,
    "broadcast": 1,
    "recv": 1,
    "send": 0,
}
"""Methods of a process group, and how many of their first arguments are written."""


class Stream:
    """A queue of the simulated device."""

    def __init__(self, device: Device, name: str) -> None:
        self.device = device
        self.name = name
        self.seen: Counts = {}

    def advance(self) -> int:
        """Queue an operation; return its number."""
        # All that the host has waited for ended before it queues this.
        _join(self.seen, self.device.host)
        self.seen[self] = self.seen.get(self, 0) + 1
        return self.seen[self]

    def wait_for(self, counts: Counts) -> None:
        """Make later operations start after `counts` have ended."""
        _join(self.seen, counts)

    def __repr__(self) -> str:
        return self.name


class Event:
    """A point in a stream."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.counts = dict(device.current.seen)
        self.at = time.perf_counter()
        self.over = True
        """Whether the device has reached it; a test may set this to False."""

    def wait(self) -> None:
        self.device.current.wait_for(self.counts)

    def synchronize(self) -> None:
        assert self.over, "the host would wait here"
        _join(self.device.host, self.counts)

    def query(self) -> bool:
        return self.over

    def elapsed_time(self, other: Event) -> float:
        # CUDA's times are float32 milliseconds
        return float(np.float32((other.at - self.at) * 1e3))


class Work:
    """A gloo transfer with the semantics of NCCL's: a wait makes the current stream wait."""

    def __init__(
        self, device: Device, name: str, real: dist.Work, wire: Stream, stash: list[Tensor]
    ) -> None:
        self.device, self.name, self.real, self.stash = device, name, real, stash
        self.counts = dict(wire.seen)

    def wait(self, *args: Any) -> bool:
        # gloo's wait also blocks the host. An observer that only times a receive must not block it
        # when it is posted: the other rank may only send after this one has continued.
        if self.device.current is self.device.compute or self.name not in ("send", "recv"):
            with _disable_current_modes():  # gloo's own operations are not queued on a stream
                self.real.wait(*args)
        self.device.current.wait_for(self.counts)
        self.stash = []  # as in ProcessGroupNCCL, the first wait releases the tensors
        return True

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)


@dataclass(eq=False)
class _Memory:
    """The accesses to one piece of memory."""

    shape: tuple[int, ...]
    made_by: str
    owner: Stream
    """The stream of the allocation, which may reuse the memory."""
    users: set[Stream] = field(default_factory=set)
    """Streams passed to `record_stream`."""
    written: Counts = field(default_factory=dict)
    """The last operation that wrote it."""
    read: Counts = field(default_factory=dict)
    """Operations that have read it since then."""
    whom: dict[Stream, str] = field(default_factory=dict)
    """The last operation on it of each stream."""

    def late(self, entries: Counts, over: Counts) -> list[str]:
        """Return those of `entries` that are not known to have ended."""
        late = (s for s, number in entries.items() if over.get(s, 0) < number)
        return [f"{self.whom[s]} on {s}" for s in late]

    def __str__(self) -> str:
        return f"{list(self.shape)} of {self.made_by} on {self.owner}"


class Device(TorchDispatchMode):
    """A context in which this process has streams; `faults` lists what a real device might get
    wrong.
    """

    def __init__(self) -> None:
        super().__init__()
        self.faults: list[str] = []
        self.host: Counts = {}
        """The operations that the host has waited for."""
        self.compute = self.current = Stream(self, "compute")
        self.touched = 0
        """The number of operations tracked on all streams."""
        self.made: list[Stream] = []
        """The streams that were created."""
        self.timed: list[Event] = []
        """The events with timing enabled."""
        self._memory: dict[int, _Memory] = {}
        self._wires: dict[Any, Stream] = {}
        self._freeing = True
        self._patches = ExitStack()

    def __enter__(self) -> Self:
        seam: dict[str, Callable[..., Any]] = {
            "new": self._new,
            "current": lambda device: self.current,
            "on": self._on,
            "follow": self._follow,
            "mark": self._mark,
            "in_use": self._in_use,
            "serve": lambda *_: True,
        }
        self._patches.enter_context(mock.patch.multiple(streams, **seam))
        for name, written in _TRANSFERS.items():
            if real := getattr(dist.ProcessGroup, name, None):
                transfer = self._transfer(name, real, written)
                self._patches.enter_context(mock.patch.object(dist.ProcessGroup, name, transfer))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._freeing = False  # the interpreter exits, and memory is freed in any order
        super().__exit__(*error)
        self._patches.close()

    # -- calls of the project ----------------------------------------------------------------

    def _new(self, device: torch.device) -> Stream:
        self.made.append(Stream(self, f"stream {len(self.made) + 1}"))
        return self.made[-1]

    @contextmanager
    def _on(self, stream: Stream | None) -> Iterator[None]:
        before, self.current = self.current, stream or self.current
        try:
            yield
        finally:
            self.current = before

    def _follow(self, stream: Stream | None) -> None:
        if stream is not None:
            stream.wait_for(self.current.seen)

    def _mark(self, device: torch.device, *, timed: bool = False) -> Event:
        event = Event(self)
        if timed:
            self.timed.append(event)
        return event

    def _in_use(self, *tensors: Tensor) -> None:
        for tensor in tensors:
            self._of(tensor).users.add(self.current)

    # -- calls of torch ----------------------------------------------------------------------

    def _transfer(self, name: str, real: Callable[..., Any], written: int) -> Callable[..., Any]:
        def launch(group: dist.ProcessGroup, *args: Any, **options: Any) -> Any:
            wire = self._wires.get(group.group_name) or Stream(self, f"wire {len(self._wires) + 1}")
            self._wires[group.group_name] = wire
            # NCCL's stream waits for the stream that launches the transfer.
            wire.wait_for(self.current.seen)
            self._touch(wire, name, tensors_in(args), tensors_in(args[:written]))
            with _disable_current_modes():  # the accesses are recorded on the wire above
                work = real(group, *args, **options)
            return Work(self, name, work, wire, tensors_in(args))

        return launch

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        given, given_back = tensors_in((args, kwargs)), tensors_in(found)
        inputs = {_address(x) for x in given}
        changed = _written(func, args, kwargs)
        fresh = [x for x in given_back if _address(x) not in inputs]
        name = _name(func)
        if fresh and name in _ALLOCATE_ONLY:
            for x in fresh:
                self._of(x, name)
        # An operation that only returns views of its inputs accesses no memory.
        elif fresh or changed or not given_back:
            for x in fresh:
                self._of(x, name)
            self._touch(self.current, name, given, changed + fresh)
        if name in _OF_HOST:
            _join(self.host, self.current.seen)
        return found

    # -- memory ------------------------------------------------------------------------------

    def _of(self, tensor: Tensor, name: str = "before") -> _Memory:
        """Return the record of `tensor`'s memory, created if it is new."""
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address not in self._memory:
            made = _Memory(tuple(tensor.shape), name, self.current)
            self._memory[address] = made
            # Views share a storage: its end is when the allocator gets the memory back.
            weakref.finalize(storage, partial(self._free, address)).atexit = False
        return self._memory[address]

    def _touch(
        self, stream: Stream, name: str, used: Iterable[Tensor], written: Iterable[Tensor]
    ) -> None:
        """Record that `stream` reads `used`, except what it writes, and writes `written`."""
        number = stream.advance()
        self.touched += 1
        writes = {id(m): m for m in map(self._of, written)}
        reads = {id(m): m for m in map(self._of, used) if id(m) not in writes}
        for memory in reads.values():
            self._expect(memory, memory.late(memory.written, stream.seen), f"{name} on {stream}")
            memory.read[stream], memory.whom[stream] = number, name
        for memory in writes.values():
            late = memory.late({**memory.written, **memory.read}, stream.seen)
            self._expect(memory, late, f"{name} on {stream}")
            memory.written, memory.read = {stream: number}, {}
            memory.whom[stream] = name

    def _expect(self, memory: _Memory, late: list[str], who: str) -> None:
        if late:
            self.faults.append(f"{who} does not wait for {', '.join(late)}: {memory}")

    def _free(self, address: int) -> None:
        memory = self._memory.pop(address)
        if not self._freeing:
            return
        # The allocator reuses memory on the owner stream at once, and waits for recorded users.
        over = dict(memory.owner.seen)
        for counts in (self.host, *(user.seen for user in memory.users)):
            _join(over, counts)
        if late := memory.late({**memory.written, **memory.read}, over):
            self.faults.append(f"freed before {', '.join(late)} is over: {memory}")


def _join(counts: Counts, others: Counts) -> None:
    for stream, number in others.items():
        counts[stream] = max(counts.get(stream, 0), number)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the arguments that an operation changes."""
    return tensors_in([args[i] if i < len(args) else kwargs.get(name) for i, name in _writes(func)])


@cache
def _name(func: Any) -> str:
    return str(func.overloadpacket).removeprefix("aten.")


@cache
def _writes(func: Any) -> list[tuple[int, str]]:
    """Return the place and name of each argument that an operation changes."""
    arguments = enumerate(func._schema.arguments)
    return [(i, a.name) for i, a in arguments if a.alias_info is not None and a.alias_info.is_write]
