"""The event record of a block for one micro-batch, and the recorder that writes it."""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, UntypedStorage, nn

from isp.core.comm.tag import Purpose, Transfer
from isp.core.mesh.phase import Phase
from isp.core.tensors import memory_of, tensors_in
from isp.core.torch_private import TorchDispatchMode, storage_key
from isp.core.weights.declare import DeclaredBlock, WeightHolder
from isp.core.weights.uses import Block
from isp.models.tracing.position import Position

__all__ = [
    "Event",
    "EventRecorder",
    "GradientReady",
    "Launch",
    "PeakMemory",
    "Reach",
    "Read",
    "Saved",
    "Work",
]


class Launch(NamedTuple):
    """An event of a block: a transfer is launched."""

    transfer: Transfer


class Arrive(NamedTuple):
    """An event of a block: it waits for a transfer that it has launched."""

    age: int
    """Number of device transfers launched after the awaited one: 0 if that is the latest."""


class Reach(NamedTuple):
    """Event: a use begins.

    In backward it is recorded only if the layer computes a gradient of its input, for which it
    needs the weight.
    """

    use: int
    phase: Phase


class Read(NamedTuple):
    """Event: a use reads its weight, which has to be gathered by then."""

    use: int
    phase: Phase


class Work(Enum):
    """The resource that bounds a computation; its value names the unit of the amount."""

    PRODUCT = "FLOPs of a product of matrices"
    ATTENTION = "FLOPs of local attention"
    SCAN = "FLOPs of a scan"
    MEMORY = "bytes read and written, with little computed"


class Compute(NamedTuple):
    """Event: a computation; in backward the gradients of all its inputs together."""

    kind: Work
    amount: float


class GradientReady(NamedTuple):
    """Event: the gradient of a use's weight or bias is ready to be reduced."""

    use: int
    is_bias: bool


Event = Launch | Arrive | Reach | Read | Compute | GradientReady


class Saved(NamedTuple):
    """Bytes that forward keeps for backward, by owner."""

    activations: int = 0
    attention: int = 0
    host: int = 0
    """Bytes in host memory, which are not part of `total`."""

    @property
    def total(self) -> int:
        """Return the bytes on the device."""
        return self.activations + self.attention


class BlockRecord(NamedTuple):
    """The compute, transfers and memory of one block for one micro-batch."""

    forward: tuple[Event, ...]
    backward: tuple[Event, ...]
    """Events of backward, recomputation included."""
    saved: Saved
    """Memory that the block keeps between its forward and its backward."""
    work: int
    """The most bytes that backward takes at a time in addition to `saved`."""

    def without_input(self) -> BlockRecord:
        """Return this record without what keeps the block's input for backward.

        It is for a recomputed block inside a segment: its input is recomputed from the input of the
        segment's first block, so the block keeps nothing.
        """
        forward, backward = (tuple(e for e in record if not _is_of_input(e)) for record in self[:2])
        return BlockRecord(forward, backward, Saved(), self.work)

    def gradients(self, block: Block) -> Iterator[str]:
        """Yield the names of the parameters whose gradients backward delivers, in order."""
        for event in self.backward:
            if isinstance(event, GradientReady):
                name = block.uses[event.use].bias if event.is_bias else block.uses[event.use].weight
                assert name is not None
                yield name

    @property
    def again(self) -> Iterator[Event]:
        """Yield the events of a forward that is run again to get the block's output."""
        for event in self.forward:
            if isinstance(event, Reach | Read):
                yield event._replace(phase=Phase.RECOMPUTE)
            elif not _is_of_input(event):
                # The copy of the input to the host is left out: the first forward has made it.
                yield event


def _is_of_input(event: Event) -> bool:
    """Return True for a copy of a block's input to or from the host."""
    return isinstance(event, Launch) and event.transfer.tag.purpose is Purpose.BLOCK_INPUT


@dataclass(slots=True)
class _Kept:
    """A storage that forward keeps for backward."""

    block: int
    """Index of the block that saved it first."""
    memory: torch.UntypedStorage
    by_attention: bool = False


