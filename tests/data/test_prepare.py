"""`isp data prepare`: from text or examples to a .bin/.idx pair."""

import itertools
import os
from pathlib import Path

import numpy as np
import pytest

from isp.config.data import DataConfig
from isp.data.indexed import IndexedDataset
from isp.data.packing import ExampleDataset
from isp.data.prepare import PrepareSummary, prepare
from isp.data.sources import open_datasets
from tests.data.chat_folder import CHATML_MARKED, chat_folder, write_lines
from tests.data.test_tokenizer import write_tokenizer


def test_documents_are_written_with_one_eos_each(tmp_path: Path) -> None:
    """Catches a missing eos, and a summary whose numbers are not those of the files."""
    (tmp_path / "a.txt").write_text("hé")
    (tmp_path / "b.jsonl").write_text('{"body": "x"}\n{"body": ""}\n{"body": "yz"}\n')
    inputs = [str(tmp_path / "a.txt"), str(tmp_path / "b.jsonl")]
    summary = prepare(inputs, tmp_path / "out" / "p", text_key="body")
    documents = [tokens.tolist() for tokens in IndexedDataset(tmp_path / "out" / "p")]
    assert documents == [[*"hé".encode(), 256], [ord("x"), 256], [*b"yz", 256]]
    assert summary == PrepareSummary(
        tmp_path / "out" / "p", 3, 9, 3 + 14 + 15, tokenizer="bytes", vocab_size=257
    )


def test_an_eos_of_the_text_is_not_doubled(tmp_path: Path) -> None:
    """Catches an end of document written twice where the text has its own."""
    tokenizer = write_tokenizer(tmp_path / "t", ["</s>"])
    (tmp_path / "a.jsonl").write_text('{"text": "the cat"}\n{"text": "the cat </s>"}\n')
    prepare(str(tmp_path / "a.jsonl"), tmp_path / "p", tokenizer=str(tokenizer))
    assert [tokens.tolist() for tokens in IndexedDataset(tmp_path / "p")] == [[1, 2, 4]] * 2


def test_a_second_run_writes_the_same_bytes(tmp_path: Path) -> None:
    """Catches output appended to that of an earlier run, and files that depend on the time."""
    (tmp_path / "a.txt").write_text("text")
    contents = []
    for output in (tmp_path / "p", tmp_path / "p.bin", str(tmp_path / "p.idx")):
        done = prepare(str(tmp_path / "a.txt"), output, overwrite=bool(contents))
        assert done.prefix == tmp_path / "p"
        contents.append([(tmp_path / f"p.{suffix}").read_bytes() for suffix in ("bin", "idx")])
    assert contents[0] == contents[1] == contents[2]


