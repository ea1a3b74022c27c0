"""Trial of a foreign tokenizer.json, whose patterns may never end and whose rules may grow."""

from __future__ import annotations

import json
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

from isp.utils.files import LARGE_FILE_BYTES, read_limited
from isp.utils.limits import check_in_child

__all__ = ["check_tokenizer"]

_MOST_SECONDS = 120.0
"""Limit of reading the file and of the trial: 40 MB take about 3 s."""
_MOST_BYTES = 2**32
_MOST_TOKENS = 100
"""Limit of the tokens of a character: bytes of its longest decomposition are 72."""
_PASSED: set[bytes] = set()
"""Digests of the files that have passed."""
_RUN = 2000
"""Characters of a text that repeats one: patterns that backtrack, or grow, do so on these."""


def check_tokenizer(file: Path) -> None:
    """Raise ValueError for a tokenizer.json that takes too much time or memory, or is none.

    It is read, and tries some texts, in a child process: the library is not written in Python,
    which thus cannot interrupt it, and ends the process when memory runs out. Files with the same
    contents are tried once in a process.
    """
    try:
        data = read_limited(file, LARGE_FILE_BYTES)
    except ValueError as error:
        raise ValueError(f"data.tokenizer={error}") from None
    except OSError as error:
        raise ValueError(f"data.tokenizer={file} cannot be read: {error.strerror}") from None
    digest = sha256(data).digest()
    if digest not in _PASSED:
        check_in_child(
            f"data.tokenizer={file}",
            lambda: _try(data),
            seconds=_MOST_SECONDS,
            most_bytes=_MOST_BYTES,
        )
        _PASSED.add(digest)


def _try(data: bytes) -> None:
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_buffer(data)
    except Exception as error:  # The package raises bare Exception for every fault of the file.
        raise ValueError(f"not a usable tokenizer.json: {error}") from None
    tokenizer.no_truncation()
    for text in _texts(json.loads(data)):
        try:
            ids = tokenizer.encode(text, add_special_tokens=False).ids
            tokenizer.decode(ids)
        except MemoryError:
            raise
        except Exception:  # no token for some character, and none for what is unknown
            continue
        if len(ids) > _MOST_TOKENS * (len(text) + 10):
            raise ValueError(
                f"it makes {len(ids):,} tokens of a text of {len(text):,} characters, and the limit"
                f" is {_MOST_TOKENS} a character: its normalizer grows without bound"
            )


def _texts(described: Any) -> Iterator[str]:
    """Each character of Unicode's first plane, runs of some, and what the file's rules look for."""
    yield "".join(map(chr, (*range(1, 0xD800), *range(0xE000, 0xFFFE))))
    for character in "aA0 \n\t-.'é漢\u0301\U0001f600":
        yield character * _RUN
        yield character * _RUN + "!"
        yield f"{character}b" * (_RUN // 2) + "\0"
    for part in ("normalizer", "pre_tokenizer", "decoder"):
        for text in _strings(described.get(part)):
            yield text[:_RUN] * max(1, _RUN // max(1, len(text)))


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for below in value.values() if isinstance(value, dict) else value:
            yield from _strings(below)
