"""What importing the library's parts loads; `lint-imports` checks the layers and cycles."""

from __future__ import annotations

import subprocess
import sys

import pytest

LOADED = "import sys; print(*sys.modules)"
CORE = (
    "import pkgutil, importlib, isp.core; [importlib.import_module(m.name) for m in"
    " pkgutil.walk_packages(isp.core.__path__, 'isp.core.')]"
)


@pytest.mark.parametrize(
    ("code", "unwanted"),
    [
        ("import isp", {"torch", "isp.core"}),
        ("import isp.config", {"torch"}),
        (
            "import isp; isp.parallelize",
            {"isp.data", "isp.evaluation", "isp.planner", "isp.profile", "isp.train"},
        ),
        (CORE, {"isp.config", "isp.models", "safetensors", "tokenizers", "transformers", "yaml"}),
    ],
    ids=["isp", "config", "parallelize", "core"],
)
def test_an_import_loads_no_more_than_it_needs(code: str, unwanted: set[str]) -> None:
    """Catches an import that makes every start slower, or the runtime need what is above it."""
    command = [sys.executable, "-c", f"{code}; {LOADED}"]
    loaded = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert not unwanted & set(loaded)
