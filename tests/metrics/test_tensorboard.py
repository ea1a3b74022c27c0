"""The TensorBoard event files of a run."""

import logging
import math
from dataclasses import replace
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from isp.metrics import TrackedRun, Trackers
from tests.disk import no_file_larger_than
from tests.metrics.test_record import RECORD


def shown(folder: Path, tag: str) -> list[tuple[int, float]]:
    """Return the steps and values of a tag."""
    events = EventAccumulator(str(folder)).Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


def tensorboard(folder: Path, last_step: int = 0) -> Trackers:
    return Trackers(["tensorboard"], TrackedRun("job", "now", folder, last_step=last_step))


def write(folder: Path, steps: range, *, last_step: int = 0, offset: float = 0.0) -> None:
    with tensorboard(folder, last_step) as board:
        for step in steps:
            board.log(step, {"loss": step + offset})


def test_every_metric_is_written(tmp_path: Path) -> None:
    """Catches a metric that is missing or named differently than in metrics.jsonl."""
    with tensorboard(tmp_path) as board:
        record = replace(RECORD, val_loss=2.5, mfu=None, skipped=True, grad_norm=math.nan)
        board.log(record.step, record.values())
    assert shown(tmp_path / "tb", "val_loss") == [(10, 2.5)]
    assert shown(tmp_path / "tb", "skipped") == [(10, 1.0)]
    assert shown(tmp_path / "tb", "tokens") == [(10, 81920.0)]
    assert math.isnan(shown(tmp_path / "tb", "grad_norm")[0][1])
    tags = EventAccumulator(str(tmp_path / "tb")).Reload().Tags()["scalars"]
    assert {"loss", "lr", "tgs", "step_ms", "mem_gib"} <= set(tags)
    assert not {"step", "mfu", "loss_scale"} & set(tags)


def test_a_resumed_run_continues_without_repeated_steps(tmp_path: Path) -> None:
    """Catches lost or repeated steps shown twice after a crash."""
    write(tmp_path, range(1, 6))
    write(tmp_path, range(4, 7), last_step=3, offset=0.5)
    assert shown(tmp_path / "tb", "loss") == [(1, 1), (2, 2), (3, 3), (4, 4.5), (5, 5.5), (6, 6.5)]


def test_a_full_disk_does_not_end_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a run ended because its event files cannot be written."""
    monkeypatch.setattr("threading.excepthook", lambda failure: None)
    with no_file_larger_than(100), tensorboard(tmp_path) as board:
        for step in range(1, 100):
            board.log(step, RECORD.values())
    (warning,) = caplog.records
    assert warning.levelno == logging.WARNING
    assert "training continues" in warning.getMessage()
