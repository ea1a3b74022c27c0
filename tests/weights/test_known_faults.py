"""One regression test for each fault that is known of InternEvo's runtime for the same job.

| fault                                                   | regression test                       |
|---------------------------------------------------------|---------------------------------------|
| weights gathered twice when only a fraction of the      | `test_communicator`:                  |
| blocks is recomputed                                    | `test_one_gather_a_forward_and_...`   |
| prefetch that does not wait until the optimizer has     | `test_published`: `test_gathers_wait_ |
| published the weight                                    | until_the_weights_are_published`      |
| a pool buffer reused while in use, unnoticed            | `test_pool`: `test_misuse_raises`,    |
|                                                         | `test_poison`; `test_gpu`:            |
|                                                         | `test_buffers_outlive_their_readers`  |
| gradients that autograd sees as constant zeros          | `test_autograd_sees_no_zeros`         |
| the embedding gathered synchronously, and again in      | `test_ends`: `test_embedding_is_      |
| backward where it is not needed                         | gathered_ahead_and_not_in_backward`   |
| all-gather along a dimension other than the first that  | `test_collectives_along_any_dim`      |
| is right only for batch 1                               |                                       |
| AVG over groups of unequal token counts                 | `test_unequal_token_counts`           |
| rotary positions not sharded with the sequence          | `test_rotary_positions_are_sharded`   |
| structure found by module name                          | `test_names_mean_nothing`             |
| one communicator per process                            | `test_several`: `test_several_        |
|                                                         | communicators_and_chunks`             |
| dispatch that ends in `assert False`                    | `test_every_case_is_dispatched`,      |
|                                                         | `test_unknown_choices_name_the_known` |
"""

from __future__ import annotations

import importlib
import itertools
import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from isp.comm import Channel, Mesh
from isp.data.batch import MicroBatch
from isp.layers.factory import LayerFactory
from isp.layers.linear import Role, moves_for
from isp.layers.loss import IGNORED, vocab_parallel_cross_entropy
from isp.layers.module import bind_names, named_parameters
from isp.layers.rotary import RotaryEmbedding
from isp.optim import MainGradients
from isp.parallel import Axis, Mode, ParallelConfig, TensorConfig, Topology, WeightConfig
from isp.parallel.config import LaunchPoint, OverlapUnit
from isp.train.step import slice_sequence
from isp.weights.communicator import ISPCommModelConfig, ISPCommunicator
from isp.weights.declare import DeclaredBlock, DeclaredUse
from isp.weights.trace import sequential_actions
from tests.ranks import run_ranks
from tests.weights.echo import CPU, EchoChannel, echo_layers, echo_net

IDS = torch.tensor([[1, 2, 3]])


def test_the_table_is_true() -> None:
    """Catches a test of the table above that has been renamed or removed."""
    assert __doc__ is not None
    rows = [line.split("|")[2].strip() for line in __doc__.splitlines() if line.startswith("| ")]
    tests, num_tests = dict(globals()), 0
    for name, colon in re.findall(r"`([\w.]+)`(:?)", "".join(rows[1:])):
        if colon:
            tests |= vars(importlib.import_module(f"tests.weights.{name}"))
            continue
        stem = name.removesuffix("...")
        assert any(t == name or (stem != name and t.startswith(stem)) for t in tests), name
        num_tests += 1
    assert num_tests == 14


# -- gradients that autograd sees as constant zeros ------------------------------------------


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


# -- all-gather along a dimension other than the first ---------------------------------------


def run_collectives(rank: int) -> None:
    mesh = Mesh(Topology.create(2, ParallelConfig(tensor=TensorConfig(size=2))), rank)
    channel = mesh[Axis.TENSOR]
    full = torch.arange(3 * 4 * 6 * 2.0).view(3, 4, 6, 2)  # batch 3
    for dim in (1, 2, -1, -2):
        own = full.chunk(2, dim)[rank]
        assert torch.equal(channel.all_gather(own, dim).wait(), full), dim
        assert torch.equal(channel.reduce_scatter(full, dim).wait(), 2 * own), dim
    for scatter, gather in itertools.permutations((1, 2, 3), 2):
        own, expected = full.chunk(2, gather)[rank], full.chunk(2, scatter)[rank]
        found = channel.all_to_all(own, scatter=scatter, gather=gather).wait()
        assert torch.equal(found, expected), (scatter, gather)


def test_collectives_along_any_dim() -> None:
    """Catches ranks' slices joined as if every dim before the split one had length 1."""
    run_ranks(2, run_collectives)


# -- AVG over groups of unequal token counts -------------------------------------------------

V, D = 8, 4


