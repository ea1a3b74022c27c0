"""Which tokenizer made a `.bin/.idx` pair: `PREFIX.tokenizer.json`, beside the pair.

Megatron-LM's format has no place for it, and its own pairs have no such file: they are taken as
they are. Ids are compared, not files: a tokenizer that was saved again, or to which tokens were
added after its last id, has the same.
"""

from __future__ import annotations

import json
from functools import lru_cache
from hashlib import sha256
from pathlib import Path

from isp.config.data import BYTE_TOKENIZER
from isp.data.tokenizer import HFTokenizer, Tokenizer
from isp.utils.json_file import read_json

__all__ = ["check_tokenizer", "record_path", "tokenizer_name", "write_record"]


def record_path(prefix: Path) -> Path:
    """Return the file that says which tokenizer made the pair of `prefix`."""
    return prefix.with_name(prefix.name + ".tokenizer.json")


def tokenizer_name(tokenizer: Tokenizer) -> str:
    """Return what `data.tokenizer` names it by."""
    return str(tokenizer.file) if isinstance(tokenizer, HFTokenizer) else BYTE_TOKENIZER


def write_record(prefix: Path, tokenizer: Tokenizer) -> None:
    """Write which tokenizer made the pair of `prefix`."""
    size = tokenizer.vocab_size
    found = {
        "tokenizer": tokenizer_name(tokenizer),
        "vocab_size": size,
        "sha256": _digest(tokenizer, size),
    }
    path = record_path(prefix)
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    partial.replace(path)


def check_tokenizer(prefix: Path, tokenizer: Tokenizer, key: str) -> None:
    """Raise ValueError for a pair, named by `key`, that a tokenizer with other ids has made."""
    path = record_path(prefix)
    if not path.exists():
        return
    found = read_json(path)
    size = found.get("vocab_size")
    if type(size) is int and found.get("sha256") == _digest(tokenizer, size):
        return
    raise ValueError(
        f"{key}={prefix} was prepared with the tokenizer {found.get('tokenizer')} ({size} entries),"
        f" and data.tokenizer={tokenizer_name(tokenizer)} has other ids: use that tokenizer, or"
        f" prepare the text again with this one (if the ids are the same after all, delete {path})"
    )


def _digest(tokenizer: Tokenizer, size: int) -> str:
    """Return a digest of the tokens with ids below `size`."""
    return _of_entries(tokenizer, size) if isinstance(tokenizer, HFTokenizer) else BYTE_TOKENIZER


@lru_cache(maxsize=8)  # sorting a large vocabulary takes a part of a second for each pair
def _of_entries(tokenizer: HFTokenizer, size: int) -> str:
    entries = sorted((i, token) for token, i in tokenizer.vocabulary().items() if i < size)
    return sha256(json.dumps(entries).encode()).hexdigest()
