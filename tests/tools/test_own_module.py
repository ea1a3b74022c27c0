"""The example of a module of one's own does what the README says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "tools" / "own_module.py"


def _losses(*launcher: str) -> list[float]:
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *launcher, str(EXAMPLE)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=110, env=environment
    )
    assert done.returncode == 0, done.stderr
    return [float(loss) for loss in re.findall(r"step \d: loss ([\d.]+)", done.stdout)]


def test_two_ranks_train_as_one_does() -> None:
    """Catches an example that no longer runs, or whose gradients are not those of all ranks."""
    alone = _losses()
    assert len(alone) == 3
    assert alone == sorted(alone, reverse=True)
    assert _losses("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2") == alone


def test_the_readme_shows_lines_of_the_example() -> None:
    """Catches an example in the README that nothing runs."""
    (shown,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    lines = [line.strip() for line in EXAMPLE.read_text().splitlines()]
    assert len(shown.splitlines()) > 5
    assert [line for line in shown.splitlines() if line.strip() not in lines] == []
