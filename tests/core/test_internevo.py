"""Names of InternEvo that the runtime itself does not use behave as InternEvo's users expect."""

from __future__ import annotations

from unittest import mock

import torch

from isp.core.comm import Channel
from isp.core.internevo import HeadWeightParallelCommunicator, ISPOverlapState
from isp.core.mesh.config import LaunchPoint
from isp.core.weights.gradients import ProductSink
from isp.core.weights.uses import sequential_actions
from isp.core.weights.wp_communicator import (
    DeferredWeightGradients,
    LocalWeights,
    WPCommunicator,
)
from tests.core.weights.echo import echo_net


def test_overlap_state_shows_which_weights_are_gathered() -> None:
    """Catches a state that lacks a weight of its chunk, or shows it as gathered when it is not."""
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


def test_all_communicators_of_a_model_share_one_route() -> None:
    """Catches a route without effect when it is set on the communicator of a head or table."""
    _, communicator, _ = echo_net()
    head = HeadWeightParallelCommunicator(communicator, Channel.solo(), Channel.solo())
    head.route = route = DeferredWeightGradients(mock.create_autospec(ProductSink))
    assert communicator.route is route
    communicator.route = None
    assert head.route is None


def test_a_users_communicator_needs_two_methods() -> None:
    """Catches a new abstract method, which would break communicators of users."""

    class Own(WPCommunicator):
        gathers_weights = False
        unshard = LocalWeights.unshard
        grad_hook = LocalWeights.grad_hook

    assert Own().pass_by("anything") is None  # type: ignore[func-returns-value]


def test_communication_mode_is_that_of_the_weights() -> None:
    """Catches a mode that differs from that of the communicator's weights."""
    _, communicator, _ = echo_net()
    assert (communicator.communication_mode, LocalWeights().communication_mode) == ("isp", "tp")