def test_a_bad_line_leaves_no_files(tmp_path: Path) -> None:
    """Catches a partial pair after an error in the middle of the text."""
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n{"text"\n')
    with pytest.raises(ValueError, match=r"a\.jsonl, line 2 is not JSON"):
        prepare(str(tmp_path / "a.jsonl"), tmp_path / "p")
    assert os.listdir(tmp_path) == ["a.jsonl"]


def test_pairs_and_empty_inputs_are_refused(tmp_path: Path) -> None:
    """Catches a pair tokenized a second time, and empty input written as an empty pair."""
    (tmp_path / "a.txt").write_text("text")
    prepare(str(tmp_path / "a.txt"), tmp_path / "p")
    with pytest.raises(ValueError, match="is already tokenized"):
        prepare(str(tmp_path / "p"), tmp_path / "q")
    (tmp_path / "blank.jsonl").write_text("\n")
    with pytest.raises(ValueError, match=r"input=.*blank\.jsonl holds no documents"):
        prepare([str(tmp_path / "blank.jsonl")], tmp_path / "q")
    with pytest.raises(FileNotFoundError, match="input=gone does not exist"):
        prepare("gone", tmp_path / "q")
    assert not list(tmp_path.glob("q*"))


@pytest.mark.parametrize("output", ["file.txt/x", "file.txt/x/y"])
def test_an_output_that_cannot_be_written_is_refused(tmp_path: Path, output: str) -> None:
    """Catches only "File exists", which does not say what is wrong with the output."""
    (tmp_path / "file.txt").write_text("text")
    with pytest.raises(ValueError, match=rf"^output=.*{output}: cannot write to .*: name a path"):
        prepare(str(tmp_path / "file.txt"), tmp_path / output)


def test_prepared_examples_give_the_samples_of_their_lines(tmp_path: Path) -> None:
    """Catches labels that are lost on disk, shifted, or those of another example."""
    folder = str(chat_folder(tmp_path / "model"))
    lines = [
        {
            "messages": [
                {"role": "user", "content": f"{i}?"},
                {"role": "assistant" if i != 5 else "user", "content": "so " * (i % 7)},
            ]
        }
        for i in range(20)
    ]
    source = str(write_lines(tmp_path / "a.jsonl", lines))
    done = prepare(source, tmp_path / "p", tokenizer=folder)
    opened = [
        open_datasets(DataConfig(source=item, tokenizer=folder, seq_len=128), seed=0).train
        for item in (source, str(tmp_path / "p"))
    ]
    rows = []
    for data in opened:
        assert isinstance(data, ExampleDataset)
        rows.append([data.sample(i) for i in range(data.samples_per_epoch)])
    # Numbers of the examples differ by the one left out, so their order does: compare the pieces.
    pieces = [
        sorted(
            (tuple(sample.tokens[a:b]), tuple(sample.labels[a:b]))
            for sample in samples
            for a, b in itertools.pairwise([*np.flatnonzero(sample.positions == 0), 128])
            if (sample.labels[a:b] != -100).any()
        )
        for samples in rows
    ]
    assert pieces[0] == pieces[1]
    assert len(pieces[0]) == 19 == done.num_documents
    trained = sum(len(f"{'so ' * (i % 7)}") + 2 for i in range(20) if i != 5)
    assert (done.num_trained, done.num_dropped) == (trained, 1)


def test_labels_of_an_older_pair_are_removed(tmp_path: Path) -> None:
    """Catches text that is trained with the labels of an earlier pair."""
    tokens = str(write_lines(tmp_path / "a.jsonl", [{"input_ids": [1, 2], "labels": [-100, 2]}]))
    prepare(tokens, tmp_path / "p")
    assert (tmp_path / "p.labels.idx").exists()
    (tmp_path / "a.txt").write_text("text")
    prepare(str(tmp_path / "a.txt"), tmp_path / "p", overwrite=True)
    found = sorted(os.listdir(tmp_path))
    assert found == ["a.jsonl", "a.txt", "p.bin", "p.idx", "p.tokenizer.json"]


def test_a_pair_is_read_with_the_tokenizer_that_made_it(tmp_path: Path) -> None:
    """Catches ids of one tokenizer read as those of another."""
    made, *same = (
        str(write_tokenizer(tmp_path / name, specials))
        for name, specials in {
            "made": ["</s>"],
            "again": ["</s>"],
            "more": ["</s>", "<pad>"],
        }.items()
    )
    other = str(write_tokenizer(tmp_path / "other", ["<s>", "</s>"]))
    (tmp_path / "a.txt").write_text("the cat")
    prepare(str(tmp_path / "a.txt"), tmp_path / "p", tokenizer=made)

    def opened(tokenizer: str) -> None:
        open_datasets(
            DataConfig(source=str(tmp_path / "p"), tokenizer=tokenizer, seq_len=2), seed=0
        )

    for tokenizer in (made, *same):
        opened(tokenizer)
    said = rf"data\.source=.*p was prepared with the tokenizer {made} \(5 entries\), and "
    for tokenizer in (other, "bytes"):
        with pytest.raises(ValueError, match=rf"{said}data\.tokenizer={tokenizer} has other ids"):
            opened(tokenizer)
    (tmp_path / "p.tokenizer.json").unlink()  # as of Megatron-LM
    opened("bytes")


def test_labels_of_other_lengths_are_refused(tmp_path: Path) -> None:
    """Catches tokens and labels that were written at different times."""
    for name, ids in (("p", [1, 2]), ("q", [1, 2, 3])):
        source = str(write_lines(tmp_path / f"{name}.jsonl", [{"input_ids": ids}]))
        prepare(source, tmp_path / name)
    for suffix in ("bin", "idx"):
        (tmp_path / f"q.labels.{suffix}").rename(tmp_path / f"p.labels.{suffix}")
    with pytest.raises(ValueError, match=r"p\.idx and .*p\.labels\.idx disagree about the lengths"):
        open_datasets(DataConfig(source=str(tmp_path / "p"), seq_len=2), seed=0)


def test_examples_without_trained_tokens_are_refused(tmp_path: Path) -> None:
    """Catches a pair without anything to train on, and a partial pair."""
    folder = str(chat_folder(tmp_path / "model", CHATML_MARKED))
    users = [{"messages": [{"role": "user", "content": "x"}]}]
    source = str(write_lines(tmp_path / "a.jsonl", users))
    with pytest.raises(ValueError, match=r"input=.*a\.jsonl has no token to train on"):
        prepare(source, tmp_path / "p", tokenizer=folder)
    assert sorted(os.listdir(tmp_path)) == ["a.jsonl", "model"]
