"""Tokenizers: the bytes of UTF-8 (the default), or a tokenizer.json of Hugging Face.

A tokenizer.json is tried in a child process before it is used, see [Note: Foreign code] in
docs/design/notes/train.md.
"""

import json
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from isp.config.data import BYTE_TOKENIZER
from isp.utils.environment import require
from isp.utils.files import LARGE_FILE_BYTES, download_hint, read_json, read_limited
from isp.utils.limits import check_in_child

__all__ = [
    "ByteTokenizer",
    "Encoding",
    "HFTokenizer",
    "TokenArray",
    "Tokenizer",
    "load_tokenizer",
    "with_bos",
]

TokenArray = npt.NDArray[np.integer[Any]]

# Tried in this order if neither `data.eos_token` nor tokenizer_config.json names the token.
_COMMON_EOS_TOKENS = (
    "</s>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<eos>",
    "<|eos|>",
    "<|end▁of▁sentence|>",
    "<|im_end|>",
    "<|eot_id|>",
    "[EOS]",
)

_MOST_SECONDS = 120.0
"""Time limit to read and try a tokenizer.json; a file of 40 MB takes about 3 s."""
_MOST_BYTES = 2**32
"""Memory limit to read and try a tokenizer.json."""
_MOST_TOKENS = 100
"""Limit of tokens for one character. The longest decomposition of a character in Unicode has 72
bytes, so no honest tokenizer needs more."""
_PASSED: set[bytes] = set()
"""SHA-256 digests of the files that this process has tried; a cache, no state of a run."""
_RUN = 2000
"""Length of the trial texts that repeat a character: on these, regular expressions may backtrack
for ever, and normalizers may grow the text."""


class Encoding(NamedTuple):
    """Tokens of a text, each with the range of characters [start, end) that it encodes."""

    tokens: TokenArray  # [T tokens]
    starts: npt.NDArray[np.int64]  # [T]
    ends: npt.NDArray[np.int64]  # [T]


class Tokenizer(Protocol):
    """Interface of tokenizers; all ids are below `vocab_size`."""

    @property
    def vocab_size(self) -> int:
        """The largest id plus one. A model's embedding may have more rows, to divide evenly."""

    @property
    def eos_id(self) -> int:
        """Id of the token that ends every document."""

    @property
    def bos(self) -> tuple[int, ...]:
        """Ids that the tokenizer puts before a text: usually one id, or none."""

    def encode(self, text: str) -> TokenArray:
        """Return the ids of `text`, without special tokens around it."""

    def decode(self, tokens: TokenArray, *, special: bool = False) -> str:
        """Return the text of `tokens`, without special tokens unless `special`."""


class ByteTokenizer:
    """A tokenizer whose ids 0..255 are the bytes of UTF-8, and 256 is the end of a document."""

    vocab_size = 257
    eos_id = 256
    bos: tuple[int, ...] = ()

    def encode(self, text: str) -> TokenArray:
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8)

    def decode(self, tokens: TokenArray, *, special: bool = False) -> str:
        """Return the text of `tokens`, with U+FFFD for bytes that are not whole characters."""
        ids = np.asarray(tokens)
        data: bytes = ids[ids < self.eos_id].astype(np.uint8).tobytes()
        return data.decode("utf-8", "replace")


