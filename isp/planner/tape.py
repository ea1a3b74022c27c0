"""Tapes: what a block of a model does for one micro-batch, in order, and who takes it down."""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from isp.comm.tag import Purpose, Transfer
from isp.parallel.phase import Phase
from isp.weights.declare import DeclaredBlock, WeightHolder

__all__ = [
    "Arrive",
    "Attend",
    "Event",
    "Gradient",
    "Launch",
    "Loss",
    "Product",
    "Reach",
    "Read",
    "Saved",
    "Scan",
    "Sweep",
    "TapeRecorder",
    "Tapes",
    "pairs_seen",
]


class Launch(NamedTuple):
    """A transfer sets off."""

    number: int
    transfer: Transfer


class Arrive(NamedTuple):
    """A transfer is waited for, and there."""

    number: int


class Reach(NamedTuple):
    """A use begins; in backward only that of a layer whose input has a gradient."""

    use: int
    phase: Phase


class Read(NamedTuple):
    """The weight of a use is read."""

    use: int
    phase: Phase


class Product(NamedTuple):
    """Matrices are multiplied."""

    flops: int


class Attend(NamedTuple):
    """Local attention, or its gradient."""

    phase: Phase
    features: int
    """Of all query heads that the rank attends with."""
    window: int | None
    """Tokens that a token attends to; None: all before it."""
    pairs: float | None = None
    """Pairs of a query and a key that it sees; None: those of the case's rows and documents."""


def pairs_seen(length: int, window: int | None) -> float:
    """Pairs of a query and a key that it sees, in a causal document."""
    reach = length if window is None else min(length, window)
    return reach * (2 * length - reach) / 2


class Scan(NamedTuple):
    """A scan of this rank's heads or slices, or its gradient."""

    phase: Phase
    flops: int
    """In forward."""


class Sweep(NamedTuple):
    """Memory is read and written, with little computed."""

    num_bytes: int


class Gradient(NamedTuple):
    """The gradient of the weight, or bias, of a use is there."""

    use: int
    is_bias: bool


class Loss(NamedTuple):
    """The loss of the logits, or its gradient."""


Event = Launch | Arrive | Reach | Read | Product | Attend | Scan | Sweep | Gradient | Loss


def _renumbered(event: Event, by: int, numbers: range | None = None) -> Event:
    """The same with another transfer, if it is one's, and its number is of `numbers`."""
    if not isinstance(event, Launch | Arrive) or not (numbers is None or event.number in numbers):
        return event
    return event._replace(number=event.number + by)


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


class Tapes(NamedTuple):
    """A block's work for one micro-batch."""

    forward: tuple[Event, ...]
    backward: tuple[Event, ...]
    """With what is recomputed for it."""
    saved: Saved
    """Memory kept from the one to the other."""
    work: int
    """Bytes in hand besides what was saved, where both together take most in its backward."""

    def without_input(self) -> Tapes:
        """The same of a recomputed block whose input is not kept, nor brought back."""
        forward, backward = (tuple(e for e in tape if not _is_of_input(e)) for tape in self[:2])
        return Tapes(forward, backward, Saved(), self.work)

    @property
    def again(self) -> Iterator[Event]:
        """Its forward, as it is computed again for what it gives."""
        for event in self.forward:
            if isinstance(event, Reach | Read | Attend | Scan):
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


class _Again(NamedTuple):
    """A part of a tape that stands for more than was run."""

    begin: int
    end: int
    times: int
    launches: int
    """In the part."""
    numbers: range
    """Of the transfers launched from the part's begin until it was said."""


