"""The files of a source, by their names, and the documents or rows in them.

The order depends on the source's paths alone. JSON is read one object at a time, without a schema
for all of them, which would lose keys of mixed conversations.
"""

import csv
import glob
import gzip
import json
import os
import re
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import BufferedReader, TextIOWrapper
from pathlib import Path
from typing import IO, Any, NamedTuple

from isp.config.data import PYTHON_STDLIB
from isp.data.tables import TABLE_SUFFIXES, read_table, saved_files
from isp.utils.packages import require

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
_CSV = {".csv": ",", ".tsv": "\t"}
"""Suffixes of tables that are text, and what separates their cells."""
_RECORDS = (*_LINES, ".json", *_CSV, *sorted(TABLE_SUFFIXES))
_OF_FOLDERS = _TEXT_SUFFIXES | {*_LINES, *TABLE_SUFFIXES}
"""Suffixes taken from a folder, in which .json and .csv files often describe other files."""
_CHUNK = 2**20
"""Characters of a JSON array that are read at a time."""
_BEGIN = 2**16
"""Bytes among which an array begins."""
_SPACE = re.compile(r"[ \t\r\n]*")
_MOST_MISSING = 12
"""Characters before the end of a text that is cut off at which a fault may be, as in \\u00e9."""

# Tests hold odd encodings and generated tables; packages are not the library's own.
_STDLIB_EXCLUDED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
)


class Document(NamedTuple):
    """One document, and how many bytes of its file it took (for a progress bar)."""

    text: str
    num_bytes: int


class JsonLine(NamedTuple):
    """A line or entry of a JSON file, or a row of a table: its keys, its place, its size.

    Keys that are null are not in it. The size is in bytes of the decompressed file, in characters
    for entries of an array and rows of a .csv file.
    """

    record: dict[str, Any]
    where: str
    num_bytes: int


def find_files(
    source: str | Sequence[str], *, key: str = "data.source", as_text: bool = False
) -> list[Path]:
    """Return the files of `source`, item by item, sorted inside each folder and glob.

    `as_text`: also files of unknown suffixes, which are plain text.
    Raises FileNotFoundError for an item that matches nothing, ValueError for an empty file or one
    of an unknown suffix.
    """
    items = [source] if isinstance(source, str) else source
    found = [path for item in items for path in _files_of_item(item, key)]
    for path in found:
        if not (as_text or _suffix(path) in (*_RECORDS, *_TEXT_SUFFIXES)):
            raise ValueError(
                f"{key}: {path.name} has no suffix that tells how to read it. Known are text"
                f" ({' '.join(sorted(_TEXT_SUFFIXES))}), JSON (.jsonl .ndjson .json) and .csv .tsv,"
                f" also with .gz or .zst, tables ({' '.join(sorted(TABLE_SUFFIXES))}) and .bin/.idx"
                f" pairs. To read it as plain text: data.format=text (--format text)"
            )
    return found


