"""All kinds of parameters that users have, on real ranks, against plain torch in float64.

B batch, S sequence, D model size, V vocabulary. Every rank has its own samples; the weight group is
the world, so gradients are the sums over all samples.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from isp.core.layers.module import bind_names, named_parameters
from isp.core.mesh import Axis
from isp.core.mesh.config import OverlapUnit, Prefetch
from isp.core.weights.communicator import ISPCommModelConfig, ISPCommunicator
from isp.core.weights.uses import sequential_actions
from tests.core.weights.echo import leased_bytes
from tests.core.weights.parameter_cases import CASES, B, Case, D, Full, S, V, plainly
from tests.ranks import run_ranks
from tests.saved import saving
from tests.toolkit import CPU, ToolkitLayers, blocks_of, init_weights, weight_mesh

LR = 0.002
MICRO = 2


@dataclass(frozen=True, kw_only=True)
class Way:
    """Options of a run that may not change a bit."""

    overlap: bool = True
    announced: bool = True
    """Whether `begin` is called."""
    unit: OverlapUnit = OverlapUnit.LAYER


WAYS = (
    Way(),
    Way(overlap=False),
    Way(announced=False),
    Way(overlap=False, announced=False),
    Way(unit=OverlapUnit.MODULE),
)


def ways_of(world: int) -> tuple[Way, ...]:
    """Return all ways for two ranks, and one for more, where only the cut of parameters differs."""
    return WAYS if world == 2 else (WAYS[0], WAYS[-1])


class Bench:
    """A rank with its mesh, and methods that build models on it."""

    def __init__(self, rank: int, world: int) -> None:
        self.channel = weight_mesh(rank, world)[Axis.WEIGHT]

    def communicator(self, way: Way) -> ISPCommunicator:
        return ISPCommunicator(
            self.channel,
            ISPCommModelConfig(device=CPU),
            prefetch=Prefetch(unit=way.unit, overlap=way.overlap),
            poison=True,
        )

    def layers(self, communicator: ISPCommunicator, *, split_hidden: bool = False) -> ToolkitLayers:
        return ToolkitLayers(
            weight=self.channel, communicator=communicator, embed_split_hidden=split_hidden
        )

    def inputs(self, case: type[Case], step: int) -> list[list[Tensor]]:
        """Return each rank's input of each micro-batch, equal on all ranks."""
        random = torch.Generator().manual_seed(step)
        shape = (B, S) if case.tokens else (B, S, D)

        def one() -> Tensor:
            if case.tokens:
                return torch.randint(V, shape, generator=random)
            x = torch.randn(shape, generator=random, dtype=torch.float64)
            return x.requires_grad_(case.input_grad)

        return [[one() for _ in range(self.channel.size)] for _ in range(MICRO)]


def start(model: nn.Module) -> Full:
    """Set the model's initial weights; return the full tensors; biases are not zero."""
    bind_names(model)
    init_weights(model, seed=4)
    full: Full = {}
    for item in named_parameters(model):
        name, parameter, layout = item.name, item.parameter, item.layout
        random = torch.Generator().manual_seed(len(name))
        value = 0.5 * torch.randn(layout.global_shape, generator=random, dtype=torch.float64)
        full[name] = value.requires_grad_(parameter.requires_grad)
        with torch.no_grad():
            parameter.copy_(layout.shard(value))
    return full


@torch.no_grad()
def check_and_update(model: nn.Module, full: Full) -> None:
    """Compare every gradient, then take a step of plain gradient descent."""
    for item in named_parameters(model):
        name, parameter, layout = item.name, item.parameter, item.layout
        if not parameter.requires_grad:
            assert parameter.grad is None, name
            continue
        expected = full[name].grad
        assert expected is not None
        assert parameter.grad is not None, name
        torch.testing.assert_close(
            parameter.grad,
            layout.shard(expected),
            rtol=1e-12,
            atol=1e-12,
            msg=lambda m, n=name: f"{n}: {m}",
        )
        for p in (parameter, full[name]):
            torch.optim.SGD([p], lr=LR, fused=True).step()  # changes p without a new version
            p.grad = None


def step(bench: Bench, model: Case, full: Full, number: int) -> Iterator[Tensor]:
    """Run forward and backward of a step's micro-batches; yield outputs and input gradients."""
    for batches in bench.inputs(type(model), number):
        for rank, x in enumerate(batches):
            expected = plainly(type(model), x, full)
            expected.square().sum().backward()
            if rank != bench.channel.rank:
                continue
            own = x.detach().clone().requires_grad_(x.requires_grad)
            found = model(own)
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
            found.square().sum().backward()
            yield found.detach()
            if own.grad is not None:
                torch.testing.assert_close(own.grad, x.grad, rtol=1e-12, atol=1e-12)
                yield own.grad


@torch.no_grad()
def evaluate(bench: Bench, model: Case, full: Full) -> None:
    x = bench.inputs(type(model), 77)[0][bench.channel.rank].detach()
    expected = plainly(type(model), x, full)
    torch.testing.assert_close(model(x), expected, rtol=1e-12, atol=1e-12)


def run_case(bench: Bench, case: type[Case], way: Way, split_hidden: bool) -> list[Tensor]:
    """Run and check two steps with an evaluation in between; return all results."""
    communicator = bench.communicator(way)
    model = case(bench.layers(communicator, split_hidden=split_hidden))  # type: ignore[call-arg]
    full = start(model)
    communicator.declare([blocks_of(*model.uses())])
    seen: list[Tensor] = []
    for number in range(2):
        if way.announced:
            communicator.begin(sequential_actions(MICRO))
        seen += step(bench, model, full, number)
        communicator.finish()
        assert leased_bytes(communicator) == 0
        check_and_update(model, full)
        evaluate(bench, model, full)
    return [*seen, *(p.detach() for p in model.parameters())]


def run_all(rank: int, world: int) -> int:
    bench = Bench(rank, world)
    runs = 0
    for case, split_hidden in itertools.product(CASES, (False, True)):
        if split_hidden and not case.tokens:
            continue
        expected: list[Tensor] = []
        for way in ways_of(world):
            try:
                found = run_case(bench, case, way, split_hidden)
                expected = expected or found
                same = [torch.equal(a, b) for a, b in zip(found, expected, strict=True)]
                assert all(same), f"bits differ: {same}"
            except BaseException as error:
                raise AssertionError(f"{case.__name__} {way} {split_hidden=}: {error}") from error
            runs += 1
    return runs


@pytest.mark.parametrize("world", [2, 4])
def test_all_kinds_of_parameters_train_as_in_plain_torch(world: int) -> None:
    """Catches what the docstring of each case says, over two micro-batches of several rows."""
    runs = run_ranks(world, run_all, world)
    assert runs == [(len(CASES) + 2) * len(ways_of(world))] * world


@pytest.mark.parametrize("frozen", [False, True])
def test_a_frozen_weight_saves_no_activation(frozen: bool) -> None:
    """Catches an input saved for the gradient of a frozen weight; adapters rely on it."""
    bench = Bench(0, 1)
    layer = bench.layers(bench.communicator(Way())).column(D, (D,), bias=True, std=0.5)
    layer.weight.requires_grad_(not frozen)
    x = torch.randn(B, S, D, dtype=torch.float64, requires_grad=True)
    with saving() as kept:
        layer(x)
    assert any(t.shape == x.shape for t in kept) is not frozen
