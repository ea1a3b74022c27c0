"""Examples to fine-tune on: the lines of a .jsonl file, or a `.bin/.idx` pair with one of labels.

[Note: Labels on disk] `PREFIX.bin/.idx` holds the tokens of an example as one document, and
`PREFIX.labels.bin/.idx` its labels, in the same order. Without the second pair all are trained.
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from isp.data.chat import ChatTemplate, Example
from isp.data.config import Format
from isp.data.dataset import IGNORE_INDEX, check_ids
from isp.data.documents import JsonLine, find_files, read_jsonl
from isp.data.indexed import IndexedDataset, indexed_prefix, token_dtype
from isp.data.stores import ConcatStore, MemoryStore, TokenStore
from isp.data.tokenizer import TokenArray, Tokenizer

__all__ = [
    "LABEL_DTYPE",
    "ExampleStore",
    "check_trained",
    "count_trained",
    "file_format",
    "find_format",
    "labels_prefix",
    "open_examples",
    "read_examples",
]

LABEL_DTYPE = np.dtype(np.int32)


class ExampleStore(NamedTuple):
    """Tokens and labels of the same examples; document d of one belongs to d of the other."""

    tokens: TokenStore
    labels: TokenStore


def find_format(items: list[str], asked: Format, *, text_key: str, key: str) -> Format:
    """What the items of a source hold, of which nothing but first lines is read.

    TEXT, or one of the others if there is none of text; MESSAGES if any file has these.
    Raises ValueError for a mixture.
    """
    found: dict[Format, str] = {}
    for item in items:
        if (prefix := indexed_prefix(item)) is not None:
            found.setdefault(_pair_format(prefix, asked), str(prefix))
            continue
        for path in find_files(item, key=key):
            found.setdefault(file_format(path, asked, text_key), str(path))
    if Format.TEXT in found and len(found) > 1:
        listed = ", ".join(f"{path} ({form})" for form, path in found.items())
        raise ValueError(
            f"{key} mixes text with examples that have labels: {listed}: give one kind"
        )
    return next(form for form in (Format.TEXT, Format.MESSAGES, Format.TOKENS) if form in found)


def file_format(path: Path, asked: Format, text_key: str) -> Format:
    """What the lines of a file hold: as asked, else as the keys of its first line say."""
    if asked is not Format.AUTO:
        if path.suffix != ".jsonl" and asked is not Format.TEXT:
            raise ValueError(f"data.format={asked}: {path} is no .jsonl file")
        return asked
    if path.suffix != ".jsonl":
        return Format.TEXT
    first = next((line.record for line in read_jsonl(path)), {})
    keys = {text_key: Format.TEXT, "messages": Format.MESSAGES, "input_ids": Format.TOKENS}
    return next((form for name, form in keys.items() if name in first), Format.TEXT)


def _pair_format(prefix: Path, asked: Format) -> Format:
    if asked is not Format.TEXT and _has_labels(prefix):
        return Format.TOKENS
    if asked is Format.MESSAGES:
        raise ValueError(
            f"data.format={asked}: {prefix}.bin has no labels beside it: data.format=tokens trains"
            " all of its tokens, or `isp data prepare` writes labels from a .jsonl file"
        )
    return Format.TOKENS if asked is Format.TOKENS else Format.TEXT


def read_examples(
    path: Path,
    form: Format,
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
) -> Iterator[tuple[Example, JsonLine]]:
    """The examples of a .jsonl file, with the lines that they come from.

    Raises ValueError naming the file and the line.
    """
    read: Callable[[JsonLine], Example]
    if form is Format.MESSAGES:
        assert template is not None
        read = partial(_conversation, template=template)
    else:
        read = partial(_tokens, vocab_size=tokenizer.vocab_size)
    return ((read(line), line) for line in read_jsonl(path))


def open_examples(
    items: list[str],
    asked: Format,
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    *,
    text_key: str,
    key: str,
) -> ExampleStore:
    """The examples of a source: lines are read into memory, pairs are mapped.

    Raises ValueError for what is not an example, or if nothing of a source is trained.
    """
    stores: list[ExampleStore] = []
    for item in items:
        if (prefix := indexed_prefix(item)) is not None:
            stores.append(_open_pairs(prefix))
            continue
        examples = [
            example
            for path in find_files(item, key=key)
            for example, _ in read_examples(
                path, file_format(path, asked, text_key), tokenizer, template
            )
        ]
        check_trained(any(count_trained(labels) for _, labels in examples), f"{key}={item}")
        dtypes = (token_dtype(tokenizer.vocab_size), LABEL_DTYPE)
        columns = zip(*examples, strict=True)
        stores.append(
            ExampleStore(
                *(
                    MemoryStore(f"{key}={item}", column, dtype=dtype)
                    for column, dtype in zip(columns, dtypes, strict=True)
                )
            )
        )
    if len(stores) == 1:
        return stores[0]
    return ExampleStore(*(ConcatStore(column) for column in zip(*stores, strict=True)))


def check_trained(trained: bool, name: str) -> None:
    """Refuse a source of which nothing is trained."""
    if not trained:
        raise ValueError(
            f"{name} has no token to train on: no message with the role 'assistant', or no label"
            f" but {IGNORE_INDEX}"
        )


def count_trained(labels: TokenArray) -> int:
    """The tokens of an example that have a label; nothing predicts its first."""
    return int(np.count_nonzero(labels[1:] != IGNORE_INDEX))


def labels_prefix(prefix: Path) -> Path:
    """The pair with the labels of a pair: [Note: Labels on disk]."""
    return prefix.with_name(prefix.name + ".labels")


def _has_labels(prefix: Path) -> bool:
    labels = labels_prefix(prefix)
    return labels.with_name(labels.name + ".idx").exists()


def _open_pairs(prefix: Path) -> ExampleStore:
    tokens = IndexedDataset(prefix)
    if not _has_labels(prefix):
        return ExampleStore(tokens, tokens)
    labels = IndexedDataset(labels_prefix(prefix))
    if not np.array_equal(tokens.lengths, labels.lengths):
        raise ValueError(
            f"{tokens.idx_path} and {labels.idx_path} have examples of other lengths: write both"
            " again (`isp data prepare`)"
        )
    return ExampleStore(tokens, labels)


def _conversation(line: JsonLine, *, template: ChatTemplate) -> Example:
    """The tokens of `messages`, which the template sees with `tools` and `chat_template_kwargs`."""
    record, where = line.record, line.where
    if "messages" not in record:
        raise ValueError(f"{where} has no key 'messages', only {', '.join(map(repr, record))}")
    tools, variables = record.get("tools"), record.get("chat_template_kwargs") or {}
    if tools is not None and not _is_list_of(dict, tools):
        raise ValueError(f"{where}: 'tools' is not a list of objects (JSON schemas)")
    if not isinstance(variables, dict):
        raise ValueError(f"{where}: 'chat_template_kwargs' is not an object")
    return template.example(record["messages"], where, tools=tools, variables=variables)


def _tokens(line: JsonLine, *, vocab_size: int) -> Example:
    """`input_ids`, and `labels` if they are there."""
    record, where = line.record, line.where
    tokens = _ids(record, "input_ids", where)
    check_ids(tokens, vocab_size=vocab_size, where=where)
    if record.get("labels") is None:
        labels = tokens
    else:
        labels = _ids(record, "labels", where)
    if len(labels) != len(tokens):
        raise ValueError(
            f"{where} has {len(labels)} labels for {len(tokens)} input_ids: labels are aligned with"
            f" input_ids (not shifted), {IGNORE_INDEX} where nothing is trained"
        )
    trained = np.where(labels == IGNORE_INDEX, 0, labels)
    check_ids(trained, vocab_size=vocab_size, where=f"{where}, 'labels'")
    if not all(record.get("attention_mask") or [1]):
        raise ValueError(f"{where} is padded (zeros in 'attention_mask'): write it without padding")
    return Example(tokens, labels)


def _ids(record: dict[str, Any], name: str, where: str) -> TokenArray:
    ids = record.get(name)
    if not _is_list_of(int, ids) or not ids:
        raise ValueError(f"{where} has no {name!r} that is a list of whole numbers")
    try:
        return np.array(ids, dtype=np.int64)
    except OverflowError:
        raise ValueError(f"{where}: {name!r} holds a number beyond 64 bits") from None


def _is_list_of(kind: type, values: object) -> bool:
    return isinstance(values, list) and all(type(value) is kind for value in values)
