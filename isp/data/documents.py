"""The files of a source, by their names, and the documents or rows in them.

The order depends on the source's paths alone. Lines and arrays of JSON are read here, one object at
a time: one schema for all rows, as tables have, would lose keys of mixed conversations. Tables are
read by `datasets`, batch by batch.
"""

import glob
import gzip
import json
import os
import re
import sys
import sysconfig
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from io import BufferedReader, TextIOWrapper
from pathlib import Path
from typing import Any, NamedTuple

from isp.data.config import PYTHON_STDLIB
from isp.foreign.shown import first_line
from isp.settings.packages import require

__all__ = [
    "Document",
    "JsonLine",
    "find_files",
    "has_records",
    "read_documents",
    "read_jsonl",
    "read_records",
]

# fmt: off
_TEXT_SUFFIXES = frozenset({
    ".txt", ".text", ".md", ".rst", ".org", ".tex",
    ".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".cuh", ".go", ".java", ".jl", ".js",
    ".lua", ".r", ".rb", ".rs", ".scala", ".sh", ".sql", ".swift", ".ts",
})
# fmt: on
_LINES = (".jsonl", ".ndjson")
_TABLES = {
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".csv": "csv",
    ".tsv": "csv",
}
"""Suffixes of tables, and the readers of `datasets`."""
_OF_FOLDERS = frozenset({*_LINES, ".parquet", ".arrow", ".feather"})
"""What a folder contributes beside text; .json and .csv files in it often describe other things."""
_BATCH_ROWS = 1024
_CHUNK = 2**20
"""Characters of a JSON array that are read at a time."""
_SPACE = re.compile(r"[ \t\r\n]*")


# Tests hold odd encodings and generated tables; packages are not the library's own.
_STDLIB_EXCLUDED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
)


class Document(NamedTuple):
    """One document, and how many bytes of its file it took (for a progress bar)."""

    text: str
    num_bytes: int


class JsonLine(NamedTuple):
    """A line or entry of a JSON file, or a row of a table: its keys, its place, its bytes.

    Keys that are null are not in it.
    """

    record: dict[str, Any]
    where: str
    num_bytes: int


def find_files(
    source: str | Sequence[str], *, key: str = "data.source", as_text: bool = False
) -> list[Path]:
    """Return the files of `source`, item by item, sorted inside each folder and glob.

    `as_text` takes any file, as plain text if its name does not say what it holds.
    Raises FileNotFoundError for an item that matches nothing, ValueError for an empty file or one
    whose name does not say what it holds.
    """
    items = [source] if isinstance(source, str) else source
    found = [path for item in items for path in _files_of_item(item, key)]
    for path in found:
        if not (as_text or has_records(path) or _suffix(path) in _TEXT_SUFFIXES):
            raise ValueError(
                f"{key}: the name of {path} does not say what it holds. Known are text"
                f" ({' '.join(sorted(_TEXT_SUFFIXES))}), JSON (.jsonl .ndjson .json, also with .gz"
                f" or .zst), tables ({' '.join(_TABLES)}) and .bin/.idx pairs: rename it, or read"
                f" such files as plain text with data.format=text (--format text)"
            )
    return found


