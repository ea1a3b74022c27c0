"""Steps that an exception ended, backward passes between steps, and the steps after them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import Tensor

from isp.core.comm import Mesh
from isp.core.mesh import Axis, Mode, PipelineSchedule
from isp.step.step_work import slice_sequence
from model.config import ModelConfig
from tests.ranks import run_ranks
from tests.train.runs import Layout, Meshes, Numbers, Run, Task, Weights, make_run

MODEL = ModelConfig(
    vocab_size=32, hidden_size=16, num_layers=3, num_heads=4, num_kv_heads=2, intermediate_size=24
)
LAYOUTS = {
    "isp": Layout(mode=Mode.ISP, tensor=2, weight=4, data=2, micro=2),
    "fsp": Layout(mode=Mode.FSP, tensor=2, weight=1, data=2, micro=2),
}
ZERO = PipelineSchedule.INTERLEAVED_ZERO_BUBBLE
SPLIT = {
    "isp, split backward": Layout(tensor=2, weight=2, pipeline=2, schedule=ZERO, micro=2),
    "mtp, split backward": Layout(mode=Mode.MTP, pipeline=2, schedule=ZERO, micro=2),
}


class Fault(Exception):
    """An error that ends a step in these tests."""


class _Fails(torch.autograd.Function):
    """Identity whose backward raises."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        raise Fault


def _fail_once(run: Run, where: str) -> None:
    """Let the middle block of the run raise in its next forward or backward."""
    block = list(run.step.chunks[0].parts().values())[2]

    def fail(module: object, args: object, y: Tensor) -> Tensor:
        hook.remove()
        if where == "forward":
            raise Fault
        return _Fails.apply(y)  # type: ignore[no-any-return]

    hook = block.register_forward_hook(fail)


def _undisturbed(rank: int, layout: Layout) -> tuple[Mesh, Numbers, Weights]:
    mesh = Meshes(rank).of(layout)
    whole = make_run(mesh, layout, Task(model=MODEL))
    numbers, weights = whole.numbers(range(3)), whole.weights()
    whole.close()
    return mesh, numbers, weights


def _steps(rank: int, layout: Layout) -> None:
    mesh, expected, weights = _undisturbed(rank, layout)
    run = make_run(mesh, layout, Task(model=MODEL))
    found = run.numbers(range(1))
    for where in ("forward", "forward", "backward", "backward", "forward"):  # one after another
        _fail_once(run, where)
        with pytest.raises(Fault):
            run.numbers(range(1, 2))
    found += run.numbers(range(1, 3))
    assert found == expected
    for name, weight in run.weights().items():
        assert (weight == weights[name]).all(), name


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_failed_step_can_be_repeated(name: str) -> None:
    """Catches gradients, promises or gathered weights that remain after a step has raised."""
    run_ranks(LAYOUTS[name].world, _steps, LAYOUTS[name])


def _loss(run: Run, *, fails: bool = False) -> tuple[Tensor, Tensor]:
    """Return a loss of a forward outside of a step, and the output of the first block."""
    step, chunk = run.step, run.step.chunks[0]
    batch = run.task.batch(99, step.mesh[Axis.DATA].rank)
    if run.layout.mode is Mode.ISP:
        batch = slice_sequence(batch, step.mesh[Axis.TENSOR])
    x = batch.tokens
    parts = chunk.parts()
    if "model.embed_tokens" not in parts:
        x = torch.ones(*x.shape, MODEL.hidden_size, dtype=torch.float64, requires_grad=True)
    seen: list[Tensor] = []
    block = next(part for name, part in parts.items() if ".layers." in name)

    def see(module: object, args: object, y: Tensor) -> Tensor | None:
        seen.append(y)
        return _Fails.apply(y) if fails else None  # type: ignore[no-any-return]

    with block.register_forward_hook(see):
        y = chunk(x, batch.positions, batch.cu_seqlens)
    return y.square().sum(), seen[0]


def _go_backward(run: Run, *, refused: bool) -> None:
    """Run backward for some gradients, for all, and once with a failure midway."""
    run.weights()  # waits until all weights are published
    weight = next(i.parameter for i in run.parameters if i.name.endswith("mlp.down_proj.weight"))
    loss, h = _loss(run)
    torch.autograd.grad(loss, h)
    loss, h = _loss(run)
    loss.backward(inputs=[h])
    (found,) = torch.autograd.grad(_loss(run)[0], weight)
    assert found.count_nonzero() > 0
    for fails in (False, True):
        expected: AbstractContextManager[object] = nullcontext()
        if refused:
            expected = pytest.raises(RuntimeError, match=r"came after its last one.*autograd\.grad")
        elif fails:
            expected = pytest.raises(Fault)
        loss, _ = _loss(run, fails=fails)
        with expected:
            loss.backward()


def _disturbed(rank: int, layout: Layout) -> None:
    mesh, expected, weights = _undisturbed(rank, layout)
    run = make_run(mesh, layout, Task(model=MODEL))
    found = []
    for step in range(3):
        _go_backward(run, refused=step > 0)
        found += run.numbers(range(step, step + 1))
    assert found == expected
    for name, weight in run.weights().items():
        assert (weight == weights[name]).all(), name


@pytest.mark.parametrize("name", LAYOUTS | SPLIT)
def test_a_users_backward_between_steps_changes_nothing(name: str) -> None:
    """Catches gradients or promises of a user's backward that enter the following steps."""
    layout = (LAYOUTS | SPLIT)[name]
    run_ranks(layout.world, _disturbed, layout)
