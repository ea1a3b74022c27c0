"""The modules that an import loads; `lint-imports` checks layers and cycles."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

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
    """Catches an import that slows every start, or a runtime that depends on a layer above."""
    command = [sys.executable, "-c", f"{code}; {LOADED}"]
    loaded = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert not unwanted & set(loaded)


def test_tools_import_names_that_exist() -> None:
    """Catches a tool that no test runs, such as one for GPUs, broken by a moved module."""
    missing = []
    for file in (Path(__file__).parents[1] / "tools").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            module = getattr(node, "module", None) or ""
            if isinstance(node, ast.ImportFrom) and module.split(".")[0] == "isp":
                missing += [f"{file.name}: {m}" for m in _missing(module, node.names)]
    assert not missing


def _missing(module: str, names: list[ast.alias]) -> list[str]:
    """Return the names that `module` has neither as attributes nor as submodules."""
    found = []
    for name in (name.name for name in names):
        try:
            if not hasattr(importlib.import_module(module), name):
                importlib.import_module(f"{module}.{name}")
        except ModuleNotFoundError as error:  # an optional package that is not installed here
            if (error.name or "").split(".")[0] == "isp":
                found.append(f"{module}.{name}")
    return found
