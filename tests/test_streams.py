"""Order and lifetimes on device streams: tests of the checker, and of real steps under it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from isp.core.comm import streams
from isp.core.mesh import Mode, PipelineSchedule, WeightConfig
from isp.core.mesh.config import LaunchPoint, OverlapUnit
from tests.model.decoders import SMALL
from tests.ranks import run_each, run_ranks
from tests.streams import Device
from tests.train.runs import Layout, Meshes, Task, make_run

CPU = torch.device("cpu")
TASK = Task(model=SMALL)

# -- the checker ---------------------------------------------------------------------------------


def test_ordered_accesses_are_no_fault() -> None:
    """Catches a checker that reports faults where there are none."""
    with Device() as device:
        side, x = streams.new(CPU), torch.ones(4)
        streams.follow(side)
        with streams.on(side):
            y = x * 2
            streams.in_use(x)
            done = streams.mark(CPU)
        del x  # `side` still reads it, which record_stream has told the allocator
        assert done is not None
        done.wait()
        y.add_(1)
        streams.follow(side)
        with streams.on(side):
            y.zero_()
        del y  # allocated on `side`, which may reuse it
        z = torch.ones(4)
        streams.follow(side)
        with streams.on(side):
            z.add_(1)
            done = streams.mark(CPU)
        assert done is not None
        done.synchronize()
        del z  # the host has waited for its end
    assert device.faults == []


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("read", "mul on stream 1 does not wait for ones on compute"),
        ("write", "add_ on compute does not wait for mul on stream 1"),
        ("overwrite", "fill_ on compute does not wait for add_ on stream 1"),
        ("free", "freed before mul on stream 1 is over"),
    ],
)
def test_each_kind_of_fault_is_found(fault: str, words: str) -> None:
    """Catches a rule that the checker does not apply."""
    with Device() as device:
        side, x = streams.new(CPU), torch.ones(4)
        if fault != "read":
            streams.follow(side)
        with streams.on(side):
            _ = x.add_(2) if fault == "overwrite" else x * 2
        if fault == "write":
            x.add_(1)
        elif fault == "overwrite":
            x.fill_(0)
        if fault != "free":
            streams.in_use(x)
            with streams.on(side):
                streams.in_use(x)
        del x
    assert [fault.startswith(words) for fault in device.faults] == [True]


# -- steps ---------------------------------------------------------------------------------------

CASES = {
    "isp": (Layout(mode=Mode.ISP, tensor=2, weight=2, data=2, zero1=2, micro=2), TASK),
    "fsp": (Layout(mode=Mode.FSP, tensor=2, data=2), TASK),
    "pipeline": (
        Layout(mode=Mode.ISP, tensor=1, weight=2, data=2, pipeline=2, micro=2, zero1=1),
        TASK,
    ),
    "zero bubble": (
        Layout(
            mode=Mode.ISP,
            tensor=2,
            weight=2,
            pipeline=2,
            schedule=PipelineSchedule.ZBV,
            chunks=2,
            micro=4,
        ),
        Task(model=replace(SMALL, num_layers=4)),
    ),
    "inputs on the host": (
        Layout(tensor=2, weight=2, micro=2),
        Task(model=replace(SMALL, checkpoint=1.0, checkpoint_offload=True)),
    ),
    "inputs on the host, pipeline": (
        Layout(tensor=2, mode=Mode.MTP, pipeline=2, micro=2),
        Task(
            model=replace(
                SMALL,
                num_layers=6,
                checkpoint=1.0,
                checkpoint_offload=True,
                checkpoint_segment=2,
                checkpoint_distribute_activations=True,
            )
        ),
    ),
}
ISP, _ = CASES["isp"]
OPTIONS = [
    WeightConfig(memory_pool=False, reduce_by="reduce_scatter"),
    WeightConfig(overlap=False, reduce_by="all_to_all"),
    WeightConfig(own_reduce_group=True, launch_allgather_before=LaunchPoint.WQKV),
    WeightConfig(forward_overlap_per=OverlapUnit.MODULE, vocab_parallel_loss=True),
]


def _faults(
    rank: int, case: tuple[Layout, Task], timed: bool = False, steps: int = 2
) -> tuple[list[str], int]:
    """Return faults of `steps` with an evaluation after the second, and the number of
    operations.
    """
    layout, task = case
    with Device() as device:
        mesh = Meshes(rank).of(layout)
        # Small buckets, so that weights are published in several, as large models do.
        run = make_run(mesh, layout, task, dtype=torch.bfloat16, bucket_bytes=1000)
        if timed:
            run.step.mesh.log.collect(CPU)
        for step in range(steps):
            run.numbers(range(step, step + 1))
            if step == 1:
                run.step.evaluate([[task.batch(0, place) for place in range(layout.micro)]])
        if not timed:  # as in a user's training loop
            assert run.step.mesh.log.transfers == []
            assert len(device.made) <= 2, "streams but those of gathers and copies to the host"
        return device.faults, device.touched


def _check(layout: Layout, task: Task, *, timed: bool = False, steps: int = 2) -> None:
    for faults, touched in run_ranks(layout.world, _faults, (layout, task), timed, steps):
        assert touched > 1000
        assert faults == []


@pytest.mark.parametrize("case", CASES)
def test_steps_have_no_faults_on_streams(case: str) -> None:
    """Catches tensors read before they are written, and memory that is reused too early."""
    _check(*CASES[case], steps=3)


@pytest.mark.parametrize("case", ["isp", "inputs on the host"])
def test_timing_transfers_adds_no_fault(case: str) -> None:
    """Catches tensors that NCCL releases because a stream that only measures time has waited."""
    _check(*CASES[case], timed=True)


def test_other_options_and_recomputed_blocks_have_no_faults() -> None:
    """Catches a buffer freed too early on another path of weights and gradients, and weights of a
    recomputation freed before the backward that shares them.
    """
    cases = {str(options): (replace(ISP, options=options), TASK) for options in OPTIONS}
    cases["recomputed"] = ISP, Task(model=replace(SMALL, checkpoint=0.5))
    for name, of_ranks in run_each(ISP.world, _faults, cases).items():
        for faults, touched in of_ranks:
            assert touched > 1000
            assert faults == [], name
