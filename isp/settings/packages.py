"""Packages of others that only some keys and commands need."""

from __future__ import annotations

import importlib.util

__all__ = ["require_hf"]


def require_hf(who: str, *packages: str) -> None:
    """Raise ValueError, with the way out, if `who` needs one of `packages` and it is missing."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise ValueError(
                f"{who} needs the {package} package: bash tools/setup_env.sh hf (or pip install"
                f" {' '.join(packages)})"
            )
