"""Packages of others that only some keys and commands need."""

from __future__ import annotations

import importlib.util

__all__ = ["require"]


def require(who: str, *packages: str, extra: str = "hf") -> None:
    """Raise ValueError, with the way out, if `who` needs one of `packages` and it is missing.

    `extra`: the set of packages of `tools/setup_env.sh` that has them.
    """
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise ValueError(
                f"{who} needs the {package} package: bash tools/setup_env.sh {extra} (or pip"
                f" install {' '.join(packages)})"
            )
