"""The environment of this process: optional packages, and the variables of its launcher."""

from __future__ import annotations

import importlib.util
import os

__all__ = [
    "launched",
    "rank_and_size",
    "require",
]


def require(who: str, *packages: str, extra: str | None = "hf") -> None:
    """Raise ValueError, with how to install it, if one of `packages` is missing.

    `who` needs them, for the error: a key or a command. `extra`: the set of packages of
    `tools/setup_env.sh` that has them; None if no set has.
    """
    for package in packages:
        if importlib.util.find_spec(package) is None:
            pip = f"pip install {' '.join(packages)}"
            way = pip if extra is None else f"bash tools/setup_env.sh {extra} (or {pip})"
            raise ValueError(f"{who} needs the {package} package: {way}")


def launched() -> bool:
    """Return True if torchrun, or a launcher with the same variables, has started this process."""
    # Other programs set one of the two for purposes of their own, so check for both.
    return {"RANK", "WORLD_SIZE"} <= os.environ.keys()


def rank_and_size() -> tuple[int, int]:
    """Return the rank of this process and the number of ranks; (0, 1) if it was not launched."""
    if not launched():
        return 0, 1
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
