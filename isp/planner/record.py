"""What a block of a model does for one micro-batch, in order, and the recorder of it."""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from isp.core.comm.tag import Purpose, Transfer
from isp.core.mesh.phase import Phase
from isp.core.tensors import memory_of
from isp.core.torch_private import storage_key
from isp.core.weights.declare import DeclaredBlock, WeightHolder
from isp.core.weights.uses import Block

__all__ = [
    "Event",
    "EventRecorder",
    "Gradient",
    "Launch",
    "Reach",
    "Read",
    "Saved",
    "Work",
]


class Launch(NamedTuple):
    """A transfer is launched."""

    transfer: Transfer


class Arrive(NamedTuple):
    """A transfer is waited for, and there."""

    behind: int
    """Its place among those launched on the device: 0 is the last one."""


class Reach(NamedTuple):
    """A use begins; in backward only that of a layer whose input has a gradient."""

    use: int
    phase: Phase


class Read(NamedTuple):
    """The weight of a use is read."""

    use: int
    phase: Phase


class Work(Enum):
    """What limits a computation, and the unit of its amount."""

    PRODUCT = "FLOPs of a product of matrices"
    ATTENTION = "FLOPs of local attention"
    SCAN = "FLOPs of a scan"
    MEMORY = "bytes read and written, with little computed"


class Compute(NamedTuple):
    """The rank computes; in backward, all gradients together."""

    kind: Work
    amount: float


class Gradient(NamedTuple):
    """The gradient of the weight, or bias, of a use is there."""

    use: int
    is_bias: bool


Event = Launch | Arrive | Reach | Read | Compute | Gradient


class Saved(NamedTuple):
    """Bytes that are kept for backward, by who keeps them."""

    activations: int = 0
    attention: int = 0
    host: int = 0
    """In the host's memory: no part of `total`."""

    @property
    def total(self) -> int:
        """Both, on the device."""
        return self.activations + self.attention


class BlockRecord(NamedTuple):
    """A block's work for one micro-batch."""

    forward: tuple[Event, ...]
    backward: tuple[Event, ...]
    """With what is recomputed for it."""
    saved: Saved
    """Memory kept from the one to the other."""
    work: int
    """Bytes in hand besides what was saved, where both together take most in its backward."""

    def without_input(self) -> BlockRecord:
        """The same of a recomputed block whose input is not kept, nor brought back."""
        forward, backward = (tuple(e for e in record if not _is_of_input(e)) for record in self[:2])
        return BlockRecord(forward, backward, Saved(), self.work)

    def gradients(self, block: Block) -> Iterator[str]:
        """The parameters whose gradients the backward of a block gives, in order."""
        for event in self.backward:
            if isinstance(event, Gradient):
                name = block.uses[event.use].bias if event.is_bias else block.uses[event.use].weight
                assert name is not None
                yield name

    @property
    def again(self) -> Iterator[Event]:
        """Its forward, as it is computed again for what it gives."""
        for event in self.forward:
            if isinstance(event, Reach | Read):
                yield event._replace(phase=Phase.RECOMPUTE)
            elif not _is_of_input(event):
                yield event


def _is_of_input(event: Event) -> bool:
    return isinstance(event, Launch) and event.transfer.tag.purpose is Purpose.BLOCK_INPUT


@dataclass(slots=True)
class _Kept:
    """Memory that is kept for backward."""

    block: int
    memory: torch.UntypedStorage
    by_attention: bool = False


