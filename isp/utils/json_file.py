"""Objects in JSON files that others wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from isp.utils.files import LARGE_FILE_BYTES, SMALL_FILE_BYTES, read_limited
from isp.utils.hub import download_hint

__all__ = ["parse_json", "read_json"]


def read_json(path: Path, *, large: bool = False) -> dict[str, Any]:
    """Return the object in a JSON file, of up to 16 MiB, or 256 MiB for a `large` one.

    Raises ValueError, naming the file, for anything else.
    """
    try:
        data = read_limited(path, LARGE_FILE_BYTES if large else SMALL_FILE_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        folder = path.parent
        if folder.is_dir():
            lack = f"has no {path.name}: is it a model's folder?"
        else:
            lack = f"is no folder{download_hint(folder)}"
        raise ValueError(f"{folder} {lack}") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    return parse_json(data, path)


def parse_json(data: bytes, path: Path) -> dict[str, Any]:
    """Return the object that `data`, the contents of the file at `path`, is.

    Raises ValueError, naming the file, for anything else, also for one that is nested too deeply.
    """
    try:
        found = json.loads(data)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    except ValueError as error:  # no JSON, or a number of too many digits
        raise ValueError(f"{path} is damaged: {error}") from None
    except RecursionError:
        raise ValueError(
            f"{path} is damaged: its lists and objects are nested too deeply"
        ) from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} is not a JSON object")
    return found
