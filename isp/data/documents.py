"""Finds the files of a source, copies remote ones, and reads their documents or rows.

The order of files depends only on their paths. JSON is read one object at a time and without a
common schema: a schema would lose keys where conversations differ. Tables are read in batches.
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
from hashlib import sha256
from io import BufferedReader, TextIOWrapper
from pathlib import Path
from socket import gethostname
from typing import IO, Any, NamedTuple

from isp.config.data import PYTHON_STDLIB
from isp.utils.environment import require
from isp.utils.files import read_json
from isp.utils.text import check_complete, first_line

__all__ = [
    "Document",
    "JsonLine",
    "find_files",
    "has_records",
    "local_copies",
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
_TABLE_SUFFIXES = frozenset({".parquet", ".arrow", ".feather"})
"""Suffixes of tables that pyarrow reads."""
_BATCH_ROWS = 1024
"""Number of rows of a .parquet file that are read at a time."""
_LINES = (".jsonl", ".ndjson")
"""Suffixes of files with one JSON object on each line."""
_CSV = {".csv": ",", ".tsv": "\t"}
"""Suffixes of tables in text form, with the character that separates cells."""
_RECORDS = (*_LINES, ".json", *_CSV, *sorted(_TABLE_SUFFIXES))
"""Suffixes of files with objects or rows, see `has_records`."""
_OF_FOLDERS = _TEXT_SUFFIXES | {*_LINES, *_TABLE_SUFFIXES}
"""Suffixes of the files that are read from a folder. Not .json and .csv: in a folder, these often
describe the other files."""
_CHUNK = 2**20
"""Number of characters of a JSON array that are read at a time."""
_BEGIN = 2**16
"""Number of bytes at the beginning of a file in which the bracket of an array has to be."""
_SPACE = re.compile(r"[ \t\r\n]*")
_MOST_MISSING = 12
"""A JSON error at most this many characters before the end of the text read so far may only mean
that the text is cut off, as inside of \\u00e9 or -Infinity."""

_REMOTE = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
"""Begin of a URL."""
_HUB = re.compile(r"hf://(?!datasets/)([\w.-]+/[\w.-]+)(?::([\w.-]+))?")
"""A data set of the Hugging Face hub: name, and split if given."""

# Tests have files in odd encodings and generated tables; site-packages are other projects.
_STDLIB_EXCLUDED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
)


class Document(NamedTuple):
    """A document of a text source."""

    text: str
    num_bytes: int
    """Size of the document in its file, for a progress bar."""


class JsonLine(NamedTuple):
    """An object in a JSON file (a line, or an entry of an array), or a row of a table."""

    record: dict[str, Any]
    """The values by key, without those that are null."""
    where: str
    """The file, and the number of the line, array element or table row in it, for errors."""
    num_bytes: int
    """Size in the decompressed file: bytes, or characters for JSON arrays and .csv files."""


def find_files(
    source: str | Sequence[str], *, key: str = "data.source", as_text: bool = False
) -> list[Path]:
    """Return the files of `source`: a path, folder or glob, or a list of them.

    Files are in the order of the list, and those of a folder or glob are sorted. `as_text` also
    accepts files with unknown suffixes, as plain text. `key` names the source in errors. Raises
    FileNotFoundError for an element of the list that matches nothing, and ValueError for an empty
    file or one with an unknown suffix.
    """
    items = [source] if isinstance(source, str) else source
    found = [path for item in items for path in _files_of_item(item, key)]
    for path in found:
        if not (as_text or _suffix(path) in (*_RECORDS, *_TEXT_SUFFIXES)):
            raise ValueError(
                f"{key}: {path.name} has no suffix that tells how to read it. Known are text"
                f" ({' '.join(sorted(_TEXT_SUFFIXES))}), JSON (.jsonl .ndjson .json) and .csv .tsv,"
                f" also with .gz or .zst, tables ({' '.join(sorted(_TABLE_SUFFIXES))}) and"
                f" .bin/.idx pairs. To read it as plain text: data.format=text (--format text)"
            )
    return found


def read_documents(path: Path, *, text_key: str = "text") -> Iterator[Document]:
    """Yield the documents of a file that are not empty; a text file is one document.

    Raises ValueError, with the file and the line, entry or row.
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
    """Return the files of one path, folder or glob; raise the errors of `find_files`."""
    path = Path(item).expanduser()
    if item == PYTHON_STDLIB:
        return _stdlib_files()
    if path.is_dir():
        try:
            saved = _saved_files(path)
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
    """Return the .py files of the running Python's standard library, about 11 MB.

    They differ between versions of Python, and so do losses on them.
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
    """Return the suffix that decides the format of a file, in lower case: .jsonl for A.JSONL.gz."""
    name = Path(path.name.lower())
    inner = Path(name.stem).suffix if name.suffix in (".gz", ".zst") else ""
    return inner if inner in (*_LINES, ".json", *_CSV) else name.suffix


def _walk(root: Path, suffixes: frozenset[str], excluded: frozenset[str]) -> list[Path]:
    """Return the visible files below `root` with one of `suffixes`, sorted by relative path.

    Raises ValueError if a file and a compressed copy of it are both there.
    """
    files = []
    for folder, names, file_names in os.walk(root):
        # Change the list in place: os.walk descends into the folders that stay in it.
        names[:] = [n for n in names if n not in excluded and not n.startswith(".")]
        paths = (Path(folder, name) for name in file_names if not name.startswith("."))
        files += [path for path in paths if _suffix(path) in suffixes and path.is_file()]
    whole = {str(path) for path in files}
    for path in files:
        if path.suffix.lower() in (".gz", ".zst") and str(path.with_suffix("")) in whole:
            raise ValueError(
                f"{path} is next to {path.stem}, so the same text would be read twice: remove one"
            )
    # Compare parts of paths: as strings, "a-b" would come before "a/b", since "-" is before "/".
    return sorted(files, key=lambda path: path.relative_to(root).parts)


def has_records(path: Path) -> bool:
    """Return True if a file has objects with keys (JSON or rows of a table), by its suffix."""
    return _suffix(path) in _RECORDS


def read_records(path: Path) -> Iterator[JsonLine]:
    """Yield the objects or rows of a file for which `has_records` is true.

    Raises ValueError, with the file and the line, entry or row.
    """
    suffix = _suffix(path)
    if suffix in _LINES:
        yield from read_jsonl(path)
    elif suffix == ".json":
        yield from _read_json(path)
    elif suffix in _CSV:
        yield from _read_csv(path, _CSV[suffix])
    else:
        for number, (row, num_bytes) in enumerate(_read_table(path), start=1):
            yield _json_line(row, f"{path}, row {number}", num_bytes)


def read_jsonl(path: Path) -> Iterator[JsonLine]:
    """Yield the objects of a file of JSON lines; blank lines are skipped.

    Raises ValueError, with the file and the line, for a line that is not a JSON object.
    """
    with _opened(path) as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                where = f"{path}, line {number}"
                yield _json_line(_parsed(line, where), where, len(line))


def _read_json(path: Path) -> Iterator[JsonLine]:
    """Yield the entries of a JSON array, or the lines of a .json file that begins with an object.

    An array is decoded entry by entry: `held` is the text from the current entry on, as far as it
    was read. More is read until it has the entry and the comma or bracket after that.
    """
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
            # An empty array; a bracket after a comma is an error.
            if held[at : at + 1] == "]" and number == 1:
                at += 1
                break
            try:
                record, end = decoder.raw_decode(held, at)
                end = _after_space(held, end)
                # If the entry ends where `held` does, the rest of a number may still be unread.
                is_cut_off = end == len(held)
                fault = fault if is_cut_off else "no comma follows it"
            except RecursionError:
                raise ValueError(f"{where} is nested too deeply: correct or remove it") from None
            except json.JSONDecodeError as error:
                # More text can only help if the error is near the end of `held`.
                is_cut_off = error.pos > len(held) - _MOST_MISSING or "Unterminated" in error.msg
                fault = f"{error.msg}, {max(0, error.pos - at)} characters after its beginning"
            if held[end : end + 1] in (",", "]"):
                yield _json_line(_checked(record, where), where, end - at)
                at, number, size = end + 1, number + 1, _CHUNK
                if held[end] == "]":
                    break
                continue
            # Read twice as much each time: each attempt decodes the entry from its beginning, so a
            # long one is decoded only a few times.
            if not is_cut_off or not (more := text.read(size)):
                raise ValueError(f"{where} is not JSON ({fault}): correct or remove it")
            held, at, size = held[at:] + more, 0, 2 * size
        if rest := (held[at:] + text.read(_CHUNK)).strip():
            raise ValueError(f"{path}: {rest[:20]!r} follows the array: write one array, or lines")


def _read_csv(path: Path, separator: str) -> Iterator[JsonLine]:
    """Yield the rows of a .csv or .tsv file; the first row has the keys, all values are text."""
    csv.field_size_limit(sys.maxsize)  # documents may be longer than the default, 131,072
    with _opened(path) as file:
        text = TextIOWrapper(file, encoding="utf-8-sig", newline="")
        rows = csv.DictReader(text, delimiter=separator, strict=True)
        number = 0
        try:
            for number, row in enumerate(rows, start=1):
                where = f"{path}, row {number}"
                if None in row or None in row.values():
                    raise ValueError(
                        f"{where} has more or fewer cells than the first row: correct or remove it"
                    )
                yield JsonLine(row, where, sum(map(len, row.values())))
        except csv.Error as error:
            raise ValueError(f"{path}, row {number + 1} is not CSV: {error}") from None


def _after_space(text: str, at: int) -> int:
    """Return the index of the first character from `at` on that is not white space."""
    found = _SPACE.match(text, at)
    assert found is not None
    return found.end()


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    """Context with a file open for reading, decompressed if its suffix says so.

    Raises ValueError if the file is damaged or not UTF-8.
    """
    try:
        with _decompressed(path) as file:
            yield file
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error.reason}): convert it") from None
    except ValueError:
        raise
    except Exception as error:  # each decompressor defines its own exceptions
        raise ValueError(f"{path} cannot be read: {error}") from None


def _decompressed(path: Path) -> Any:
    """Open a file for reading, through the decompressor for .gz or .zst."""
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
    """Return a `JsonLine` without keys whose value is null, at any depth.

    In tables, and in JSON that `datasets` writes, every row has every key, and null in place of a
    value that the row lacks. So null means that there is no such key.
    """
    # List the null keys in `where`, which begins each error about the row: an error such as "has no
    # key 'text'" would otherwise look wrong to a user who sees the key in the file.
    null = ", ".join(key for key, value in record.items() if value is None)
    where += f" (null: {null})" if null else ""
    try:
        return JsonLine(_without_null(record), where, num_bytes)
    except RecursionError:
        raise ValueError(f"{where} is nested too deeply: correct or remove it") from None


def _without_null(value: Any) -> Any:
    """Return `value` without keys that are null, in dicts and lists of any depth."""
    if isinstance(value, dict):
        return {key: _without_null(x) for key, x in value.items() if x is not None}
    return [_without_null(x) for x in value] if isinstance(value, list) else value


def _parsed(line: bytes, where: str) -> dict[str, Any]:
    """Return the JSON object in a line; raise ValueError if the line is not one."""
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
    """Return `record`; raise ValueError if it is not an object."""
    if not isinstance(record, dict):
        raise ValueError(f"{where} is a JSON {type(record).__name__}: it must be an object")
    return record


def _text_of_line(record: dict[str, Any], text_key: str, where: str) -> str:
    """Return the text under `text_key`; raise ValueError, with the place, if there is none."""
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
    except UnicodeEncodeError as error:  # JSON can escape half of a surrogate pair
        raise ValueError(
            f"{where} holds text that is not Unicode ({error.reason}): correct or remove it"
        ) from None
    return text


def _saved_files(folder: Path) -> list[Path] | None:
    """Return the Arrow files, in order, of a folder that `save_to_disk` of `datasets` wrote.

    Returns None for other folders. Raises ValueError for several splits, for a selection of rows
    that is stored as indices, and for files outside of the folder.
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
        return None  # another program has written this state.json
    if state.get("_indices_data_files"):
        raise ValueError("holds a selection of its rows: save it after flatten_indices()")
    files = []
    for entry in entries:
        name = entry.get("filename") if isinstance(entry, dict) else None
        # Only a name, not a path, which could point to any file of this machine.
        if not isinstance(name, str) or Path(name).name != name:
            raise ValueError(
                f"is not read: its state.json names the file {json.dumps(name)}, which is not in"
                f" the folder: save the dataset again with save_to_disk"
            )
        if not (folder / name).is_file():
            raise ValueError(f"lacks {name}, or it is no regular file: copy the folder again")
        files.append(folder / name)
    return files


