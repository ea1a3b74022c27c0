"""Objects in JSON files that others wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

__all__ = ["read_json"]


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.  Raises ValueError, naming the file, for anything else."""
    try:
        found = json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError):
        folder = path.parent
        lack = f"has no {path.name}: is it a model's folder?" if folder.is_dir() else "is no folder"
        raise ValueError(f"{folder} {lack}") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds no object")
    return found