class TapeRecorder:
    """Notes what happens, under the block in which it does."""

    def __init__(self) -> None:
        self.phase = Phase.FORWARD
        self.attends = False
        """Whether local attention runs."""
        self._block = 0
        self._ahead = 0
        """The block that what is kept belongs to: the next from a block's last use on."""
        self._launched = 0
        self._next: dict[int, int] = {}
        """The block that is run behind each."""
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
        self._again: defaultdict[tuple[int, bool], list[_Again]] = defaultdict(list)
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

    def follow(self, blocks: Sequence[DeclaredBlock], run: Sequence[int]) -> None:
        """Note when a use of `blocks` is reached, of which those at `run` are."""
        self._next = dict(zip(run, [*run[1:], len(blocks)], strict=True))
        for b, block in ((b, blocks[b]) for b in run):
            block.module.register_forward_pre_hook(partial(self._enters, b))
            block.module.register_forward_hook(partial(self._leaves, b))
            called: set[int] = set()
            for v, use in enumerate(block.uses):
                module = use.layer if use.at is None else use.at
                assert isinstance(module, nn.Module), f"nothing is called at {use.name}"
                if id(module) in called:
                    self._places[id(use.layer)] = b, v
                    self._inside.add(id(use.layer))
                    continue
                assert id(module) not in self._places, f"{use.name} is called twice"
                self._places[id(module)] = self._places[id(use.layer)] = b, v
                called.add(id(module))
                module.register_forward_pre_hook(self._begins)
                module.register_forward_hook(self._ends)
            self._lasts.add(id(module))

    def forget(self) -> None:
        """What was noted so far was for practice."""
        for noted in (self._events, self._again, self._reached, self._kept, self._offloaded):
            noted.clear()
        self._block = self._ahead = self._launched = 0

    def note(self, event: Event) -> None:
        """Something happens in the block that runs."""
        self._running().append(event)

    def _running(self) -> list[Event]:
        return self._events[self._block, self.phase is Phase.FORWARD]

    def position(self, product: int | None = None) -> int:
        """Where the tape that runs is now, or was at `product`, counted from 0."""
        events = self._running()
        if product is None:
            return len(events)
        return [i for i, event in enumerate(events) if isinstance(event, Product)][product]

    def flops(self, begin: int) -> int:
        """Those of the products from position `begin` of the tape that runs on."""
        return sum(e.flops for e in self._running()[begin:] if isinstance(e, Product))

    def repeat(self, begin: int, end: int, times: int) -> None:
        """Say that what came from position `begin` of the tape that runs to `end` comes `times`
        more; what is on its way then is that of the last."""
        events = self._running()
        step = sum(isinstance(event, Launch) for event in events[begin:end])
        before = self._launched - sum(isinstance(event, Launch) for event in events[begin:])
        again = _Again(begin, end, times, step, range(before + 1, self._launched + 1))
        self._again[self._block, self.phase is Phase.FORWARD].append(again)
        self._launched += times * step

    def launched(self, transfer: Transfer) -> Callable[[], None]:
        """A transfer sets off."""
        self._launched += 1
        number = self._launched
        self.note(Launch(number, transfer))
        return lambda: self.note(Arrive(number))

    def offload(self, transfer: Transfer) -> None:
        """What the block that comes next is given goes to the host."""
        self._launched += 1
        self._events[self._ahead, True].append(Launch(self._launched, transfer))
        self._offloaded[self._ahead] += transfer.sent_bytes

    def use_of(self, layer: WeightHolder) -> int:
        """The use of a layer in its block."""
        return self._places[id(layer)][1]

    def is_inside(self, layer: WeightHolder) -> bool:
        """Whether the use of a layer is no call of its own."""
        return id(layer) in self._inside

    def tapes(self, block: int, saved: Saved) -> Tapes:
        """A block's work, of which `saved` is kept."""
        forward, backward = self._tape(block, True), self._tape(block, False)
        work = max(0, self._peaks[block] - saved.total)
        return Tapes(forward, backward, saved, work)

    def _tape(self, *key: Any) -> tuple[Event, ...]:
        events = self._events[key]
        for begin, end, times, step, numbers in reversed(self._again[key]):
            part = events[begin:end]
            copies = [_renumbered(e, n * step) for n in range(1, times + 1) for e in part]
            rest = (_renumbered(e, times * step, numbers) for e in events[end:])
            events = [*events[:end], *copies, *rest]
        return tuple(events)

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
            if memory._cdata not in self._known and memory._cdata not in self._alive:
                self._alive[memory._cdata] = memory
                self._owners.pop(memory._cdata, None)  # of memory that was there before
                looked = None
        if looked == own:  # no more than there was
            return
        self._looked = own
        there = (m.nbytes() for key, m in self._alive.items() if self._owners.get(key, own) == own)
        self._peaks[own] = max(self._peaks[own], sum(there))

    def delivered(self, gradient: Tensor) -> None:
        """A weight's gradient is somebody else's from here on."""
        memory = gradient.untyped_storage()
        self._alive.pop(memory._cdata, None)
        self._delivered.append(memory)  # autograd hands it on, which makes nothing
        self._known.add(memory._cdata)

    def know(self, tensors: Iterable[Tensor]) -> None:
        """These are there in any case."""
        self._known = {x.untyped_storage()._cdata for x in tensors}

    def at_loss(self, block: int) -> None:
        """What is kept from here on is the loss's, as if that were block number `block`."""
        self._ahead = block

    def keep(self, x: Tensor) -> Tensor:
        """Autograd keeps x."""
        memory = x.untyped_storage()
        if memory._cdata not in self._known:
            kept = self._kept.setdefault(memory._cdata, _Kept(self._ahead, memory))
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
        self._ahead = self._next[block] if id(module) in self._lasts else block
        y.register_hook(lambda _: self._goes_back(block))

    def _goes_back(self, block: int) -> None:
        self._block = block
