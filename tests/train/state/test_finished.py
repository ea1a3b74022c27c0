"""Runs that end inside the work of a step, and what the same command then completes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from isp.cli import main
from isp.config import load_config
from isp.core.layers.vocab_loss import IGNORED
from isp.core.micro_batch import MicroBatch
from isp.metrics import StepRecord, read_metrics
from isp.parity.forked import RankError
from isp.train.data import StepData
from isp.train.folder.run_folder import RunFolder
from isp.train.monitor.meter import StepOutputs
from isp.train.run import main as train
from isp.train.state.resume import check_start
from tests.ranks import run_programs
from tests.train.jobs import numbers, run_folders, run_forked, write_job

ONE_RANK = ["--parallel.tensor.size=1", "--parallel.weight.size=1", "--training.steps=4"]
EVALUATES = ["--data.valid_fraction=0.2", "--validation.freq=2", "--validation.steps=2"]


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """Return a job whose text has many documents, so that some can be held out."""
    path = write_job(tmp_path)
    for i in range(20):
        (tmp_path / f"doc_{i}.txt").write_text(f"document {i} " * 12)
    path.write_text(path.read_text().replace("/text.txt", "/doc_*.txt"))
    return path


def _run(job: Path, *words: str) -> None:
    run_forked(job, *ONE_RANK, *words, num_ranks=1)


def _records(run: Path) -> list[tuple[object, ...]]:
    """Return the numbers of all steps, with their evaluations."""
    losses = [record.val_loss for record in read_metrics(run / "metrics.jsonl")]
    return [(*step, loss) for step, loss in zip(numbers(run), losses, strict=True)]


def _log(run: Path) -> str:
    return (run / "logs/rank_0.log").read_text()


def _die() -> None:
    os._exit(9)


def _stop() -> None:
    os.kill(os.getpid(), signal.SIGUSR1)


def _in_evaluation(patch: pytest.MonkeyPatch, number: int, act: Callable[[], None]) -> None:
    """Call `act` after the first batch of evaluation `number`, which then never runs out of
    batches.
    """
    whole, begun = StepData.validation, []

    def validation(data: StepData, source: int) -> Iterator[list[MicroBatch]]:
        begun.append(number)
        if len(begun) != number:
            yield from whole(data, source)
            return
        first, *_ = whole(data, source)
        yield first
        act()
        while True:
            time.sleep(0.01)
            yield first

    patch.setattr(StepData, "validation", validation)


def _at_record(patch: pytest.MonkeyPatch, number: int, act: Callable[[], object]) -> None:
    """Call `act` before the record of step `number` is written."""
    write = StepOutputs.record

    def record(outputs: StepOutputs, of_step: StepRecord) -> None:
        if of_step.step == number:
            act()
        write(outputs, of_step)

    patch.setattr(StepOutputs, "record", record)


@pytest.mark.parametrize(
    ("when", "number", "act"),
    [
        (_in_evaluation, 1, _stop),
        (_in_evaluation, 2, _die),
        (_at_record, 4, _die),
    ],
    ids=["stopped in an evaluation", "killed in the last", "killed after it"],
)
def test_an_interrupted_step_is_completed_on_restart(
    job: Path,
    monkeypatch: pytest.MonkeyPatch,
    when: Callable[..., None],
    number: int,
    act: Callable[[], None],
) -> None:
    """Catches a run started anew, and a record or an evaluation that is never made up for."""
    _run(job, *EVALUATES, "--job.name=whole")
    with monkeypatch.context() as patch:
        when(patch, number, act)
        if act is _die:
            with pytest.raises(RuntimeError, match="rank 0 died"):
                _run(job, *EVALUATES)
        else:
            _run(job, *EVALUATES)
    (whole,), (run,) = run_folders(job, "whole"), run_folders(job)
    assert _records(run) != _records(whole)
    assert "done:" not in _log(run)
    _run(job, *EVALUATES)
    assert run_folders(job) == [run]
    assert [loss is not None for *_, loss in _records(whole)] == [False, True, False, True]
    assert _records(run) == _records(whole)
    assert _log(run).count("completing step") == 1


def _rank_of_launch(rank: int, job: Path, launch: str) -> None:
    """Run a rank under torchrun without a counted restart, as where another machine's rank died."""
    os.environ["TORCHELASTIC_RUN_ID"] = launch
    train(load_config(job, ONE_RANK))


def _end_by_torchrun(job: Path, launch: str) -> None:
    """End the run under torchrun, whose restarts have the same launch id."""
    run_programs(1, _rank_of_launch, job, "train")


