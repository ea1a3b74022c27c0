"""Experiment trackers: the base class, one tracker for each library, and the threads they run in.

Each tracker runs in a thread of its own. If it is slow, hangs or fails, training goes on as before.
"""

from __future__ import annotations

import logging
import pkgutil
import queue
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from isp.utils.environment import require
from isp.utils.files import read_limited, write_whole
from isp.utils.text import first_line

__all__ = ["TrackedRun", "Tracker", "Trackers", "check_tracker", "mlflow_name", "tracker_of"]

logger = logging.getLogger(__name__)


class TrackedRun(NamedTuple):
    """Description of a run, which a tracker gets when the run begins or resumes."""

    project: str
    """Name of the project under which the tracker shows this run and runs to compare it with."""
    name: str
    folder: Path
    """Folder for the tracker's own files."""
    config: Mapping[str, Any] = {}
    """The configuration, as nested sections of plain values."""
    last_step: int = 0
    """Step after which the run resumes. Later steps may have been logged: they run again."""
    id: str | None = None
    """Result of `Tracker.init` when the run began; None for a new run."""


class Tracker:
    """Base class of trackers. To use a subclass of your own: `metrics.report_to: [module:Class]`.

    An object is made without arguments, on rank 0 only, and used in one thread. If it raises an
    exception, it is no longer used, with a warning, and the run continues.
    """

    def init(self, run: TrackedRun) -> str | None:
        """Begin a run, or resume it if `run.id` is set.

        Return an id by which the run can be resumed; None if it cannot.
        """
        raise NotImplementedError

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log the metrics of a step; keys are those of `metrics.jsonl`."""
        raise NotImplementedError

    def finish(self, *, failed: bool) -> None:
        """Send pending data and end; `failed`: the run ended in an exception."""
        raise NotImplementedError


class _TensorBoard(Tracker):
    """Writes TensorBoard's event files. Steps that run again replace those in earlier files."""

    def init(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # TensorBoard then ignores steps from this one on in earlier files.
        purge = run.last_step + 1 if run.last_step else None
        inner = run.config.get("metrics", {}).get("save_tb_folder", "tb")
        self._writer = SummaryWriter(run.folder / inner, purge_step=purge)
        if run.config and not run.last_step:
            # Four spaces make a code block in Markdown, as which TensorBoard shows texts.
            lines = (f"    {key}: {value}" for key, value in _flat(run.config).items())
            self._writer.add_text("config", "\n".join(lines), 0)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for key, value in values.items():
            self._writer.add_scalar(key, value, step)

    def finish(self, *, failed: bool) -> None:
        self._writer.close()


class _WandB(Tracker):
    """Logs to Weights & Biases. Steps that run again keep the values that were logged first."""

    def init(self, run: TrackedRun) -> str:
        import wandb

        self._run = wandb.init(
            project=run.project,
            name=run.name,
            dir=str(run.folder),
            config=dict(run.config),
            id=run.id,
            resume="allow",
            allow_val_change=True,
            # Without a network, give up before `FINISH_SECONDS`, for which a run waits at its end.
            settings=wandb.Settings(login_timeout=30, init_timeout=50),
        )
        return str(self._run.id)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def finish(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class _Trackio(Tracker):
    """Logs to Hugging Face's Trackio, on this machine or in a Space. The id is the run's name."""

    def init(self, run: TrackedRun) -> str:
        import trackio

        name = run.id or run.name
        resume = "allow" if run.id else "never"
        config = _flat(run.config)
        self._run = trackio.init(run.project, name=name, config=config, resume=resume, embed=False)
        return str(self._run.name)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def finish(self, *, failed: bool) -> None:
        self._run.finish()


class _MLflow(Tracker):
    """Logs to MLflow at `MLFLOW_TRACKING_URI`; the project is MLflow's experiment."""

    def init(self, run: TrackedRun) -> str:
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        self._client = MlflowClient()
        if run.id is not None:
            self._id = run.id
            self._client.update_run(run.id, status="RUNNING")
            return self._id
        found = self._client.get_experiment_by_name(run.project)
        experiment = self._client.create_experiment(run.project) if found is None else None
        experiment = experiment or found.experiment_id
        self._id = str(self._client.create_run(experiment, run_name=run.name).info.run_id)
        flat = _flat(run.config)
        params = [Param(mlflow_name(key), str(value)[:500]) for key, value in flat.items()]
        for at in range(0, len(params), 100):  # MLflow takes at most 100 in one request
            self._client.log_batch(self._id, params=params[at : at + 100])
        return self._id

    def log(self, step: int, values: Mapping[str, float]) -> None:
        import time

        from mlflow.entities import Metric

        now = int(time.time() * 1e3)
        metrics = [
            Metric(mlflow_name(key), float(value), now, step) for key, value in values.items()
        ]
        self._client.log_batch(self._id, metrics=metrics)

    def finish(self, *, failed: bool) -> None:
        self._client.set_terminated(self._id, "FAILED" if failed else "FINISHED")


def mlflow_name(key: str) -> str:
    """Return `key` as a name for MLflow: at most 250 characters, no punctuation but `_-. /`."""
    name = re.sub(r"[^\w. /-]", "_", key)
    if len(name) <= 250:
        return name
    # The hash keeps long names that begin the same apart.
    return f"{name[:240]}_{sha256(key.encode()).hexdigest()[:9]}"


class _SwanLab(Tracker):
    """Logs to SwanLab, where `SWANLAB_MODE` says; only runs in its cloud can be resumed."""

    def init(self, run: TrackedRun) -> str | None:
        import swanlab

        resume = {} if run.id is None else {"id": run.id, "resume": "allow"}
        self._run = swanlab.init(
            project=run.project,
            name=run.name,
            log_dir=str(run.folder),
            config=dict(run.config),
            **resume,
        )
        return str(self._run.id) if self._run.mode == "online" else None

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def finish(self, *, failed: bool) -> None:
        self._run.finish("crashed" if failed else "success")


_LIBRARIES: dict[str, type[Tracker]] = {
    "tensorboard": _TensorBoard,
    "wandb": _WandB,
    "trackio": _Trackio,
    "mlflow": _MLflow,
    "swanlab": _SwanLab,
}


def tracker_of(name: str) -> Tracker:
    """Return a new tracker for an entry of `metrics.report_to`: a library, or module:Class."""
    if name in _LIBRARIES:
        return _LIBRARIES[name]()
    made: Tracker = pkgutil.resolve_name(name)()
    return made


def check_tracker(name: str) -> None:
    """Raise ValueError if the tracker `name` cannot be used: not installed, or not a `Tracker`."""
    who = f"metrics.report_to={name}"
    if name in _LIBRARIES:
        require(who, name, extra="tensorboard" if name == "tensorboard" else None)
        return
    try:
        found = pkgutil.resolve_name(name)
    except (ImportError, AttributeError, SyntaxError) as error:
        raise ValueError(f"{who}: {error}: is its folder in PYTHONPATH?") from error
    if not (isinstance(found, type) and issubclass(found, Tracker)):
        raise ValueError(f"{who} must be a subclass of isp.metrics.Tracker")


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return `config` as a flat dict with keys such as `parallel.tensor.size`."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        below = isinstance(value, Mapping) and bool(value)
        flat |= _flat(value, f"{prefix}{key}.") if below else {f"{prefix}{key}": value}
    return flat


# -- threads ---------------------------------------------------------------------------------

FINISH_SECONDS = 60.0
"""Time that all trackers together have to send pending data at the end of a run."""
MOST_PENDING = 10_000
"""Number of calls that may wait for a tracker. With more, it is no longer used."""


class Trackers(AbstractContextManager["Trackers"]):
    """Context with the trackers `names` (of `metrics.report_to`) of `run`, each in its own thread.

    Leaving it waits until all have finished, at most `FINISH_SECONDS`. A tracker that fails or
    hangs is reported in one warning, and the run continues. The ids of the run in its trackers are
    kept in the folder `ids` (default: `run.folder`): when the run resumes, it continues there.
    """

    def __init__(self, names: Iterable[str], run: TrackedRun, *, ids: Path | None = None) -> None:
        folder = run.folder if ids is None else ids
        self._threads = [_TrackerThread(name, run, folder) for name in names]

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log the metrics `values` of `step` in all trackers; returns at once."""
        for thread in self._threads:
            thread.put(lambda tracker: tracker.log(step, values))

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for thread in self._threads:
            thread.put(lambda tracker: tracker.finish(failed=kind is not None))
            thread.put(None)
        end = time.monotonic() + FINISH_SECONDS
        for thread in self._threads:
            if not thread.failed:
                thread.join(max(0.0, end - time.monotonic()))
            if thread.is_alive():
                thread.give_up(f"not finished within {FINISH_SECONDS:g} s")


class _TrackerThread(threading.Thread):
    """Thread that makes the calls of one tracker in order, until one of them fails."""

    def __init__(self, name: str, run: TrackedRun, ids: Path) -> None:
        super().__init__(name=f"tracker {name}", daemon=True)
        self.failed = False
        self._calls: queue.Queue[Callable[[Tracker], None] | None] = queue.Queue(MOST_PENDING)
        self._tracker_name = name
        self._tracked = run
        self._id_file = ids / f".tracker.{name}"
        self.start()

    def put(self, call: Callable[[Tracker], None] | None) -> None:
        """Queue `call`; None ends the thread."""
        if self.failed:  # the thread has ended, or hangs: nothing takes calls from the queue
            return
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            self.give_up(f"{MOST_PENDING:,} calls wait for it: it hangs, or is too slow")

    def run(self) -> None:
        """Open the tracker and make its calls; Python calls this in the thread."""
        tracker: Tracker | None = None
        try:
            tracker = self._open()
            while (call := self._calls.get()) is not None:
                call(tracker)
        except Exception as error:  # libraries may raise any exception: report it
            self.give_up(first_line(error))

    def give_up(self, why: str) -> None:
        """Stop using the tracker, and warn once with the reason `why`."""
        if not self.failed:
            logger.warning(
                "nothing more is sent to %s (%s): training continues, and metrics.jsonl has all"
                " metrics",
                self._tracker_name,
                why,
            )
        self.failed = True

    def _open(self) -> Tracker:
        """Make and initialize the tracker, and write the id of a new run to its file."""
        known = read_limited(self._id_file).decode() if self._id_file.exists() else None
        self._tracked.folder.mkdir(parents=True, exist_ok=True)
        tracker = tracker_of(self._tracker_name)
        given = tracker.init(self._tracked._replace(id=known))
        if given is not None and given != known:
            write_whole(self._id_file, given)
        return tracker