class EventRecorder:
    """Records the events of a rehearsal and the memory of each block.

    Memory is what autograd saves in forward, and the peak of all that exists in backward. Storages
    are known by the address of their C++ object (`storage_key`), which is unique while they exist.
    """

    def __init__(self) -> None:
        self.phase = Phase.FORWARD
        self.attends = False
        """True while local attention runs."""
        self._block = 0
        self._ahead = 0
        """The block that memory saved now counts for: after a block's last use, the next block."""
        self._launched = 0
        """Number of transfers launched so far."""
        # These keys are of storages that exist before and after a micro-batch, such as weights and
        # token ids. They are never counted.
        self._known: set[int] = set()
        self._reached: set[tuple[int, int]] = set()
        """Uses that forward has reached, as (block, use)."""
        self._kept: dict[int, _Kept] = {}
        """Memory kept for backward, by the storage's key."""
        self._places: dict[int, tuple[int, int]] = {}
        """Use, as (block, use), by the id of the module whose call starts it, or of its layer."""
        self._lasts: set[tuple[int, int]] = set()
        """The last use of each block, as (block, use)."""
        self._inside: set[int] = set()
        """Ids of layers without a call of their own: they are used in the call of another use."""
        self._events: defaultdict[tuple[int, bool], list[Event]] = defaultdict(list)
        """Events by (block, True for forward and False for backward)."""
        self._alive: weakref.WeakValueDictionary[int, torch.UntypedStorage] = (
            weakref.WeakValueDictionary()
        )
        """Storages that exist in backward, by key: kept ones, and those made in backward."""
        self._owners: dict[int, int] = {}
        """The block that kept a storage in forward, by the storage's key."""
        self._peaks: defaultdict[int, int] = defaultdict(int)
        """Peak bytes while a block goes backward, by block."""
        # Delivered gradients are held, so that their addresses are not reused for other storages.
        self._delivered: list[torch.UntypedStorage] = []
        self._looked: int | None = None
        """The block in backward when memory was last summed; None if tensors were made since."""
        self._offloaded: Counter[int] = Counter()
        """Bytes that each block has saved for backward in host memory, by index of the block."""

    def follow(self, blocks: Sequence[DeclaredBlock], position: Position) -> None:
        """Install the hooks that record the start of each use of `blocks`.

        `position`: the model's position, which calls hooks where attention or a scan begins.
        """
        for b, block in enumerate(blocks):
            block.module.register_forward_pre_hook(partial(self._enters, b))
            block.module.register_forward_hook(partial(self._leaves, b))
            called: set[int] = set()
            for v, place in enumerate(block.uses):
                at = place.at
                # A mixer that is a function, such as attention, has no module to put a hook on. The
                # position calls a hook with the mixer's input x; a hook on the gradient of x tells
                # when backward is there.
                if at is None:
                    assert place.layer is None, f"nothing is called at {place.use.name}"
                    self._mixes(place.key, b, v, position)
                    continue
                # Several layers may run in one call of a module, such as fused experts. The module
                # gets hooks for the first of them only.
                if id(at) in called:
                    self._places[id(place.layer)] = b, v
                    self._inside.add(id(place.layer))
                    continue
                assert id(at) not in self._places, f"{place.use.name} is called twice"
                self._places[id(at)] = self._places[id(place.layer)] = b, v
                called.add(id(at))
                at.register_forward_pre_hook(partial(self._begins, b, v))
                at.register_forward_hook(partial(self._ends, b, v))
            # If the block's last layer runs inside another layer's call, the block's last use is
            # the one with that call.
            self._lasts.add((b, v) if at is None else self._places[id(at)])

    def _mixes(self, key: Hashable, block: int, use: int, position: Position) -> None:
        """Record the start of `use` at each call of the mixer that `position` knows by `key`."""

        def hook(x: Tensor) -> None:
            self._begins(block, use)
            self._ends(block, use, None, (), x)

        position.register_mixing_hook(key, hook)

    def forget(self) -> None:
        """Discard what was recorded so far, after a warm-up."""
        for noted in (self._events, self._reached, self._kept, self._offloaded):
            noted.clear()
        self._block = self._ahead = self._launched = 0

    def note(self, event: Event) -> None:
        """Append an event to the running block's record."""
        self.running.append(event)

    @property
    def running(self) -> list[Event]:
        """Return the running block's events, of forward or of backward."""
        return self._events[self._block, self.phase is Phase.FORWARD]

    def launched(self, transfer: Transfer) -> Callable[[], None]:
        """Record a launch, and return a function that records its wait (protocol `Listener`)."""
        self._launched += 1
        number = self._launched
        self.note(Launch(transfer))
        return lambda: self.note(Arrive(self._launched - number))

    def offload(self, transfer: Transfer) -> None:
        """Record that the input of the next block goes to the host."""
        self._events[self._ahead, True].append(Launch(transfer))
        self._offloaded[self._ahead] += transfer.sent_bytes

    def use_of(self, layer: WeightHolder) -> int:
        """Return the index of a layer's use in its block."""
        return self._places[id(layer)][1]

    def is_declared(self, layer: WeightHolder) -> bool:
        """Return True if a block declares a use of the layer."""
        return id(layer) in self._places

    def is_inside(self, layer: WeightHolder) -> bool:
        """Return True if the layer's use is part of the call that started another use."""
        return id(layer) in self._inside

    def record(self, block: int, saved: Saved) -> BlockRecord:
        """Return the record of a block that keeps `saved`."""
        forward, backward = (tuple(self._events[block, of]) for of in (True, False))
        work = max(0, self._peaks[block] - saved.total)
        return BlockRecord(forward, backward, saved, work)

    def turn(self, num_blocks: int) -> list[Saved]:
        """Switch to backward and return what each block keeps; from now on peaks are measured."""
        found = self.saved(num_blocks)
        for key, kept in self._kept.items():
            self._alive[key], self._owners[key] = kept.memory, kept.block
        self._kept.clear()
        self.phase = Phase.BACKWARD
        return found

    def made(self, tensors: Iterable[Tensor]) -> None:
        """Record new tensors, and update the peak memory of the block in backward."""
        if self.phase is Phase.FORWARD:
            return
        own, looked = self._block, self._looked
        for x in tensors:
            memory = x.untyped_storage()
            if storage_key(memory) not in self._known and storage_key(memory) not in self._alive:
                self._alive[storage_key(memory)] = memory
                # The address may have been that of a storage that is freed, and had an owner.
                self._owners.pop(storage_key(memory), None)
                looked = None
        # Without a new storage since the last sum, memory cannot have grown: summing is slow.
        if looked == own:
            return
        self._looked = own
        # Memory that other blocks keep is counted as theirs (`Saved`), not as this block's work.
        there = (m.nbytes() for key, m in self._alive.items() if self._owners.get(key, own) == own)
        self._peaks[own] = max(self._peaks[own], sum(there))

    def delivered(self, gradient: Tensor) -> None:
        """Stop counting a weight's gradient, which the gradient reduction owns from now on."""
        memory = gradient.untyped_storage()
        self._alive.pop(storage_key(memory), None)
        # Autograd returns the gradient to further operations, where it must not count as new.
        self._delivered.append(memory)
        self._known.add(storage_key(memory))

    def know(self, tensors: Iterable[Tensor]) -> None:
        """Exclude these tensors from all counts, since they exist anyway."""
        self._known = {*map(memory_of, tensors)}

    def at_loss(self, block: int) -> None:
        """Count memory saved from now on for the loss, which has the index `block`."""
        self._ahead = block

    def keep(self, x: Tensor) -> Tensor:
        """Record that autograd saves `x`; for `saved_tensors_hooks`."""
        memory = x.untyped_storage()
        if storage_key(memory) not in self._known:
            kept = self._kept.setdefault(storage_key(memory), _Kept(self._ahead, memory))
            kept.by_attention |= self.attends
        return x

    def saved(self, num_blocks: int) -> list[Saved]:
        """Return the bytes that each block keeps; a storage counts for the first block only."""
        found = [(0, 0)] * num_blocks
        for kept in self._kept.values():
            others, attention = found[kept.block]
            size = kept.memory.nbytes()
            by_attention = size if kept.by_attention else 0
            found[kept.block] = others + size - by_attention, attention + by_attention
        return [Saved(*sizes, self._offloaded[b]) for b, sizes in enumerate(found)]

    def _enters(self, block: int, *_: object) -> None:
        """Make `block` the running one, in forward."""
        if self.phase is Phase.FORWARD:
            self._block = block

    def _leaves(self, block: int, module: nn.Module, _: Any, y: Any) -> None:
        """Switch to the block as soon as the gradient of its output is there.

        A recomputed block computes its forward again before any of its uses has a gradient, so the
        hooks on uses come too late.
        """
        y = y[0] if isinstance(y, tuple) else y
        if self.phase is Phase.FORWARD and y.requires_grad:
            y.register_hook(lambda _: self._goes_back(block))

    def _begins(self, block: int, use: int, *_: object) -> None:
        """Record the start of a use; a forward pre-hook."""
        if self.phase is Phase.FORWARD:
            # A loss may run layers of the head again, for example for each chunk of tokens: only
            # the first run of a use counts as its start.
            if (block, use) in self._reached:
                return
            self._reached.add((block, use))
        self._enters(block)
        self.note(Reach(use, self.phase))

    def _ends(self, block: int, use: int, _: nn.Module | None, __: Any, y: Tensor) -> None:
        """Switch to the block as soon as the gradient of a use's output y is there; a hook."""
        if self.phase is not Phase.FORWARD or not y.requires_grad:
            # A layer that computes its own gradient runs its parts without autograd: y has no hook.
            return
        self._ahead = block + ((block, use) in self._lasts)
        y.register_hook(lambda _: self._goes_back(block))

    def _goes_back(self, block: int) -> None:
        """Make `block` the running one, in backward."""
        self._block = block


class PeakMemory(TorchDispatchMode):
    """Measures the peak bytes of tensors made in this context, on any device, meta included.

    Bytes are counted after each operation, so memory that an operation uses internally is missed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = 0
        """Largest number of bytes of all storages that existed at a time."""
        self._bytes = 0
        self._alive: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {*map(memory_of, tensors_in(args, kwargs))}
        out = func(*args, **(kwargs or {}))
        for x in tensors_in(out):
            # A result that shares memory with an argument, a view or in-place, takes none.
            if memory_of(x) not in given:
                self._add(x.untyped_storage())
        self.peak_bytes = max(self.peak_bytes, self._bytes)
        return out

    def _add(self, memory: UntypedStorage) -> None:
        """Add the bytes of a storage to the sum of bytes in use, until the storage is freed."""
        key, size = storage_key(memory), memory.nbytes()

        def freed(_: object) -> None:
            del self._alive[key]
            self._bytes -= size

        if key not in self._alive:
            self._alive[key] = weakref.ref(memory, freed)
            self._bytes += size
