"""List the files whose code runs in a training step: those to read to understand a step.

    PYTHONPATH=. torchrun --nproc-per-node 4 tools/step_files.py

Prints the files of isp/ and model/ in which a function is called in the second step of the
quickstart, on rank 0, and their number.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from types import FrameType

from isp.config import load_config
from isp.train.run import main as train
from isp.train.trainer import Trainer

ROOT = Path(__file__).parents[1]
WORDS = ["--training.steps=3", "--validation.freq=0", "--checkpoint.async_mode=disabled"]


def main() -> None:
    """Train for three steps, and print the files of all functions that the second step called."""
    found: set[str] = set()
    take = Trainer._train_step

    def note(frame: FrameType, event: str, arg: object) -> None:
        found.add(frame.f_code.co_filename)

    def traced(trainer: Trainer, outputs: object) -> object:
        # Trace only the second step, as the first one also sets things up.
        sys.settrace(note if trainer.step == 1 else None)
        try:
            return take(trainer, outputs)  # type: ignore[arg-type]
        finally:
            sys.settrace(None)

    Trainer._train_step = traced  # type: ignore[method-assign, assignment]
    with tempfile.TemporaryDirectory() as folder:
        words = [*WORDS, f"--job.dump_folder={folder}"]
        train(load_config(ROOT / "configs/quickstart.yaml", words))
    if os.environ["RANK"] != "0":
        return
    by_folder = defaultdict(list)
    for name in sorted(found):
        path = Path(name)
        if any(path.is_relative_to(ROOT / package) for package in ("isp", "model")):
            by_folder[path.parent.relative_to(ROOT)].append(path.name)
    for parent, names in by_folder.items():
        print(f"{parent}/: {', '.join(names)}")
    print(f"{sum(map(len, by_folder.values()))} files")


if __name__ == "__main__":
    main()
