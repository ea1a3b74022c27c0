"""Several communicators in one process, and one without weights.

D model size; see `tests.core.weights.test_parameters` for the models.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from isp.core.internevo import ISPCommunicatorWrapper
from isp.core.layers.rank_layers import RankLayers
from isp.core.mesh.config import OverlapUnit
from isp.core.weights.uses import sequential_actions
from tests.core.weights.echo import leased_bytes
from tests.core.weights.parameter_cases import Bias, D, linear
from tests.core.weights.test_parameters import MICRO, Bench, Way, check_and_update, start
from tests.ranks import run_ranks
from tests.toolkit import blocks_of


class Experts(nn.Module):
    """Two dense layers with an expert in between; the expert's weights have another
    communicator.
    """

    def __init__(self, dense: RankLayers, expert: RankLayers) -> None:
        super().__init__()
        self.one = dense.column(D, (D,), bias=True, std=0.5)
        self.expert = expert.column(D, (D,), bias=True, std=0.5)
        self.two = dense.column(D, (D,), std=0.5)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.two(torch.tanh(self.expert(torch.sin(self.one(x)))))
        return y


def run_experts(bench: Bench, announced: bool) -> None:
    rank = bench.channel.rank
    dense, expert = bench.communicator(Way()), bench.communicator(Way(unit=OverlapUnit.MODULE))
    empty = bench.communicator(Way())
    model = Experts(bench.layers(dense), bench.layers(expert))
    full = start(model)
    dense.declare([blocks_of(model.one, model.two)])
    expert.declare([blocks_of(model.expert)])
    empty.declare([()])
    wrapper = ISPCommunicatorWrapper([dense, expert, empty])
    asked: list[nn.Module] = []
    wrapper.register_prerequisite_for_forward_prefetch_hooks(asked.append)
    with pytest.raises(TypeError):
        wrapper.register_prerequisite_for_forward_prefetch_hooks(3)  # type: ignore[arg-type]
    for number in range(3):
        if announced:
            wrapper.begin(sequential_actions(MICRO))
        wrapper.switch_current_model_chunk(0)
        for batches in bench.inputs(Bias, number):
            for x in batches:
                p = full
                h = torch.tanh(linear(torch.sin(linear(x, p, "one")), p, "expert"))
                expected = linear(h, p, "two")
                expected.square().sum().backward()
            found = model(batches[rank].detach())
            found.square().sum().backward()
            if rank == 1:  # the last plain computation
                torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        wrapper.finish()
        for communicator in (dense, expert):
            assert leased_bytes(communicator) == 0
        check_and_update(model, full)
    assert {id(m) for m in asked} == {id(model.one), id(model.expert), id(model.two)}
    with wrapper.recomputing():
        assert dense.is_recomputing
        assert expert.is_recomputing
    wrapper.begin(sequential_actions(1))
    assert min(leased_bytes(c) for c in (dense, expert)) > 0
    wrapper.drain()
    assert max(leased_bytes(c) for c in (dense, expert)) == 0


def run_several(rank: int) -> None:
    bench = Bench(rank, 2)
    for announced in (False, True):
        run_experts(bench, announced)


def test_several_communicators_are_independent() -> None:
    """Catches a wrapper's call that reaches only one communicator, and state shared between
    communicators of a process.
    """
    run_ranks(2, run_several)