def read_documents(path: Path, *, text_key: str = "text") -> Iterator[Document]:
    """Yield the non-empty documents of one file.

    Raises ValueError naming the file, and the line, entry or row.
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
    """Return the files of one item of a source."""
    path = Path(item).expanduser()
    if item == PYTHON_STDLIB:
        return _stdlib_files()
    if path.is_dir():
        try:
            saved = saved_files(path)
        except ValueError as error:
            raise ValueError(f"{key}={item} {error}") from None
        if saved is not None:
            return saved
        if files := _walk(path, _OF_FOLDERS, frozenset({"__pycache__"})):
            return files
        raise FileNotFoundError(
            f"{key}={item} is a folder without text files (suffixes taken from a folder:"
            f" {' '.join(sorted(_OF_FOLDERS))}): name other files with a glob, {item}/**/*.json"
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
    files = _walk(root, frozenset({".py"}), _STDLIB_EXCLUDED_FOLDERS)
    if not files:
        raise FileNotFoundError(
            f"data.source={PYTHON_STDLIB}: this Python has no library sources in {root}: install "
            "them, or give text files of your own"
        )
    return files


def _suffix(path: Path) -> str:
    """Return the suffix that tells how to read a file, in lower case: .jsonl for A.JSONL.gz."""
    name = Path(path.name.lower())
    inner = Path(name.stem).suffix if name.suffix in (".gz", ".zst") else ""
    return inner if inner in (*_LINES, ".json", *_CSV) else name.suffix


def _walk(root: Path, suffixes: frozenset[str], excluded: frozenset[str]) -> list[Path]:
    """Return the visible files below `root` with one of `suffixes`, sorted by their path inside it.

    Raises ValueError for a file that stands beside an archive of itself.
    """
    files = []
    for folder, names, file_names in os.walk(root):
        names[:] = [n for n in names if n not in excluded and not n.startswith(".")]
        paths = (Path(folder, name) for name in file_names if not name.startswith("."))
        files += [path for path in paths if _suffix(path) in suffixes and path.is_file()]
    whole = {str(path) for path in files}
    for path in files:
        if path.suffix.lower() in (".gz", ".zst") and str(path.with_suffix("")) in whole:
            raise ValueError(f"{path} stands beside {path.stem}, its text: remove one of them")
    # Parts, not strings: the separator must not take part in the order.
    return sorted(files, key=lambda path: path.relative_to(root).parts)


def has_records(path: Path) -> bool:
    """Return whether a file holds objects with keys: JSON, or rows of a table."""
    return _suffix(path) in _RECORDS


def read_records(path: Path) -> Iterator[JsonLine]:
    """Yield the objects of a file that `has_records`.

    Raises ValueError naming the file and the line, entry or row.
    """
    suffix = _suffix(path)
    if suffix in _LINES:
        yield from read_jsonl(path)
    elif suffix == ".json":
        yield from _read_json(path)
    elif suffix in _CSV:
        yield from _read_csv(path, _CSV[suffix])
    else:
        for number, (row, num_bytes) in enumerate(read_table(path), start=1):
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
        begin = file.read(_BEGIN).removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
    if begin in (b"{", b""):
        yield from read_jsonl(path)
        return
    if begin != b"[":
        raise ValueError(f"{path} is not JSON: it must be an array of objects, or JSON lines")
    decoder = json.JSONDecoder()
    with _opened(path) as file:
        text = TextIOWrapper(file, encoding="utf-8-sig")
        held = text.read(_BEGIN)
        at, number, size = held.index("[") + 1, 1, _CHUNK
        while True:
            where, end, fault = f"{path}, entry {number}", len(held), "it is cut off"
            at = _after_space(held, at)  # raw_decode refuses white space before a value
            if held[at : at + 1] == "]" and number == 1:  # an empty array
                at += 1
                break
            try:
                record, end = decoder.raw_decode(held, at)
                end = _after_space(held, end)
                is_cut_off = end == len(held)  # a comma, or the rest of a number, may follow
                fault = fault if is_cut_off else "no comma follows it"
            except RecursionError:
                raise ValueError(f"{where} is nested too deeply: correct or remove it") from None
            except json.JSONDecodeError as error:
                # A fault far from the end of what is held is one of the file.
                is_cut_off = error.pos > len(held) - _MOST_MISSING or "Unterminated" in error.msg
                fault = f"{error.msg}, {max(0, error.pos - at)} characters after its beginning"
            if held[end : end + 1] in (",", "]"):
                yield _json_line(_checked(record, where), where, end - at)
                at, number, size = end + 1, number + 1, _CHUNK
                if held[end] == "]":
                    break
                continue
            # Twice as much each time: a long entry is not decoded a thousand times.
            if not is_cut_off or not (more := text.read(size)):
                raise ValueError(f"{where} is not JSON ({fault}): correct or remove it")
            held, at, size = held[at:] + more, 0, 2 * size
        if rest := (held[at:] + text.read(_CHUNK)).strip():
            raise ValueError(f"{path}: {rest[:20]!r} follows the array: write one array, or lines")


def _read_csv(path: Path, separator: str) -> Iterator[JsonLine]:
    """Yield the rows of a .csv or .tsv file, whose first row has the keys; every cell is text."""
    csv.field_size_limit(sys.maxsize)  # 131,072 characters, else: less than a long document
    with _opened(path) as file:
        text = TextIOWrapper(file, encoding="utf-8-sig", newline="")
        rows = csv.DictReader(text, delimiter=separator, strict=True)
        number = 0
        try:
            for number, row in enumerate(rows, start=1):
                where = f"{path}, row {number}"
                if None in row or None in row.values():
                    raise ValueError(f"{where} has more or fewer cells than the first row")
                yield JsonLine(row, where, sum(map(len, row.values())))
        except csv.Error as error:
            raise ValueError(f"{path}, row {number + 1} is not CSV: {error}") from None


def _after_space(text: str, at: int) -> int:
    """Return the place of the first character from `at` on that is not white space."""
    found = _SPACE.match(text, at)
    assert found is not None
    return found.end()


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    """Open a file, decompressed as its suffix says.  Raises ValueError if it is damaged."""
    try:
        with _decompressed(path) as file:
            yield file
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error.reason}): convert it") from None
    except ValueError:
        raise
    except Exception as error:  # each of the decompressors has its own
        raise ValueError(f"{path} cannot be read: {error}") from None


def _decompressed(path: Path) -> Any:
    """Open a file for reading through the decompressor that its suffix names."""
    suffix = path.suffix.lower()
    if suffix == ".gz":
        return gzip.open(path)
    if suffix != ".zst":
        return path.open("rb")
    if sys.version_info >= (3, 14):
        from compression import zstd

        return zstd.open(path)
    require(f"reading {path}", "pyarrow", extra="data")
    import pyarrow

    return BufferedReader(pyarrow.CompressedInputStream(pyarrow.OSFile(str(path)), "zstd"))


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
    """Return the object in a line.  Raises ValueError if there is none."""
    try:
        record = json.loads(line)
    except ValueError as error:
        hint = ": write each object on one line, or an array" * (line.strip() in (b"{", b"["))
        raise ValueError(
            f"{where} is not JSON ({error}){hint or ': correct or remove the line'}"
        ) from None
    except RecursionError:
        raise ValueError(f"{where} is nested too deeply: correct or remove it") from None
    return _checked(record, where)


def _checked(record: Any, where: str) -> dict[str, Any]:
    """Return `record`.  Raises ValueError unless it is an object."""
    if not isinstance(record, dict):
        raise ValueError(f"{where} is a JSON {type(record).__name__}: it must be an object")
    return record


def _text_of_line(record: dict[str, Any], text_key: str, where: str) -> str:
    """Return the text of one object, or raise ValueError saying where and what is wrong."""
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