def _read_table(path: Path) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield each row of a table, with the mean number of bytes of the rows in its batch.

    Raises ValueError if the file is damaged or has a value that Python cannot represent, and if
    pyarrow is not installed.
    """
    require(f"data.source={path}", "pyarrow", extra="data")
    column = ""
    try:
        for batch in _batches(path):
            num_bytes = batch.nbytes // max(1, batch.num_rows)
            names, columns = batch.schema.names, []
            for name, values in zip(names, batch.columns, strict=True):
                column = f", column {name!r},"  # The error below names this column.
                columns.append(values.to_pylist())
            column = ""
            for row in zip(*columns, strict=True):
                yield dict(zip(names, row, strict=True)), num_bytes
    except Exception as error:  # such as OverflowError for a date after year 9999
        raise ValueError(f"{path}{column} cannot be read: {error}") from error


def _batches(path: Path) -> Iterator[Any]:
    """Yield the record batches of a .parquet or Arrow file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    if path.suffix.lower() == ".parquet":
        with pq.ParquetFile(path) as file:
            yield from file.iter_batches(_BATCH_ROWS)
        return
    with pa.memory_map(str(path)) as source:
        try:
            reader = pa.ipc.open_file(source)
        except pa.ArrowInvalid:  # `datasets` writes Arrow's stream format, not its file format.
            source.seek(0)
            yield from pa.ipc.open_stream(source)
        else:
            yield from map(reader.get_batch, range(reader.num_record_batches))


