"""Hints for names of the Hugging Face hub that are given where a folder is expected."""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["download_hint"]

_ID = re.compile(r"[A-Za-z0-9][\w.-]*/([A-Za-z0-9][\w.-]*)")
_NO_MODEL = re.compile(r".*\.(json|yaml|yml|txt)|.*/step_\d+")
"""Files, and checkpoints, of the user's own."""


def download_hint(path: str | Path) -> str:
    """Return a hint how to download `path`, or "" if it cannot be a name of the hub.

    `path`: as the user typed it. A name is `owner/name`, unless there is a folder `owner` here.
    """
    name = str(path)
    found = _ID.fullmatch(name)
    if found is None or _NO_MODEL.fullmatch(name) or Path(name).parent.exists():
        return ""
    return (
        f"; if it is a model of the Hugging Face hub, download it first:"
        f" `hf download {name} --local-dir {found[1]}`"
    )
