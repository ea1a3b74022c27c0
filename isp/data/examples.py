"""`SourceReader`: reads a source as text, or as examples for fine-tuning.

Examples on disk are two `.bin/.idx` pairs, tokens and labels. See [Note: Labels on disk] in
docs/design/notes/data.md.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from isp.config.data import Format, TrainOn
from isp.data.chat import ChatTemplate, Example
from isp.data.dataset import IGNORE_INDEX, check_ids
from isp.data.documents import (
    JsonLine,
    find_files,
    has_records,
    local_copies,
    read_documents,
    read_records,
)
from isp.data.indexed import (
    IndexedDataset,
    check_pair,
    check_pair_tokenizer,
    indexed_prefix,
    token_dtype,
)
from isp.data.stores import ConcatStore, EndedStore, MemoryStore, TokenStore
from isp.data.tokenizer import TokenArray, Tokenizer, with_bos
from isp.data.turns import read_talk, read_template_inputs, with_system

__all__ = [
    "LABEL_DTYPE",
    "ExampleStore",
    "SourceReader",
    "check_any",
    "check_trained",
    "count_trained",
    "file_format",
    "find_format",
    "labels_prefix",
]

LABEL_DTYPE = np.dtype(np.int32)
"""Dtype of labels on disk and in memory: it has space for any id and for `IGNORE_INDEX`."""
_TEMPLATE_INPUTS = {"system", "tools", "chat_template_kwargs"}
"""Keys of a row that the chat template gets in addition to messages."""
_USED = {
    Format.MESSAGES: {"messages", "conversations"} | _TEMPLATE_INPUTS,
    Format.PREFERENCES: {"prompt", "chosen", "rejected"} | _TEMPLATE_INPUTS,
    Format.COMPLETIONS: {"prompt", "completion"} | _TEMPLATE_INPUTS,
    Format.TOKENS: {"input_ids", "labels", "attention_mask", "position_ids"},
}
"""By format, the keys of a row that are read; the log lists the keys that are not."""
_ANSWERS = {Format.PREFERENCES: ("chosen", "rejected"), Format.COMPLETIONS: ("completion",)}
"""By format, the keys of a row that have answers to its prompt."""


class ExampleStore(NamedTuple):
    """The tokens and the labels of examples, in two stores.

    Document i of `tokens` has the tokens of example i, and document i of `labels` its labels.
    """

    tokens: TokenStore
    labels: TokenStore


def find_format(items: list[str], asked: Format, *, text_key: str, key: str) -> Format:
    """Return the format of a source with the paths, globs or folders `items`.

    Reads at most the first line of each file. `asked`: `data.format`; `key` names the source in
    errors.

    If several formats of examples are mixed, returns MESSAGES if it is one of them, since those
    need a chat template. Raises ValueError for text mixed with examples, and for pairs of
    preferences mixed with other examples.
    """
    found: dict[Format, str] = {}  # each format with its first file, which an error names
    for item in items:
        if (prefix := indexed_prefix(item)) is not None:
            found.setdefault(_pair_format(prefix, asked), str(prefix))
            continue
        for path in find_files(item, key=key, as_text=asked is Format.TEXT):
            found.setdefault(file_format(path, asked, text_key), str(path))
    for form, mixed in (
        (Format.TEXT, "text with examples that have labels"),
        (Format.PREFERENCES, "pairs of preferences with other examples"),
    ):
        if form in found and len(found) > 1:
            listed = ", ".join(f"{path} ({form})" for form, path in found.items())
            raise ValueError(f"{key} mixes {mixed}: {listed}: use one kind only")
    order = (Format.TEXT, Format.MESSAGES, Format.COMPLETIONS, Format.TOKENS, Format.PREFERENCES)
    return next(form for form in order if form in found)


def file_format(path: Path, asked: Format, text_key: str) -> Format:
    """Return the format of the rows of a file: `asked`, or for AUTO by the keys of the first row.

    Raises ValueError for a file without keys (plain text) if another format than text is asked for.
    """
    if asked is not Format.AUTO:
        if not has_records(path) and asked is not Format.TEXT:
            raise ValueError(
                f"data.format={asked}: {path} is neither JSON nor a table: use auto or text"
            )
        return asked
    if not has_records(path):
        return Format.TEXT
    first = next((line.record for line in read_records(path)), {})
    keys = {
        text_key: Format.TEXT,
        "messages": Format.MESSAGES,
        "conversations": Format.MESSAGES,
        "input_ids": Format.TOKENS,
        "chosen": Format.PREFERENCES,
        "completion": Format.COMPLETIONS,
    }
    return next((form for name, form in keys.items() if name in first), Format.TEXT)


def _pair_format(prefix: Path, asked: Format) -> Format:
    """Return the format of the .bin/.idx files of `prefix`: TOKENS if labels are there, else TEXT.

    If `asked` is one of these two, returns that. Raises ValueError if messages are asked for and
    there are no labels.
    """
    if asked is not Format.TEXT and _has_labels(prefix):
        return Format.TOKENS
    if asked is Format.MESSAGES:
        raise ValueError(
            f"data.format={asked}: there are no labels next to {prefix}.bin: data.format=tokens"
            " trains all of its tokens, or `isp data prepare` writes labels from a .jsonl file"
        )
    return Format.TOKENS if asked is Format.TOKENS else Format.TEXT


class SourceReader:
    """Reads the files and .bin/.idx pairs of a source, as text or as examples.

    `key` names the source in errors; `template` is the path of a chat template, which replaces the
    tokenizer's. The constructor reads at most the first line of each file, and raises
    FileNotFoundError or ValueError for a source, or a chat template, that cannot be read.
    """

    def __init__(
        self,
        source: str | Sequence[str],
        tokenizer: Tokenizer,
        *,
        asked: Format,
        text_key: str,
        template: str | None,
        key: str,
        train_on: TrainOn = TrainOn.ASSISTANT,
        add_bos: bool = True,
    ) -> None:
        self.items = local_copies([source] if isinstance(source, str) else source, key)
        self._tokenizer, self._asked, self._text_key, self._key = tokenizer, asked, text_key, key
        for item in self.items:
            if (prefix := indexed_prefix(item)) is not None:
                check_pair_tokenizer(prefix, tokenizer, key)
        form = find_format(self.items, asked, text_key=text_key, key=key)
        self._unused = Counter[str]()
        self.is_text = form is Format.TEXT
        self.is_pairs = form is Format.PREFERENCES
        has_turns, has_texts = self._kinds(form)
        if train_on is not TrainOn.ASSISTANT and form is not Format.MESSAGES:
            raise ValueError(
                f"data.train_on={train_on} is for conversations, and {key} holds none (lines with"
                " 'messages'): leave it out"
            )
        self._template = ChatTemplate(tokenizer, template, train_on=train_on) if has_turns else None
        self.has_chats = has_turns
        """True if the source has conversations that the chat template renders."""
        self.takes_bos = has_texts and bool(tokenizer.bos)
        """True if the source has texts, and the tokenizer puts a token before texts."""
        self._bos = tokenizer.bos if add_bos else ()

    def check(self) -> None:
        """Raise errors that `open` would raise, but read at most the first line of each file.

        Faults in later lines are found only by `open`.
        """
        for item in self.items:
            if (prefix := indexed_prefix(item)) is not None:
                check_pair(prefix)
        for path in filter(has_records, self.files):
            next(self.read(path), None)

    @property
    def files(self) -> list[Path]:
        """All files of the source, except .bin and .idx files."""
        items = [item for item in self.items if indexed_prefix(item) is None]
        return self._find(items)

    def _find(self, items: list[str]) -> list[Path]:
        """Return the files of the paths, globs or folders `items`, without .bin and .idx files."""
        return find_files(items, key=self._key, as_text=self._asked is Format.TEXT)

    def read(self, path: Path) -> Iterator[tuple[list[Example], int]]:
        """Yield the examples of each row or text document of a file, and its size in bytes.

        A document is one example, trained as a whole, without eos. Keys that are not used are
        counted, for `unused`. Raises ValueError, with the file and the line.
        """
        form = file_format(path, self._asked, self._text_key)
        if form is Format.TEXT:
            for text, num_bytes in read_documents(path, text_key=self._text_key):
                tokens = self.encode(text)
                yield [Example(tokens, tokens)], num_bytes
            return
        for line in read_records(path):
            if form is Format.MESSAGES:
                assert self._template is not None
                turns, inputs = read_talk(line)
                examples = [self._template.example(turns, line.where, **inputs._asdict())]
                self._unused.update(self._template.unnamed(turns, **inputs._asdict()))
            elif form in _ANSWERS:
                keys = _ANSWERS[form]
                examples = _read_answers(line, keys, self._tokenizer, self._template, self._bos)
            else:
                examples = _documents(line, vocab_size=self._tokenizer.vocab_size)
            self._unused.update(line.record.keys() - _USED[form])
            yield examples, line.num_bytes

    def _kinds(self, form: Format) -> tuple[bool, bool]:
        """Return two bools: the source has messages; it has texts. Reads first lines at most.

        A .bin/.idx pair has neither, but token ids.
        """
        if form is Format.TEXT:
            return False, not all(map(indexed_prefix, self.items))
        has_turns = has_texts = False
        for path in filter(has_records, self.files):
            form = file_format(path, self._asked, self._text_key)
            # Answers to a prompt may be texts or messages, in the same format: look at a line.
            first = next(read_records(path), None) if form in _ANSWERS else None
            if first is not None and _is_text(first.record):
                has_texts = True
            elif first is not None or form is Format.MESSAGES:
                has_turns = True
        return has_turns, has_texts

    def encode(self, text: str) -> TokenArray:
        """Return the tokens of a document, with BOS, without eos; none if it is empty."""
        tokens = self._tokenizer.encode(text)
        return with_bos(tokens, self._bos) if len(tokens) else tokens

    @property
    def begin(self) -> str:
        """Sentence for the log: whether texts begin with a BOS; "" if the tokenizer has none."""
        if not self.takes_bos:
            return ""
        token = self._tokenizer.decode(np.array(self._tokenizer.bos), special=True)
        return f"texts begin with{'' if self._bos else 'out'} {token}"

    @property
    def unused(self) -> str:
        """Sentence for the log: keys in JSON objects or tables that were not used, each with the
        number of rows that have it; "" if all were used."""
        listed = ", ".join(f"{key} ({count:,})" for key, count in sorted(self._unused.items()))
        return listed and f"not used, by rows: {listed}"

    @property
    def note(self) -> str:
        """`begin` and `unused`, to be appended to the source's line in the log."""
        return "".join(f"; {words}" for words in (self.begin, self.unused) if words)

    def open(self) -> ExampleStore:
        """Return all examples of the source.

        Text files and conversations are tokenized into memory; .bin/.idx files have token ids, and
        are memory-mapped. Documents of text end with eos. Raises ValueError for a file that cannot
        be read, and if an entry of the key, such as a path or glob, gives no trained token.
        """
        stores = list(map(self._open, self.items))
        if len(stores) == 1:
            return stores[0]
        # Join all stores of tokens, and all stores of labels.
        return ExampleStore(*(ConcatStore(column) for column in zip(*stores, strict=True)))

    def _open(self, item: str) -> ExampleStore:
        """Return the examples of one path, glob or folder of the source; see `open`."""
        prefix, name = indexed_prefix(item), f"{self._key}={item}"
        if prefix is not None and not self.is_text:
            return _open_pairs(prefix)
        dtype = token_dtype(self._tokenizer.vocab_size)
        examples = (
            example
            for path in ([] if prefix is not None else self._find([item]))
            for of_line, _ in self.read(path)
            for example in of_line
        )
        if self.is_text:
            store: TokenStore
            if prefix is not None:
                store = IndexedDataset(prefix)
            else:
                store = MemoryStore(name, (tokens for tokens, _ in examples), dtype=dtype)
            check_any(len(store.lengths), name)
            store = EndedStore(store, self._tokenizer.eos_id)
            # All tokens of a text are trained, so its labels are its tokens.
            return ExampleStore(store, store)
        of_files = list(examples)  # A list, because it is iterated twice below.
        check_trained(any(count_trained(labels) for _, labels in of_files), name)
        tokens, labels = zip(*of_files, strict=True)
        return ExampleStore(
            MemoryStore(name, tokens, dtype=dtype), MemoryStore(name, labels, dtype=LABEL_DTYPE)
        )


