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
    """Launch of a transfer."""

    transfer: Transfer


class Arrive(NamedTuple):
    """Wait for a transfer, which then has arrived."""

    age: int
    """Transfers launched on the device since: 0 for the latest."""


class Reach(NamedTuple):
    """Start of a use; in backward only if the layer's input needs a gradient."""

    use: int
    phase: Phase


class Read(NamedTuple):
    """Read of a use's weight."""

    use: int
    phase: Phase


class Work(Enum):
    """The resource that bounds a computation; its value names the unit of the amount."""

    PRODUCT = "FLOPs of a product of matrices"
    ATTENTION = "FLOPs of local attention"
    SCAN = "FLOPs of a scan"
    MEMORY = "bytes read and written, with little computed"


class Compute(NamedTuple):
    """A computation; in backward it covers the gradients of all its inputs."""

    kind: Work
    amount: float


class GradientReady(NamedTuple):
    """The gradient of a use's weight or bias is ready."""

    use: int
    is_bias: bool


Event = Launch | Arrive | Reach | Read | Compute | GradientReady


class Saved(NamedTuple):
    """Bytes that forward keeps for backward, by owner."""

    activations: int = 0
    attention: int = 0
    host: int = 0
    """Bytes in the memory of the host, not part of `total`."""

    @property
    def total(self) -> int:
        """Return the bytes on the device."""
        return self.activations + self.attention


class BlockRecord(NamedTuple):
    """The work of one block for one micro-batch."""

    forward: tuple[Event, ...]
    backward: tuple[Event, ...]
    """Events of backward, recomputation included."""
    saved: Saved
    """Memory kept between forward and backward."""
    work: int
    """Peak of the bytes in backward beyond `saved`."""

    def without_input(self) -> BlockRecord:
        """Return the record of a recomputed block that neither keeps nor fetches its input."""
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
        """Yield forward's events when it is recomputed to get its output."""
        for event in self.forward:
            if isinstance(event, Reach | Read):
                yield event._replace(phase=Phase.RECOMPUTE)
            elif not _is_of_input(event):
                # The input is offloaded once only, in the first forward.
                yield event


def _is_of_input(event: Event) -> bool:
    """Return True for the transfer of a block's input to or from the host."""
    return isinstance(event, Launch) and event.transfer.tag.purpose is Purpose.BLOCK_INPUT


@dataclass(slots=True)
class _Kept:
    """Memory that forward keeps for backward."""

    block: int
    memory: torch.UntypedStorage
    by_attention: bool = False


