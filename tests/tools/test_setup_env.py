"""`tools/setup_env.sh` and `setup.py`: what they refuse and package; nothing is installed."""

from __future__ import annotations

import runpy
import subprocess
from pathlib import Path
from unittest import mock

import pytest
import setuptools

ROOT = Path(__file__).parents[2]


def test_an_unknown_extra_is_refused_first() -> None:
    """Catches a set of packages that the script does not know, or confuses with another."""
    done = subprocess.run(
        ["bash", "tools/setup_env.sh", "report", "hf", "flash", "tensorboard", "test"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == (
        "error: unknown extra 'test': name some of data docs flash hf peft report"
        " tensorboard trainer dev, or none\n"
    )


def test_a_wheel_has_all_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a file that isp reads and that only exists in the repository."""
    monkeypatch.chdir(ROOT)
    with mock.patch.object(setuptools, "setup") as setup:
        runpy.run_path("setup.py")
    build = setuptools.Distribution(setup.call_args.kwargs).get_command_obj("build_py")
    build.ensure_finalized()
    packed = {Path(folder) / name for _, folder, _, names in build.data_files for name in names}
    read = {p for package in ("isp", "model") for p in Path(package).rglob("*.*") if p.is_file()}
    read = {p for p in read if p.suffix not in (".py", ".pyc", ".md")}
    assert read <= packed
    assert Path("isp/planner/fabrics/cpu.yaml") in read
