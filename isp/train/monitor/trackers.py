"""`run_trackers`: opens the experiment trackers of a run, with its configuration and layout."""

from __future__ import annotations

from pathlib import Path

from isp.config import JobConfig, to_plain
from isp.metrics import TrackedRun, Trackers
from isp.train.folder.run_folder import RunFolder
from isp.utils.files import read_json

__all__ = ["run_trackers"]

_ENVIRONMENT = ("python", "torch", "cuda", "git_commit", "world_size", "hostnames", "devices")
"""Keys of env.json whose values are sent to trackers."""


def run_trackers(config: JobConfig, folder: RunFolder, *, last_step: int) -> Trackers:
    """Open the trackers of `config` for the run in `folder`, which resumes after `last_step`.

    Trackers get the configuration, the layout and the versions. A resumed run continues the entry
    that it began in each tracker: the ids of the entries are kept in the folder of its checkpoints.
    """
    environment = read_json(folder.environment_file)
    facts = {key: environment[key] for key in _ENVIRONMENT}
    layout = config.topology(facts["world_size"]).sizes()
    run = TrackedRun(
        project=config.metrics.project or config.job.name,
        name=folder.path.name,
        folder=folder.path,
        config={
            **to_plain(config, redact=True),
            "layout": layout,
            "environment": {"isp": environment["packages"].get("isp"), **facts},
        },
        last_step=last_step,
    )
    ids = Path(config.checkpoint.folder or folder.checkpoint_folder)
    return Trackers(config.metrics.trackers, run, ids=ids)
