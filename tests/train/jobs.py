"""A small job in a file, run by forked ranks or by real launchers, and the results of its runs."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from isp.config import load_config
from isp.metrics import read_metrics
from isp.train.run import main
from tests.ranks import run_programs

__all__ = ["numbers", "run_folders", "run_forked", "tensors", "write_job"]

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
    """Write and return a job of 2 ranks in `folder`, with its text; runs go to `folder`/out."""
    words = "".join(f"word {i} of many\n" for i in range(400))
    (folder / "text.txt").write_text(words)
    path = folder / "job.yaml"
    path.write_text(JOB.format(folder=folder))
    return path


def run_forked(job: Path, *overrides: str, num_ranks: int = NUM_RANKS) -> None:
    """Run `isp train` on this many forked ranks; raise the errors of ranks."""
    run_programs(num_ranks, lambda rank: main(load_config(job, overrides)))


def run_folders(job: Path, name: str = "job") -> list[Path]:
    """Return the folders of all runs of `name`, oldest first."""
    paths = (job.parent / "out" / name).iterdir()
    return sorted(path for path in paths if path.is_dir() and not path.is_symlink())


def numbers(run: Path) -> list[tuple[int, float, float, float, int]]:
    """Return step, loss, gradient norm, rate and tokens of a run's steps, without times and
    memory.
    """
    records = read_metrics(run / "metrics.jsonl")
    return [(r.step, r.loss, r.grad_norm, r.lr, r.tokens) for r in records]


def tensors(run: Path, step: int) -> dict[str, Tensor]:
    """Return every whole weight and optimizer state of a checkpoint.

    Values of each rank are left out: torch seeds its default generator, which nothing uses, with
    another number in every process.
    """
    plain = run / "plain.pt"
    dcp_to_torch_save(run / "checkpoint" / f"step_{step}", plain)
    found: dict[str, Tensor] = torch.load(plain)
    shared = {name: tensor for name, tensor in found.items() if not name.startswith("local.")}
    assert len(shared) > 20
    return shared
