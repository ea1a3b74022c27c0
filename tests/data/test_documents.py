"""Documents of text sources: which, in which order, and what is said when there are none."""

import json
import os
from pathlib import Path

import pytest

from isp.data.documents import find_files, read_documents


def write(path: Path, text: str | bytes) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return str(path)


def documents_of(
    source: str | list[str], text_key: str = "text", key: str = "data.source"
) -> list[str]:
    """The texts of a source."""
    files = find_files(source, key=key)
    return [text for file in files for text, _ in read_documents(file, text_key=text_key)]


def test_text_file_is_one_document_byte_for_byte(tmp_path: Path) -> None:
    """Catches line endings that Python translates."""
    assert documents_of(write(tmp_path / "a.log", "x\r\ny\n")) == ["x\r\ny\n"]


def test_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    """Catches a document that begins with an invisible character."""
    assert documents_of(write(tmp_path / "a.txt", b"\xef\xbb\xbfx")) == ["x"]


def test_jsonl_is_one_document_a_line(tmp_path: Path) -> None:
    """Catches blank lines, empty texts and separators inside a text being taken for documents."""
    texts = ["one\n", "", "two\u2028three", "4"]
    lines = "\n\n".join(json.dumps({"body": text}, ensure_ascii=False) for text in texts)
    source = write(tmp_path / "a.jsonl", lines)
    assert documents_of(source, text_key="body") == ["one\n", "two\u2028three", "4"]


def test_folder_is_sorted_and_filtered(tmp_path: Path) -> None:
    """Catches the file system's order, hidden files, caches and binaries among the documents."""
    for name in ("b.txt", "a/z.py", "a.txt", "a/b/c.md", "a!/x.txt"):
        write(tmp_path / name, name)
    for name in (".git/x.txt", ".hidden.txt", "__pycache__/x.py", "image.png"):
        write(tmp_path / name, "no")
    write(tmp_path / "empty.txt", "")
    write(tmp_path / "c.jsonl", '{"text": "c1"}\n{"text": "c2"}\n')
    documents = documents_of(str(tmp_path))
    # Parts are compared: "a/.." goes before "a!/.." although "!" sorts before "/".
    assert documents == ["a/b/c.md", "a/z.py", "a!/x.txt", "a.txt", "b.txt", "c1", "c2"]


def test_glob_and_list_keep_the_order_of_the_items(tmp_path: Path) -> None:
    """Catches a global sort, which would change the order when an item is added."""
    for name in ("a.log", "b.log", "sub/c.log"):
        write(tmp_path / name, name)
    items = [str(tmp_path / "b.log"), str(tmp_path / "**" / "*.log")]
    assert documents_of(items) == ["b.log", "a.log", "b.log", "sub/c.log"]


def test_a_name_with_glob_characters_is_a_file_first(tmp_path: Path) -> None:
    """Catches a file that cannot be named because its name looks like a pattern."""
    assert documents_of(write(tmp_path / "a[1].txt", "x")) == ["x"]


def test_python_stdlib_is_the_library_alone() -> None:
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
def test_bad_jsonl_line(tmp_path: Path, line: str | bytes, message: str) -> None:
    """Catches a message that does not say which line of which file."""
    body = line if isinstance(line, bytes) else line.encode()
    source = write(tmp_path / "a.jsonl", b'{"text": "fine"}\n\n' + body + b"\n")
    with pytest.raises(ValueError, match=r"a\.jsonl, line 3 ") as refused:
        documents_of(source)
    assert message in str(refused.value)


def test_binary_file(tmp_path: Path) -> None:
    """Catches undecodable bytes that turn into silent replacement characters."""
    source = write(tmp_path / "a.txt", b"abc\xff")
    with pytest.raises(ValueError, match=r"a\.txt is not UTF-8 text \(byte 0xff at offset 3\)"):
        documents_of(source)


def test_nothing_there(tmp_path: Path) -> None:
    """Catches a source without text that would surface as an empty dataset, or not at all."""
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
