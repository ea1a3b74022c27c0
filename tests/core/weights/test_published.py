"""Gathers of weights that the optimizer is still sending."""

from __future__ import annotations

import time

import torch

from isp.core.comm import Mesh
from isp.core.layers.module import named_parameters
from isp.core.mesh import Axis
from isp.core.optim.config import OptimizerConfig
from isp.core.optim.main_grads import MainGradients
from isp.core.optim.zero1 import Zero1Optimizer
from isp.core.weights.communicator import ISPCommModelConfig, ISPCommunicator
from isp.core.weights.uses import sequential_actions
from tests.core.weights.echo import CPU, Net, echo_layers
from tests.ranks import run_ranks
from tests.toolkit import topology

IDS = torch.tensor([[1, 2, 3, 1], [4, 5, 6, 7]])
LATENCY_SECONDS = 0.02


def published_run(rank: int, *, latency: float, ask: bool, steps: int = 3) -> list[float]:
    """Return outputs of a net whose updated weights the optimizer publishes after `latency`."""
    mesh = Mesh(topology(4, weight=2), rank)
    zero1, weight = mesh[Axis.ZERO1], mesh[Axis.WEIGHT]
    assert zero1.size == 2
    zero1.arrival = lambda _: time.perf_counter() + latency
    communicator = ISPCommunicator(weight, ISPCommModelConfig(device=CPU), poison=True)
    net = Net(echo_layers(communicator, weight), bias=True)
    communicator.declare([net.declared()])
    parameters = list(named_parameters(net))
    gradients = MainGradients(parameters, mesh)
    optimizer = Zero1Optimizer(gradients, mesh, OptimizerConfig(lr=0.05), bucket_bytes=256)
    communicator.deliver_to(gradients)

    def published(module: torch.nn.Module) -> None:
        for p in module.parameters():
            optimizer.published(p)

    if ask:
        communicator.register_prerequisite_for_forward_prefetch_hooks(published)
    outputs = []
    for step in range(steps):
        communicator.begin(sequential_actions(1))
        gradients.zero()
        gradients.expect_last()
        y = net(IDS.roll(rank + step))
        outputs += [y.sum().item()]
        y.square().sum().backward()
        communicator.finish()
        gradients.reduce()
        optimizer.step(0.05, wait=False)
    return outputs


def published_runs(rank: int) -> tuple[list[float], list[float], list[float]]:
    return (
        published_run(rank, latency=0.0, ask=True),
        published_run(rank, latency=LATENCY_SECONDS, ask=True),
        published_run(rank, latency=LATENCY_SECONDS, ask=False),
    )


def test_gathers_wait_until_the_weights_are_published() -> None:
    """Catches a prefetch of unpublished weights; without the prerequisite, bits differ."""
    for prompt, late, careless in run_ranks(4, published_runs):
        assert late == prompt
        assert careless != prompt
