"""Experiment trackers: the calls they receive, and that none of them can end a run."""

import importlib.util
import json
import time
import weakref
from collections.abc import Mapping
from pathlib import Path

import pytest

from isp.cli import main
from isp.config.sections import MetricsConfig
from isp.metrics import TrackedRun, Tracker, Trackers, read_metrics, trackers
from isp.metrics.trackers import mlflow_name
from tests.ranks import run_isp
from tests.step.test_phases import ALONE
from tests.train.jobs import write_job

OWN = "tests.metrics.test_trackers:JsonTracker"
FAILING = "tests.metrics.test_trackers:Failing"


class JsonTracker(Tracker):
    """A tracker that writes a line of JSON for each call to the folder of the run."""

    def init(self, run: TrackedRun) -> str:
        self.file = run.folder.parent / "calls.jsonl"
        self.id = run.id or "first"
        self._add("init", self.id, run.id, run.last_step, dict(run.config), run.project, run.name)
        return self.id

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._add("log", step, values["loss"])

    def finish(self, *, failed: bool) -> None:
        self._add("finish", failed)

    def _add(self, *call: object) -> None:
        with self.file.open("a") as file:
            file.write(json.dumps(call) + "\n")


class Failing(Tracker):
    def init(self, run: TrackedRun) -> None:
        return None

    def log(self, step: int, values: Mapping[str, float]) -> None:
        raise ConnectionError("no network")


class Hanging(Tracker):
    def init(self, run: TrackedRun) -> None:
        return None

    def log(self, step: int, values: Mapping[str, float]) -> None:
        time.sleep(3600)


class Values(dict[str, float]):
    """Values with support for weak references."""


def test_a_resumed_run_is_one_run_in_a_tracker(tmp_path: Path) -> None:
    """Catches steps that are not sent, and a second run or name."""
    job = write_job(tmp_path)
    words = ["train", str(job), *ALONE, f"--metrics.report_to=[{OWN}, {FAILING}]"]
    run_isp(1, *words, "--training.steps", "2")
    run_isp(1, *words, "--training.steps", "4")
    run = tmp_path / "out/job/latest"
    calls = [json.loads(line) for line in (run.resolve().parent / "calls.jsonl").open()]
    begins = [call[1:] for call in calls if call[0] == "init"]
    mine = [call for call in calls if call[0] not in ("init", "finish")]
    losses = [["log", r.step, r.loss] for r in read_metrics(run / "metrics.jsonl")]
    assert mine == losses
    assert len(losses) == 4
    assert [begin[1:3] for begin in begins] == [[None, 0], ["first", 2]]
    assert {begin[5] for begin in begins} == {run.resolve().name}
    config = begins[0][3]
    assert config["layout"][0] == "world 1 = pipeline 1 x data 1 x tensor 1"
    assert config["training"]["steps"] == 2
    assert config["environment"]["torch"]
    log = (run / "logs/rank_0.log").read_text()
    assert log.count(f"nothing more is sent to {FAILING} (ConnectionError: no network)") == 2


def test_a_hanging_tracker_delays_the_end_for_a_limited_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a process that never ends, or ends before the other trackers have finished."""
    monkeypatch.setattr(trackers, "FINISH_SECONDS", 2.0)
    run = TrackedRun("job", "now", tmp_path / "run")
    with Trackers([OWN.replace("JsonTracker", "Hanging"), OWN], run) as both:
        both.log(1, {"loss": 2.0})
    assert "not finished within 2 s" in caplog.text
    calls = [json.loads(line) for line in (tmp_path / "calls.jsonl").open()]
    assert calls[1:] == [["log", 1, 2.0], ["finish", False]]


def test_a_hanging_or_failed_tracker_keeps_no_steps(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches memory that grows with each step while a tracker hangs or after it has failed."""
    monkeypatch.setattr(trackers, "MOST_PENDING", 3)
    kept, run = [], TrackedRun("job", "now", tmp_path / "run")
    with Trackers([OWN.replace("JsonTracker", "Hanging"), FAILING], run) as both:
        for step in range(100):
            values = Values(loss=2.0)
            kept.append(weakref.ref(values))
            both.log(step, values)
            del values
            time.sleep(0.001)
        assert sum(values() is not None for values in kept) <= 3 + 2
    assert "Hanging (3 calls wait for it: it hangs, or is too slow)" in caplog.text
    assert "not finished" not in caplog.text


