"""No step makes the host wait for its device: tests of the guard, and of steps under it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import isp
from isp.config import JobConfig
from isp.core.comm import pinned_memory
from isp.core.mesh import Mode, PipelineSchedule, WeightConfig
from isp.core.mesh.config import ContextExchange
from isp.core.optim.config import GradScalerConfig, OptimizerConfig
from isp.step.train_step import TrainStep
from model.config import ModelConfig
from tests.host_syncs import HostSyncs, syncs_on_cuda
from tests.models.models import job, packed_rows, tiny
from tests.ranks import run_each, run_ranks
from tests.train.runs import OPTIMIZER, Layout, Meshes, Task, make_run

CPU = torch.device("cpu")
# -- the guard -----------------------------------------------------------------------------------


class _InBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        dy.tolist()
        return dy


def _copied_at_once(x: Tensor) -> None:
    copy = pinned_memory.HostCopy(x + 1)
    copy.wait()


PLANTED: dict[str, Callable[[Tensor], Any]] = {
    "_local_scalar_dense item": lambda x: x.sum().item(),
    "_local_scalar_dense bool": lambda x: 1 if x.any() else 0,
    "_local_scalar_dense int": lambda x: int(x.sum()),
    "_local_scalar_dense float": lambda x: float(x.sum()),
    "_local_scalar_dense index": lambda x: [1, 2][x.long().sum()],
    "_local_scalar_dense format": lambda x: f"{x.sum():.2f}",
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "cpu": lambda x: x.cpu(),
    "to cpu": lambda x: x.to("cpu"),
    "to device": lambda x: torch.ones(2).to(CPU),
    "tensor": lambda x: torch.tensor([1.0, 2.0], device=CPU),
    "new_tensor": lambda x: x.new_tensor([1.0]),
    "nonzero": lambda x: x.nonzero(),
    "nonzero where": lambda x: torch.where(x > 0),
    "masked_select": lambda x: x.masked_select(x > 0),
    "index": lambda x: x[x > 0],
    "index_put_": lambda x: x.index_put_((x >= 0,), torch.zeros_like(x)),
    "_unique2": lambda x: x.unique(),
    "equal": lambda x: torch.equal(x, x),
    "repeat_interleave": lambda x: x.repeat_interleave(x.long()),
    "copy_ from the host": lambda x: x.copy_(torch.ones(2)),
    "copy_ to the host": lambda x: torch.ones(2).copy_(x, non_blocking=True),
    "mul of a tensor that is not there": lambda x: x * torch.ones(2),
    "HostCopy.wait": _copied_at_once,
    "tolist in backward": lambda x: _InBackward.apply(x.requires_grad_()).sum().backward(),
}


@pytest.mark.parametrize("planted", PLANTED)
def test_each_kind_of_wait_is_recorded(planted: str) -> None:
    """Catches a kind of wait that the guard misses."""
    x = torch.zeros(2)
    with HostSyncs() as guard:
        PLANTED[planted](x)
    (found,) = guard.found
    what, place = found.split(" in ")
    assert planted.startswith(what)
    assert place.startswith("tests/test_host_syncs.py:")


def test_operations_without_a_wait_are_not_recorded() -> None:
    """Catches a guard that reports waits where none is needed."""
    x = torch.ones(2)
    with HostSyncs() as guard:
        ends = torch.tensor([0, 1])
        guard.of_host(given := torch.ones(1))
        assert ends.diff().tolist() == [1]
        assert int(ends.sum() + given.long()) == 2
        sent = pinned_memory.send(ends, CPU)
        copy = pinned_memory.HostCopy(x.index_select(0, sent) * 2 + torch.tensor(3.0))
        buffer = pinned_memory.zeros(2, torch.float32, CPU)
        buffer.copy_(x, non_blocking=True)
        x[x > 0] = 0.0  # by the mask, as masked_fill
        assert guard.followed > 0
        assert guard.take() == []
        x.sum().item()
        assert copy.wait().tolist() == [5.0, 5.0], "what was sent before the last wait is there"
    assert len(guard.found) == 1


# -- steps ---------------------------------------------------------------------------------------

MODEL = ModelConfig(
    vocab_size=52, hidden_size=48, num_layers=2, num_heads=6, num_kv_heads=3, intermediate_size=40
)
EVEN = replace(MODEL, num_heads=4, num_kv_heads=2)
WINDOW = replace(MODEL, sliding_window=11)
AGAIN = replace(MODEL, checkpoint=1.0)
LEAN = replace(
    MODEL,
    num_kv_heads=6,
    checkpoint=1.0,
    checkpoint_offload=True,
    checkpoint_segment=2,
    loss_chunk_tokens=5,
    mlp_tile_tokens=6,
)


@dataclass(frozen=True, kw_only=True)
class Case:
    layout: Layout
    model: ModelConfig = MODEL
    packed: bool = True
    dtype: torch.dtype = torch.bfloat16
    optimizer: OptimizerConfig = field(default_factory=lambda: OPTIMIZER)


ISP = Layout(tensor=2, weight=2, micro=2)
OF_TWO = {
    "isp": Case(layout=ISP),  # KV heads are repeated
    "rows": Case(layout=ISP, packed=False),
    "window": Case(layout=replace(ISP, data=1), model=WINDOW),
    "recomputed": Case(layout=ISP, model=AGAIN),
    "replicas": Case(layout=Layout(data=2, zero1=2)),
    "lean": Case(layout=ISP, model=LEAN, optimizer=replace(OPTIMIZER, offload_states=True)),
    "loss over ranks": Case(
        layout=replace(ISP, options=WeightConfig(vocab_parallel_loss=True, embed_split_hidden=True))
    ),
    "scaled": Case(
        layout=ISP, optimizer=replace(OPTIMIZER, grad_scaler=GradScalerConfig(use="always"))
    ),
    "gather": Case(layout=replace(ISP, context=2), model=WINDOW),
    "ring": Case(layout=replace(ISP, context=2, exchange=ContextExchange.RING)),
    "pipeline": Case(layout=Layout(pipeline=2, micro=3), model=AGAIN),
    "zero bubble": Case(
        layout=Layout(pipeline=2, micro=4, schedule=PipelineSchedule.ZBV, chunks=2),
        model=replace(MODEL, num_layers=4),
    ),
    **{m: Case(layout=Layout(mode=m, tensor=2), model=EVEN) for m in Mode if m is not Mode.ISP},
}
OF_FOUR = {
    f"heads x context, {exchange}": Case(
        layout=Layout(tensor=4, weight=2, context=2, exchange=exchange)
    )
    for exchange in ContextExchange
}


@dataclass(frozen=True)
class Found:
    """The waits of a step, by its parts, and the operations that were followed."""

    passes: list[str]
    """Waits in forward and backward."""
    end: list[str]
    """Waits in reduction, update and the outcome of the step."""
    evaluation: list[str]
    followed: int


def _guarded(step: TrainStep, batches: Sequence[Any]) -> Found:
    """Return the waits of the second step; the first does what is done once."""
    with HostSyncs() as guard:
        guard.of_host(*(batch.cu_seqlens for batch in batches))
        step(batches, 1e-3)
        guard.take()
        work = step.start(batches)
        step.run(work, training=True)
        passes = guard.take()
        step.finish(work, 1e-3)
        end = guard.take()
        step.evaluate([batches])
        return Found(passes, end, guard.take(), guard.followed)


def _steps(rank: int, cases: dict[str, Case]) -> dict[str, Found]:
    meshes, found = Meshes(rank), {}
    for name, case in cases.items():
        layout, task = case.layout, Task(model=case.model, packed=case.packed, micro_bsz=2)
        run = make_run(meshes.of(layout), layout, task, dtype=case.dtype, config=case.optimizer)
        found[name] = _guarded(run.step, [task.batch(0, i) for i in range(layout.micro)])
        run.close()
    return found


def _check(name: str, found: Found) -> None:
    """Check that a step only waits for the norm, and an evaluation for its result.

    The norm says whether the step is skipped; loss and token counts have arrived by then.
    """
    assert found.followed > 100, name
    assert found.passes == [], name
    assert [wait.rpartition("/")[0] for wait in found.end] == ["tolist in isp/core/optim"]
    assert found.evaluation == ["tolist in isp/step/train_step.py:evaluate"], name


@pytest.mark.parametrize(("world", "cases"), [(2, OF_TWO), (4, OF_FOUR)], ids=["2", "4"])
def test_a_step_waits_once(world: int, cases: dict[str, Case]) -> None:
    """Catches any wait that keeps the host from running ahead of the device."""
    for of_rank in run_ranks(world, _steps, cases, timeout_seconds=110):
        for name, found in of_rank.items():
            _check(name, found)


TRACED = {
    "llama": job(2, 2, recompute=0.5, dtype="bfloat16"),
    "mistral": job(2, context=2, recompute=0.5, dtype="bfloat16"),
    "gemma3_text": job(2, mode=Mode.MTP, recompute=1.0, dtype="bfloat16"),
}


def _traced(rank: int, case: tuple[nn.Module, JobConfig]) -> Found:
    run = isp.parallelize(*case)
    rows = packed_rows(2, 32, [[1, 30, 1], [20, 12]]).part(run.dp_rank, run.dp_size)
    with HostSyncs() as guard:
        guard.of_host(*rows)
        run.step(run.loss(*rows))
        guard.take()
        loss = run.loss(*rows)
        passes = guard.take()
        run.step(loss)
        end = guard.take()
        with torch.no_grad():
            run.loss(*rows)
        return Found(passes, end, guard.take(), guard.followed)


def test_a_step_of_a_model_of_transformers_waits_once() -> None:
    """Catches waits for rows that a user's loop passes, and in the forward of transformers
    models.
    """
    cases = {name: (tiny(name), config) for name, config in TRACED.items()}
    for name, of_ranks in run_each(2, _traced, cases, timeout_seconds=110).items():
        for found in of_ranks:
            _check(name, found)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["isp", "rows", "window", "recomputed", "lean", "scaled"])
def test_a_step_waits_once_on_cuda(name: str) -> None:
    """Catches waits inside an operation, which are not seen on the CPU."""
    case = OF_TWO[name]
    device, layout = torch.device("cuda", 0), Layout(micro=2)
    task = Task(model=case.model, packed=case.packed, micro_bsz=2)
    mesh = Meshes(0).of(layout)
    run = make_run(mesh, layout, task, dtype=case.dtype, config=case.optimizer, device=device)
    batches = [task.batch(0, place).to(device) for place in range(layout.micro)]
    for _ in range(2):
        run.step(batches, 1e-3)
    with syncs_on_cuda() as passes:
        work = run.step.start(batches)
        run.step.run(work, training=True)
    with syncs_on_cuda() as end:
        run.step.finish(work, 1e-3)
    assert passes == []
    assert len(end) == 1, end
