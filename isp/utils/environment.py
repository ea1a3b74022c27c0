"""The environment of this process: optional packages, and torchrun's variables."""

from __future__ import annotations

import importlib.util
import os

__all__ = [
    "launched",
    "rank_and_size",
    "require",
]


def require(who: str, *packages: str, extra: str | None = "hf") -> None:
    """Raise ValueError, with the command to install it, if one of `packages` is not installed.

    `who`: the key or the command that needs them, for the error. `extra`: the argument of
    `tools/setup_env.sh` with which it installs them; None if it never does.
    """
    for package in packages:
        if importlib.util.find_spec(package) is None:
            pip = f"pip install {' '.join(packages)}"
            way = pip if extra is None else f"bash tools/setup_env.sh {extra} (or {pip})"
            raise ValueError(f"{who} needs the {package} package: {way}")


def launched() -> bool:
    """Return True if torchrun, or a launcher with the same variables, started this process."""
    # Other programs set one of the two for other purposes, so check for both.
    return {"RANK", "WORLD_SIZE"} <= os.environ.keys()


def rank_and_size() -> tuple[int, int]:
    """Return this process's rank and the number of ranks; (0, 1) without a launcher."""
    if not launched():
        return 0, 1
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
