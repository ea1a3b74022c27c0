"""The model of one's own in the guides does what is said of it."""

from __future__ import annotations

import io
import re
from contextlib import chdir, redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors.torch import load_file

from tests.ranks import run_programs

ROOT = Path(__file__).parents[2]


def _sample(word: str) -> str:
    """Return the block of Python in the guides that has this word."""
    text = "".join(page.read_text() for page in (ROOT / "docs/guides").glob("*.md*"))
    (sample,) = {s for s in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if word in s}
    return str(sample)


def _losses(rank: int, folder: Path) -> list[float]:
    with chdir(folder), redirect_stdout(io.StringIO()) as said:
        exec(_sample("own.py"), vars(ModuleType("own")))
    return [float(loss) for loss in re.findall(r"step \d: loss ([\d.]+)", said.getvalue())]


def test_the_script_runs_as_it_is_printed(tmp_path: Path) -> None:
    """Catches a script that no longer runs, ranks that go apart, weights that nobody can load."""
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    of_ranks = run_programs(4, _losses, tmp_path)
    assert of_ranks == [of_ranks[0]] * 4
    assert len(of_ranks[0]) == 5
    assert of_ranks[0][-1] < of_ranks[0][0] - 0.1
    saved = load_file(tmp_path / "outputs/own/model.safetensors")
    assert saved["blocks.2.down.weight"].shape == (64, 256)
    assert "head.weight" in saved
    assert len(saved) == 3 * 12 + 5


def test_the_script_is_short() -> None:
    """Catches an example that has become a program."""
    assert len([line for line in _sample("own.py").splitlines() if line.strip()]) <= 40


def test_the_registered_forward_is_that_of_its_module() -> None:
    """Catches an example that computes something else than the module in whose place it is."""
    names: dict[str, Any] = {}
    exec(_sample("register_mixer"), names)
    module, x = names["Decay"](5).double(), torch.randn(2, 9, 5, dtype=torch.float64)
    assert torch.allclose(names["decay_by_scan"](module, x), module(x), rtol=0, atol=1e-12)
