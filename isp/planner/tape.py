"""Tapes: what a block of a model does for one micro-batch, in order, and who takes it down."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from isp.comm.cargo import Purpose, Trip
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
    "TapeRecorder",
    "Tapes",
]


class Launch(NamedTuple):
    """A transfer sets off."""

    number: int
    trip: Trip


class Arrive(NamedTuple):
    """A transfer is waited for, and there."""

    number: int


class Reach(NamedTuple):
    """A visit begins; in backward only that of a layer whose input has a gradient."""

    visit: int
    phase: Phase


class Read(NamedTuple):
    """The weight of a visit is read."""

    visit: int
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


class Gradient(NamedTuple):
    """The gradient of the weight, or bias, of a visit is there."""

    visit: int
    is_bias: bool


class Loss(NamedTuple):
    """The loss of the logits, or its gradient."""


Event = Launch | Arrive | Reach | Read | Product | Attend | Gradient | Loss


class Saved(NamedTuple):
    """Bytes that are kept for backward, by who keeps them."""

    activations: int = 0
    attention: int = 0

    @property
    def total(self) -> int:
        """Both."""
        return self.activations + self.attention


class Tapes(NamedTuple):
    """A block's work for one micro-batch."""

    forward: tuple[Event, ...]
    backward: tuple[Event, ...]
    """With what is recomputed for it."""
    saved: Saved
    """Memory kept from the one to the other."""
    work: int
    """Bytes of gradients of activations in its backward, where they take most."""


@dataclass(slots=True)
class _Kept:
    """Memory that is kept for backward."""

    block: int
    memory: torch.UntypedStorage
    by_attention: bool = False


class TapeRecorder:
    """Notes what happens, under the block in which it does."""

    def __init__(self, parts: int) -> None:
        self.phase = Phase.FORWARD
        self._parts = parts
        """Ranks of the tensor group."""
        self.attends = False
        """Whether local attention runs."""
        self._block = 0
        self._ahead = 0
        """The block that what is kept belongs to: the next from a block's last visit on."""
        self._launched = 0
        self._known: set[int] = set()
        self._kept: dict[int, _Kept] = {}
        """By the storage."""
        self._places: dict[int, tuple[int, int]] = {}
        """Block and visit, by the id of the module that is called there."""
        self._lasts: set[int] = set()
        """Those of the last visits of blocks."""
        self._events: defaultdict[tuple[int, bool], list[Event]] = defaultdict(list)
        """By block, and whether in forward."""
        self._outputs: defaultdict[int, list[int]] = defaultdict(list)
        """Bytes of what its visits give, by block."""

    def follow(self, blocks: Sequence[DeclaredBlock]) -> None:
        """Note when a visit of `blocks` is reached."""
        for b, block in enumerate(blocks):
            block.module.register_forward_pre_hook(partial(self._enters, b))
            for v, visit in enumerate(block.visits):
                module = visit.layer if visit.at is None else visit.at
                assert isinstance(module, nn.Module), f"nothing is called at {visit.name}"
                assert id(module) not in self._places, f"{visit.name} is called twice"
                self._places[id(module)] = self._places[id(visit.layer)] = b, v
                module.register_forward_pre_hook(self._begins)
                module.register_forward_hook(self._ends)
            self._lasts.add(id(module))

    def note(self, event: Event) -> None:
        """Something happens in the block that runs."""
        self._events[self._block, self.phase is Phase.FORWARD].append(event)

    def launched(self, trip: Trip) -> Callable[[], None]:
        """A transfer sets off."""
        self._launched += 1
        number = self._launched
        self.note(Launch(number, trip))
        return lambda: self.note(Arrive(number))

    def visit_of(self, layer: WeightHolder) -> int:
        """The visit of a layer in its block."""
        return self._places[id(layer)][1]

    def tapes(self, block: int, saved: Saved) -> Tapes:
        """A block's work, of which `saved` is kept.

        Most is in hand as its last linear goes back, when all that was saved is still there: the
        gradients of what it gives, as they came and as they were gathered, and of what it takes.
        """
        forward, backward = self._events[block, True], self._events[block, False]
        trips = [event.trip for event in backward if isinstance(event, Launch)]
        gathered = [
            trip.sent_bytes * self._parts // (self._parts - 1)
            for trip in trips
            if trip.kind == "all_gather" and trip.cargo.purpose is Purpose.OUTPUT_GRADIENT
        ]
        outputs = self._outputs[block]
        work = sum(outputs[-2:]) + max(gathered, default=0)
        return Tapes(tuple(forward), tuple(backward), saved, work)

    def know(self, tensors: Iterable[Tensor]) -> None:
        """These are there in any case."""
        self._known = {x.untyped_storage()._cdata for x in tensors}

    def keep(self, x: Tensor) -> Tensor:
        """Autograd keeps x."""
        memory = x.untyped_storage()
        if memory._cdata not in self._known:
            kept = self._kept.setdefault(memory._cdata, _Kept(self._ahead, memory))
            kept.by_attention |= self.attends
        return x

    def saved(self, num_blocks: int) -> list[Saved]:
        """Bytes each block keeps, memory once, for the first that does."""
        found = [[0, 0] for _ in range(num_blocks)]
        for kept in self._kept.values():
            found[kept.block][kept.by_attention] += kept.memory.nbytes()
        return [Saved(*sizes) for sizes in found]

    def _enters(self, block: int, *_: object) -> None:
        if self.phase is Phase.FORWARD:
            self._block = block

    def _begins(self, module: nn.Module, _: Any) -> None:
        block, visit = self._places[id(module)]
        self._enters(block)
        self.note(Reach(visit, self.phase))

    def _ends(self, module: nn.Module, _: Any, y: Tensor) -> None:
        """A block goes back from the moment at which the gradient of a visit's result is there."""
        if self.phase is not Phase.FORWARD:
            return
        block, _ = self._places[id(module)]
        self._ahead = block + (id(module) in self._lasts)
        self._outputs[block].append(y.nbytes)
        y.register_hook(lambda _: self._goes_back(block))

    def _goes_back(self, block: int) -> None:
        self._block = block
