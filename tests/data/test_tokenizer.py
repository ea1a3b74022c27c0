"""Tokenizers: bytes, and tokenizer.json files made by the tests."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from isp.data import tokenizer as tokenizer_module
from isp.data.tokenizer import ByteTokenizer, HFTokenizer, load_tokenizer, with_bos

TEXTS = ["", "plain", "naïve — 東京 🎉", "\0\n\r\t", "\U0010ffff"]


@pytest.mark.parametrize("text", TEXTS)
def test_bytes_round_trip(text: str) -> None:
    """Catches an encoding other than UTF-8, and an eos that shows in the text."""
    tokenizer = ByteTokenizer()
    tokens = tokenizer.encode(text)
    assert tokens.tolist() == list(text.encode())
    assert tokenizer.decode(np.append(tokens.astype(np.int64), tokenizer.eos_id)) == text


def test_bytes_ids_are_within_the_vocabulary() -> None:
    """Catches an eos outside the embedding, or one that is also a byte."""
    tokenizer = load_tokenizer("bytes")
    assert 255 < tokenizer.eos_id < tokenizer.vocab_size == 257


def test_bytes_decode_accepts_incomplete_text_and_padding_ids() -> None:
    """Catches an exception, or ids that wrap around, when a sample of a model is shown."""
    tokens = np.array([*"é".encode()[:1], 65, 256, 300])
    assert ByteTokenizer().decode(tokens) == "\ufffdA"


def write_tokenizer(folder: Path, specials: list[str], **options: object) -> Path:
    """Write a word-level tokenizer.json with `specials` after four words."""
    tokenizers = pytest.importorskip("tokenizers")
    words = {"[UNK]": 0, "the": 1, "cat": 2, "sat": 3}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(specials)
    for name, option in options.items():
        getattr(tokenizer, name)(option)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


BYTE_LEVEL = {"add_prefix_space": False, "trim_offsets": True, "use_regex": True}
IDS = {"<s>": 4, "<b>": 5, "</s>": 6}


def template(*begin: str, end: str | None = None) -> dict[str, Any]:
    """Return a post-processor that adds these tokens before and after a text."""
    names = [*begin, *([end] if end else [])]

    def special(name: str) -> dict[str, Any]:
        return {"SpecialToken": {"id": name, "type_id": 0}}

    text: dict[str, Any] = {"Sequence": {"id": "A", "type_id": 0}}
    single = [*map(special, begin), text, *map(special, [end] if end else [])]
    tokens = {name: {"id": name, "ids": [IDS[name]], "tokens": [name]} for name in names}
    pair = [*single, {"Sequence": {"id": "B", "type_id": 1}}]
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": pair,
        "special_tokens": tokens,
    }


def test_hf_file_and_folder_are_the_same(tmp_path: Path) -> None:
    """Catches a folder in which tokenizer.json is not found."""
    file = write_tokenizer(tmp_path, ["</s>"])
    for path in (file, tmp_path):
        tokenizer = load_tokenizer(str(path))
        assert tokenizer.encode("the cat sat").tolist() == [1, 2, 3]
        assert tokenizer.decode(np.array([1, 2, 3, 4])) == "the cat sat"
        assert (tokenizer.eos_id, tokenizer.vocab_size) == (4, 5)


@pytest.mark.parametrize("name", ["</s>", "<|endoftext|>", "<eos>", "<|end_of_text|>", "[EOS]"])
def test_hf_finds_common_eos(tmp_path: Path, name: str) -> None:
    """Catches a common model family that would need `eos_token`."""
    assert HFTokenizer(write_tokenizer(tmp_path, ["<pad>", name])).eos_id == 5


def test_hf_eos_of_the_user_precedes_that_of_the_folder(tmp_path: Path) -> None:
    """Catches a guess that overrides the user's key or the tokenizer's own config."""
    file = write_tokenizer(tmp_path, ["</s>", "<mine>", "<theirs>"])
    config = tmp_path / "tokenizer_config.json"
    for declared in ("<theirs>", {"content": "<theirs>", "lstrip": False}):
        config.write_text(json.dumps({"eos_token": declared}))
        assert HFTokenizer(file).eos_id == 6
        assert HFTokenizer(file, eos_token="<mine>").eos_id == 5
    config.write_text(json.dumps({"eos_token": None}))
    assert HFTokenizer(file).eos_id == 4


def test_hf_truncation_and_padding_are_switched_off(tmp_path: Path) -> None:
    """Catches documents cut to a length that a fine-tuning script stored in the file."""
    file = write_tokenizer(tmp_path, ["</s>"], enable_truncation=2)
    assert len(HFTokenizer(file).encode("the cat sat the cat")) == 5


def test_hf_vocab_size_counts_gaps(tmp_path: Path) -> None:
    """Catches an embedding with fewer rows than the largest id needs."""
    file = write_tokenizer(tmp_path, ["</s>"])
    parsed = json.loads(file.read_text())
    parsed["model"]["vocab"]["far"] = 99
    file.write_text(json.dumps(parsed))
    assert HFTokenizer(file).vocab_size == 100


PROCESSORS: dict[str, tuple[dict[str, Any] | None, tuple[int, ...]]] = {
    "none": (None, ()),
    "byte level": ({"type": "ByteLevel", **BYTE_LEVEL}, ()),
    "bos": (template("<s>"), (4,)),
    "two tokens, and one at the end": (template("<s>", "<b>", end="</s>"), (4, 5)),
    "the end alone": (template(end="</s>"), ()),
    "in a sequence": (
        {
            "type": "Sequence",
            "processors": [{"type": "ByteLevel", **BYTE_LEVEL}, template("<s>")],
        },
        (4,),
    ),
    "bert": ({"type": "BertProcessing", "sep": ["</s>", 6], "cls": ["<s>", 4]}, (4,)),
}
"""Post-processors of a tokenizer.json, and the tokens that they add before a text."""


@pytest.mark.parametrize("name", PROCESSORS)
def test_hf_begins_texts_as_transformers_does(tmp_path: Path, name: str) -> None:
    """Catches a BOS token in prompts that training did not have."""
    from transformers import AutoTokenizer

    processor, bos = PROCESSORS[name]
    file = write_tokenizer(tmp_path, ["<s>", "<b>", "</s>"])
    file.write_text(json.dumps({**json.loads(file.read_text()), "post_processor": processor}))
    config = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}  # not read
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = HFTokenizer(file)
    assert tokenizer.bos == bos
    theirs = AutoTokenizer.from_pretrained(tmp_path)("the cat").input_ids
    text = tokenizer.encode("the cat")
    assert theirs[: len(bos) + 2] == with_bos(text, tokenizer.bos).tolist() == [*bos, 1, 2]
    assert with_bos(with_bos(text, bos), bos).tolist() == [*bos, 1, 2]  # a text that brings its own


def test_hf_without_eos_is_refused(tmp_path: Path) -> None:
    """Catches a run whose documents have no end, and a message that does not say what to do."""
    file = write_tokenizer(tmp_path, ["<odd>"])
    with pytest.raises(ValueError, match=r"usual end-of-document.*data\.eos_token"):
        HFTokenizer(file)
    with pytest.raises(ValueError, match=r"data\.eos_token is <none>, which is not in"):
        HFTokenizer(file, eos_token="<none>")
    assert HFTokenizer(file, eos_token="<odd>").eos_id == 4
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<gone>"}')
    with pytest.raises(ValueError, match=r"tokenizer_config\.json is <gone>"):
        HFTokenizer(file)


def test_hf_missing_and_broken_files_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches the library's exception without the key and the path."""
    pytest.importorskip("tokenizers")
    with pytest.raises(FileNotFoundError, match=r"data\.tokenizer=.*none.* does not exist"):
        load_tokenizer(str(tmp_path / "none"))
    with pytest.raises(ValueError, match=r"data\.tokenizer=/dev/null is a pipe or a device: name"):
        load_tokenizer("/dev/null")  # a pipe would be waited for
    with pytest.raises(FileNotFoundError, match=r"folder without a tokenizer\.json"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"not a usable tokenizer\.json"):
        load_tokenizer(str(tmp_path))
    monkeypatch.setattr(tokenizer_module, "read_limited", _refuse)  # since root may read any file
    with pytest.raises(ValueError, match=r"data\.tokenizer=.*json cannot be read: Permission"):
        load_tokenizer(str(tmp_path))


def _refuse(path: Path, _: int) -> bytes:
    raise PermissionError(13, "Permission denied", str(path))


def test_hf_missing_package_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a ModuleNotFoundError without the pip command."""
    (tmp_path / "tokenizer.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ValueError, match=r"setup_env\.sh hf \(or pip install tokenizers\)"):
        load_tokenizer(str(tmp_path))


def test_hf_huge_ids_are_refused(tmp_path: Path) -> None:
    """Catches an id that overflows later, and a vocabulary of gigabytes."""
    path = write_tokenizer(tmp_path / "t", ["</s>"])
    text = path.read_text()
    for largest, refused in ((2**31 - 2, False), (4_000_000_000, True)):
        path.write_text(re.sub(r'"sat": ?3', f'"sat": {largest}', text))
        if refused:
            with pytest.raises(ValueError, match=r"has a token with the id 4,000,000,000"):
                HFTokenizer(path)
        else:
            assert HFTokenizer(path).vocab_size == largest + 1
