"""Examples read from lines: their formats and labels, and the errors for bad lines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from isp.config.data import DataConfig, Format
from isp.data.dataset import IGNORE_INDEX
from isp.data.examples import file_format, find_format
from isp.data.packing import ExampleDataset
from isp.data.prepare import prepare
from isp.data.sources import Datasets, check_sources, describe_source, open_datasets
from isp.data.tokenizer import HFTokenizer, load_tokenizer
from tests.data.chat_folder import LLAMA3, chat_folder, write_lines

TALK = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "bc"}]


def opened(source: str | Path | list[str], **keys: Any) -> Datasets:
    item = source if isinstance(source, list) else str(source)
    config = DataConfig(source=item, **{"seq_len": 8, **keys})
    check_sources(config, load_tokenizer(config.tokenizer))
    return open_datasets(config, seed=0)


def test_labels_are_shifted_once(tmp_path: Path) -> None:
    """Catches labels shifted twice or not at all, or replaced by the tokens themselves."""
    lines = [{"input_ids": [5, 6, 7, 8], "labels": [5, -100, 70, 8], "attention_mask": [1] * 4}]
    sample = opened(write_lines(tmp_path / "a.jsonl", lines), seq_len=6).train.sample(0)
    assert sample.tokens.tolist() == [5, 6, 7, 8, 256, 256]
    assert sample.labels.tolist() == [-100, 70, 8, -100, -100, -100]
    assert sample.positions.tolist() == [0, 1, 2, 3, 0, 1]


def test_without_labels_all_tokens_are_trained(tmp_path: Path) -> None:
    """Catches input_ids without labels that are refused, or not trained."""
    for extra in ({}, {"labels": None}):
        path = write_lines(tmp_path / "a.jsonl", [{"input_ids": [5, 6, 7], **extra}])
        assert opened(path, seq_len=3).train.sample(0).labels.tolist() == [6, 7, -100]


def test_position_ids_that_restart_separate_documents(tmp_path: Path) -> None:
    """Catches attention between documents of one line, or a label across their boundary."""
    lines = [
        {"input_ids": [1, 2, 3, 4, 5], "position_ids": [0, 1, 0, 1, 2]},
        {"input_ids": [6, 7, 8], "labels": [6, -100, 8], "position_ids": [0, 0, 1]},
    ]
    apart = [
        {"input_ids": [1, 2]},
        {"input_ids": [3, 4, 5]},
        {"input_ids": [6], "labels": [6]},
        {"input_ids": [7, 8], "labels": [-100, 8]},
    ]
    path, other = (
        write_lines(tmp_path / n, of) for n, of in (("a.jsonl", lines), ("b.jsonl", apart))
    )
    for keys in ({"seq_len": 8}, {"seq_len": 4}, {"pack": False}):
        found, expected = (opened(p, **keys).train for p in (path, other))
        assert found.samples_per_epoch == expected.samples_per_epoch
        for i in range(found.samples_per_epoch):
            pairs = zip(found.sample(i)[:3], expected.sample(i)[:3], strict=True)
            for of_found, of_expected in pairs:
                assert of_found.tolist() == of_expected.tolist()


def test_messages_become_rows(tmp_path: Path) -> None:
    """Catches a template that is not used, or labels that do not reach the sample."""
    folder = chat_folder(tmp_path / "model")
    path = write_lines(tmp_path / "a.jsonl", [{"messages": TALK}] * 2)
    data = opened(path, tokenizer=str(folder), seq_len=64)
    tokenizer = HFTokenizer(folder)
    turn = tokenizer.encode("bc<|im_end|>\n").tolist()
    sample = data.train.sample(0)
    assert sample.labels[sample.labels != IGNORE_INDEX].tolist() == turn * 2
    first, second, padding = np.flatnonzero(sample.positions == 0)
    assert first == 0
    text = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nbc<|im_end|>\n"
    assert sample.tokens[:second].tolist() == tokenizer.encode(text).tolist()
    assert sample.tokens[padding] == tokenizer.eos_id


@pytest.mark.parametrize(
    ("record", "form"),
    [
        ({"text": "x", "messages": TALK}, Format.TEXT),
        ({"messages": TALK, "input_ids": [1]}, Format.MESSAGES),
        ({"input_ids": [1]}, Format.TOKENS),
        ({"other": 1}, Format.TEXT),
    ],
)
def test_the_first_line_selects_the_format(
    tmp_path: Path, record: dict[str, Any], form: Format
) -> None:
    """Catches text files that are now read in another format."""
    path = write_lines(tmp_path / "a.jsonl", [record])
    assert file_format(path, Format.AUTO, "text") is form
    assert file_format(path, Format.MESSAGES, "text") is Format.MESSAGES


def test_token_lines_and_conversations_mix_but_not_with_text(tmp_path: Path) -> None:
    """Catches text trained without labels in a source with examples, and examples that
    cannot mix.
    """
    tokens = write_lines(tmp_path / "a.jsonl", [{"input_ids": [1, 2]}])
    talks = write_lines(tmp_path / "b.jsonl", [{"messages": TALK}])
    text = write_lines(tmp_path / "c.jsonl", [{"text": "x"}])
    both = [str(tokens), str(talks)]
    data = opened(both, tokenizer=str(chat_folder(tmp_path / "model")), seq_len=64)
    assert np.count_nonzero(data.train.sample(0).positions == 0) == 3
    with pytest.raises(ValueError, match=r"data.source mixes text .*c.jsonl \(text\)"):
        find_format([*both, str(text)], Format.AUTO, text_key="text", key="data.source")


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ({"input_ids": [1, 2], "labels": [1]}, "has 1 labels for 2 input_ids"),
        ({"input_ids": [1, 300]}, "token 1 is id 300, and the tokenizer has 257"),
        ({"input_ids": [1, -1]}, "token 1 is id -1"),
        ({"input_ids": [1, 2], "labels": [-100, 999]}, "'labels', token 1 is id 999"),
        ({"input_ids": [1, 2.5]}, "no 'input_ids' that is a list of whole numbers"),
        ({"input_ids": []}, "no 'input_ids'"),
        ({"input_ids": [1, 2**70]}, "beyond 64 bits"),
        ({"labels": [1]}, "no 'input_ids'"),
        ({"input_ids": [1, 2], "attention_mask": [1, 0]}, "'attention_mask' has values other"),
        ({"input_ids": [1, 2], "attention_mask": [1]}, "has 1 attention_mask for 2 input_ids"),
        ({"input_ids": [1, 2], "attention_mask": 1}, "no 'attention_mask' that is a list"),
        ({"input_ids": [1, 2], "position_ids": [1, 2]}, "'position_ids' has 1 at token 0"),
        ({"input_ids": [1, 2, 3], "position_ids": [0, 1, 4]}, "'position_ids' has 4 at token 2"),
        ({"input_ids": [1, 2, 3], "position_ids": [0, 0, 2]}, "'position_ids' has 2 at token 2"),
        ({"input_ids": [1, 2], "position_ids": [0]}, "has 1 position_ids for 2 input_ids"),
        ({"input_ids": [1, 2], "assistant_masks": [0, 1]}, "'assistant_masks', which is not read"),
    ],
)
def test_bad_lines_are_refused_with_file_and_line(
    tmp_path: Path, line: dict[str, Any], fault: str
) -> None:
    """Catches a traceback, and a message that does not say which of a million lines is bad."""
    path = write_lines(tmp_path / "a.jsonl", [{"input_ids": [1, 2]}, line])
    with pytest.raises(ValueError, match=f"a.jsonl, line 2.*{fault}"):
        opened(path)


def test_missing_keys_templates_and_turns_are_refused(tmp_path: Path) -> None:
    """Catches an error for a missing key, template or turn that does not say what to do."""
    folder = str(chat_folder(tmp_path / "model"))
    path = write_lines(tmp_path / "a.jsonl", [{"messages": TALK}, {"turns": []}])
    with pytest.raises(ValueError, match=r"a.jsonl, line 2 has no key 'messages', only 'turns"):
        opened(path, tokenizer=folder)
    with pytest.raises(ValueError, match=r"data.tokenizer=bytes has no chat template"):
        opened(path)
    users = write_lines(tmp_path / "b.jsonl", [{"messages": TALK[:1]}] * 3)
    with pytest.raises(ValueError, match=r"b.jsonl has no token to train on: no message with"):
        opened(users, tokenizer=folder)
    (tmp_path / "c.txt").write_text("x")
    with pytest.raises(
        ValueError, match=r"data.format=messages: .*c.txt is neither JSON nor a table"
    ):
        opened(tmp_path / "c.txt", tokenizer=folder, format=Format.MESSAGES)
    with pytest.raises(ValueError, match=r"b.jsonl, line 1 has no 'input_ids'"):
        opened(users, tokenizer=folder, format=Format.TOKENS)


def test_held_out_examples_keep_tokens_and_labels_together(tmp_path: Path) -> None:
    """Catches an example in both parts, and tokens of one example with labels of another."""
    lines = [{"input_ids": [i] * 4, "labels": [-100, i, i, i]} for i in range(200)]
    path = write_lines(tmp_path / "a.jsonl", lines)
    data = opened(path, seq_len=4, valid_fraction=0.2)
    assert data.valid is not None
    seen = []
    for part in (data.train, data.valid):
        assert isinstance(part, ExampleDataset)
        for i in range(part.samples_per_epoch):
            sample = part.sample(i)
            assert sample.labels.tolist() == [*[sample.tokens[0]] * 3, -100]
            seen.append(int(sample.tokens[0]))
        assert part.samples_per_epoch > 20
    assert sorted(seen) == list(range(200))
    other = opened(path, seq_len=4, valid_source=str(path))
    assert other.valid is not None
    assert other.valid.samples_per_epoch == 200


def test_pack_false_gives_each_example_a_row(tmp_path: Path) -> None:
    """Catches unpacked rows whose positions restart, which attention would not know."""
    lines = [{"input_ids": [i] * (i + 2)} for i in range(4)]
    train = opened(write_lines(tmp_path / "a.jsonl", lines), pack=False).train
    assert train.samples_per_epoch == 4
    for i in range(4):
        sample = train.sample(i)
        assert sample.positions.tolist() == list(range(8))
        assert np.count_nonzero(sample.labels != -100) == sample.tokens[0] + 1


TEXTS = ["ab", "<|begin_of_text|>cd", "efg"]


@pytest.mark.parametrize("add_bos", [True, False])
def test_bos_is_added_as_in_transformers_and_trl(tmp_path: Path, add_bos: bool) -> None:
    """Catches a text, an answer or a stream without BOS, or with two."""
    from transformers import PreTrainedTokenizerFast

    folder = chat_folder(tmp_path / "model", LLAMA3, adds_bos=True)
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    end, tokenizer = theirs.eos_token, HFTokenizer(folder)

    def ids(text: str) -> list[int]:
        """Return the tokens of a text with its end, as TRL's SFTTrainer makes them."""
        text = text.removeprefix(theirs.bos_token) if add_bos else text
        found: list[int] = theirs(text + end, add_special_tokens=add_bos).input_ids
        return found

    keys = {"tokenizer": str(folder), "seq_len": 128, "add_bos": add_bos}
    path = write_lines(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS * 20])
    token = theirs.bos_token
    pair = prepare(str(path), tmp_path / "p", tokenizer=str(folder), add_bos=add_bos)
    for source, more in ((path, {}), (path, {"streaming": True}), (pair.prefix, {})):
        train = opened(source, **keys, **more).train
        sample = train.sample(0)
        begins = np.flatnonzero(sample.positions == 0)
        documents = [part.tolist() for part in np.split(sample.tokens, begins[1:])]
        assert {tuple(part) for part in documents[1:-1]} == {tuple(ids(text)) for text in TEXTS}
        note = f"; texts begin with{'' if add_bos else 'out'} {token}"
        assert train.summary.endswith(note) == (source is path)
    rows: list[tuple[dict[str, Any], str, str]] = [
        ({"prompt": "ab", "completion": "cd"}, "ab", "abcd"),
        ({"chosen": "abcd", "rejected": "abe"}, "ab", "abcd"),
        ({"chosen": "cd", "rejected": "e"}, "", "cd"),
    ]
    for row, prompt, whole in rows:
        config = DataConfig(source=str(write_lines(tmp_path / "b.jsonl", [row])), **keys)
        sample = open_datasets(config, seed=0).train.sample(0)
        expected = ids(whole)
        assert sample.tokens[: len(expected)].tolist() == expected
        answer = len(expected) - max(1, len(ids(prompt)) - 1)  # the first token is no label
        assert (
            sample.labels[len(expected) - 1 - answer : len(expected) - 1].tolist()
            == (expected[-answer:])
        )
        assert (sample.labels[: len(expected) - 1 - answer] == IGNORE_INDEX).all()
    # A chat template writes its own.
    path = write_lines(tmp_path / "c.jsonl", [{"messages": TALK}])
    train = opened(path, **keys).train
    assert np.count_nonzero(train.sample(0).tokens == tokenizer.token_id(token)) == 1
    assert "begin with" not in train.summary


def test_prepared_pairs_get_no_bos(tmp_path: Path) -> None:
    """Catches a BOS token before the documents of a .bin/.idx pair, or before bytes."""
    folder = str(chat_folder(tmp_path / "model", adds_bos=True))
    path = write_lines(tmp_path / "a.jsonl", [{"text": "abcd"}] * 4)
    prefix = prepare(str(path), tmp_path / "p", tokenizer=folder, add_bos=False).prefix
    tokens = opened(prefix, tokenizer=folder, seq_len=5).train.sample(0).tokens
    assert HFTokenizer(folder).decode(tokens, special=True) == "abcd<|im_end|>"
    assert opened(path, seq_len=5).train.sample(0).tokens.tolist() == [*b"abcd", 256]
    shown = describe_source(DataConfig(source=str(path), tokenizer=folder, seq_len=6))
    assert "texts begin with <|begin_of_text|>\n" in shown
    assert "example     '<|begin_of_text|>abcd<|im_end|>'" in shown
