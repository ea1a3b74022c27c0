"""Names on the Hugging Face hub that were given where a folder is wanted."""

from __future__ import annotations

import os
import re
from pathlib import Path

__all__ = ["download_hint"]

_ID = re.compile(r"[A-Za-z0-9][\w.-]*/([A-Za-z0-9][\w.-]*)")


def download_hint(path: str | Path) -> str:
    """Return how to download what `path` names on the hub; "" for what cannot be a name there.

    That is any path but `owner/name`, and one in a folder that is here.
    """
    name = os.path.relpath(path)  # some callers have made it absolute
    found = _ID.fullmatch(name)
    if found is None or name.endswith((".yaml", ".yml")) or Path(name).parent.exists():
        return ""
    return (
        f"; a model of the Hugging Face hub is downloaded first, by"
        f" `hf download {name} --local-dir {found[1]}`, and its folder named"
    )
