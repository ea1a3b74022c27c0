"""Runs that are stopped, or die, and resume as if nothing had happened."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from isp.checkpoint.folder import CheckpointFolder
from isp.checkpoint.remote import RemoteCheckpoints
from isp.config import JobConfig
from isp.config.data import DataConfig
from isp.config.sections import (
    CheckpointConfig,
    CommConfig,
    JobSection,
    MetricsConfig,
    TrainingConfig,
    ValidationConfig,
)
from isp.core.mesh import Mode, ParallelConfig, TensorConfig, WeightConfig
from isp.core.optim.config import LRSchedulerConfig, OptimizerConfig
from isp.metrics import StepRecord, read_metrics
from isp.train.data import StepData
from isp.train.run import main
from isp.train.state import saved_run
from isp.train.state.resume import check_start
from model.config import ModelConfig
from tests.ranks import run_programs

STEPS = 8
ISP_2 = ParallelConfig(tensor=TensorConfig(size=2), weight=WeightConfig(size=2))
ISP_4 = ParallelConfig(tensor=TensorConfig(size=2), weight=WeightConfig(size=4))
MTP_2 = ParallelConfig(tensor=TensorConfig(size=2, mode=Mode.MTP))


@pytest.fixture
def config(tmp_path: Path) -> JobConfig:
    """Return a job of 8 steps on 4 ranks, with two rows of unequal documents a step."""
    for i in range(12):
        (tmp_path / f"{i}.txt").write_text(f"document {i} " * (1 + 7 * i % 5))
    return JobConfig(
        job=JobSection(dump_folder=str(tmp_path / "outputs")),
        model=ModelConfig(
            vocab_size=260,
            hidden_size=16,
            num_layers=2,
            num_heads=2,
            intermediate_size=24,
            tie_embeddings=True,
            init_std=0.1,
        ),
        data=DataConfig(source=str(tmp_path / "*.txt"), seq_len=32),
        parallel=ISP_4,
        training=TrainingConfig(steps=STEPS, dtype="float64", seed=3),
        optimizer=OptimizerConfig(lr=1e-2),
        lr_scheduler=LRSchedulerConfig(warmup_steps=2),
        metrics=MetricsConfig(),
        checkpoint=CheckpointConfig(),
    )


class _AtStep(logging.Handler):
    """A log handler that acts when a step is logged, which only rank 0 does."""

    def __init__(self, step: int, act: Callable[[], None]) -> None:
        super().__init__()
        self._begin, self._act = f"step={step}/", act

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage().startswith(self._begin):
            self._act()


def _rank(rank: int, config: JobConfig, at_step: int, act: Callable[[], None] | None) -> None:
    if rank == 0 and act is not None:
        logging.getLogger("isp.train.trainer").addHandler(_AtStep(at_step, act))
    main(config)


def _run(world: int, config: JobConfig, at_step: int = 0, act: Any = None) -> Path:
    """Run the job; return the folder of the newest run."""
    run_programs(world, _rank, config, at_step, act)
    return _latest(config)


def _latest(config: JobConfig) -> Path:
    return (Path(config.job.dump_folder) / config.job.name / "latest").resolve()


def _stop() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def _hang() -> None:
    time.sleep(1000)


def _draw() -> None:
    torch.rand(7)


def _draw_and_stop() -> None:
    _draw()
    _stop()


def _die() -> None:
    os._exit(9)


def _numbers(run: Path) -> list[StepRecord]:
    return read_metrics(run / "metrics.jsonl")


def _checkpoint(run: Path, step: int = STEPS) -> dict[str, Tensor]:
    """Return every whole tensor of a checkpoint."""
    plain = run / "plain.pt"
    dcp_to_torch_save(CheckpointFolder(run / "checkpoint").published(step), plain)
    found: dict[str, Tensor] = torch.load(plain)
    assert len(found) > 20
    return found


def _elsewhere(config: JobConfig, name: str) -> JobConfig:
    return replace(config, job=replace(config.job, name=name))


@pytest.mark.slow
def test_a_stopped_run_resumes_bit_by_bit(config):
    """Catches state that is not saved or loaded: moments, masters, step, rate, data, random
    numbers.
    """
    training = replace(config.training, dtype="bfloat16")
    config = replace(config, parallel=ISP_2, training=training)
    whole = _run(2, _elsewhere(config, "whole"), 3, _draw)
    stopped = _run(2, config, 3, _draw_and_stop)
    (saved,) = CheckpointFolder(stopped / "checkpoint").steps()
    assert 3 <= saved < STEPS, "stopped soon after it was asked, and before the end"
    assert [r.step for r in _numbers(stopped)] == list(range(1, saved + 1))

    resumed = _run(2, config)
    assert resumed == stopped, "the same folder goes on"
    expected = [(r.step, r.loss, r.grad_norm, r.lr, r.tokens) for r in _numbers(whole)]
    assert len(expected) == STEPS
    assert [(r.step, r.loss, r.grad_norm, r.lr, r.tokens) for r in _numbers(resumed)] == expected
    assert expected[-1][1] < expected[0][1]
    ours, theirs = _checkpoint(resumed), _checkpoint(whole)
    assert ours.keys() == theirs.keys()
    assert {f"local.{rank}" for rank in range(2)} <= theirs.keys()
    assert theirs["local.0"].tolist() != theirs["local.1"].tolist(), "rank 0 has drawn"
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name


def _assert_close(resumed: Path, whole: Path) -> None:
    ours, theirs = _numbers(resumed), _numbers(whole)
    assert [(r.step, r.lr, r.tokens) for r in ours] == [(r.step, r.lr, r.tokens) for r in theirs]
    for one, other in zip(ours, theirs, strict=True):
        # Sums in another order: float64 rounding, carried on by a few steps of AdamW.
        assert one.loss == pytest.approx(other.loss, rel=1e-9)
        assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-9)


def test_a_stopped_run_resumes_in_another_layout(config, tmp_path):
    """Catches shards, moments or samples in the wrong place, and a global batch that changes with
    the number of data ranks.
    """
    config = replace(config, training=replace(config.training, global_batch_size=2))
    whole = _run(1, replace(_elsewhere(config, "whole"), parallel=ParallelConfig()))
    stopped = _run(4, config, 3, _stop)
    layouts = (2, MTP_2), (1, ParallelConfig())
    for number, (world, parallel) in enumerate(layouts):
        other = replace(
            config,
            job=replace(config.job, dump_folder=str(tmp_path / f"copy_{number}")),
            parallel=parallel,
        )
        shutil.copytree(config.job.dump_folder, other.job.dump_folder, symlinks=True)
        assert _run(world, other).name == stopped.name
        _assert_close(_latest(other), whole)


def test_a_run_on_a_new_machine_resumes_from_the_store(config, tmp_path):
    """Catches copies that are not made, not found, partial, not deleted with the others, or damaged
    with no older one used instead; and a last copy that is lost with exit code 0, costs steps, or
    is made again each time.
    """
    store, folder = tmp_path / "store", tmp_path / "checkpoint"
    checkpoint = CheckpointConfig(
        interval=2, keep_latest_k=2, folder=str(folder), upload_to=f"file://{store}"
    )
    config = replace(config, parallel=ParallelConfig())
    whole = _numbers(_run(1, _elsewhere(config, "whole")))
    config = replace(config, checkpoint=checkpoint)
    stopped = _numbers(_run(1, config, 3, _stop))
    shutil.rmtree(folder)
    shutil.rmtree(config.job.dump_folder)
    (store / "step_99").mkdir()  # an upload that did not end
    shutil.copytree(store / f"step_{stopped[-1].step}", store / "step_3_by_hand")
    resumed = _numbers(_run(1, config))
    assert 3 <= stopped[-1].step < STEPS
    assert [(r.step, r.loss) for r in [*stopped, *resumed]] == [(r.step, r.loss) for r in whole]
    assert RemoteCheckpoints(f"file://{store}").steps() == [STEPS, STEPS - 2]
    there = sorted(p.name for p in store.iterdir())
    assert there == ["step_3_by_hand", "step_6", "step_8", "step_99"]
    for copy in (store / "step_8").iterdir():
        assert copy.read_bytes() == (folder / "step_8" / copy.name).read_bytes()

    os.truncate(store / "step_8/manifest.json", 20)
    shutil.rmtree(folder)
    shutil.rmtree(config.job.dump_folder)
    resumed = _numbers(_run(1, config))
    assert [(r.step, r.loss) for r in resumed] == [(r.step, r.loss) for r in whole[STEPS - 2 :]]

    shutil.rmtree(store)
    store.write_text("in the way of every copy")
    shutil.rmtree(folder)
    fault = "training has finished, but .*/step_8 could not be copied to checkpoint.upload_to=file:"
    with pytest.raises(RuntimeError, match=fault):
        _run(1, config)
    run = _latest(config)
    assert len(_numbers(run)) == STEPS
    assert "step_8 could not be copied to" in (run / "logs/rank_0.log").read_text()
    store.unlink()
    again = _run(1, config)
    assert again != run
    assert "step=" not in (again / "logs/rank_0.log").read_text()
    assert RemoteCheckpoints(f"file://{store}").steps() == [STEPS]
    made = (store / "step_8/manifest.json").stat().st_mtime_ns  # an inode may be used again
    _run(1, config)
    assert (store / "step_8/manifest.json").stat().st_mtime_ns == made, "it was there already"


def test_no_rank_waits_for_a_slow_store(config, tmp_path, monkeypatch):
    """Catches a run that ends because copies take long, a folder deleted while it is copied, and a
    step that is only searched in the empty local folder, or copied silently.
    """
    store, folder, upload = tmp_path / "store", tmp_path / "checkpoint", RemoteCheckpoints.upload

    def slowly(self: RemoteCheckpoints, folder: Path, *, keep: int) -> None:
        if folder.name == "step_2":
            time.sleep(5)
        upload(self, folder, keep=keep)

    monkeypatch.setattr(RemoteCheckpoints, "upload", slowly)
    checkpoint = CheckpointConfig(
        interval=2,
        keep_latest_k=1,
        async_mode="disabled",
        folder=str(folder),
        upload_to=f"file://{store}",
    )
    comm = CommConfig(train_timeout_seconds=3)
    config = replace(config, parallel=MTP_2, checkpoint=checkpoint, comm=comm)
    log = (_run(2, config) / "logs/rank_0.log").read_text()
    assert "step_6 is not copied to file:" in log
    assert "could not be copied" not in log
    assert RemoteCheckpoints(f"file://{store}").steps() == [STEPS]
    shutil.rmtree(folder)
    shutil.rmtree(config.job.dump_folder)
    training = replace(config.training, steps=STEPS + 1)
    config = replace(config, parallel=ParallelConfig(), training=training)
    for step in (STEPS - 1, STEPS):
        checkpoint = replace(checkpoint, load_step=step, auto_resume=False)
        config = replace(config, checkpoint=checkpoint)
        check_start(config, config.topology(1))
        if step == STEPS:
            run = _run(1, config)
            assert [r.step for r in _numbers(run)] == [STEPS + 1]
            log = (run / "logs/rank_0.log").read_text()
            assert f"copied      step {STEPS} from file://{store} to {folder}" in log
            continue
        with pytest.raises(RuntimeError, match=r"load_step=7: neither .* nor checkpoint.upload_to"):
            _run(1, config)


def test_a_run_that_hangs_is_ended_and_resumes(config):
    """Catches a hang that lasts, names no rank, or loses the last checkpoint."""
    config = replace(
        config,
        parallel=MTP_2,
        checkpoint=replace(config.checkpoint, interval=2),
        comm=CommConfig(train_timeout_seconds=4),  # the ranks of a busy machine are apart, too
    )
    whole = _numbers(_run(2, _elsewhere(config, "whole")))
    hung = r"rank 1: broadcast of data in the tensor group \[0, 1\] .*: rank 0 did not arrive"
    with pytest.raises(RuntimeError, match=hung):
        _run(2, config, 5, _hang)
    resumed = _numbers(_run(2, config))
    assert [(r.step, r.loss) for r in resumed] == [(r.step, r.loss) for r in whole]
    assert "step_4, the newest good one" in (_latest(config) / "logs/rank_0.log").read_text()


def test_latest_checkpoint_refers_to_the_previous_run(config):
    """Catches `latest/checkpoint` resolved to the new run's own empty folder."""
    config = replace(config, parallel=ParallelConfig(), training=TrainingConfig(steps=2))
    first = _run(1, config)
    named = replace(config.checkpoint, folder=f"{first.parent}/latest/checkpoint")
    longer = replace(config, checkpoint=named, training=TrainingConfig(steps=3))
    assert [r.step for r in _numbers(_run(1, longer))] == [3]


