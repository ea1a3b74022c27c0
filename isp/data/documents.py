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
from hashlib import sha256
from io import BufferedReader, TextIOWrapper
from pathlib import Path
from socket import gethostname
from typing import IO, Any, NamedTuple

from isp.config.data import PYTHON_STDLIB
from isp.utils.json_file import read_json
from isp.utils.packages import require
from isp.utils.safe_text import check_complete, first_line

__all__ = [
    "Document",
    "JsonLine",
    "find_files",
    "has_records",
    "localised",
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
_BATCH_ROWS = 1024
_LINES = (".jsonl", ".ndjson")
_CSV = {".csv": ",", ".tsv": "\t"}
"""Suffixes of tables that are text, and what separates their cells."""
_RECORDS = (*_LINES, ".json", *_CSV, *sorted(_TABLE_SUFFIXES))
_OF_FOLDERS = _TEXT_SUFFIXES | {*_LINES, *_TABLE_SUFFIXES}
"""Suffixes taken from a folder, in which .json and .csv files often describe other files."""
_CHUNK = 2**20
"""Characters of a JSON array that are read at a time."""
_BEGIN = 2**16
"""Bytes among which an array begins."""
_SPACE = re.compile(r"[ \t\r\n]*")
_MOST_MISSING = 12
"""Characters before the end of a text that is cut off at which a fault may be, as in \\u00e9."""

_REMOTE = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_HUB = re.compile(r"hf://(?!datasets/)([\w.-]+/[\w.-]+)(?::([\w.-]+))?")

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
                f" also with .gz or .zst, tables ({' '.join(sorted(_TABLE_SUFFIXES))}) and"
                f" .bin/.idx pairs. To read it as plain text: data.format=text (--format text)"
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


def _saved_files(folder: Path) -> list[Path] | None:
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


def _read_table(path: Path) -> Iterator[tuple[dict[str, Any], int]]:
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
