"""The example of a module of one's own does what the README says."""

from __future__ import annotations

import io
import re
import runpy
from contextlib import redirect_stdout
from pathlib import Path

from tests.ranks import run_programs

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "tools" / "own_module.py"


def _losses(rank: int) -> list[float]:
    with redirect_stdout(io.StringIO()) as said:
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    return [float(loss) for loss in re.findall(r"step \d: loss ([\d.]+)", said.getvalue())]


def test_two_ranks_train_as_one_does() -> None:
    """Catches an example that no longer runs, or whose gradients are not those of all ranks."""
    (alone,) = run_programs(1, _losses)
    assert len(alone) == 3
    assert alone == sorted(alone, reverse=True)
    assert run_programs(2, _losses)[0] == alone


def test_the_readme_shows_lines_of_the_example() -> None:
    """Catches an example in the README that nothing runs."""
    samples = re.findall(r"```python\n(.*?)```", (ROOT / "isp/README.md").read_text(), re.DOTALL)
    (shown,) = (sample for sample in samples if "ISPCommunicator(" in sample)
    lines = [line.strip() for line in EXAMPLE.read_text().splitlines()]
    assert len(shown.splitlines()) > 5
    assert [line for line in shown.splitlines() if line.strip() not in lines] == []