def run_unequal_counts(rank: int) -> None:
    """One, no and three valid tokens on three ranks of four, and a gradient of the global mean."""
    parallel = ParallelConfig(tensor=TensorConfig(size=2), weight=WeightConfig(size=2))
    mesh = Mesh(Topology.create(4, parallel), rank)
    assert mesh[Axis.WEIGHT_DATA].size == 2
    communicator = ISPCommunicator(mesh[Axis.WEIGHT], ISPCommModelConfig(device=CPU))
    layers = LayerFactory(
        mode=Mode.ISP,
        tensor=Channel.solo("tensor"),
        weight=mesh[Axis.WEIGHT],
        communicator=communicator,
        device=CPU,
        dtype=torch.float64,
    )
    head = layers.head(D, V, std=1.0)
    random = torch.Generator().manual_seed(0)
    full = torch.randn(V, D, generator=random, dtype=torch.float64, requires_grad=True)
    x = torch.randn(4, 3, D, generator=random, dtype=torch.float64)  # a row for each rank
    labels = torch.randint(V, (4, 3), generator=random)
    for row, valid in enumerate((1, 0, 3, 2)):
        labels[row, valid:] = IGNORED
    F.cross_entropy(F.linear(x, full).flatten(0, 1), labels.flatten()).backward()

    with torch.no_grad():
        head.weight.copy_(head.layouts["weight"].shard(full))
    gradients = MainGradients(named_parameters(nn.ModuleDict({"head": head})), mesh)
    communicator.deliver_to(gradients)
    gradients.expect_last()
    solo = Channel.solo("tensor")
    own = slice(rank, rank + 1)
    losses = vocab_parallel_cross_entropy(head(x[own]), labels[own], first=0, channel=solo)
    (losses.sum() / 6).backward()  # valid tokens of all ranks
    communicator.finish()
    gradients.reduce()
    assert full.grad is not None
    expected = head.layouts["weight"].shard(full.grad)
    torch.testing.assert_close(gradients.grad(head.weight), expected, rtol=1e-12, atol=1e-12)


def test_unequal_token_counts() -> None:
    """Catches a mean over ranks of means over tokens, in the weight group or over replicas."""
    run_ranks(4, run_unequal_counts)


# -- rotary positions ------------------------------------------------------------------------


def test_rotary_positions_are_sharded() -> None:
    """Catches ranks that all rotate by the positions of the first one's tokens."""
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])  # two documents
    cu_seqlens = torch.tensor([0, 3, 8], dtype=torch.int32)
    tokens = torch.arange(8)[None]
    batch = MicroBatch(tokens, tokens.clone(), positions, cu_seqlens)
    rotary = RotaryEmbedding(4, base=10000.0)
    full = rotary(positions, dtype=torch.float64)
    shards = []
    for rank in (0, 1):
        channel = EchoChannel(rank)
        part = slice_sequence(batch, channel)
        assert part.positions.tolist() == [positions[0].chunk(2)[rank].tolist()]
        assert part.cu_seqlens is not None
        assert torch.equal(part.cu_seqlens, cu_seqlens)  # attention sees the full sequence
        shards.append(rotary(part.positions, dtype=torch.float64))
    for whole, parts in zip(full, zip(*shards, strict=True), strict=True):
        dim = next(d for d in range(whole.dim()) if whole.shape[d] == 8)
        assert torch.equal(torch.cat(parts, dim), whole)
    assert not torch.equal(shards[0][0], shards[1][0])


# -- structure found by module name ----------------------------------------------------------


class Odd(nn.Module):
    """Two linears in a container with names that no other model uses."""

    def __init__(self, layers: LayerFactory) -> None:
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


# -- dispatch that ends in `assert False` ----------------------------------------------------


def test_every_case_is_dispatched() -> None:
    """Catches a mode, role, unit or launch point that falls through."""
    channel = EchoChannel()
    for mode, role in itertools.product(Mode, Role):
        moves_for(mode, role, channel)
    for unit, launch, overlap in itertools.product(OverlapUnit, LaunchPoint, (True, False)):
        net, communicator, _ = echo_net(unit=unit, launch=launch, overlap=overlap)
        assert communicator.plan(sequential_actions(1)).steps
        assert net(IDS).isfinite().all()


@pytest.mark.parametrize("enum", [Mode, LaunchPoint, OverlapUnit])
def test_unknown_choices_name_the_known(enum: type[Mode | LaunchPoint | OverlapUnit]) -> None:
    """Catches a misspelt choice that is carried along until some branch has no answer to it."""
    with pytest.raises(ValueError, match="'ips' is not a valid"):
        enum("ips")
