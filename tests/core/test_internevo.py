"""InternEvo's names that the runtime does not use: each does what its users expect of it."""

from __future__ import annotations

import torch

from isp.core.internevo import ISPOverlapState
from isp.core.mesh.config import LaunchPoint
from isp.core.weights.uses import sequential_actions
from isp.core.weights.wp_communicator import LocalWeights
from tests.core.weights.echo import echo_net


def test_overlap_state_shows_what_is_gathered() -> None:
    """Catches a state that misses a weight of its chunk, or shows it gathered when it is not."""
    net, communicator, _ = echo_net(num_blocks=2, launch=LaunchPoint.WO)
    (state,) = ISPOverlapState.of_chunks(communicator)
    names = [weight.name.removesuffix(".weight") for weight in state.weights]
    assert names == ["embedding", "a.wqkv", "a.wo", "b.wqkv", "b.wo", "head"]
    assert not any(weight.gathered for weight in state.weights)
    communicator.begin(sequential_actions(1))
    assert [w.gathered is not None for w in state.weights] == [
        True,
        True,
        True,
        False,
        False,
        False,
    ]
    net(torch.tensor([[1, 2, 3, 1]])).sum().backward()
    communicator.finish()
    assert not any(weight.gathered for weight in state.weights)


def test_communication_mode() -> None:
    """Catches a mode that is not that of the communicator's weights."""
    _, communicator, _ = echo_net()
    assert (communicator.communication_mode, LocalWeights().communication_mode) == ("isp", "tp")