def _end_by_nproc(job: Path, launch: str) -> None:
    """End the run under `--nproc`; a repeated command has a launch id of its own."""

    def start(nproc: int, command: Sequence[str]) -> int:
        try:
            run_programs(nproc, _rank_of_launch, job, launch)
        except RankError:
            return 137
        return 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("isp.cli.launch.launch", start)
        if code := main(["train", str(job), "--nproc=1", *ONE_RANK]):
            raise RuntimeError(f"rank 0 died: {code}")


@pytest.mark.parametrize("end", [_end_by_torchrun, _end_by_nproc])
def test_a_death_after_the_end_of_a_run_trains_nothing_again(
    job: Path, monkeypatch: pytest.MonkeyPatch, end: Callable[[Path, str], None]
) -> None:
    """Catches all steps trained again in another folder because a rank died after the run had
    finished: after a restart by torchrun, and in a loop that repeats the command.
    """
    write = RunFolder.write_finished

    def write_and_die(folder: RunFolder, step: int | None) -> None:
        write(folder, step)
        if step is not None:
            _die()

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "write_finished", write_and_die)
        with pytest.raises(RuntimeError, match="rank 0 died"):
            end(job, "first")
    (run,) = run_folders(job)
    expected = numbers(run)
    end(job, "second")
    assert run_folders(job) == [run]
    assert len(expected) == 4
    assert numbers(run) == expected
    assert "step_4, the newest good one" in _log(run)
    if end is _end_by_nproc:
        end(job, "third")
        assert len(run_folders(job)) == 2, "it had ended well"


def test_a_run_resumed_from_checkpoint_folder_completes_its_evaluation(
    job: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Catches a missing last evaluation of a run that resumes in a new run folder."""
    words = [*EVALUATES, f"--checkpoint.folder={tmp_path / 'checkpoints'}"]
    _run(job, *EVALUATES, "--job.name=whole")
    with monkeypatch.context() as patch:
        _in_evaluation(patch, 2, _stop)
        _run(job, *words)
    _run(job, *words)
    (whole,), (_, resumed) = run_folders(job, "whole"), run_folders(job)
    assert _records(resumed) == _records(whole)[-1:]


def test_an_evaluation_without_a_label_has_no_loss(
    job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a val_loss of 0.0, the best possible, where nothing was evaluated."""
    whole = StepData.validation

    def unlabelled(data: StepData, source: int) -> Iterator[list[MicroBatch]]:
        for batches in whole(data, source):
            for batch in batches:
                batch.labels.fill_(IGNORED)
            yield batches

    monkeypatch.setattr(StepData, "validation", unlabelled)
    _run(job, *EVALUATES)
    (run,) = run_folders(job)
    assert [record.val_loss for record in read_metrics(run / "metrics.jsonl")] == [None] * 4
    assert _log(run).count("so there is no val_loss: check data.valid_source") == 2
    assert "  val_loss:" not in _log(run)


def test_a_run_folder_removed_during_the_run_is_an_error(
    job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a run that ends with exit code 0 but has no metrics."""

    def remove() -> None:
        (run,) = run_folders(job)
        run.rename(run.with_name("kept"))

    _at_record(monkeypatch, 2, remove)
    with pytest.raises(
        RuntimeError, match=r"was removed or moved away during the run: .*metrics.jsonl"
    ):
        _run(job)


def test_a_checkpoint_beyond_the_last_step_is_refused(job: Path, tmp_path: Path) -> None:
    """Catches a run that ends at once, or starts anew, because fewer steps are configured."""
    folder = tmp_path / "checkpoints"
    _run(job, f"--checkpoint.folder={folder}", f"--job.log_folder={tmp_path / 'disk'}")
    (run,) = run_folders(job)
    assert "done: 4 steps" in (tmp_path / "disk/job" / run.name / "rank_0.log").read_text()
    assert not list((run / "logs").iterdir())
    whole = ["--checkpoint.initial_load_model_only=false", "--checkpoint.initial_load_path"]
    for words in ([f"--checkpoint.folder={folder}"], [*whole, str(folder)]):
        for steps in (4, 3):
            config = load_config(job, [*ONE_RANK, *words, f"--training.steps={steps}"])
            with ExitStack() as refused:
                if steps == 3:
                    beyond = r"step_4 is beyond training.steps=3: .* at least 4 steps"
                    refused.enter_context(pytest.raises(ValueError, match=beyond))
                check_start(config, config.topology(1))
