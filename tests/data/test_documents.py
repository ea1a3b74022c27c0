"""Documents of text sources: their selection, their order, and errors."""

import gzip
import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from isp.data import documents
from isp.data.documents import find_files, read_documents


def write(path: Path, text: str | bytes) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return str(path)


def documents_of(
    source: str | list[str], text_key: str = "text", key: str = "data.source"
) -> list[str]:
    """Return the texts of a source."""
    files = find_files(source, key=key)
    return [text for file in files for text, _ in read_documents(file, text_key=text_key)]


def test_a_text_file_is_one_document_byte_for_byte(tmp_path: Path) -> None:
    """Catches line endings that Python translates."""
    assert documents_of(write(tmp_path / "a.txt", "x\r\ny\n")) == ["x\r\ny\n"]


def test_a_byte_order_mark_is_removed(tmp_path: Path) -> None:
    """Catches a document that begins with an invisible character."""
    assert documents_of(write(tmp_path / "a.txt", b"\xef\xbb\xbfx")) == ["x"]


def test_jsonl_has_one_document_a_line(tmp_path: Path) -> None:
    """Catches blank lines, empty texts and separators inside a text that count as documents."""
    texts = ["one\n", "", "two\u2028three", "4"]
    lines = "\n\n".join(json.dumps({"body": text}, ensure_ascii=False) for text in texts)
    source = write(tmp_path / "a.jsonl", lines)
    assert documents_of(source, text_key="body") == ["one\n", "two\u2028three", "4"]


def _zst(data: bytes) -> bytes:
    pyarrow = pytest.importorskip("pyarrow")
    return bytes(pyarrow.compress(data, codec="zstd", asbytes=True))


@pytest.mark.parametrize(
    ("suffix", "packed"),
    [("", bytes), (".gz", gzip.compress), (".GZ", gzip.compress), (".zst", _zst)],
)
def test_json_files_are_recognized_by_name(
    tmp_path: Path, suffix: str, packed: Callable[[bytes], bytes]
) -> None:
    """Catches JSON read as plain text: arrays, compressed lines, and suffixes in upper case."""
    texts = ["one\n", 'tw"o], {', "3" * 100]
    objects = [{"text": text, "more": [{"a": None}]} for text in texts]
    lines = "\n".join(map(json.dumps, objects))
    whole = {"a.jsonl": lines, "b.NDJSON": lines, "c.json": lines}
    for indent in (None, 2):
        whole[f"d{indent}.json"] = json.dumps(objects, indent=indent)
    whole["e.Json"] = "\ufeff " + json.dumps(objects) + " \n"
    for name, text in whole.items():
        source = write(tmp_path / f"{name}{suffix}", packed(text.encode()))
        assert documents_of(source) == texts, name