def check_any(num_documents: int, name: str) -> None:
    """Raise ValueError if the source of text called `name` has no documents."""
    if not num_documents:
        raise ValueError(f"{name} holds no documents: every file of it is empty")


def check_trained(trained: bool, name: str) -> None:
    """Raise ValueError unless the source called `name` has a trained token."""
    if not trained:
        raise ValueError(
            f"{name} has no token to train on: no message with the role 'assistant', or no label"
            f" but {IGNORE_INDEX}"
        )


def count_trained(labels: TokenArray) -> int:
    """Return the number of trained tokens of an example, given its labels.

    The first token does not count, since there is no token before it that predicts it.
    """
    return int(np.count_nonzero(labels[1:] != IGNORE_INDEX))


def labels_prefix(prefix: Path) -> Path:
    """Return the path without suffix of the .bin/.idx files with the labels of those of `prefix`.

    See [Note: Labels on disk].
    """
    return prefix.with_name(prefix.name + ".labels")


def _has_labels(prefix: Path) -> bool:
    """Return True if there are labels for the .bin/.idx files of `prefix`."""
    labels = labels_prefix(prefix)
    return labels.with_name(labels.name + ".idx").exists()


def _open_pairs(prefix: Path) -> ExampleStore:
    """Return the examples in the .bin/.idx files of `prefix`.

    Raises ValueError if their labels have other lengths.
    """
    tokens = IndexedDataset(prefix)
    if not _has_labels(prefix):
        return ExampleStore(tokens, tokens)
    labels = IndexedDataset(labels_prefix(prefix))
    if not np.array_equal(tokens.lengths, labels.lengths):
        raise ValueError(
            f"{tokens.idx_path} and {labels.idx_path} disagree about the lengths of examples: write"
            " both again (`isp data prepare`)"
        )
    return ExampleStore(tokens, labels)