def read_documents(path: Path, *, text_key: str = "text") -> Iterator[Document]:
    """The non-empty documents of one file.

    Raises ValueError naming the file, and the line of a .jsonl file, or the row.
    """
    if has_records(path):
        for line in read_records(path):
            if text := _text_of_line(line.record, text_key, line.where):
                yield Document(text, line.num_bytes)
        return
    data = path.read_bytes()
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not UTF-8 text (byte {data[error.start]:#04x} at offset {error.start}): "
            "convert it, or leave it out of the source"
        ) from None
    if text:
        yield Document(text, len(data))


def _files_of_item(item: str, key: str) -> list[Path]:
    """The files that one item of a source stands for."""
    path = Path(item).expanduser()
    if item == PYTHON_STDLIB:
        return _stdlib_files()
    if path.is_dir():
        of_datasets = ("dataset_dict.json", "dataset_info.json")
        if any((path / name).is_file() for name in of_datasets):
            return _saved_files(path, key)
        if files := _walk(path, _is_of_folder, frozenset({"__pycache__"})):
            return files
        taken = " ".join(sorted(_TEXT_SUFFIXES | _OF_FOLDERS))
        raise FileNotFoundError(
            f"{key}={item} is a folder without text files (suffixes taken from a folder: {taken}):"
            f" name other files with a glob, {item}/**/*.json"
        )
    if path.exists():
        if not path.is_file():
            raise ValueError(
                f"{key}={item} is a pipe, a socket or a device, whose text can be read only"
                " once and is read several times: write it to a file, and name that"
            )
        if path.stat().st_size == 0:
            raise ValueError(f"{key}={item} is an empty file: fill it or leave it out")
        return [path]
    if glob.has_magic(item):
        matches = sorted(Path(match) for match in glob.glob(str(path), recursive=True))
        if files := [match for match in matches if match.is_file()]:
            return files
        raise FileNotFoundError(f"{key}={item} matches no file (seen from {os.getcwd()})")
    raise FileNotFoundError(
        f"{key}={item} does not exist (seen from {os.getcwd()}): give a file, a folder, a glob, "
        f"the prefix of a .bin/.idx pair, {PYTHON_STDLIB}, or hf://OWNER/NAME for a dataset of the"
        f" Hugging Face hub"
    )


def _stdlib_files() -> list[Path]:
    """The .py sources of the running Python's standard library, about 11 MB.

    They differ between Python versions, so curves compare only between runs of one version.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    files = _walk(root, lambda path: path.suffix == ".py", _STDLIB_EXCLUDED_FOLDERS)
    if not files:
        raise FileNotFoundError(
            f"data.source={PYTHON_STDLIB}: this Python has no library sources in {root}: install "
            "them, or give text files of your own"
        )
    return files


def _is_of_folder(path: Path) -> bool:
    return path.suffix in _TEXT_SUFFIXES or _suffix(path) in _OF_FOLDERS


def _saved_files(folder: Path, key: str) -> list[Path]:
    """Return the Arrow files of a folder that `save_to_disk` of `datasets` wrote, in their order.

    Raises ValueError for a damaged one, several splits, and rows that were selected, not written.
    """
    require(f"{key}={folder}", "datasets", extra="data")
    from datasets import DatasetDict, load_from_disk

    try:
        saved: Any = load_from_disk(str(folder))
    except Exception as error:
        raise ValueError(f"{key}={folder} cannot be read: {first_line(error)}") from error
    if isinstance(saved, DatasetDict):
        splits = list(saved)
        raise ValueError(
            f"{key}={folder} holds the splits {', '.join(splits)}: name one, {folder / splits[0]}"
        )
    if saved._indices is not None:
        raise ValueError(
            f"{key}={folder} holds a selection of its rows: save it after flatten_indices()"
        )
    return [Path(file["filename"]) for file in saved.cache_files]


def _suffix(path: Path) -> str:
    """Return the suffix that says what a file holds, in lower case: .jsonl of A.JSONL.gz."""
    *before, last = ["", *(suffix.lower() for suffix in path.suffixes)]
    is_compressed = last in (".gz", ".zst") and before[-1:] in ([x] for x in (*_LINES, ".json"))
    return before[-1] if is_compressed else last


def _walk(root: Path, takes: Callable[[Path], bool], excluded: frozenset[str]) -> list[Path]:
    """Return the visible files below `root` that `takes`, sorted by their path inside it."""
    files = []
    for folder, names, file_names in os.walk(root):
        names[:] = [n for n in names if n not in excluded and not n.startswith(".")]
        paths = (Path(folder, name) for name in file_names if not name.startswith("."))
        files += [path for path in paths if takes(path) and path.is_file()]
    # Parts, not strings: the separator must not take part in the order.
    return sorted(files, key=lambda path: path.relative_to(root).parts)


def has_records(path: Path) -> bool:
    """Return whether a file holds objects with keys: JSON, or rows of a table."""
    return _suffix(path) in (*_LINES, ".json", *_TABLES)


def read_records(path: Path) -> Iterator[JsonLine]:
    """Yield the objects of a file that `has_records`.

    Raises ValueError naming the file and the line, entry or row.
    """
    suffix = _suffix(path)
    if suffix in _LINES:
        yield from read_jsonl(path)
    elif suffix == ".json":
        yield from _read_json(path)
    else:
        for number, (row, num_bytes) in enumerate(_read_table(path), start=1):
            yield _json_line(row, f"{path}, row {number}", num_bytes)


def read_jsonl(path: Path) -> Iterator[JsonLine]:
    """Yield the objects of a file of JSON lines; blank lines are left out.

    Raises ValueError naming the file and the line that is not a JSON object.
    """
    with _opened(path) as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                where = f"{path}, line {number}"
                yield _json_line(_parsed(line, where), where, len(line))


def _read_json(path: Path) -> Iterator[JsonLine]:
    """Yield the entries of a JSON array; a file that begins with an object is one of JSON lines."""
    with _opened(path) as file:
        begin = file.peek(64).lstrip(b"\xef\xbb\xbf \t\r\n")[:1]
    if begin == b"{":
        yield from read_jsonl(path)
        return
    if begin != b"[":
        raise ValueError(f"{path} is not JSON: it must be an array of objects, or JSON lines")
    decoder = json.JSONDecoder()
    with _opened(path) as file:
        text = TextIOWrapper(file, encoding="utf-8-sig")
        held = text.read(_CHUNK)
        at, number, size = held.index("[") + 1, 1, _CHUNK
        while True:
            where, fault = f"{path}, entry {number}", "it has no end"
            at = _behind_space(held, at)
            if held[at : at + 1] == "]":
                return
            try:
                record, end = decoder.raw_decode(held, at)
                end = _behind_space(held, end)
            except RecursionError:
                raise ValueError(f"{where} is nested too deeply: correct or remove it") from None
            except ValueError as error:
                end, fault = len(held), str(error)
            if held[end : end + 1] in (",", "]"):
                yield _json_line(_checked(record, where), where, end - at)
                at, number, size = end + (held[end] == ","), number + 1, _CHUNK
                continue
            # The entry goes on beyond what is held. Twice as much each time: a long one is not
            # decoded from its beginning a thousand times.
            if not (more := text.read(size)):
                raise ValueError(f"{where} is not JSON ({fault}): correct or remove it")
            held, at, size = held[at:] + more, 0, 2 * size


def _behind_space(text: str, at: int) -> int:
    """Return the place of the first character from `at` on that is not white space."""
    found = _SPACE.match(text, at)
    assert found is not None
    return found.end()


@contextmanager
def _opened(path: Path) -> Iterator[BufferedReader]:
    """Open a file, decompressed as its suffix says.  Raises ValueError if it is damaged."""
    try:
        with _decompressed(path) as file:
            yield file
    except (EOFError, OSError, zlib.error) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error.reason}): convert it") from None


def _decompressed(path: Path) -> Any:
    suffix = path.suffix.lower()
    if suffix == ".gz":
        return gzip.open(path)
    if suffix != ".zst":
        return path.open("rb")
    if sys.version_info >= (3, 14):
        from compression import zstd

        return zstd.open(path)
    require(f"data.source={path}", "pyarrow", extra="data")
    import pyarrow

    return BufferedReader(pyarrow.CompressedInputStream(pyarrow.OSFile(str(path)), "zstd"))


def _read_table(path: Path) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield each row of a table, and its bytes in memory, as of its batch's mean.

    Raises ValueError if the file is damaged or has a value that Python cannot represent, or
    `datasets` is not installed.
    """
    require(f"data.source={path}", "datasets", extra="data")
    from datasets import load_dataset

    suffix, column = _suffix(path), ""
    how = {"sep": "\t"} if suffix == ".tsv" else {}
    try:
        # In a stream: a copy in the cache of `datasets` would be larger than the file.
        table = load_dataset(
            _TABLES[suffix],
            data_files=glob.escape(str(path)),
            split="train",
            streaming=True,
            **how,
        )
        for batch in table.with_format("arrow").iter(_BATCH_ROWS):
            num_bytes, columns = batch.nbytes // max(1, batch.num_rows), []
            for name in batch.column_names:
                column = f", column {name!r},"
                columns.append(batch[name].to_pylist())
            column = ""
            for row in zip(*columns, strict=True):
                yield dict(zip(batch.column_names, row, strict=True)), num_bytes
    except Exception as error:  # also of values that Python lacks, such as a date in the year 10000
        raise ValueError(f"{path}{column} cannot be read: {first_line(error)}") from error


def _json_line(record: dict[str, Any], where: str, num_bytes: int) -> JsonLine:
    """Make a line whose keys that are null count as absent, at every depth.

    A table has every key in every row, and what `datasets` writes as JSON has them, too.
    """
    # Messages name them, or would call a key missing that the reader sees in the file.
    null = ", ".join(key for key, value in record.items() if value is None)
    where += f" (null: {null})" if null else ""
    try:
        return JsonLine(_without_null(record), where, num_bytes)
    except RecursionError:
        raise ValueError(f"{where} is nested too deeply: correct or remove it") from None


def _without_null(value: Any) -> Any:
    """Return `value` without the keys that are null."""
    if isinstance(value, dict):
        return {key: _without_null(x) for key, x in value.items() if x is not None}
    return [_without_null(x) for x in value] if isinstance(value, list) else value


def _parsed(line: bytes, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where} is not JSON ({error}): correct or remove the line") from None
    except RecursionError:
        raise ValueError(f"{where} is nested too deeply: correct or remove it") from None
    return _checked(record, where)


def _checked(record: Any, where: str) -> dict[str, Any]:
    if not isinstance(record, dict):
        raise ValueError(f"{where} is a JSON {type(record).__name__}: it must be an object")
    return record


def _text_of_line(record: dict[str, Any], text_key: str, where: str) -> str:
    """The text of one .jsonl line, or ValueError saying `where` and what is wrong with it."""
    if text_key not in record:
        raise ValueError(
            f"{where} has no key {text_key!r}, only {', '.join(map(repr, record)) or 'none'}: set "
            "data.text_key (--text-key) to the one that holds the text"
        )
    text = record[text_key]
    if not isinstance(text, str):
        raise ValueError(
            f"{where} holds {type(text).__name__} under {text_key!r}, not text: set data.text_key "
            "(--text-key) to the key that holds the text"
        )
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:  # JSON can escape half of a surrogate pair.
        raise ValueError(f"{where} holds text that is not Unicode: {error.reason}") from None
    return text
