"""Losses and gradient norms of small runs in many layouts, recorded to compare later versions.

`python -m tests.train.recorded` compares every layout with the record, and with `--write` records
it again.

A change that must not change any number proves it by a comparison in which every bit is equal. Only
results that were meant to change are recorded again, and the commit says why.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import shutil
import tempfile
from collections.abc import Iterable
from contextlib import redirect_stdout
from pathlib import Path
from typing import NamedTuple

import torch

from isp.metrics import read_metrics
from tests.models.folders import write_folder
from tests.train.jobs import run_forked

__all__ = ["LAYOUTS", "RECORD", "TOLERANCES", "difference", "recorded", "trained"]

RECORD = Path(__file__).with_name("recorded_losses.json")

TOLERANCES = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 2e-2}
"""Relative tolerances, since kernels of another machine sum in another order."""

_JOB = """
job: {{name: job, dump_folder: {folder}/out}}
data: {{source: "{folder}/*.txt", seq_len: 64, micro_bsz: 2, micro_num: 2}}
optimizer: {{lr: 1.0e-2}}
lr_scheduler: {{warmup_steps: 2}}
training: {{steps: 4, device: cpu, dtype: float64, seed: 3}}
"""
_OWN = """
model: {vocab_size: 260, hidden_size: 32, num_layers: 4, num_heads: 8, num_kv_heads: 4,
  intermediate_size: 48, init_std: 0.1}
"""


class Recorded(NamedTuple):
    """Start of one of the recorded runs."""

    ranks: int
    overrides: str
    """Overrides of the configuration: `key=value`, without dashes."""
    hf: str = ""
    """A model type of transformers; "": ISP's decoder."""

    @property
    def dtype(self) -> str:
        """The dtype of the training."""
        keys = dict(word.split("=") for word in self.overrides.split())
        return keys.get("training.dtype", "float64")


def _isp(tensor: int, weight: int, more: str = "") -> str:
    return f"parallel.tensor.size={tensor} parallel.weight.size={weight} {more}"


def _features(mode: str, tensor: int, more: str = "") -> str:
    return f"parallel.tensor.mode={mode} parallel.tensor.size={tensor} {more}"


_CONTEXT = "parallel.sequence_2D.enable=true parallel.sequence_2D.context_size=2"
_STAGES = "parallel.pipeline.size=2 data.micro_num=4"
_INTERLEAVED = "parallel.pipeline.schedule=InterleavedZeroBubble parallel.pipeline.num_chunks=2"

LAYOUTS = {
    "one rank": Recorded(1, "validation.freq=2 data.valid_fraction=0.2"),
    "mtp 2, data 2": Recorded(4, _features("mtp", 2)),
    "msp 4": Recorded(4, _features("msp", 4, "model.checkpoint=0.5")),
    "fsp 2": Recorded(2, _features("fsp", 2, "model.tie_embeddings=true")),
    "msp 2, stages": Recorded(4, _features("msp", 2, _STAGES)),
    "isp 2 x 2": Recorded(2, _isp(2, 2, "model.mlp_tile_tokens=16")),
    "isp 2 x 4": Recorded(4, _isp(2, 4, "parallel.weight.vocab_parallel_loss=true")),
    "isp 1 x 4, by hidden": Recorded(4, _isp(1, 4, "parallel.weight.embed_split_hidden=true")),
    "isp 2, zero1 2": Recorded(4, _isp(2, 1, "parallel.zero1.size=2")),
    "isp 4 x 2, weights stay": Recorded(
        4, _isp(4, 2, "parallel.weight.reshard_after_forward=false")
    ),
    "isp 4 x 4, context": Recorded(4, _isp(4, 4, _CONTEXT)),
    "isp 4 x 2, ring": Recorded(4, _isp(4, 2, f"{_CONTEXT} parallel.sequence_2D.exchange=ring")),
    "isp 2 x 2, not packed": Recorded(2, _isp(2, 2, "data.pack=false")),
    "isp 2 x 2, segments": Recorded(
        2, _isp(2, 2, "model.checkpoint=1.0 model.checkpoint_segment=2 model.vocab_size=259")
    ),
    "isp 2 x 2, interleaved": Recorded(4, _isp(2, 2, f"{_STAGES} {_INTERLEAVED}")),
    "isp 2 x 2, float32": Recorded(2, _isp(2, 2, "training.dtype=float32 optimizer.name=lion")),
    "isp 1 x 2, bfloat16": Recorded(
        4, _isp(1, 2, "training.dtype=bfloat16 optimizer.offload_states=true")
    ),
    "llama, isp 2 x 2": Recorded(2, _isp(2, 2, "model.checkpoint=0.5"), hf="llama"),
    "qwen3_moe, isp 2 x 4": Recorded(4, _isp(2, 4), hf="qwen3_moe"),
    "llama, msp 2": Recorded(2, _features("msp", 2), hf="llama"),
}

Series = dict[str, list[float]]
"""Results of a run: for each name, one number a step."""


def trained(names: Iterable[str], folder: Path) -> dict[str, Series]:
    """Return the results of these layouts, run in `folder`."""
    for i in range(12):
        (folder / f"{i}.txt").write_text(
            "".join(f"document {i}, line {j}\n" for j in range(3 * i + 2))
        )
    found = {}
    for name in names:
        of_one = LAYOUTS[name]
        job = folder / "job.yaml"
        job.write_text(_JOB.format(folder=folder) + _model(of_one.hf, folder))
        run_forked(job, *(f"--{word}" for word in of_one.overrides.split()), num_ranks=of_one.ranks)
        (run,) = (folder / "out/job").glob("*Z")
        records = read_metrics(run / "metrics.jsonl")
        found[name] = {
            "loss": [record.loss for record in records],
            "grad_norm": [record.grad_norm for record in records],
            "val_loss": [r.val_loss for r in records if r.val_loss is not None],
        }
        shutil.rmtree(folder / "out")
    return found


def _model(hf: str, folder: Path) -> str:
    if not hf:
        return _OWN
    torch.manual_seed(0)
    return f"model: {{hf: {write_folder(folder / hf, hf)}}}\n"


def recorded() -> dict[str, Series]:
    """Return the recorded results."""
    found: dict[str, Series] = json.loads(RECORD.read_text())
    return found


def difference(found: Series, expected: Series) -> float:
    """Return the largest relative difference of two runs; infinite for different steps or
    non-finite numbers.
    """
    if {k: len(v) for k, v in found.items()} != {k: len(v) for k, v in expected.items()}:
        return float("inf")
    pairs = ((a, b) for key in expected for a, b in zip(found[key], expected[key], strict=True))
    return max(abs(a - b) / abs(b) if math.isfinite(a) else math.inf for a, b in pairs)


def main() -> int:
    """Record, or compare; return 1 if a layout differs from the record by more than its
    tolerance.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"write {RECORD.name}")
    write = parser.parse_args().write
    # What the runs log is of no interest.
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()):
        found = trained(LAYOUTS, Path(folder))
    if write:
        RECORD.write_text(json.dumps(found, indent=1) + "\n")
        return 0
    expected, worst = recorded(), 0.0
    for name, of_one in LAYOUTS.items():
        away = difference(found[name], expected[name])
        worst = max(worst, away / TOLERANCES[of_one.dtype])
        print(f"{name:<26}{'equal' if away == 0 else f'{away:.1e}'}")
    return int(worst > 1)


if __name__ == "__main__":
    raise SystemExit(main())