class EventRecorder:
    """Notes what happens, under the block in which it does."""

    def __init__(self) -> None:
        self.phase = Phase.FORWARD
        self.attends = False
        """Whether local attention runs."""
        self._block = 0
        self._ahead = 0
        """The block that what is kept belongs to: the next from a block's last use on."""
        self._launched = 0
        """Transfers of blocks that were launched so far."""
        self._known: set[int] = set()
        self._reached: set[tuple[int, int]] = set()
        """Blocks and uses that forward has come to."""
        self._kept: dict[int, _Kept] = {}
        """By the storage."""
        self._places: dict[int, tuple[int, int]] = {}
        """Block and use, by the id of the module that is called there."""
        self._lasts: set[int] = set()
        """Those of the last uses of blocks."""
        self._inside: set[int] = set()
        """The ids of layers that are used in a call that began with another use."""
        self._events: defaultdict[tuple[int, bool], list[Event]] = defaultdict(list)
        """By block, and whether in forward."""
        self._alive: weakref.WeakValueDictionary[int, torch.UntypedStorage] = (
            weakref.WeakValueDictionary()
        )
        """Memory there in backward: what was kept, and what is made."""
        self._owners: dict[int, int] = {}
        """The block that has kept it, by the storage."""
        self._peaks: defaultdict[int, int] = defaultdict(int)
        """Bytes there at most while a block goes back, by block."""
        self._delivered: list[torch.UntypedStorage] = []
        self._looked: int | None = None
        """The block that went back when all memory was looked at last."""
        self._offloaded: Counter[int] = Counter()
        """Bytes in the host's memory, by block."""

    def follow(self, blocks: Sequence[DeclaredBlock]) -> None:
        """Note when a use of `blocks`, all that are run, is reached."""
        for b, block in enumerate(blocks):
            block.module.register_forward_pre_hook(partial(self._enters, b))
            block.module.register_forward_hook(partial(self._leaves, b))
            called: set[int] = set()
            for v, place in enumerate(block.uses):
                module = place.layer if place.at is None else place.at
                assert isinstance(module, nn.Module), f"nothing is called at {place.use.name}"
                if id(module) in called:
                    self._places[id(place.layer)] = b, v
                    self._inside.add(id(place.layer))
                    continue
                assert id(module) not in self._places, f"{place.use.name} is called twice"
                self._places[id(module)] = self._places[id(place.layer)] = b, v
                called.add(id(module))
                module.register_forward_pre_hook(self._begins)
                module.register_forward_hook(self._ends)
            self._lasts.add(id(module))

    def forget(self) -> None:
        """What was noted so far was for practice."""
        for noted in (self._events, self._reached, self._kept, self._offloaded):
            noted.clear()
        self._block = self._ahead = self._launched = 0

    def note(self, event: Event) -> None:
        """Something happens in the block that runs."""
        self.running.append(event)

    @property
    def running(self) -> list[Event]:
        """The events of the block that runs, in its direction."""
        return self._events[self._block, self.phase is Phase.FORWARD]

    def launched(self, transfer: Transfer) -> Callable[[], None]:
        """A transfer is launched."""
        self._launched += 1
        number = self._launched
        self.note(Launch(transfer))
        return lambda: self.note(Arrive(self._launched - number))

    def offload(self, transfer: Transfer) -> None:
        """What the block that comes next is given goes to the host."""
        self._events[self._ahead, True].append(Launch(transfer))
        self._offloaded[self._ahead] += transfer.sent_bytes

    def use_of(self, layer: WeightHolder) -> int:
        """The use of a layer in its block."""
        return self._places[id(layer)][1]

    def is_declared(self, layer: WeightHolder) -> bool:
        """Whether a block declares a use of a layer."""
        return id(layer) in self._places

    def is_inside(self, layer: WeightHolder) -> bool:
        """Whether the use of a layer is no call of its own."""
        return id(layer) in self._inside

    def record(self, block: int, saved: Saved) -> BlockRecord:
        """A block's work, of which `saved` is kept."""
        forward, backward = (tuple(self._events[block, of]) for of in (True, False))
        work = max(0, self._peaks[block] - saved.total)
        return BlockRecord(forward, backward, saved, work)

    def turn(self, num_blocks: int) -> list[Saved]:
        """The forward is over: what each block keeps; what is there is watched from here on."""
        found = self.saved(num_blocks)
        for key, kept in self._kept.items():
            self._alive[key], self._owners[key] = kept.memory, kept.block
        self._kept.clear()
        self.phase = Phase.BACKWARD
        return found

    def made(self, tensors: Iterable[Tensor]) -> None:
        """An operation gave these."""
        if self.phase is Phase.FORWARD:
            return
        own, looked = self._block, self._looked
        for x in tensors:
            memory = x.untyped_storage()
            key = storage_key(memory)
            if key not in self._known and key not in self._alive:
                self._alive[key] = memory
                self._owners.pop(key, None)  # of memory that was there before
                looked = None
        if looked == own:  # no more than there was
            return
        self._looked = own
        there = (m.nbytes() for key, m in self._alive.items() if self._owners.get(key, own) == own)
        self._peaks[own] = max(self._peaks[own], sum(there))

    def delivered(self, gradient: Tensor) -> None:
        """A weight's gradient is somebody else's from here on."""
        memory = gradient.untyped_storage()
        self._alive.pop(storage_key(memory), None)
        self._delivered.append(memory)  # autograd hands it on, which makes nothing
        self._known.add(storage_key(memory))

    def know(self, tensors: Iterable[Tensor]) -> None:
        """These are there in any case."""
        self._known = {*map(memory_of, tensors)}

    def at_loss(self, block: int) -> None:
        """What is kept from here on is the loss's, as if that were block number `block`."""
        self._ahead = block

    def keep(self, x: Tensor) -> Tensor:
        """Autograd keeps x."""
        memory = x.untyped_storage()
        key = storage_key(memory)
        if key not in self._known:
            kept = self._kept.setdefault(key, _Kept(self._ahead, memory))
            kept.by_attention |= self.attends
        return x

    def saved(self, num_blocks: int) -> list[Saved]:
        """Bytes each block keeps, memory once, for the first that does."""
        found = [(0, 0)] * num_blocks
        for kept in self._kept.values():
            others, attention = found[kept.block]
            size = kept.memory.nbytes()
            by_attention = size if kept.by_attention else 0
            found[kept.block] = others + size - by_attention, attention + by_attention
        return [Saved(*sizes, self._offloaded[b]) for b, sizes in enumerate(found)]

    def _enters(self, block: int, *_: object) -> None:
        if self.phase is Phase.FORWARD:
            self._block = block

    def _leaves(self, block: int, module: nn.Module, _: Any, y: Any) -> None:
        """A block that is computed again may be so before a use's gradient is there."""
        y = y[0] if isinstance(y, tuple) else y
        if self.phase is Phase.FORWARD and y.requires_grad:
            y.register_hook(lambda _: self._goes_back(block))

    def _begins(self, module: nn.Module, _: Any) -> None:
        block, use = self._places[id(module)]
        if self.phase is Phase.FORWARD:
            if (block, use) in self._reached:  # a loss that runs what is behind the head again
                return
            self._reached.add((block, use))
        self._enters(block)
        self.note(Reach(use, self.phase))

    def _ends(self, module: nn.Module, _: Any, y: Tensor) -> None:
        """A block goes back from the moment at which the gradient of a use's result is there."""
        if self.phase is not Phase.FORWARD or not y.requires_grad:
            return  # within a layer that computes its own gradient it requires none
        block, _ = self._places[id(module)]
        self._ahead = block + (id(module) in self._lasts)
        y.register_hook(lambda _: self._goes_back(block))

    def _goes_back(self, block: int) -> None:
        self._block = block
