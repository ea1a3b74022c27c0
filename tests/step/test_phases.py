"""The time of a run by phase: the clock, and the records that it fills."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

import pytest
import torch

from isp.config import load_config
from isp.core.comm.tag import Tag
from isp.core.comm.transfer_log import CommLog
from isp.core.mesh import Mode
from isp.core.mesh.phase import Phase
from isp.metrics import read_metrics
from isp.step.phases import PhaseClock, training_seconds
from isp.train.run import main
from model.config import ModelConfig
from tests.metrics.test_progress import Terminal
from tests.metrics.test_tensorboard import shown
from tests.ranks import run_ranks
from tests.streams import Device
from tests.train.jobs import write_job
from tests.train.runs import Layout, Meshes, Task, make_run

CPU = torch.device("cpu")


def test_every_moment_belongs_to_one_phase() -> None:
    """Catches time that is counted twice or not at all, and a phase that does not end."""
    before = time.perf_counter()
    clock = PhaseClock(CPU)
    begin = time.perf_counter()
    for phase in (Phase.DATA, Phase.OPTIMIZER, Phase.CHECKPOINT, Phase.DATA):
        clock.enter(phase)
        assert clock.current is phase
        time.sleep(0.02)
    clock.enter(Phase.OTHER)
    end = time.perf_counter()
    times = clock.take()
    after = time.perf_counter()
    assert end - begin <= sum(times.values()) <= after - before
    assert times[Phase.DATA] >= 0.04
    assert min(times[Phase.OPTIMIZER], times[Phase.CHECKPOINT]) >= 0.02
    assert times[Phase.EVALUATION] == 0
    whole = training_seconds(times) + times[Phase.CHECKPOINT]
    assert whole == pytest.approx(sum(times.values()))
    assert clock.take()[Phase.DATA] == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_step_is_measured_on_the_device() -> None:
    """Catches the time to launch kernels reported as that of running them."""
    device = torch.device("cuda")
    x = torch.randn(4096, 4096, device=device)
    torch.cuda.synchronize()
    clock = PhaseClock(device)
    clock.enter(Phase.FORWARD_BACKWARD)
    begin = time.perf_counter()
    for _ in range(50):
        x = x @ x
    launched = time.perf_counter() - begin
    clock.enter(Phase.OPTIMIZER)
    x.sum().item()
    clock.enter(Phase.OTHER)
    times = clock.take()
    assert times[Phase.FORWARD_BACKWARD] > 2 * launched
    assert times[Phase.OPTIMIZER] < times[Phase.FORWARD_BACKWARD]


def test_a_phase_still_running_on_the_device_is_not_waited_for() -> None:
    """Catches a host that waits for the end of the update to measure it."""
    with Device() as device:
        clock = PhaseClock(CPU)
        clock.enter(Phase.OPTIMIZER)
        clock.enter(Phase.OTHER)
        end = device.timed[-1]
        end.over = False
        assert clock.take()[Phase.OPTIMIZER] == 0
        end.over = True
        assert clock.take()[Phase.OPTIMIZER] > 0
        assert clock.take()[Phase.OPTIMIZER] == 0


def test_a_transfer_lasts_until_the_wait_for_it_returns() -> None:
    """Catches more time waited than in flight: a busy machine resumes the waiting rank late."""
    log = CommLog()
    late, early = (log.start("all_gather", "weight", Tag(tensor=label), 8) for label in "ab")
    late.launched, late.wait_began, late.ended, late.exposed = 1.0, 2.0, 3.0, 2.5
    early.launched, early.ended, early.wait_began, early.exposed = 5.0, 6.0, 7.0, 0.25
    totals = CommLog.totals([late, early])
    assert totals.comm_seconds == 3.5 + 1.0
    assert totals.exposed_seconds == 2.75


MODEL = ModelConfig(
    vocab_size=32, hidden_size=16, num_layers=3, num_heads=4, num_kv_heads=2, intermediate_size=24
)
LAYOUT = Layout(mode=Mode.ISP, tensor=2, weight=2, data=2, micro=2)


def _left_over(rank: int) -> list[tuple[list[str], int]]:
    """Return the transfers each step leaves in the log, and how many the next step waits for."""
    run = make_run(Meshes(rank).of(LAYOUT), LAYOUT, Task(model=MODEL))
    log = run.step.mesh.log
    log.collect()
    found: list[tuple[list[str], int]] = []
    left = []
    for step in range(4):
        run.numbers(range(step, step + 1))
        if step == 2:
            run.step.evaluate([[run.task.batch(0, place) for place in range(2)]])
        ended = {id(t) for t in log.take_waited()}
        found.append(([t.label for t in log.transfers], sum(id(t) in ended for t in left)))
        left = list(log.transfers)
    run.close()
    return found


def test_a_step_only_leaves_transfers_that_the_next_one_waits_for() -> None:
    """Catches transfers without a wait, which would accumulate, and lost waits."""
    for steps in run_ranks(LAYOUT.world, _left_over):
        labels, _ = steps[0]
        assert labels[0] == "model.embed_tokens.weight", "gathered for the next forward"
        assert steps[1:] == [(labels, len(labels))] * 3


def _train_watched(rank: int, job: str, words: list[str]) -> list[str]:
    """Train, and return the visible rows of the terminal."""
    terminal = Terminal()
    sys.stdout = sys.stderr = terminal
    main(load_config(job, words))
    return terminal.rows()


ALONE = ["--parallel.tensor.size", "1", "--parallel.weight.size", "1", "--data.seq_len", "32"]


def test_records_have_the_time_of_each_phase(tmp_path: Path) -> None:
    """Catches phases that add up to more than the step, or include evaluations or saves."""
    job = write_job(tmp_path)
    words = ["--checkpoint.async_mode", "disabled"]  # background threads would log at any time
    words += ["--checkpoint.interval", "3", "--validation.freq", "4", "--validation.steps", "2"]
    words += ["--metrics.enable_tensorboard", "--data.valid_source", str(tmp_path / "text.txt")]
    (rows,) = run_ranks(1, _train_watched, str(job), [*ALONE, *words])
    records = read_metrics(tmp_path / "out/job/latest/metrics.jsonl")
    assert len(records) == 8
    for record in records:
        parts = [
            record.data_ms,
            record.forward_backward_ms,
            record.reduce_ms,
            record.optimizer_ms,
        ]
        assert all(part is not None and part > 0 for part in parts)
        assert sum(parts) < record.step_ms  # type: ignore[arg-type]
    drawn = shown(tmp_path / "out/job/latest/tb", "loss")
    assert drawn == [(r.step, pytest.approx(r.loss, rel=1e-6)) for r in records], "in float32"
    assert [r.step for r in records if r.evaluation_ms is not None] == [4, 8]
    assert [r.step for r in records if r.checkpoint_ms is not None] == [4, 7]
    assert all(r.checkpoint_ms > 0 for r in records if r.checkpoint_ms is not None)
    assert [r.step for r in records if r.eta_seconds is not None] == [2, 3, 4, 5, 6, 7]
    log = (tmp_path / "out/job/latest/logs/rank_0.log").read_text()
    assert log.count(" eta=0:") == 6
    start = rows[: next(i for i, row in enumerate(rows) if row.startswith("step="))]
    assert len([row for row in start if row]) <= 10, "a run starts with few lines"
    assert max(len(row) for row in rows if row.startswith("step=")) <= 120
    *_, saved, step, evaluation, bar, end, text = [row for row in rows if row]
    assert sum(row.startswith("step=") and " lr=" in row for row in rows) == 8
    assert bar.startswith("100%|")
    assert "8/8, loss: " in bar
    assert [row.split()[0] for row in (saved, step, end)] == ["saved", "step=8/8", "done:"]
    assert evaluation.startswith("step=8 val_loss=")
    assert re.match(
        r"generate text: (isp|\S+ -m isp) generate \S+ --prompt .* --temperature 0", text
    )