_LABELS = (
    f"write 'labels' aligned with input_ids (not shifted), {IGNORE_INDEX} for tokens without loss"
)
_REFUSED = {
    **dict.fromkeys(("assistant_masks", "completion_mask", "loss_mask", "prompt_mask"), _LABELS),
    "seq_lengths": "write 'position_ids' that restart at 0 at each document",
}
"""Keys in which other programs have labels and positions, with the remedy for each."""


def _documents(line: JsonLine, *, vocab_size: int) -> list[Example]:
    """Return the examples of a row with `input_ids`: one, or one for each 0 in `position_ids`.

    Raises ValueError, with the place and the key, if the lists of a row differ in length, or have
    values out of range.
    """
    record, where = line.record, line.where
    tokens = _ids(record, "input_ids", where)
    check_ids(tokens, vocab_size=vocab_size, where=where)
    labels = _aligned(record, "labels", where, tokens)
    trained = np.where(labels == IGNORE_INDEX, 0, labels)  # Replace -100: only ids are checked.
    check_ids(trained, vocab_size=vocab_size, where=f"{where}, 'labels'")
    if (_aligned(record, "attention_mask", where, np.ones_like(tokens)) != 1).any():
        raise ValueError(
            f"{where}: 'attention_mask' has values other than 1: write examples without padding;"
            f" to put several documents on one line, use 'position_ids' that restart at 0"
        )
    for name, instead in _REFUSED.items():
        if name in record:
            raise ValueError(f"{where} has {name!r}, which is not read: {instead}")
    positions = _aligned(record, "position_ids", where, np.arange(len(tokens)))
    # A document begins at each position 0. In it, positions have to count up by one.
    begins = np.flatnonzero(positions == 0)
    expected = np.arange(len(tokens))
    if len(begins) and begins[0] == 0:
        # The position of a token is its index minus that of the first token of its document.
        expected -= np.repeat(begins, np.diff(begins, append=len(tokens)))
    if (differ := np.flatnonzero(positions != expected)).size:
        raise ValueError(
            f"{where}: 'position_ids' has {positions[differ[0]]} at token {differ[0]}: positions"
            f" count up from 0, and restart at 0 at each document"
        )
    # Split before each document but the first.
    return list(map(Example, np.split(tokens, begins[1:]), np.split(labels, begins[1:])))


