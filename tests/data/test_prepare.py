"""Text to a .bin/.idx pair."""

import os
from pathlib import Path

import pytest

from isp.data.indexed import IndexedDataset
from isp.data.prepare import prepare
from tests.data.test_tokenizer import write_tokenizer


def test_writes_documents_with_one_eos_each(tmp_path: Path) -> None:
    """Catches a missing eos, and a summary whose numbers are not those of the files."""
    (tmp_path / "a.txt").write_text("hé")
    (tmp_path / "b.jsonl").write_text('{"body": "x"}\n{"body": ""}\n{"body": "yz"}\n')
    inputs = [str(tmp_path / "a.txt"), str(tmp_path / "b.jsonl")]
    summary = prepare(inputs, tmp_path / "out" / "p", text_key="body", progress=False)
    documents = [tokens.tolist() for tokens in IndexedDataset(tmp_path / "out" / "p")]
    assert documents == [[*"hé".encode(), 256], [ord("x"), 256], [*b"yz", 256]]
    assert summary == (tmp_path / "out" / "p", 3, 9, 3 + 14 + 15)


def test_eos_that_is_already_there(tmp_path: Path) -> None:
    """Catches an end of document written twice where the text brings its own."""
    tokenizer = write_tokenizer(tmp_path / "t", ["</s>"])
    (tmp_path / "a.jsonl").write_text('{"text": "the cat"}\n{"text": "the cat </s>"}\n')
    prepare(str(tmp_path / "a.jsonl"), tmp_path / "p", tokenizer=str(tokenizer), progress=False)
    assert [tokens.tolist() for tokens in IndexedDataset(tmp_path / "p")] == [[1, 2, 4]] * 2


def test_again_gives_the_same_bytes(tmp_path: Path) -> None:
    """Catches an append to what an earlier run wrote, and files that depend on the time."""
    (tmp_path / "a.txt").write_text("text")
    contents = []
    for output in (tmp_path / "p", tmp_path / "p.bin", str(tmp_path / "p.idx")):
        assert prepare(str(tmp_path / "a.txt"), output, progress=False).prefix == tmp_path / "p"
        contents.append([(tmp_path / f"p.{suffix}").read_bytes() for suffix in ("bin", "idx")])
    assert contents[0] == contents[1] == contents[2]


def test_bad_line_leaves_nothing(tmp_path: Path) -> None:
    """Catches half a pair after an error in the middle of the text."""
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n{"text"\n')
    with pytest.raises(ValueError, match=r"a\.jsonl, line 2 is not JSON"):
        prepare(str(tmp_path / "a.jsonl"), tmp_path / "p", progress=False)
    assert os.listdir(tmp_path) == ["a.jsonl"]


def test_inputs_that_cannot_be_prepared(tmp_path: Path) -> None:
    """Catches a pair tokenised a second time, and empty input written as an empty pair."""
    (tmp_path / "a.txt").write_text("text")
    prepare(str(tmp_path / "a.txt"), tmp_path / "p", progress=False)
    with pytest.raises(ValueError, match="is tokenised already"):
        prepare(str(tmp_path / "p"), tmp_path / "q", progress=False)
    (tmp_path / "blank.jsonl").write_text("\n")
    with pytest.raises(ValueError, match=r"input=.*blank\.jsonl holds no documents"):
        prepare([str(tmp_path / "blank.jsonl")], tmp_path / "q", progress=False)
    with pytest.raises(FileNotFoundError, match="input=gone does not exist"):
        prepare("gone", tmp_path / "q", progress=False)
    assert not list(tmp_path.glob("q*"))


@pytest.mark.parametrize("output", ["file/x", "file/x/y"])
def test_an_output_that_cannot_be_written(tmp_path: Path, output: str) -> None:
    """Catches "File exists" alone, which does not say what is wrong with the output."""
    (tmp_path / "file").write_text("text")
    with pytest.raises(ValueError, match=rf"^output=.*{output}: cannot write to .*: name a path"):
        prepare(str(tmp_path / "file"), tmp_path / output, progress=False)
