"""A weight that layers share, each with a bias of its own.

D features
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from isp.layers.module import bind_names
from isp.parallel.config import OverlapUnit, Prefetch
from isp.weights.communicator import ISPCommModelConfig, ISPCommunicator
from isp.weights.declare import DeclaredBlock, DeclaredUse
from isp.weights.trace import sequential_actions
from tests.weights.echo import EchoChannel, echo_layers, plain_linear

D = 4


@pytest.mark.parametrize("announced", [True, False])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("unit", list(OverlapUnit))
def test_each_layer_adds_its_own_bias(unit: OverlapUnit, overlap: bool, announced: bool) -> None:
    """Catches the bias of the first layer that reads the weight in the place of the others'."""
    channel = EchoChannel()
    communicator = ISPCommunicator(
        channel,
        ISPCommModelConfig(device=torch.device("cpu")),
        prefetch=Prefetch(unit=unit, overlap=overlap),
        poison=True,
    )
    layers = echo_layers(communicator, channel)
    model = nn.ModuleList(layers.row(D, D, bias=True, std=0.5) for _ in range(3))
    with torch.no_grad():
        for number, layer in enumerate(model):
            layer.weight.normal_()
            layer.bias.fill_(number + 1)
    model[2].weight = model[0].weight
    bind_names(model)
    communicator.declare(
        [
            [
                DeclaredBlock(name=str(i), module=x, uses=(DeclaredUse(name="l", layer=x),))
                for i, x in enumerate(model)
            ]
        ]
    )
    if announced:
        communicator.begin(sequential_actions(1))
    found = expected = torch.randn(1, 2, D, dtype=torch.float64)
    for layer in model:
        found, expected = layer(found), plain_linear(expected, layer)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    _backward(found, communicator)


def _backward(out: Tensor, communicator: ISPCommunicator) -> None:
    out.sum().backward()
    communicator.finish()