def _evaluating(config: JobConfig, monkeypatch: pytest.MonkeyPatch) -> JobConfig:
    """Return a job that only evaluates at its end, where the rank dies."""
    monkeypatch.setattr(StepData, "validation", lambda self: _die())
    data = replace(config.data, valid_fraction=0.2)
    one = replace(config, parallel=ParallelConfig(), data=data)
    return replace(one, validation=ValidationConfig(freq=1000))


def test_a_stop_saves_without_evaluating(config, monkeypatch):
    """Catches a stopped run that first runs an evaluation which is not due."""
    stopped = _run(1, _evaluating(config, monkeypatch), 3, _stop)
    (saved,) = CheckpointFolder(stopped / "checkpoint").steps()
    assert 3 <= saved < STEPS
    assert [r.step for r in _numbers(stopped)] == list(range(1, saved + 1))


class _MakeRoom(logging.Handler):
    """A log handler that removes `obstacle` after a failing save has been logged twice."""

    def __init__(self, obstacle: Path) -> None:
        super().__init__(logging.ERROR)
        self._obstacle, self._told = obstacle, 0

    def emit(self, record: logging.LogRecord) -> None:
        self._told += "Trying again for" in record.getMessage()
        if self._told == 2:
            self._obstacle.unlink(missing_ok=True)


