"""Rows of Parquet and Arrow files, and of folders that Hugging Face's `save_to_disk` wrote.

They are read batch by batch: no file is in memory as a whole.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from isp.utils.json_file import read_json
from isp.utils.packages import require

__all__ = ["TABLE_SUFFIXES", "read_table", "saved_files"]

TABLE_SUFFIXES = frozenset({".parquet", ".arrow", ".feather"})
_BATCH_ROWS = 1024


def saved_files(folder: Path) -> list[Path] | None:
    """The Arrow files of a folder of `save_to_disk`, in their order; None: it is no such folder.

    Raises ValueError for several splits, for rows that were selected but not written, and for
    files outside of the folder.
    """
    if (folder / "dataset_dict.json").exists():
        found = read_json(folder / "dataset_dict.json").get("splits")
        splits = [str(split) for split in found] if isinstance(found, list) and found else ["?"]
        raise ValueError(f"holds the splits {', '.join(splits)}: name one, {folder / splits[0]}")
    if not (folder / "state.json").exists():
        return None
    try:
        state = read_json(folder / "state.json")
    except ValueError as error:
        if any(folder.glob("*.arrow")):
            raise ValueError(f"cannot be read: {error}") from None
        return None
    if not isinstance(entries := state.get("_data_files"), list):
        return None  # another program's
    if state.get("_indices_data_files"):
        raise ValueError("holds a selection of its rows: save it after flatten_indices()")
    files = []
    for entry in entries:
        name = entry.get("filename") if isinstance(entry, dict) else None
        if not isinstance(name, str) or Path(name).name != name:
            raise ValueError(
                f"is not read: its state.json names the file {json.dumps(name)}, which is not in"
                f" the folder: save the dataset again with save_to_disk"
            )
        if not (folder / name).is_file():
            raise ValueError(f"lacks {name}, or it is no regular file: copy the folder again")
        files.append(folder / name)
    return files


def read_table(path: Path) -> Iterator[tuple[dict[str, Any], int]]:
    """Each row of a file, and its bytes in memory, as of its batch's mean.

    Raises ValueError if the file is damaged or has a value that Python cannot represent, or pyarrow
    is not installed.
    """
    require(f"data.source={path}", "pyarrow", extra="data")
    column = ""
    try:
        for batch in _batches(path):
            num_bytes = batch.nbytes // max(1, batch.num_rows)
            names, columns = batch.schema.names, []
            for name, values in zip(names, batch.columns, strict=True):
                column = f", column {name!r},"
                columns.append(values.to_pylist())
            column = ""
            for row in zip(*columns, strict=True):
                yield dict(zip(names, row, strict=True)), num_bytes
    except Exception as error:  # also of values that Python lacks, such as a date in the year 10000
        raise ValueError(f"{path}{column} cannot be read: {error}") from error


def _batches(path: Path) -> Iterator[Any]:
    """Batches of rows."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    if path.suffix.lower() == ".parquet":
        with pq.ParquetFile(path) as file:
            yield from file.iter_batches(_BATCH_ROWS)
        return
    with pa.memory_map(str(path)) as source:
        try:
            reader = pa.ipc.open_file(source)
        except pa.ArrowInvalid:  # `datasets` writes the other of Arrow's two formats
            source.seek(0)
            yield from pa.ipc.open_stream(source)
        else:
            yield from map(reader.get_batch, range(reader.num_record_batches))