def test_a_failed_run_is_marked_as_failed_in_its_tracker(tmp_path: Path) -> None:
    """Catches a run that ends with an error but is shown as finished."""
    job = write_job(tmp_path)
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "ab" * 500}) + "\nno json\n")
    words = [f"--data.source={tmp_path}/a.jsonl", "--data.streaming", "--training.steps=500"]
    (said,) = run_isp(1, "train", str(job), *ALONE, f"--metrics.report_to=[{OWN}]", *words)
    assert "a.jsonl, line 2 is not JSON" in said.err
    calls = [json.loads(line) for line in (tmp_path / "out/job/calls.jsonl").open()]
    assert calls[-1] == ["finish", True]


def test_faults_are_reported_before_ranks_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a missing tracker that is only noticed at the end of training."""
    find = importlib.util.find_spec
    absent = "wandb", "tensorboard"
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name in absent else find(name)
    )
    job = write_job(tmp_path)
    for name, fault in (
        ("wandb", "error: metrics.report_to=wandb needs the wandb package: pip install wandb"),
        ("tensorboard", "bash tools/setup_env.sh tensorboard (or pip install tensorboard)"),
        ("nowhere:Mine", "error: metrics.report_to=nowhere:Mine: No module named 'nowhere'"),
        ("pathlib:Path", "pathlib:Path must be a subclass of isp.metrics.Tracker"),
        ("wand", "must be some of tensorboard, wandb, trackio, mlflow, swanlab, or module:Class"),
    ):
        assert main(["train", str(job), "--nproc", "2", f"--metrics.report_to=[{name}]"]) == 2
        assert fault in capsys.readouterr().err
    assert MetricsConfig(enable_tensorboard=True).trackers == ["tensorboard"]


def test_mlflow_accepts_every_name() -> None:
    """Catches a device name or source path that ends the tracking, and two names that
    become one.
    """
    assert mlflow_name("environment.devices.Intel(R) Xeon") == "environment.devices.Intel_R_ Xeon"
    assert mlflow_name("validation/loss/code-1.txt") == "validation/loss/code-1.txt"
    ends = [mlflow_name("validation/loss/" + "folder/" * 40 + end) for end in "ab"]
    assert len(set(ends)) == 2
    assert all(len(end) == 250 for end in ends)


@pytest.mark.parametrize("name", ["trackio", "mlflow"])
def test_a_real_tracker_shows_both_parts_of_a_resumed_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a call that the library does not have, and a second run after resuming."""
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    library = pytest.importorskip(name)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.chdir(tmp_path)
    config = {"training": {"steps": 4}, "devices": {"Intel(R) Xeon(R)": 2}}
    for first in (1, 3):
        run = TrackedRun("job", "now", tmp_path / "run", config, last_step=first - 1)
        with Trackers([name], run) as sent:
            for step in (first, first + 1):
                sent.log(step, {"loss": step + 0.5, "validation/loss/" + "a/" * 150 + "b": 1.0})
    if name == "trackio":
        (found,) = library.Api().runs("job")
        seen = library.sqlite_storage.SQLiteStorage.get_logs("job", "now")
        assert [(r["step"], r["loss"]) for r in seen if "loss" in r] == LOSSES
        assert found.config["training.steps"] == 4
    else:
        client = library.MlflowClient()
        (found,) = client.search_runs([client.get_experiment_by_name("job").experiment_id])
        seen = client.get_metric_history(found.info.run_id, "loss")
        assert [(m.step, m.value) for m in seen] == LOSSES
        assert (found.data.params["training.steps"], found.info.status) == ("4", "FINISHED")


LOSSES = [(1, 1.5), (2, 2.5), (3, 3.5), (4, 4.5)]
