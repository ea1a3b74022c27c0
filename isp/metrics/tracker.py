"""`Tracker`: what an experiment tracker does here; and one for each library that is supported."""

from __future__ import annotations

import pkgutil
import re
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from isp.utils.environment import require

__all__ = ["TrackedRun", "Tracker", "check_tracker", "mlflow_name", "tracker_of"]


class TrackedRun(NamedTuple):
    """What a tracker is told of a run when it begins or resumes."""

    project: str
    """The runs that are compared with each other."""
    name: str
    folder: Path
    """The tracker's own files may go here."""
    config: Mapping[str, Any] = {}
    """Everything that decides the run, as nested sections of plain values."""
    last_step: int = 0
    """The run resumes after it; what was logged of later steps is done again."""
    id: str | None = None
    """What `Tracker.init` returned when the run began; None then."""


class Tracker:
    """Base class of trackers: `metrics.report_to: [module:Class]` names one of your own.

    It is created without arguments, and used by rank 0 alone, in a thread of its own. An exception
    ends the tracking, with a warning, and not the run.
    """

    def init(self, run: TrackedRun) -> str | None:
        """Begin, or resume where `run.id` is set; the id by which the run is resumed."""
        raise NotImplementedError

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """The metrics of a step, under the keys of `metrics.jsonl`."""
        raise NotImplementedError

    def finish(self, *, failed: bool) -> None:
        """Send what is pending, and end."""
        raise NotImplementedError


class _TensorBoard(Tracker):
    """Event files; TensorBoard ignores what earlier files there say of repeated steps."""

    def init(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        purge = run.last_step + 1 if run.last_step else None
        inner = run.config.get("metrics", {}).get("save_tb_folder", "tb")
        self._writer = SummaryWriter(run.folder / inner, purge_step=purge)
        if run.config and not run.last_step:
            lines = (f"    {key}: {value}" for key, value in _flat(run.config).items())
            self._writer.add_text("config", "\n".join(lines), 0)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for key, value in values.items():
            self._writer.add_scalar(key, value, step)

    def finish(self, *, failed: bool) -> None:
        self._writer.close()


class _WandB(Tracker):
    """Weights & Biases; repeated steps keep their first values."""

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
            # Without a network it gives up within the time that the end of a run waits for it.
            settings=wandb.Settings(login_timeout=30, init_timeout=50),
        )
        return str(self._run.id)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def finish(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class _Trackio(Tracker):
    """Trackio of Hugging Face, on this machine or a Space; its runs are resumed by name."""

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
    """MLflow, by `MLFLOW_TRACKING_URI`; project is the experiment."""

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
        for at in range(0, len(params), 100):  # its limit of one request
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
    """`key` as MLflow takes names: at most 250 characters, of signs only `_-. /`."""
    name = re.sub(r"[^\w. /-]", "_", key)
    if len(name) <= 250:
        return name
    return f"{name[:240]}_{sha256(key.encode()).hexdigest()[:9]}"


class _SwanLab(Tracker):
    """SwanLab, by `SWANLAB_MODE`; only runs in the cloud are resumed."""

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
    """The tracker `name` of `metrics.report_to`: a library, or module:Class."""
    if name in _LIBRARIES:
        return _LIBRARIES[name]()
    made: Tracker = pkgutil.resolve_name(name)()
    return made


def check_tracker(name: str) -> None:
    """Raise ValueError if the tracker `name` cannot be used: not installed, or no `Tracker`."""
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
    """`config` with keys such as `parallel.tensor.size`."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        below = isinstance(value, Mapping) and bool(value)
        flat |= _flat(value, f"{prefix}{key}.") if below else {f"{prefix}{key}": value}
    return flat