class HFTokenizer:
    """The tokenizer in a tokenizer.json, by Hugging Face's package `tokenizers`.

    `path` is the file, or a folder with it. Raises FileNotFoundError or ValueError, with
    `data.tokenizer`, also if the package is not installed.
    """

    def __init__(self, path: str | Path, *, eos_token: str | None = None) -> None:
        self.file = file = _tokenizer_file(Path(path).expanduser())
        self._tokenizer = _read_tokenizer(file)
        # A fine-tuning script may have saved the file with truncation, which would cut documents
        # silently.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        # Not the number of entries: there may be gaps between ids.
        self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        if self.vocab_size > np.iinfo(np.int32).max:
            raise ValueError(
                f"data.tokenizer={file} has a token with the id {self.vocab_size - 1:,}, and a"
                f" model needs an embedding for every id up to it: use smaller ids"
            )
        self.eos_id = self._find_eos(file, eos_token)
        self.bos = self._find_bos()

    def encode(self, text: str) -> TokenArray:
        """Return the ids of `text`, without special tokens around it.

        Raises ValueError if the tokenizer has no token for a part of `text`.
        """
        return np.array(self._encoded(text).ids, dtype=np.int32)

    def encode_prompt(self, text: str) -> list[int]:
        """Return the ids of `text`, with the special tokens that the tokenizer adds to a text."""
        ids: list[int] = self._encoded(text, add_special_tokens=True).ids
        return ids

    def encode_with_offsets(self, text: str) -> Encoding:
        """Return the ids of `text` as `encode` does, with the range of characters of each."""
        encoding = self._encoded(text)
        tokens = np.array(encoding.ids, dtype=np.int32)
        starts, ends = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2).T
        return Encoding(tokens, starts, ends)

    def special_tokens(self) -> tuple[str, ...]:
        """Return the texts of all special tokens."""
        added = self._tokenizer.get_added_tokens_decoder().values()
        return tuple(token.content for token in added if token.special)

    def token_id(self, name: str) -> int | None:
        """Return the id of the token with the text `name`; None if there is none."""
        found: int | None = self._tokenizer.token_to_id(name)
        return found

    def vocabulary(self) -> dict[str, int]:
        """Return the ids of all tokens by their texts."""
        ids: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        return ids

    def added_tokens(self) -> tuple[str, ...]:
        """Return the texts of all added tokens, special or not; a text never splits them."""
        return tuple(t.content for t in self._tokenizer.get_added_tokens_decoder().values())

    def decode(self, tokens: TokenArray, *, special: bool = False) -> str:
        ids = np.asarray(tokens).tolist()
        try:
            text: str = self._tokenizer.decode(ids, skip_special_tokens=not special)
        except Exception as error:  # the package raises Exception itself for faults
            raise ValueError(f"data.tokenizer={self.file} cannot decode tokens: {error}") from None
        return text

    def _encoded(self, text: str, *, add_special_tokens: bool = False) -> Any:
        """Return the encoding of `text` as an object of the package; raises as `encode` does."""
        try:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        except Exception as error:  # the package raises Exception itself, as for an unknown word
            start = repr(text[:60]) + "..." * (len(text) > 60)
            raise ValueError(
                f"data.tokenizer={self.file} cannot encode the text that begins with {start}:"
                f" {error}: use a tokenizer with a token for all that the text contains"
            ) from None

    def _find_bos(self) -> tuple[int, ...]:
        """Return the ids that the post-processor of tokenizer.json puts before a text.

        `add_bos_token` in tokenizer_config.json is ignored, as by transformers 5 if there is a
        tokenizer.json.
        """
        # Encode a text and see which ids come before it. The text is eos: there may be no token for
        # another one, such as "a".
        name = self._tokenizer.id_to_token(self.eos_id)
        found = self._encoded(name, add_special_tokens=True)
        # Sequence 0 is the text; added tokens before it belong to no sequence.
        of_text = 0 if 0 not in found.sequence_ids else found.sequence_ids.index(0)
        return tuple(found.ids[:of_text])

    def _find_eos(self, file: Path, eos_token: str | None) -> int:
        """Return the id of `eos_token`, else of that in tokenizer_config.json, else a common one.

        Raises ValueError if the named token, or all common ones, are not in the vocabulary.
        """
        declared = eos_token or _declared_eos(file.with_name("tokenizer_config.json"))
        for name in _COMMON_EOS_TOKENS if declared is None else (declared,):
            eos_id = self._tokenizer.token_to_id(name)
            if eos_id is not None:
                return int(eos_id)
        if declared is not None:
            where = "data.eos_token" if eos_token else "eos_token of its tokenizer_config.json"
            raise ValueError(
                f"data.tokenizer={file}: {where} is {declared}, which is not in the vocabulary: "
                "set data.eos_token to the token that ends a document"
            )
        raise ValueError(
            f"data.tokenizer={file} has none of the usual end-of-document tokens "
            f"({' '.join(_COMMON_EOS_TOKENS)}): name its own with data.eos_token"
            f" (isp data prepare: --eos-token)"
        )


def with_bos(tokens: TokenArray, bos: tuple[int, ...]) -> TokenArray:
    """Return `tokens` with the ids `bos` before them, unless they already begin with these."""
    if tuple(tokens[: len(bos)].tolist()) == bos:
        return tokens
    return np.concatenate([np.array(bos, dtype=np.int32), tokens])