def _aligned(
    record: dict[str, Any], name: str, where: str, default: npt.NDArray[np.integer[Any]]
) -> TokenArray:
    """Return the list of integers under `name` in a row, or `default` if there is none.

    Raises ValueError if it has another length than `default`.
    """
    if record.get(name) is None:
        return default
    found = _ids(record, name, where)
    if len(found) != len(default):
        hint = f", {IGNORE_INDEX} for tokens without loss" if name == "labels" else ""
        raise ValueError(
            f"{where} has {len(found)} {name} for {len(default)} input_ids: {name} are aligned with"
            f" input_ids (not shifted){hint}"
        )
    return found


def _ids(record: dict[str, Any], name: str, where: str) -> TokenArray:
    """Return the list of integers under `name` in a row; raise ValueError for other values."""
    ids = record.get(name)
    if not isinstance(ids, list) or not ids or {*map(type, ids)} != {int}:
        raise ValueError(f"{where} has no {name!r} that is a list of whole numbers")
    try:
        return np.array(ids, dtype=np.int64)
    except OverflowError:
        raise ValueError(
            f"{where}: {name!r} holds a number beyond 64 bits: correct or remove it"
        ) from None


def _is_text(record: dict[str, Any]) -> bool:
    """Return True if the answers in a row are texts, False if they are messages."""
    return isinstance(record.get("chosen", record.get("completion")), str)


