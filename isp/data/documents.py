"""The documents of a text source, in an order that depends on the source's paths alone."""

import glob
import json
import os
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from isp.data.config import PYTHON_STDLIB
from isp.data.tables import TABLE_SUFFIXES, read_table, saved_files

__all__ = [
    "Document",
    "JsonLine",
    "find_files",
    "has_records",
    "read_documents",
    "read_jsonl",
    "read_records",
]

# What a folder contributes; a file that is named, or matched by a glob, may have any suffix.
# fmt: off
_TEXT_SUFFIXES = frozenset({
    ".txt", ".text", ".md", ".rst", ".org", ".tex", ".jsonl", *TABLE_SUFFIXES,
    ".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".cuh", ".go", ".java", ".jl", ".js",
    ".lua", ".r", ".rb", ".rs", ".scala", ".sh", ".sql", ".swift", ".ts",
})
# fmt: on


# Tests hold odd encodings and generated tables; packages are not the library's own.
_STDLIB_EXCLUDED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
)


class Document(NamedTuple):
    """One document, and how many bytes of its file it took (for a progress bar)."""

    text: str
    num_bytes: int


class JsonLine(NamedTuple):
    """One line of a .jsonl file, or row of a table: what it holds, its place, how many bytes.

    Keys that are null are not in it.
    """

    record: dict[str, Any]
    where: str
    num_bytes: int


def find_files(source: str | Sequence[str], *, key: str = "data.source") -> list[Path]:
    """The files of `source`, item by item, sorted inside each folder and glob.

    Raises FileNotFoundError for an item that matches nothing, ValueError for an empty file.
    """
    items = [source] if isinstance(source, str) else source
    return [path for item in items for path in _files_of_item(item, key)]


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
        try:
            saved = saved_files(path)
        except ValueError as error:
            raise ValueError(f"{key}={item} {error}") from None
        if saved is not None:
            return saved
        if files := _walk(path, _TEXT_SUFFIXES, frozenset({"__pycache__"})):
            return files
        raise FileNotFoundError(
            f"{key}={item} is a folder without text files (suffixes taken from a folder: "
            f"{' '.join(sorted(_TEXT_SUFFIXES))}): name other files with a glob, {item}/**/*.log"
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


def _walk(root: Path, suffixes: frozenset[str], excluded: frozenset[str]) -> list[Path]:
    """The visible files below `root` with one of `suffixes`, sorted by their path inside it."""
    files = []
    for folder, names, file_names in os.walk(root):
        names[:] = [n for n in names if n not in excluded and not n.startswith(".")]
        paths = (Path(folder, name) for name in file_names if not name.startswith("."))
        files += [path for path in paths if path.suffix in suffixes and path.is_file()]
    # Parts, not strings: the separator must not take part in the order.
    return sorted(files, key=lambda path: path.relative_to(root).parts)


def has_records(path: Path) -> bool:
    """Whether a file holds objects with keys: lines of JSON, or rows of a table."""
    return path.suffix == ".jsonl" or path.suffix.lower() in TABLE_SUFFIXES


def read_records(path: Path) -> Iterator[JsonLine]:
    """The objects of a file that `has_records`.  Raises ValueError naming the file and the line."""
    if path.suffix == ".jsonl":
        yield from read_jsonl(path)
        return
    for number, (row, num_bytes) in enumerate(read_table(path), start=1):
        yield _json_line(row, f"{path}, row {number}", num_bytes)


def read_jsonl(path: Path) -> Iterator[JsonLine]:
    """The objects of a .jsonl file, line by line; blank lines are left out.

    Raises ValueError naming the file and the line that is not a JSON object.
    """
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                where = f"{path}, line {number}"
                yield _json_line(_parsed(line, where), where, len(line))


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
    if not isinstance(record, dict):
        raise ValueError(f"{where} is a JSON {type(record).__name__}: each line must be an object")
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