def load_tokenizer(name: str, *, eos_token: str | None = None) -> Tokenizer:
    """Return the tokenizer that `data.tokenizer` and `data.eos_token` name."""
    if name == BYTE_TOKENIZER:
        return ByteTokenizer()
    return HFTokenizer(name, eos_token=eos_token)


def _tokenizer_file(path: Path) -> Path:
    """Return the path of the tokenizer.json, which is `path` or in the folder `path`.

    Raises FileNotFoundError if there is none, and ValueError if it is not a regular file.
    """
    if path.is_dir() and not (path / "tokenizer.json").is_file():
        raise FileNotFoundError(
            f"data.tokenizer={path} is a folder without a tokenizer.json: a tokenizer in another "
            "form (tokenizer.model) is converted by saving it with transformers' fast tokenizer"
        )
    if not path.exists():
        raise FileNotFoundError(
            f"data.tokenizer={path} does not exist: use {BYTE_TOKENIZER}, or the path of a "
            f"tokenizer.json or of a folder that holds one{download_hint(path)}"
        )
    if not path.is_dir() and not path.is_file():
        raise ValueError(f"data.tokenizer={path} is a pipe or a device: name a regular file")
    return path / "tokenizer.json" if path.is_dir() else path


def _read_tokenizer(file: Path) -> Any:
    """Return the tokenizer in `file`, as an object of `tokenizers`, after a trial of the file."""
    require(f"data.tokenizer={file}", "tokenizers")
    from tokenizers import Tokenizer as FastTokenizer

    _check_file(file)
    try:
        return FastTokenizer.from_file(str(file))
    except Exception as error:  # the package raises bare Exception for every fault of the file
        raise ValueError(f"data.tokenizer={file} is not a usable tokenizer.json: {error}") from None


def _declared_eos(file: Path) -> str | None:
    """Return the `eos_token` of a tokenizer_config.json; None if there is no such file or key."""
    if not file.exists():
        return None
    try:
        declared = read_json(file).get("eos_token")
    except ValueError as error:
        raise ValueError(f"{error} (next to data.tokenizer)") from None
    if isinstance(declared, dict):  # It may be an object, with the text under `content`.
        declared = declared.get("content")
    if declared is not None and not isinstance(declared, str):
        raise ValueError(f"{file}: eos_token={declared!r} is not a token: set data.eos_token")
    return declared


def _check_file(file: Path) -> None:
    """Raise ValueError for a tokenizer.json that is invalid or takes too much time or memory.

    A child process reads the file and encodes some texts [Note: Foreign code]. Files with the same
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
    """Load a tokenizer.json, and encode and decode the texts of `_texts`; runs in a child process.

    Raises ValueError for an invalid file, and for too many tokens.
    """
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_buffer(data)
    except Exception as error:  # the package raises bare Exception for every fault of the file
        raise ValueError(f"not a usable tokenizer.json: {error}") from None
    tokenizer.no_truncation()
    for text in _texts(json.loads(data)):
        try:
            ids = tokenizer.encode(text, add_special_tokens=False).ids
            tokenizer.decode(ids)
        except MemoryError:
            raise
        except Exception:  # no token for a character: an error only if a document has it
            continue
        if len(ids) > _MOST_TOKENS * (len(text) + 10):
            raise ValueError(
                f"it makes {len(ids):,} tokens of a text of {len(text):,} characters, and the limit"
                f" is {_MOST_TOKENS} a character: its normalizer grows without bound"
            )


def _texts(described: Any) -> Iterator[str]:
    """Yield texts on which to try a tokenizer; `described` is the parsed tokenizer.json.

    They are all characters of Unicode's first plane, repeated characters, and repetitions of the
    strings in the file, which its rules match.
    """
    yield "".join(map(chr, (*range(1, 0xD800), *range(0xE000, 0xFFFE))))
    for character in "aA0 \n\t-.'é漢\u0301\U0001f600":
        yield character * _RUN
        yield character * _RUN + "!"
        yield f"{character}b" * (_RUN // 2) + "\0"
    for part in ("normalizer", "pre_tokenizer", "decoder"):
        for text in _strings(described.get(part)):
            yield text[:_RUN] * max(1, _RUN // max(1, len(text)))


def _strings(value: Any) -> Iterator[str]:
    """Yield all strings in a JSON value, at any depth."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for below in value.values() if isinstance(value, dict) else value:
            yield from _strings(below)
