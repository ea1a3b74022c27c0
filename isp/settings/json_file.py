"""Objects in JSON files that others wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

__all__ = ["read_json"]


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.  Raises ValueError, naming the file, for anything else."""
    try:
        text = path.read_text()
    except (FileNotFoundError, NotADirectoryError):
        folder = path.parent
        lack = f"has no {path.name}: is it a model's folder?" if folder.is_dir() else "is no folder"
        raise ValueError(f"{folder} {lack}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    try:
        found = json.loads(text)
    except ValueError as error:  # no JSON, or a number of too many digits
        raise ValueError(f"{path} is damaged: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} is not a JSON object")
    return found
