"""A step that an exception ended, and the steps after it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from isp.parallel import Mode
from model.config import ModelConfig
from tests.ranks import run_ranks
from tests.train.runs import Layout, Meshes, Run, Task, make_run

MODEL = ModelConfig(
    vocab_size=32, hidden_size=16, num_layers=3, num_heads=4, num_kv_heads=2, intermediate_size=24
)
LAYOUTS = {
    "isp": Layout(mode=Mode.ISP, tensor=2, weight=4, data=2, micro=2),
    "fsp": Layout(mode=Mode.FSP, tensor=2, weight=1, data=2, micro=2),
}


class Fault(Exception):
    """What ends a step here."""


class _Fails(torch.autograd.Function):
    """Passes a tensor on, and raises in backward."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        raise Fault


def _fail_once(run: Run, where: str) -> None:
    """Let the middle block of the run raise in its next forward or backward."""
    block = run.step.chunks[0].parts()[2]

    def fail(module: object, args: object, y: Tensor) -> Tensor:
        hook.remove()
        if where == "forward":
            raise Fault
        return _Fails.apply(y)  # type: ignore[no-any-return]

    hook = block.register_forward_hook(fail)


def _steps(rank: int, layout: Layout, where: str) -> None:
    meshes = Meshes(rank)
    mesh = meshes.of(layout)
    whole = make_run(mesh, layout, Task(model=MODEL))
    expected = whole.numbers(range(3))
    weights = whole.weights()
    whole.close()
    run = make_run(mesh, layout, Task(model=MODEL))
    found = run.numbers(range(1))
    for _ in range(2):  # after an exception another one may come
        _fail_once(run, where)
        with pytest.raises(Fault):
            run.numbers(range(1, 2))
    found += run.numbers(range(1, 3))
    assert found == expected
    for name, weight in run.weights().items():
        assert (weight == weights[name]).all(), name


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_step_may_be_taken_again(name: str, where: str) -> None:
    """Catches gradients, promises or gathered weights left behind by a step that raised."""
    run_ranks(LAYOUTS[name].world, _steps, LAYOUTS[name], where)
