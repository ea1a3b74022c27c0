"""The metrics file after crashes, on a full disk, and when a run resumes."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from isp.metrics import MetricsFile, StepRecord, read_metrics
from tests.disk import no_file_larger_than
from tests.metrics.test_record import RECORD


def record(step: int) -> StepRecord:
    return replace(RECORD, step=step)


def steps(path: Path) -> list[int]:
    return [record.step for record in read_metrics(path)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path) as metrics:
        for step in (1, 2, 3, 4):
            metrics.write(record(step))
    return path


def test_each_line_is_on_disk_when_write_returns(tmp_path: Path) -> None:
    """Catches a buffer that is lost when the process is killed."""
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path)
    assert read_metrics(path) == []
    for step in (1, 2):
        metrics.write(record(step))
        assert read_metrics(path)[-1] == record(step)
    metrics.close()


@pytest.mark.parametrize("cut", [1, 20, 150])
def test_an_incomplete_last_line_is_removed(path: Path, cut: int) -> None:
    """Catches a reader that fails on an incomplete line, and a new line appended to it."""
    path.write_bytes(path.read_bytes()[:-cut])
    assert steps(path) == [1, 2, 3]
    with MetricsFile(path, last_step=3) as metrics:
        metrics.write(record(4))
    assert steps(path) == [1, 2, 3, 4]


def test_zeros_after_a_power_failure_are_removed(path: Path) -> None:
    """Catches blocks that were allocated but never written read as a line."""
    path.write_bytes(path.read_bytes() + bytes(4096))
    assert steps(path) == [1, 2, 3, 4]
    with MetricsFile(path, last_step=4) as metrics:
        metrics.write(record(5))
    assert steps(path) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(("last_step", "kept"), [(0, []), (2, [1, 2]), (4, [1, 2, 3, 4])])
def test_later_steps_are_removed(path: Path, last_step: int, kept: list[int]) -> None:
    """Catches steps lost in the crash that are then recorded twice."""
    MetricsFile(path, last_step=last_step).close()
    assert steps(path) == kept


def test_a_broken_line_is_named_and_the_file_is_kept(path: Path) -> None:
    """Catches a foreign or edited file that is truncated."""
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], b"hello\n", *lines[3:]]))
    before = path.read_bytes()
    with pytest.raises(ValueError, match="line 3 is not a record of a step"):
        read_metrics(path)
    with pytest.raises(ValueError, match=r"line 3 is not a record of a step .*: repair it"):
        MetricsFile(path, last_step=4)
    assert path.read_bytes() == before


@pytest.mark.parametrize("room", [0, 1, 100])
def test_a_full_disk_is_waited_for(path: Path, room: int, caplog: pytest.LogCaptureFixture) -> None:
    """Catches a run ended by a full disk, a warning for each step, and an incomplete or missing
    line.
    """
    metrics = MetricsFile(path, last_step=4)
    with no_file_larger_than(path.stat().st_size + room):
        for step in (5, 6, 7):
            metrics.write(record(step))
            assert steps(path) == [1, 2, 3, 4]
    assert [r.levelno for r in caplog.records] == [logging.WARNING]
    assert "training continues" in caplog.text
    metrics.write(record(8))
    metrics.close()
    assert steps(path) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert "no step is missing" in caplog.text


def test_a_full_disk_at_the_end_is_reported(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Catches records silently dropped, and a file with an incomplete line."""
    metrics = MetricsFile(path, last_step=4)
    with no_file_larger_than(path.stat().st_size + 10):
        metrics.write(record(5))
        metrics.close()
    assert steps(path) == [1, 2, 3, 4]
    assert caplog.records[-1].levelno == logging.ERROR
    assert StepRecord.from_json(caplog.records[-1].getMessage().splitlines()[-1]) == record(5)
    MetricsFile(path, last_step=4).close()
    assert path.read_bytes().endswith(b"\n")
