"""Random streams (equal, per rank, of experts): nested, resumed, and after exceptions."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from isp.checkpoint.plain import from_tensor, to_tensor
from isp.tensor_parallel import RngStatesTracker, RngStream, model_parallel_manual_seed

CPU = torch.device("cpu")
DEVICES = [CPU, pytest.param(torch.device("cuda", 0), marks=pytest.mark.gpu)]
pytestmark = pytest.mark.parametrize("device", DEVICES, ids=str)


def draw(device: torch.device) -> Tensor:
    return torch.rand(8, device=device)


def two_streams(device: torch.device) -> RngStatesTracker:
    tracker = RngStatesTracker(device)
    tracker.add("a", 1234)
    tracker.add("b", 5678)
    return tracker


def generator_state(device: torch.device) -> Tensor:
    return torch.get_rng_state() if device.type == "cpu" else torch.cuda.get_rng_state(device)


def test_a_stream_depends_only_on_its_seed(device: torch.device) -> None:
    """Catches a stream with other numbers than its own generator, or one that disturbs it."""
    outside = generator_state(device)
    tracker = two_streams(device)
    with tracker.fork("a"):
        first = draw(device)
        with tracker.fork("b"):
            other = draw(device)
    with tracker.fork("a"):
        second = draw(device)
    assert torch.equal(generator_state(device), outside)
    for seed, numbers in ((1234, torch.cat((first, second))), (5678, other)):
        own = torch.Generator(device).manual_seed(seed)
        parts = [torch.rand(8, device=device, generator=own) for _ in range(len(numbers) // 8)]
        assert torch.equal(numbers, torch.cat(parts))


def test_a_nested_fork_continues_its_stream(device: torch.device) -> None:
    """Catches numbers repeated or lost when forks of the same stream are nested."""
    nested, found = two_streams(device), {"a": [], "b": []}
    with nested.fork("a"):
        found["a"].append(draw(device))
        with nested.fork("b"):
            found["b"].append(draw(device))
            with nested.fork("a"):
                found["a"].append(draw(device))
                with nested.fork("a"):
                    found["a"].append(draw(device))
            found["b"].append(draw(device))
        found["a"].append(draw(device))
        inside = nested.get_states()
    plain = two_streams(device)
    for name, numbers in found.items():
        with plain.fork(name):
            assert all(torch.equal(n, draw(device)) for n in numbers)
    assert all(torch.equal(s, nested.get_states()[n]) for n, s in plain.get_states().items())
    assert all(torch.equal(s, nested.get_states()[n]) for n, s in inside.items())


def test_duplicates_and_unknown_streams_are_refused(device: torch.device) -> None:
    """Catches two streams with the same numbers, and a misspelled name that draws from another
    stream.
    """
    tracker = two_streams(device)
    with pytest.raises(ValueError, match="a random stream 'a' already"):
        tracker.add("a", 1)
    with pytest.raises(ValueError, match="seed 5678"):
        tracker.add("c", 5678)
    with pytest.raises(ValueError, match="no random stream 'c'; there are: 'a', 'b'"):
        tracker.fork("c").__enter__()
    assert set(tracker.get_states()) == {"a", "b"}


def test_an_exception_restores_the_generator(device: torch.device) -> None:
    """Catches a generator that stays forked after an error, and numbers drawn again."""
    tracker, plain = two_streams(device), two_streams(device)
    outside = generator_state(device)

    def fails() -> None:
        with tracker.fork("a"), tracker.fork("b"):
            draw(device)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert torch.equal(generator_state(device), outside)
    with plain.fork("b"):
        draw(device)
    assert all(torch.equal(s, tracker.get_states()[n]) for n, s in plain.get_states().items())
    tracker.set_states(plain.get_states())  # not inside a fork


def test_wrong_states_are_refused(device: torch.device) -> None:
    """Catches a checkpoint of another device, or a change inside a fork, that is noticed too
    late.
    """
    tracker = two_streams(device)
    with pytest.raises(ValueError, match="'a': not the state of a"):
        tracker.set_states({"a": torch.zeros(3, dtype=torch.uint8)})
    assert set(tracker.get_states()) == {"a", "b"}
    inside = pytest.raises(RuntimeError, match="inside a fork of random stream 'a'")
    with tracker.fork("a"), inside:
        tracker.set_states({})
    before = tracker.get_states()
    before["a"].zero_()
    assert tracker.get_states()["a"].any(), "what is handed out is a copy"


def test_seeds_are_those_of_megatron(device: torch.device) -> None:
    """Catches an offset that would break runs that resume from Megatron-LM's seeds."""
    seeds = {
        RngStream.EQUAL: 7,
        RngStream.PER_RANK: 7 + 2718 + 3,
        RngStream.EXPERT: 7 + 1024 + 200 + 1,
    }
    tracker = model_parallel_manual_seed(
        7, tensor_rank=3, expert_rank=2, expert_tensor_rank=1, device=device
    )
    for name, state in tracker.get_states().items():
        own = torch.Generator(device).manual_seed(seeds.pop(RngStream(name)))
        assert torch.equal(state, own.get_state())
    assert seeds == {}


def dropouts(tracker: RngStatesTracker, device: torch.device) -> dict[str, Tensor]:
    """Return a dropout of the same tensor by each stream."""
    x, kept = torch.ones(64, device=device), {}
    for stream in RngStream:
        with tracker.fork(stream):
            kept[stream] = F.dropout(x, 0.5)
    return kept


def test_a_resumed_run_continues_its_streams(device: torch.device) -> None:
    """Catches streams that restart, or do not advance, after a checkpoint."""
    tracker = model_parallel_manual_seed(7, tensor_rank=1, device=device)
    first = dropouts(tracker, device)
    saved = to_tensor(tracker.get_states())
    expected = [dropouts(tracker, device) for _ in range(2)]
    assert not torch.equal(first[RngStream.EQUAL], expected[0][RngStream.EQUAL])
    resumed = RngStatesTracker(device)
    resumed.set_states(from_tensor(saved))
    for reference in expected:
        found = dropouts(resumed, device)
        assert all(torch.equal(found[s], reference[s]) for s in RngStream)
