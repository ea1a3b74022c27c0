"""Rows of Parquet and Arrow files, and of folders that Hugging Face's `save_to_disk` wrote.

They are read batch by batch: no file is in memory as a whole.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from isp.settings.packages import require

__all__ = ["TABLE_SUFFIXES", "read_table", "saved_files"]

TABLE_SUFFIXES = frozenset({".parquet", ".arrow", ".feather"})
_BATCH_ROWS = 1024


def saved_files(folder: Path) -> list[Path] | None:
    """The Arrow files of a folder of `save_to_disk`, in their order; None: it is no such folder.

    Raises ValueError for several splits, and for rows that were selected but not written.
    """
    if (folder / "dataset_dict.json").is_file():
        splits = json.loads((folder / "dataset_dict.json").read_text())["splits"]
        raise ValueError(f"holds the splits {', '.join(splits)}: name one, {folder / splits[0]}")
    if not (folder / "state.json").is_file():
        return None
    state = json.loads((folder / "state.json").read_text())
    if not isinstance(state, dict) or "_data_files" not in state:
        return None  # another program's
    if state.get("_indices_data_files"):
        raise ValueError("holds a selection of its rows: save it after flatten_indices()")
    return [folder / file["filename"] for file in state["_data_files"]]


def read_table(path: Path) -> Iterator[tuple[dict[str, Any], int]]:
    """Each row of a file, and its bytes in memory, as of its batch's mean.

    Raises ValueError if the file is damaged, or pyarrow is not installed.
    """
    require(f"data.source={path}", "pyarrow", extra="data")
    import pyarrow as pa

    try:
        for batch in _batches(path):
            num_bytes = batch.nbytes // max(1, batch.num_rows)
            yield from ((row, num_bytes) for row in batch.to_pylist())
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


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
