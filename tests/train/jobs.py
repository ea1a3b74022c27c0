"""A small job as a file, run by forked ranks or by real launchers, and what a run of it leaves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from isp.config import load_config
from isp.metrics import read_metrics
from isp.train import main
from tests.ranks import run_programs

__all__ = ["Launchers", "launchers", "numbers", "run_folders", "run_forked", "tensors", "write_job"]

ROOT = Path(__file__).parents[2]
NUM_RANKS = 2

JOB = """
job: {{name: job, dump_folder: {folder}/out}}
model: {{vocab_size: 272, hidden_size: 16, num_layers: 1, num_heads: 2, intermediate_size: 24}}
data: {{source: {folder}/text.txt, seq_len: 64}}
parallel: {{tensor: {{size: 2, mode: isp}}, weight: {{size: 2}}}}
optimizer: {{lr: 1.0e-2}}
lr_scheduler: {{min_lr_factor: 1.0}}  # the same rate in runs of any length
training: {{steps: 8, device: cpu}}
"""


def write_job(folder: Path) -> Path:
    """A job of 2 ranks in `folder`, with its text; every run of it goes to `folder`/out."""
    words = "".join(f"word {i} of many\n" for i in range(400))
    (folder / "text.txt").write_text(words)
    path = folder / "job.yaml"
    path.write_text(JOB.format(folder=folder))
    return path


def run_forked(job: Path, *overrides: str, num_ranks: int = NUM_RANKS) -> None:
    """`isp train` on so many ranks, as forked processes; raises what a rank does."""
    run_programs(num_ranks, lambda rank: main(load_config(job, overrides)))


def run_folders(job: Path, name: str = "job") -> list[Path]:
    """The folders of all runs of `name`, oldest first."""
    paths = (job.parent / "out" / name).iterdir()
    return sorted(path for path in paths if not path.is_symlink())


def numbers(run: Path) -> list[tuple[int, float, float, float, int]]:
    """What the steps of a run came to, times and memory left out."""
    records = read_metrics(run / "metrics.jsonl")
    return [(r.step, r.loss, r.grad_norm, r.lr, r.tokens) for r in records]


def tensors(run: Path, step: int) -> dict[str, Tensor]:
    """Every weight and optimizer state of a checkpoint, whole.

    Ranks' own values are left out: torch seeds its default generator, which nothing draws from,
    with another number in every process.
    """
    plain = run / "plain.pt"
    dcp_to_torch_save(run / "checkpoint" / f"step_{step}", plain)
    found: dict[str, Tensor] = torch.load(plain)
    shared = {name: tensor for name, tensor in found.items() if not name.startswith("local.")}
    assert len(shared) > 20
    return shared


class Launchers:
    """Starts torchruns in `folder`; `launchers` ends them with all their ranks."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._started: list[subprocess.Popen[bytes]] = []

    def start(
        self,
        options: Sequence[str],
        words: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        path: Sequence[Path] = (),
        enter: Callable[[], None] | None = None,
    ) -> subprocess.Popen[bytes]:
        """torchrun with `options`, whose ranks run `isp train` with `words`.

        What they say goes to a file, `said`. `path` comes before the project in theirs. `enter` is
        called in the new process.
        """
        paths = os.pathsep.join(str(p) for p in (*path, ROOT))
        environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **(env or {})}
        command = [sys.executable, "-m", "torch.distributed.run", *options]
        with self.said(len(self._started)).open("wb") as said:
            process = subprocess.Popen(
                [*command, "-m", "isp", "train", *words],
                cwd=self._folder,
                env=environment,
                stdout=said,
                stderr=subprocess.STDOUT,
                preexec_fn=enter,
            )
        self._started.append(process)
        return process

    def said(self, number: int = 0) -> Path:
        """Where the words of a launcher and its ranks are, for messages of failing tests."""
        return self._folder / f"said_{number}.txt"

    def end(self) -> None:
        """Kill all launchers, and their ranks, which plain torchrun puts in their own sessions."""
        for process in self._started:
            process.kill()
            process.wait()
        while found := _processes_in(self._folder):
            for number in found:
                with suppress(ProcessLookupError):
                    os.kill(number, signal.SIGKILL)
            time.sleep(0.01)


@contextmanager
def launchers(folder: Path) -> Iterator[Launchers]:
    """Launchers in `folder`, which is nobody else's; none of their processes outlives this."""
    made = Launchers(folder)
    try:
        yield made
    finally:
        made.end()


def _processes_in(folder: Path) -> list[int]:
    """The processes that have been started in `folder`."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):  # it has ended, or is not ours
                if Path(os.readlink(entry / "cwd")) == folder.resolve():
                    found.append(int(entry.name))
    return found