class EventRecorder:
    """Records the events of a rehearsal, by the block in which they happen.

    It also follows memory: what autograd saves in forward, and the peak of what exists in backward.
    Storages are known by the address of their C++ object, which lives as long as they do.
    """

    def __init__(self) -> None:
        self.phase = Phase.FORWARD
        self.attends = False
        """True while local attention runs."""
        self._block = 0
        self._ahead = 0
        """The block that owns memory saved now: from a block's last use on it is the next one."""
        self._launched = 0
        """Number of the transfers that blocks have launched."""
        self._known: set[int] = set()  # storages that exist before and after: weights, token ids
        self._reached: set[tuple[int, int]] = set()
        """Blocks and uses that forward has reached."""
        self._kept: dict[int, _Kept] = {}
        """Memory kept for backward, by storage."""
        self._places: dict[int, tuple[int, int]] = {}
        """Block and use, by the id of the module whose call starts the use."""
        self._lasts: set[tuple[int, int]] = set()
        """The use of each block, with the number of the block, whose call is its last."""
        self._inside: set[int] = set()
        """Ids of layers that are used inside the call that started another use."""
        self._events: defaultdict[tuple[int, bool], list[Event]] = defaultdict(list)
        """Events by block, and True for forward."""
        self._alive: weakref.WeakValueDictionary[int, torch.UntypedStorage] = (
            weakref.WeakValueDictionary()
        )
        """Storages that exist in backward: kept ones, and those made since."""
        self._owners: dict[int, int] = {}
        """The block that kept a storage, by storage."""
        self._peaks: defaultdict[int, int] = defaultdict(int)
        """Peak bytes while a block goes backward, by block."""
        # Holds delivered gradients, so that their addresses are not reused for other storages.
        self._delivered: list[torch.UntypedStorage] = []
        self._looked: int | None = None
        """The block that went backward when memory was last summed; None if it has grown since."""
        self._offloaded: Counter[int] = Counter()
        """Bytes on the host, by block."""

    def follow(self, blocks: Sequence[DeclaredBlock], position: Position) -> None:
        """Install the hooks that record the start of each use of `blocks`.

        `position`: that of the model, which calls hooks where tokens are mixed.
        """
        for b, block in enumerate(blocks):
            block.module.register_forward_pre_hook(partial(self._enters, b))
            block.module.register_forward_hook(partial(self._leaves, b))
            called: set[int] = set()
            for v, place in enumerate(block.uses):
                at = place.at
                if at is None:  # tokens are mixed; backward gets here with the gradient of x
                    assert place.layer is None, f"nothing is called at {place.use.name}"
                    self._mixes(place.key, b, v, position)
                    continue
                if id(at) in called:  # the layer has no call of its own to hook
                    self._places[id(place.layer)] = b, v
                    self._inside.add(id(place.layer))
                    continue
                assert id(at) not in self._places, f"{place.use.name} is called twice"
                self._places[id(at)] = self._places[id(place.layer)] = b, v
                called.add(id(at))
                at.register_forward_pre_hook(partial(self._begins, b, v))
                at.register_forward_hook(partial(self._ends, b, v))
            # A layer without a call of its own ends with the call that it is in.
            self._lasts.add((b, v) if at is None else self._places[id(at)])

    def _mixes(self, key: Hashable, block: int, use: int, position: Position) -> None:
        """Record the start of each call that mixes tokens at the place `key`."""

        def hook(x: Tensor) -> None:
            self._begins(block, use)
            self._ends(block, use, None, (), x)

        position.register_mixing_hook(key, hook)

    def forget(self) -> None:
        """Discard what was recorded so far, as a warm-up."""
        for noted in (self._events, self._reached, self._kept, self._offloaded):
            noted.clear()
        self._block = self._ahead = self._launched = 0

    def note(self, event: Event) -> None:
        """Record an event in the block that runs."""
        self.running.append(event)

    @property
    def running(self) -> list[Event]:
        """Return the events of the block that runs, in its direction."""
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
        """Switch from forward to backward: return what each block keeps, and watch memory now."""
        found = self.saved(num_blocks)
        for key, kept in self._kept.items():
            self._alive[key], self._owners[key] = kept.memory, kept.block
        self._kept.clear()
        self.phase = Phase.BACKWARD
        return found

    def made(self, tensors: Iterable[Tensor]) -> None:
        """Record new tensors, and update the peak of the block that goes backward."""
        if self.phase is Phase.FORWARD:
            return
        own, looked = self._block, self._looked
        for x in tensors:
            memory = x.untyped_storage()
            if storage_key(memory) not in self._known and storage_key(memory) not in self._alive:
                self._alive[storage_key(memory)] = memory
                # The address may be that of a storage that is gone, and had an owner.
                self._owners.pop(storage_key(memory), None)
                looked = None
        if looked == own:  # nothing was made since the last sum, so it cannot have grown
            return
        self._looked = own
        # Memory that other blocks keep is counted as theirs (`Saved`), not as this block's work.
        there = (m.nbytes() for key, m in self._alive.items() if self._owners.get(key, own) == own)
        self._peaks[own] = max(self._peaks[own], sum(there))

    def delivered(self, gradient: Tensor) -> None:
        """Stop counting a weight's gradient, which the gradient reduction owns from now on."""
        memory = gradient.untyped_storage()
        self._alive.pop(storage_key(memory), None)
        self._delivered.append(memory)  # autograd passes it on, and it must not look new
        self._known.add(storage_key(memory))

    def know(self, tensors: Iterable[Tensor]) -> None:
        """Exclude these tensors from all counts, since they exist anyway."""
        self._known = {*map(memory_of, tensors)}

    def at_loss(self, block: int) -> None:
        """Count memory saved from now on for the loss, as if it were block number `block`."""
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

        A recomputed block computes before any gradient of its uses.
        """
        y = y[0] if isinstance(y, tuple) else y
        if self.phase is Phase.FORWARD and y.requires_grad:
            y.register_hook(lambda _: self._goes_back(block))

    def _begins(self, block: int, use: int, *_: object) -> None:
        """Record the start of a use; a forward pre-hook."""
        if self.phase is Phase.FORWARD:
            if (block, use) in self._reached:  # a loss may run the layers after the head twice
                return
            self._reached.add((block, use))
        self._enters(block)
        self.note(Reach(use, self.phase))

    def _ends(self, block: int, use: int, _: nn.Module | None, __: Any, y: Tensor) -> None:
        """Switch to the block as soon as the gradient of a use's output y is there; a hook."""
        if self.phase is not Phase.FORWARD or not y.requires_grad:
            return  # a layer that computes its own gradient runs its parts without autograd
        self._ahead = block + ((block, use) in self._lasts)
        y.register_hook(lambda _: self._goes_back(block))

    def _goes_back(self, block: int) -> None:
        """Make `block` the one that goes backward."""
        self._block = block


class PeakMemory(TorchDispatchMode):
    """Measures the peak bytes of tensors made in this context, on any device, meta included.

    Bytes are counted after each operation, so memory that one uses internally is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = 0
        """Most bytes that existed at once."""
        self._bytes = 0
        self._alive: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {*map(memory_of, tensors_in(args, kwargs))}
        out = func(*args, **(kwargs or {}))
        for x in tensors_in(out):
            if memory_of(x) not in given:  # a view or in-place result makes no memory
                self._add(x.untyped_storage())
        self.peak_bytes = max(self.peak_bytes, self._bytes)
        return out

    def _add(self, memory: UntypedStorage) -> None:
        """Count a storage until it is freed."""
        key, size = storage_key(memory), memory.nbytes()

        def freed(_: object) -> None:
            del self._alive[key]
            self._bytes -= size

        if key not in self._alive:
            self._alive[key] = weakref.ref(memory, freed)
            self._bytes += size