def local_copies(items: Sequence[str], key: str) -> list[str]:
    """Return `items`, with the paths of local copies in place of URLs (`s3://`, `hf://`).

    Copies are kept in `$ISP_CACHE` (default: `~/.cache/isp`), and made again if the remote file has
    changed. Raises ValueError, with `key`, if a URL cannot be read, or the package that reads it is
    not installed.
    """
    return [path for item in items for path in _local(item, key)]


def _local(item: str, key: str) -> list[str]:
    """Return the local paths of one path or URL, after copying what a URL names."""
    if not _REMOTE.match(item):
        return [item]
    check_complete(key, item)
    hub = _HUB.fullmatch(item)
    require(f"{key}={item}", "datasets" if hub else "fsspec", extra="data")
    try:
        return _of_hub(hub[1], hub[2] or "train") if hub else _copied(item)
    except Exception as error:  # each library of a file system defines its own exceptions
        why = first_line(error)
        fault = f"{key}={item} cannot be read ({why})"
        # A ValueError means a wrong scheme or split, not the network.
        if not isinstance(error, ValueError):
            fault += ": without a network, copy it to this machine and name the copy"
        raise ValueError(fault) from error


def _of_hub(name: str, split: str) -> list[str]:
    """Return the Arrow files of a split, in the cache to which `datasets` downloads them once."""
    from datasets import load_dataset

    return [file["filename"] for file in load_dataset(name, split=split).cache_files]


