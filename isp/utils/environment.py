"""Packages of others that only some keys and commands need."""

from __future__ import annotations

import importlib.util

__all__ = ["require"]


def require(who: str, *packages: str, extra: str | None = "hf") -> None:
    """Raise ValueError, with the way out, if `who` needs one of `packages` and it is missing.

    `extra`: the set of packages of `tools/setup_env.sh` that has them; None: no set has.
    """
    for package in packages:
        if importlib.util.find_spec(package) is None:
            pip = f"pip install {' '.join(packages)}"
            way = pip if extra is None else f"bash tools/setup_env.sh {extra} (or {pip})"
            raise ValueError(f"{who} needs the {package} package: {way}")