def test_a_json_array_is_read_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an entry that is lost, or read twice, at the boundary of two chunks."""
    texts = [f"{i} é日] , [\n" * (i % 7) + "." for i in range(40)]
    entries = [{"text": text, "n": [-1.5e10, True, None]} for text in texts]
    for size, is_ascii in itertools.product((1, 2, 3, 7, 64, 1000), (True, False)):
        body = json.dumps(entries, indent=1, ensure_ascii=is_ascii)
        source = write(tmp_path / "a.json", f"\r\n{body}\r\n")
        monkeypatch.setattr(documents, "_CHUNK", size)
        assert documents_of(source) == texts, size
        for empty in ("[ ]", "[]", ""):
            assert documents_of([write(tmp_path / "b.json", f"{empty}\n")]) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[{"text": "a"}, {"text": ]', "entry 2 is not JSON"),
        ('[{"text": "a"}, 3]', "entry 2 is a JSON int: it must be an object"),
        ('[{"text": "a"}', "entry 1 is not JSON (it is cut off)"),
        ('[{"text": "a"} {"text": "b"}]', "entry 1 is not JSON (no comma follows it)"),
        ('[{"text": "a"}, {"text" "a", "b": 1234567890}]', "delimiter, 8 characters after its"),
        ('[{"text": "a"},]', "entry 2 is not JSON"),
        ('[{"text": "a"}]\n[{"text": "b"}]', '\'[{"text": "b"}]\' follows the array'),
        ("[] x", "'x' follows the array"),
        ('"text"', "is not JSON: it must be an array of objects, or JSON lines"),
        ('{\n"text": "a"}', "write each object on one line, or an array"),
        (b'[{"text": "\xff"}]', "is not UTF-8 text"),
        ("[" + "[" * 100_000, "entry 1 is nested too deeply"),
    ],
)
def test_a_bad_json_array_is_refused(tmp_path: Path, text: str | bytes, message: str) -> None:
    """Catches a traceback, and an error without its position."""
    source = write(tmp_path / "a.json", text)
    with pytest.raises(ValueError, match=r"a\.json") as refused:
        documents_of(source)
    assert message in str(refused.value)


@pytest.mark.parametrize(("suffix", "packed"), [(".gz", gzip.compress), (".zst", _zst)])
def test_concatenated_archives_are_read_and_truncated_ones_refused(
    tmp_path: Path, suffix: str, packed: Callable[[bytes], bytes]
) -> None:
    """Catches a traceback, and lines that are silently lost."""
    whole = packed(b'{"text": "a"}\n' * 1000)
    assert len(documents_of(write(tmp_path / f"a.jsonl{suffix}", whole * 2))) == 2000
    with pytest.raises(ValueError, match=r"b.jsonl.* cannot be read: "):
        documents_of(write(tmp_path / f"b.jsonl{suffix}", whole[:-10]))


def test_every_cell_of_csv_is_text(tmp_path: Path) -> None:
    """Catches cells converted to numbers, NA or empty cells interpreted, and rows of another
    length.
    """
    body = 'id,text\r\n1,NA\r\n2,"a ""b"",\r\nc"\r\n3,\r\n4,17\r\n'
    texts = ["NA", 'a "b",\r\nc', "17"]
    assert documents_of(write(tmp_path / "a.csv", "\ufeff" + body)) == texts
    assert documents_of(write(tmp_path / "b.CSV.gz", gzip.compress(body.encode()))) == texts
    long = "x" * 200_000
    assert documents_of(write(tmp_path / "c.tsv", f"text\tid\n{long}\t1\n")) == [long]
    for row, fault in (
        ("5", "row 2 has more or fewer"),
        ("5,a,b", "row 2 has"),
        ('5,"a', "is not CSV"),
    ):
        source = write(tmp_path / "d.csv", f"id,text\n1,a\n{row}\n")
        with pytest.raises(ValueError, match=rf"d\.csv, row 2.*{fault.removeprefix('row 2 ')}"):
            documents_of(source)


def test_an_unknown_suffix_is_refused(tmp_path: Path) -> None:
    """Catches a file of unknown format that is trained on as text."""
    for name in ("a.log", "a", "a.jsonl.bz2"):
        source = write(tmp_path / name, "text")
        with pytest.raises(
            ValueError, match=rf"{name} has no suffix that tells how to read it. Known"
        ):
            documents_of(source)
        assert find_files(source, as_text=True) == [tmp_path / name]


def test_a_folder_is_sorted_and_filtered(tmp_path: Path) -> None:
    """Catches the order of the file system, and hidden files, caches or binaries as documents."""
    for name in ("b.txt", "a/z.py", "a.txt", "a/b/c.md", "a!/x.txt"):
        write(tmp_path / name, name)
    for name in (".git/x.txt", ".hidden.txt", "__pycache__/x.py", "image.png"):
        write(tmp_path / name, "no")
    write(tmp_path / "empty.txt", "")
    write(tmp_path / "c.JSONL", '{"text": "c1"}\n{"text": "c2"}\n')
    write(tmp_path / "config.json", '{"a": 1}')
    found = documents_of(str(tmp_path))
    # Parts are compared: "a/.." goes before "a!/.." although "!" sorts before "/".
    assert found == ["a/b/c.md", "a/z.py", "a!/x.txt", "a.txt", "b.txt", "c1", "c2"]


def test_a_file_and_its_compressed_copy_are_refused(tmp_path: Path) -> None:
    """Catches lines that are trained twice."""
    write(tmp_path / "a.jsonl", "{}")
    write(tmp_path / "a.jsonl.gz", gzip.compress(b"{}"))
    with pytest.raises(ValueError, match=r"a.jsonl.gz is next to a.jsonl, so .*: remove one"):
        documents_of(str(tmp_path))


def test_glob_and_list_keep_the_order_of_the_items(tmp_path: Path) -> None:
    """Catches a global sort, which would change the order when an item is added."""
    for name in ("a.txt", "b.txt", "sub/c.txt"):
        write(tmp_path / name, name)
    items = [str(tmp_path / "b.txt"), str(tmp_path / "**" / "*.txt")]
    assert documents_of(items) == ["b.txt", "a.txt", "b.txt", "sub/c.txt"]


def test_a_name_with_glob_characters_is_a_file_first(tmp_path: Path) -> None:
    """Catches a file that cannot be named because its name looks like a pattern."""
    assert documents_of(write(tmp_path / "a[1].txt", "x")) == ["x"]


def test_python_stdlib_is_only_the_standard_library() -> None:
    """Catches installed packages and tests in the text, and an order that is not sorted."""
    files = find_files("python-stdlib")
    names = [path.name for path in files]
    assert {"argparse.py", "dataclasses.py"} <= set(names)
    excluded = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}
    assert not any(excluded & set(path.parts[-4:]) for path in files)
    assert files == find_files("python-stdlib")
    top = [path.name for path in files if path.parent == files[names.index("argparse.py")].parent]
    assert top == sorted(top)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "is not JSON"),
        ("[1]", "is a JSON list"),
        ('{"body": "x", "id": 1}', "has no key 'text', only 'body', 'id'"),
        ("{}", "has no key 'text', only none"),
        ('{"text": 3}', "holds int under 'text'"),
        ('{"text": null}', "(null: text) has no key 'text', only none"),
        ('{"text": "\\ud800"}', "not Unicode"),
        (b'{"text": "\xff"}', "is not JSON"),
        ('{"text": ' + "[" * 100_000, "is nested too deeply"),
    ],
)
def test_a_bad_jsonl_line_is_refused_with_file_and_line(
    tmp_path: Path, line: str | bytes, message: str
) -> None:
    """Catches a message that does not say which line of which file is bad."""
    body = line if isinstance(line, bytes) else line.encode()
    source = write(tmp_path / "a.jsonl", b'{"text": "fine"}\n\n' + body + b"\n")
    with pytest.raises(ValueError, match=r"a\.jsonl, line 3 ") as refused:
        documents_of(source)
    assert message in str(refused.value)


def test_a_binary_file_is_refused(tmp_path: Path) -> None:
    """Catches undecodable bytes that silently become replacement characters."""
    source = write(tmp_path / "a.txt", b"abc\xff")
    with pytest.raises(ValueError, match=r"a\.txt is not UTF-8 text \(byte 0xff at offset 3\)"):
        documents_of(source)


def test_sources_without_text_are_refused(tmp_path: Path) -> None:
    """Catches a source without text that would show as an empty dataset, or not at all."""
    empty = write(tmp_path / "empty.txt", "")
    write(tmp_path / "binaries" / "x.png", "x")
    os.mkfifo(tmp_path / "pipe.jsonl")
    cases: list[tuple[str, type[Exception], str]] = [
        (str(tmp_path / "no.txt"), FileNotFoundError, "does not exist"),
        (str(tmp_path / "*.none"), FileNotFoundError, "matches no file"),
        (str(tmp_path / "binaries"), FileNotFoundError, "is a folder without text files"),
        (empty, ValueError, "is an empty file"),
        (str(tmp_path / "pipe.jsonl"), ValueError, "is a pipe, a socket or a device, whose text"),
    ]
    for source, kind, message in cases:
        with pytest.raises(kind) as refused:
            documents_of(source, key="data.valid_source")
        assert str(refused.value).startswith(
            (f"data.valid_source={source} {message}", f"data.valid_source={source}{message}")
        )
