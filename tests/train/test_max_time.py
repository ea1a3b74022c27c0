"""A run that ends before its time limit, and resumes when it is started again."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from isp.config import ConfigError, load_config
from isp.data.batch import BatchSampler
from isp.metrics import read_metrics
from tests.train.jobs import run_folders, run_forked, write_job

STEP_SECONDS = 100.0


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make steps take STEP_SECONDS by the clock of rank 0 only, as with a slow disk."""
    read, late = BatchSampler.micro_batches, [0.0]

    def slowly(*args: object) -> object:
        late[0] += STEP_SECONDS * (os.environ["RANK"] == "0")
        return read(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(BatchSampler, "micro_batches", slowly)
    for name in ("monotonic", "perf_counter"):
        real = getattr(time, name)
        monkeypatch.setattr(time, name, lambda real=real: real() + late[0])


def test_a_run_stops_in_time_and_resumes(tmp_path: Path, slow: None) -> None:
    """Catches an exceeded or unlogged limit, ranks that disagree, and a run started anew."""
    job, limit = write_job(tmp_path), 1200
    run_forked(job, "--training.steps", "60", "--training.max_time", "00:20:00")
    (run,) = run_folders(job)
    done = len(read_metrics(run / "metrics.jsonl"))
    assert 2 <= done < limit / STEP_SECONDS
    why = f"stopped after step {done} of 60, as another would pass training.max_time=00:20:00"
    for rank in range(2):
        assert why in (run / f"logs/rank_{rank}.log").read_text()
    run_forked(job, "--training.steps", str(done + 2))
    (run,) = run_folders(job)
    assert [r.step for r in read_metrics(run / "metrics.jsonl")] == list(range(1, done + 3))


@pytest.mark.parametrize("value", ["1h", "0", "1-2", "-3"])
def test_a_malformed_time_is_refused(tmp_path: Path, value: str) -> None:
    """Catches a limit read as another one, or refused only after ranks have started."""
    with pytest.raises(ConfigError, match=f'training.max_time="?{value}"? .*null for no limit'):
        load_config(write_job(tmp_path), ["--training.max_time", value])


@pytest.mark.parametrize(
    ("word", "seconds"), [("90", 90), ("1:30:00", 5400), ("01:30:00", 5400), ("1-0:00:00", 86400)]
)
def test_a_time_means_the_same_in_a_file_and_on_the_command_line(
    tmp_path: Path, word: str, seconds: int
) -> None:
    """Catches 1:30:00 without quotes, which YAML parses as a number of another meaning."""
    job = write_job(tmp_path)
    on_line = load_config(job, ["--training.max_time", word])
    job.write_text(job.read_text().replace("device: cpu", f"device: cpu, max_time: {word}"))
    assert load_config(job).training.max_seconds == on_line.training.max_seconds == seconds