def _read_answers(
    line: JsonLine,
    keys: tuple[str, ...],
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    bos: tuple[int, ...] = (),
) -> list[Example]:
    """Return an example of prompt and answer for each of `keys`; only the answer is trained.

    Prompt and answers are texts, which begin with `bos` and end with eos, or lists of messages. If
    a row has two answers and no `prompt`, what both begin with is the prompt. Raises ValueError,
    with the line. Source: the prompt-completion and preference formats of TRL.
    """
    record, where = line.record, line.where
    answers: list[Any] = [record.get(key) for key in keys]
    kind = str if _is_text(record) else list
    asked = record.get("prompt", kind())
    for key, value in zip((*keys, "prompt"), (*answers, asked), strict=True):
        if not isinstance(value, kind) or not (value or key == "prompt"):
            names = " and ".join(map(repr, ("prompt", *keys)))
            raise ValueError(
                f"{where}: {key!r} must be text that is not empty, or a list of messages; {names}"
                f" must be of the same kind"
            )
    if len(keys) == 1 and not asked:
        raise ValueError(f"{where}: 'prompt' must not be empty if there is a 'completion'")
    if len(keys) == 1 and isinstance(record.get("label"), bool):
        raise ValueError(
            f"{where} has the key 'label', which is not read: leave out the rows with label false,"
            " and the key 'label' in the others"
        )
    inputs = read_template_inputs(line)
    if kind is str:
        # These keys are inputs of the chat template, which does not render texts.
        of_messages = ("system", "tools", "chat_template_kwargs")
        if found := [key for key in of_messages if record.get(key)]:
            raise ValueError(
                f"{where} has {found[0]!r}, which is for messages: write 'prompt' and answers as"
                f" lists of messages, or move the text of {found[0]!r} into 'prompt'"
            )
    elif asked:
        asked = with_system(asked, line)
    else:
        answers = [with_system(answer, line) for answer in answers]
    prompt = asked or _common(answers)
    # Tokenize prompt and answer as one text, as in a conversation. A token may then have the end of
    # the prompt and the begin of the answer.
    whole: list[Any] = [asked + answer for answer in answers]
    if kind is str:
        before, *of_whole = (with_bos(tokenizer.encode(text), bos) for text in (prompt, *whole))
        texts = [np.append(tokens, tokenizer.eos_id) for tokens in of_whole]
    else:
        if template is None:
            raise ValueError(
                f"{where} has messages, but the first line of the file has text: put them into two"
                " files"
            )
        more = inputs._asdict()
        before = tokenizer.encode(template.prompt(prompt, where, **more))
        texts = [template.tokens(turns, where, num_prompt=len(prompt), **more) for turns in whole]
    return [_after(before, tokens, where) for tokens in texts]


def _common(answers: list[Any]) -> Any:
    """Return what two answers begin with: the same characters of texts, or the same messages."""
    chosen, rejected = answers
    same = takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False))
    return chosen[: sum(1 for _ in same)]


def _after(prompt: Any, tokens: Any, where: str) -> Example:
    """Return the example `tokens`, trained from the first token on that differs from `prompt`.

    Raises ValueError if no token is left to train.
    """
    same = min(len(prompt), len(tokens))
    # The first difference may be before the end of the prompt: tokenized together, the end of the
    # prompt and the begin of the answer may be in one token.
    differ = np.flatnonzero(prompt[:same] != tokens[:same])
    # The first token is never trained, since no token predicts it.
    first = max(1, int(differ[0]) if differ.size else same)
    if first >= len(tokens):
        raise ValueError(f"{where}: an answer adds no tokens to the prompt: remove the row")
    labels = np.asarray(tokens).astype(np.int32)
    labels[:first] = IGNORE_INDEX
    return Example(tokens, labels)