@pytest.mark.parametrize("makes_room", [True, False])
def test_the_last_save_is_retried(config, monkeypatch, makes_room):
    """Catches the last steps lost because the disk was full for a moment, and an endless wait."""
    monkeypatch.setattr(saved_run, "RETRY_SECONDS", 0.25)
    obstacle = Path(config.job.dump_folder) / "isp" / "latest" / f"checkpoint/step_{STEPS}.tmp"

    def obstruct() -> None:
        obstacle.write_text("a file is in the way")
        if makes_room:
            logging.getLogger("isp.train.state.saved_run").addHandler(_MakeRoom(obstacle))

    checkpoint = replace(config.checkpoint, last_save_retry_seconds=1)
    one = replace(config, parallel=MTP_2, checkpoint=checkpoint)
    if makes_room:
        run = _run(2, one, STEPS - 1, obstruct)
        assert CheckpointFolder(run / "checkpoint").steps() == [STEPS]
    else:
        with pytest.raises(RuntimeError, match=r"step_8 failed on rank 0.*was tried for 1 s"):
            _run(2, one, STEPS - 1, obstruct)
        log = (_latest(one) / "logs/rank_0.log").read_text()
        assert log.count("Trying again for") == 4
        assert "done:" not in log


def _refusal(rank: int, *args: Any) -> str:
    try:
        _rank(rank, *args, 0, None)
    except OSError as error:
        return str(error)
    return "none"


