"""Sources elsewhere: files by fsspec (`s3://`, `gs://`), copied once; datasets of the hub."""

import os
import re
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from socket import gethostname

from isp.utils.packages import require
from isp.utils.safe_text import check_complete, first_line

__all__ = ["localised"]

_REMOTE = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_HUB = re.compile(r"hf://(?!datasets/)([\w.-]+/[\w.-]+)(?::([\w.-]+))?")


def localised(items: Sequence[str], key: str) -> list[str]:
    """`items` with the paths of local copies in place of what is remote.

    Copies are kept in `$ISP_CACHE` (default: `~/.cache/isp`), and made again when the file has
    changed. Raises ValueError if it cannot be reached, or a package for it is not installed.
    """
    return [path for item in items for path in _local(item, key)]


def _local(item: str, key: str) -> list[str]:
    if not _REMOTE.match(item):
        return [item]
    check_complete(key, item)
    hub = _HUB.fullmatch(item)
    require(f"{key}={item}", "datasets" if hub else "fsspec", extra="data")
    try:
        return _of_hub(hub[1], hub[2] or "train") if hub else _copied(item)
    except Exception as error:  # of any file system and its network: reported in a line
        why = first_line(error)
        fault = f"{key}={item} cannot be read ({why})"
        if not isinstance(error, ValueError):  # a wrong scheme or split, which `why` explains
            fault += ": without a network, copy it to this machine and name the copy"
        raise ValueError(fault) from error


def _of_hub(name: str, split: str) -> list[str]:
    """The Arrow files of a split in the cache of `datasets`, which downloads them once."""
    from datasets import load_dataset

    return [file["filename"] for file in load_dataset(name, split=split).cache_files]


def _copied(url: str) -> list[str]:
    """Local copies of the files of `url`: a file, a glob or a folder; of a .bin, its whole pair.

    Of a folder it is the copied folder, whose files lie as they did.
    """
    from filelock import FileLock  # comes with torch
    from fsspec.core import url_to_fs

    system, path = url_to_fs(url)
    stem, suffix = os.path.splitext(path)
    is_pair, is_folder = suffix in (".bin", ".idx"), system.isdir(path)
    if is_pair:
        more = [f"{stem}.labels.idx", f"{stem}.labels.bin", f"{stem}.tokenizer.json"]
        found = [*filter(system.exists, more), f"{stem}.idx", f"{stem}.bin"]
    elif is_folder:
        found = sorted(system.find(path))
    elif "://" in path:  # http, which knows no folders
        found = system.glob(path)
    else:
        matches = system.glob(path, detail=True)
        found = sorted(file for file in matches if matches[file]["type"] != "directory")
    if not found:
        raise FileNotFoundError("it matches no file")
    # Without the query of a URL: the suffix says what a file holds.
    names = [file.partition("?")[0] if "://" in file else file for file in found]
    above = path if is_folder else os.path.commonpath([os.path.dirname(name) for name in names])
    root = Path(os.environ.get("ISP_CACHE", "~/.cache/isp")).expanduser()
    named = root / sha256("".join(map(system.ukey, found)).encode()).hexdigest()[:16]
    copies = [str(named / os.path.relpath(name, above)) for name in names]
    named.mkdir(parents=True, exist_ok=True)
    with FileLock(named.with_suffix(".lock")):  # one rank copies, the others wait
        for file, copy in zip(found, map(Path, copies), strict=True):
            if not copy.exists():
                part = copy.with_name(f".{copy.name}.{gethostname()}.{os.getpid()}")
                copy.parent.mkdir(parents=True, exist_ok=True)
                system.get_file(file, str(part))
                # In one piece: a copy that was cut off is made again, and on a file system whose
                # locks hold on one machine only, two machines do not write into one file.
                part.replace(copy)
    if is_folder:
        return [str(named)]
    return copies[-1:] if is_pair else copies
