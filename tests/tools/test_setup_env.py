"""`tools/setup_env.sh`: what it refuses; nothing is installed here."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_an_unknown_extra_is_refused_before_anything_is_made() -> None:
    """Catches a set of packages that the script does not know, or one it takes for another."""
    done = subprocess.run(
        ["bash", "tools/setup_env.sh", "report", "hf", "flash", "tensorboard", "test"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == (
        "error: unknown set of packages 'test': use some of flash hf lm-eval report tensorboard"
        " dev, or nothing\n"
    )
