"""One regression test for each fault that is known of InternEvo's runtime for the same job.

| fault                                                   | regression test                       |
|---------------------------------------------------------|---------------------------------------|
| weights gathered twice when only a fraction of the      | `test_plan_sizes`:                    |
| blocks is recomputed                                    | `test_every_size_holds`               |
| prefetch that does not wait until the optimizer has     | `test_published`                      |
| published the weight                                    |                                       |
| a pool buffer reused while in use, unnoticed            | `test_pool`, `test_gpu`               |
| gradients that autograd sees as constant zeros          | `test_autograd_sees_no_zeros`         |
| the embedding gathered synchronously, and again in      | `test_communicator`: `test_embedding_ |
| backward where it is not needed                         | is_gathered_ahead_and_not_in_backward`|
| all-gather along a dimension other than the first that  | `tests.comm.test_mappings`            |
| is right only for batch 1                               |                                       |
| AVG over groups of unequal token counts                 | `tests.train.test_layouts`            |
| rotary positions not sharded with the sequence          | `tests.train.test_layouts`            |
| structure found by module name                          | `test_names_mean_nothing`             |
| one communicator per process                            | `test_several`                        |
| dispatch that ends in `assert False`                    | `tests.train.test_layouts`            |
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from isp.layers.module import bind_names
from isp.weights.communicator import ISPCommModelConfig, ISPCommunicator
from isp.weights.declare import DeclaredBlock, DeclaredUse
from isp.weights.trace import sequential_actions
from tests.toolkit import ToolkitLayers
from tests.weights.echo import CPU, EchoChannel, echo_layers, echo_net

IDS = torch.tensor([[1, 2, 3]])


def test_autograd_sees_no_zeros() -> None:
    """Catches zeros handed to autograd in place of a gradient that is still on its way."""
    net, communicator, channel = echo_net(bias=True, num_recomputed=1)
    weights = dict(net.named_parameters())
    seen: list[Tensor | None] = []
    for parameter in weights.values():
        parameter.register_hook(seen.append)
    communicator.begin(sequential_actions(1))
    net(IDS).square().sum().backward()
    assert seen == [None] * len(weights)  # each was passed, and had nothing
    assert [name for name, p in weights.items() if p.grad is not None] == []
    communicator.finish()
    for name, p in weights.items():
        assert p.grad is not None, name
        assert p.grad.count_nonzero() > 0, name
    assert channel.events.count("reduce a.wo") == 1


D = 4


class Odd(nn.Module):
    """Two linears in a container with names that no other model uses."""

    def __init__(self, layers: ToolkitLayers) -> None:
        super().__init__()
        self.Ω = nn.ModuleDict({"left": layers.column(D, (D,), std=0.5)})
        self.attention = nn.ModuleList([layers.column(D, (D,), std=0.5) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.attention[1], self.Ω["left"], self.attention[0]):
            x = torch.tanh(layer(x))
        return x


def test_names_mean_nothing() -> None:
    """Catches a runtime that overlaps only models whose modules have the names it knows."""
    channel = EchoChannel()
    communicator = ISPCommunicator(channel, ISPCommModelConfig(device=CPU), poison=True)
    net = Odd(echo_layers(communicator, channel))
    bind_names(net)
    for p in net.parameters():
        nn.init.ones_(p)
    order = (net.attention[1], net.Ω["left"], net.attention[0])
    communicator.declare(
        [
            [
                DeclaredBlock(
                    name="?",
                    module=layer,
                    uses=(DeclaredUse(name="?", layer=layer),),  # type: ignore[arg-type]
                )
                for layer in order
            ]
        ]
    )
    communicator.begin(sequential_actions(1))
    net(torch.ones(1, D, dtype=torch.float64)).sum().backward()
    forward = channel.taken()[:6]
    assert forward == [
        *("gather attention.1", "gather Ω.left", "wait attention.1"),
        *("wait Ω.left", "gather attention.0", "wait attention.0"),
    ]
