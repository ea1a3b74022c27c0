"""Random streams that are equal on all ranks of a group, or different on each rank.

Dropout must be equal where all ranks compute the same activations, and different where each rank
computes a part. A stream is a state of the device's torch generator, which `fork` sets.

Source: Megatron-LM, core/tensor_parallel/random.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

__all__ = [
    "RngSnapshot",
    "RngStatesTracker",
    "RngStream",
    "generator_states",
    "model_parallel_manual_seed",
    "restore_generators",
    "seed_generators",
]


class RngStream(StrEnum):
    """The names of the random streams that `model_parallel_manual_seed` makes."""

    EQUAL = "data-parallel-rng"
    """Stream for replicated activations, equal on all ranks with the same seed."""
    PER_RANK = "model-parallel-rng"
    """Stream for sharded activations, different on each tensor rank."""
    EXPERT = "expert-parallel-rng"
    """Stream for experts, different on each expert rank and each tensor rank of an expert."""


@dataclass(frozen=True)
class RngSnapshot:
    """All states that determine the next random numbers on a device."""

    generator: Tensor
    """State of the device's own generator."""
    host: Tensor
    """State of the CPU generator, from which code for any device may draw."""
    streams: Mapping[str, Tensor]
    """State of each stream, by name."""
    current: str | None
    """Name of the stream of the innermost fork; None outside of forks."""


class RngStatesTracker:
    """Named random streams of one device, cpu or cuda; not safe for several threads.

    The device's own generator is changed only inside of forks, and restored after them.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._streams: dict[str, Tensor] = {}
        self._seeds: set[int] = set()
        self._current: str | None = None
        self.replays = False
        """True while a forward is computed again, in a `replaying` context."""

    def add(self, name: str, seed: int) -> None:
        """Add a stream. Raises ValueError if there is one of this name, or with this seed."""
        if name in self._streams:
            raise ValueError(f"there is a random stream {name!r} already: use another name")
        if seed in self._seeds:
            raise ValueError(
                f"seed {seed} of random stream {name!r} is the seed of another stream, and the two"
                f" would give the same numbers: use another seed"
            )
        self._seeds.add(seed)
        self._streams[name] = torch.Generator(self.device).manual_seed(seed).get_state()

    @contextmanager
    def fork(self, name: str = RngStream.PER_RANK) -> Iterator[None]:
        """Draw from stream `name` in this context, and restore the generator afterwards.

        Forks may be nested; a stream continues where its last fork left it, also after an
        exception. Raises ValueError if there is no such stream.
        """
        if name not in self._streams:
            known = ", ".join(map(repr, self._streams)) or "none"
            raise ValueError(f"there is no random stream {name!r}; there are: {known}")
        outer, outside = self._current, _get_state(self.device)
        if outer is not None:  # the generator holds the outer stream: save its state
            self._streams[outer] = outside
        _set_state(self.device, self._streams[name])
        self._current = name
        try:
            yield
        finally:
            self._streams[name] = _get_state(self.device)
            self._current = outer
            _set_state(self.device, outside if outer is None else self._streams[outer])

    def get_states(self) -> dict[str, Tensor]:
        """Return the state of each stream, as byte tensors in CPU memory, for a checkpoint."""
        states = {name: state.clone() for name, state in self._streams.items()}
        # Inside of a fork, the generator has the newest state of the fork's stream.
        if self._current is not None:
            states[self._current] = _get_state(self.device)
        return states

    def set_states(self, states: Mapping[str, Tensor]) -> None:
        """Replace all streams by `states`, as `get_states` returns them.

        Raises ValueError if one is not the state of a generator of this device, and RuntimeError
        inside a fork.
        """
        if self._current is not None:
            raise RuntimeError(
                f"set_states was called inside a fork of random stream {self._current!r}: call it"
                " outside of forks"
            )
        probe = torch.Generator(self.device)
        for name, state in states.items():
            try:
                probe.set_state(state)
            except (RuntimeError, TypeError) as error:
                raise ValueError(
                    f"random stream {name!r}: not the state of a {self.device.type} generator:"
                    f" pass what get_states returned on a device of this type"
                ) from error
        self._streams = {name: state.clone() for name, state in states.items()}

    def snapshot(self) -> RngSnapshot:
        """Return all states that determine the next random numbers, for `replaying`."""
        return RngSnapshot(
            _get_state(self.device), torch.get_rng_state(), self.get_states(), self._current
        )

    @contextmanager
    def replaying(self, snapshot: RngSnapshot) -> Iterator[None]:
        """Draw from `snapshot` in this context, for a recomputation; then restore the states."""
        before, outer = self.snapshot(), self.replays
        self._restore(snapshot)
        self.replays = True
        try:
            yield
        finally:
            self.replays = outer
            self._restore(before)

    def _restore(self, snapshot: RngSnapshot) -> None:
        torch.set_rng_state(snapshot.host)
        _set_state(self.device, snapshot.generator)
        self._streams, self._current = dict(snapshot.streams), snapshot.current


def model_parallel_manual_seed(
    seed: int,
    *,
    tensor_rank: int,
    expert_rank: int = 0,
    expert_tensor_rank: int = 0,
    device: torch.device,
) -> RngStatesTracker:
    """Return a tracker with the streams of `RngStream`, seeded as by Megatron-LM.

    `seed` must be equal on the ranks of a tensor group, and different between pipeline stages. The
    device's own generator is not changed: draw from `RngStream.EQUAL` where ranks must agree.
    """
    # The offsets of the seeds are the same as in Megatron-LM.
    tracker = RngStatesTracker(device)
    tracker.add(RngStream.EQUAL, seed)
    tracker.add(RngStream.PER_RANK, seed + 2718 + tensor_rank)
    tracker.add(RngStream.EXPERT, seed + 1024 + 100 * expert_rank + expert_tensor_rank)
    return tracker


_HOST = ("cpu", "meta")
"""Device types that use the CPU generator; nothing is drawn on meta."""


def _get_state(device: torch.device) -> Tensor:
    if device.type in _HOST:
        return torch.get_rng_state()
    state: Tensor = torch.get_device_module(device).get_rng_state(device)
    return state


def _set_state(device: torch.device, state: Tensor) -> None:
    if device.type in _HOST:
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)


def generator_states(device: torch.device) -> dict[str, Tensor]:
    """Return the states of torch's generators for CPU and `device`, for a checkpoint."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def seed_generators(device: torch.device, seed: int) -> None:
    """Seed torch's generators for CPU and `device`.

    `torch.manual_seed` is not used because without CUDA it formats a traceback in each call, which
    is slow: it remembers the call for devices that are initialized later.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)


def restore_generators(device: torch.device, states: Mapping[str, Tensor]) -> None:
    """Restore what `generator_states` returned; CUDA's only if `states` has it."""
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)