def test_a_broken_metrics_line_ends_all_ranks(config):
    """Catches a first rank that ends alone while the others wait for it until a timeout."""
    config = replace(config, parallel=MTP_2, training=replace(config.training, steps=2))
    with (_run(2, config) / "metrics.jsonl").open("a") as file:
        file.write("no record\n")
    more = replace(config, training=replace(config.training, steps=3))
    first, second = run_programs(2, _refusal, more)
    assert first == second
    assert "metrics.jsonl, line 3 is not a record of a step (" in first


def test_the_count_of_skipped_steps_is_resumed(config):
    """Catches a count of skipped steps that restarts with every resume."""
    config = replace(config, optimizer=replace(config.optimizer, lr=1e30))  # weights overflow
    config = replace(config, parallel=ParallelConfig())
    config = replace(config, training=replace(config.training, steps=4))
    skipped = [record.skipped for record in _numbers(_run(1, config))]
    assert any(skipped)
    before = sum(skipped)
    config = replace(config, training=replace(config.training, steps=6))
    run = _run(1, config)
    assert f"({before + 2} steps were skipped so far)" in (run / "logs/rank_0.log").read_text()


def test_a_run_starts_from_the_weights_of_another(config):
    """Catches a longer context started from random weights, in the other run's folder, or at its
    step.
    """
    first = _run(2, replace(config, parallel=MTP_2))
    checkpoint = replace(config.checkpoint, initial_load_path=str(first))
    longer = replace(
        _elsewhere(config, "longer"),
        parallel=ParallelConfig(),
        data=replace(config.data, seq_len=64),
        training=replace(config.training, steps=2, seed=4),
        checkpoint=checkpoint,
    )
    run = _run(1, longer)
    numbers = _numbers(run)
    assert [(r.step, r.tokens) for r in numbers] == [(1, 64), (2, 128)]
    assert numbers[0].lr < config.optimizer.lr, "the warm-up of a run of its own"
    assert numbers[0].loss < _numbers(first)[2].loss
    log = (run / "logs/rank_0.log").read_text()
    assert f"begins at step 0 with the weights of {first}/checkpoint/step_{STEPS}" in log
    again = _run(1, replace(longer, training=replace(longer.training, steps=3)))
    assert again == run
    assert [r.step for r in _numbers(again)] == [1, 2, 3]
    assert f"resumed from {run}/checkpoint/step_2" in (run / "logs/rank_0.log").read_text()


def test_a_run_continues_from_the_whole_state_of_another(config):
    """Catches a fork without moments or step, or one that continues in the original run's
    folder.
    """
    one = replace(config, parallel=ParallelConfig(), checkpoint=CheckpointConfig(interval=4))
    first = _run(1, one)
    checkpoint = CheckpointConfig(
        initial_load_path=str(first / "checkpoint/step_4"), initial_load_model_only=False
    )
    fork = _run(1, replace(_elsewhere(one, "fork"), checkpoint=checkpoint))
    expected = [(r.step, r.loss, r.lr, r.tokens) for r in _numbers(first)[4:]]
    assert [(r.step, r.loss, r.lr, r.tokens) for r in _numbers(fork)] == expected