def _copied(url: str) -> list[str]:
    """Copy what `url` names, and return local paths.

    For a glob these are the copies of its files, for a folder the copied folder. For a .bin or .idx
    it is the .bin; its .idx, its labels and the record of its tokenizer are copied with it.
    """
    from filelock import FileLock  # comes with torch
    from fsspec.core import url_to_fs

    system, path = url_to_fs(url)
    stem, suffix = os.path.splitext(path)
    is_pair, is_folder = suffix in (".bin", ".idx"), system.isdir(path)
    if is_pair:
        more = [f"{stem}.labels.idx", f"{stem}.labels.bin", f"{stem}.tokenizer.json"]
        # Put .bin last: for a pair, the path of the last copy is returned.
        found = [*filter(system.exists, more), f"{stem}.idx", f"{stem}.bin"]
    elif is_folder:
        found = sorted(system.find(path))
    elif "://" in path:  # This is http: it has no folders that have to be left out.
        found = system.glob(path)
    else:
        matches = system.glob(path, detail=True)
        found = sorted(file for file in matches if matches[file]["type"] != "directory")
    if not found:
        raise FileNotFoundError("it matches no file")
    # Cut off the query of a URL: the name of the copy has to end with the suffix of its format.
    names = [file.partition("?")[0] if "://" in file else file for file in found]
    above = path if is_folder else os.path.commonpath([os.path.dirname(name) for name in names])
    root = Path(os.environ.get("ISP_CACHE", "~/.cache/isp")).expanduser()
    # `ukey` is fsspec's hash of a file's properties: a file that has changed gets another folder.
    # For http it is a hash of the URL, so a change there is not noticed.
    named = root / sha256("".join(map(system.ukey, found)).encode()).hexdigest()[:16]
    copies = [str(named / os.path.relpath(name, above)) for name in names]
    named.mkdir(parents=True, exist_ok=True)
    with FileLock(named.with_suffix(".lock")):  # one rank copies, the others wait
        for file, copy in zip(found, map(Path, copies), strict=True):
            if not copy.exists():
                part = copy.with_name(f".{copy.name}.{gethostname()}.{os.getpid()}")
                copy.parent.mkdir(parents=True, exist_ok=True)
                system.get_file(file, str(part))
                # Rename it when it is complete, so that a copy that was cut off is made again. Its
                # first name has host and process: on some file systems the lock only works among
                # processes of one machine.
                part.replace(copy)
    if is_folder:
        return [str(named)]
    return copies[-1:] if is_pair else copies
