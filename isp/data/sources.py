"""The datasets of a run, opened as its configuration says."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from isp.data.chat import ChatTemplate
from isp.data.config import DataConfig, Format
from isp.data.dataset import Dataset, PackedDataset
from isp.data.documents import find_files, iterate_documents, read_documents, read_jsonl
from isp.data.examples import (
    ExampleStore,
    file_format,
    find_format,
    open_examples,
    read_examples,
)
from isp.data.indexed import IndexedDataset, check_pair, indexed_prefix, token_dtype
from isp.data.rows import ExampleDataset
from isp.data.stores import (
    ConcatStore,
    EndedStore,
    MemoryStore,
    PartStore,
    SubsetStore,
    TokenStore,
    held_out,
)
from isp.data.tokenizer import Tokenizer, load_tokenizer

__all__ = ["Datasets", "check_sources", "open_datasets"]

AnyStore = TokenStore | ExampleStore

_MOST_LOOKED_AT = 1 << 16
"""Documents that are counted before a run to see that a fraction of them can be held out."""
_HELD_OUT_SEED = 0  # evaluation must not change with the training seed: curves are compared on it


class Datasets(NamedTuple):
    """The run's datasets: `valid` is None where nothing is held out."""

    tokenizer: Tokenizer
    train: Dataset
    valid: Dataset | None


def open_datasets(config: DataConfig, *, seed: int) -> Datasets:
    """The tokenizer and the datasets that `config` names; text is tokenised here, in memory.

    Raises FileNotFoundError or ValueError naming the key, the path and the way out.
    """
    tokenizer = load_tokenizer(config.tokenizer, eos_token=config.eos_token)
    train_store = _open(config, tokenizer, "data.source")
    valid_store: AnyStore | None = None
    if config.valid_source is not None:
        valid_store = _open(config, tokenizer, "data.valid_source")
    elif config.valid_fraction > 0.0:
        train_store, valid_store = _split(train_store, config.valid_fraction)
    train, valid = (
        None if store is None else _dataset(store, config, tokenizer, store_seed)
        for store, store_seed in ((train_store, seed), (valid_store, _HELD_OUT_SEED))
    )
    assert train is not None
    return Datasets(tokenizer, train, valid)


def _dataset(store: AnyStore, config: DataConfig, tokenizer: Tokenizer, seed: int) -> Dataset:
    if isinstance(store, ExampleStore):
        return ExampleDataset(
            store,
            vocab_size=tokenizer.vocab_size,
            pad_id=tokenizer.eos_id,
            seq_len=config.seq_len,
            pack=config.pack,
            seed=seed,
            excess_length=config.excess_length_strategy,
        )
    return PackedDataset(
        store,
        vocab_size=tokenizer.vocab_size,
        seq_len=config.seq_len,
        pack=config.pack,
        seed=seed,
    )


def check_sources(config: DataConfig, tokenizer: Tokenizer) -> None:
    """Raise FileNotFoundError or ValueError for a source, or a template, that cannot be read.

    Of the files no more is read than the first lines, and as many documents as
    `data.valid_fraction` needs to hold out one and leave one.
    """
    for key, items in _sources(config).items():
        form = find_format(items, config.format, text_key=config.text_key, key=key)
        template = None
        if form is Format.MESSAGES:
            template = ChatTemplate(tokenizer, config.chat_template)
        for item in items:
            if (prefix := indexed_prefix(item)) is not None:
                check_pair(prefix)
                continue
            for path in find_files(item, key=key):
                if path.suffix == ".jsonl":
                    next(_documents_of(path, config, tokenizer, template), None)
    if config.valid_fraction > 0.0:
        _check_fraction(config, tokenizer)


def _documents_of(
    path: Path, config: DataConfig, tokenizer: Tokenizer, template: ChatTemplate | None
) -> Iterator[int]:
    """The number of documents that each document or line of a file gives."""
    form = file_format(path, config.format, config.text_key)
    if form is Format.TEXT:
        return (1 for _ in read_documents(path, text_key=config.text_key))
    if form is Format.MESSAGES and template is None:
        return (1 for _ in read_jsonl(path))
    return (len(examples) for examples, _ in read_examples(path, form, tokenizer, template))


def _check_fraction(config: DataConfig, tokenizer: Tokenizer) -> None:
    """Refuse a fraction that leaves nothing to train on, or nothing to evaluate on."""
    chosen = held_out(_MOST_LOOKED_AT, config.valid_fraction)
    both = chosen.any() and not chosen.all()
    needed = 1 + max(chosen.argmax(), (~chosen).argmax()) if both else _MOST_LOOKED_AT
    items = _sources(config)["data.source"]
    count = 0
    for documents in _numbers_of_documents(items, config, tokenizer):
        count += documents
        if count >= needed:
            return
    form = find_format(items, config.format, text_key=config.text_key, key="data.source")
    if count != 1 or form is not Format.TEXT:  # Of a single text, the end is held out.
        _check_split(chosen[:count], config.valid_fraction, f"data.source={', '.join(items)}")


def _numbers_of_documents(
    items: list[str], config: DataConfig, tokenizer: Tokenizer
) -> Iterator[int]:
    for item in items:
        if (prefix := indexed_prefix(item)) is not None:
            yield len(IndexedDataset(prefix).lengths)
            continue
        for path in find_files(item):
            yield from _documents_of(path, config, tokenizer, None)


def _sources(config: DataConfig) -> dict[str, list[str]]:
    """The items of each source that is given, by its key."""
    given = {"data.source": config.source, "data.valid_source": config.valid_source}
    return {
        key: [source] if isinstance(source, str) else source
        for key, source in given.items()
        if source is not None
    }


def _open(config: DataConfig, tokenizer: Tokenizer, key: str) -> AnyStore:
    """What a source holds, under the name `key` in messages."""
    items, text_key = _sources(config)[key], config.text_key
    form = find_format(items, config.format, text_key=text_key, key=key)
    if form is Format.TEXT:
        return _open_store(items, tokenizer, text_key=text_key, key=key)
    template = None
    if form is Format.MESSAGES:
        template = ChatTemplate(tokenizer, config.chat_template)
    return open_examples(items, config.format, tokenizer, template, text_key=text_key, key=key)


def _open_store(items: list[str], tokenizer: Tokenizer, *, text_key: str, key: str) -> TokenStore:
    """The documents of a source: text is tokenised into memory, a .bin/.idx pair is mapped.

    Each document ends with eos. `key` is the name of the source in messages.
    """
    stores: list[TokenStore] = []
    for item in items:
        opened: TokenStore
        prefix = indexed_prefix(item)
        if prefix is not None:
            opened = IndexedDataset(prefix)
        else:
            documents = map(tokenizer.encode, iterate_documents(item, text_key=text_key, key=key))
            dtype = token_dtype(tokenizer.vocab_size)
            opened = MemoryStore(f"{key}={item}", documents, dtype=dtype)
        stores.append(EndedStore(opened, tokenizer.eos_id))
    return stores[0] if len(stores) == 1 else ConcatStore(stores)


def _split(store: AnyStore, fraction: float) -> tuple[AnyStore, AnyStore]:
    """The documents to train on and those held out; ValueError if either would be empty.

    Of a single text, the end is held out.
    """
    tokens = store.tokens if isinstance(store, ExampleStore) else store
    documents = np.flatnonzero(tokens.lengths)
    if tokens is store and len(documents) == 1:
        return _split_text(tokens, int(documents[0]), fraction)
    chosen = held_out(len(tokens.lengths), fraction)
    _check_split(chosen, fraction, tokens.name)
    names = (
        f"{tokens.name} without its held-out documents",
        f"what data.valid_fraction={fraction} holds out of {tokens.name}",
    )
    kept, taken = (
        ExampleStore(*(SubsetStore(name, part, documents) for part in store))
        if isinstance(store, ExampleStore)
        else SubsetStore(name, store, documents)
        for name, documents in zip(names, map(np.flatnonzero, (~chosen, chosen)), strict=True)
    )
    return kept, taken


def _split_text(store: TokenStore, document: int, fraction: float) -> tuple[TokenStore, TokenStore]:
    """The beginning and the end of the only text of a store."""
    length = int(store.lengths[document])
    count = round(fraction * length)
    if count in (0, length):
        raise ValueError(
            f"data.valid_fraction={fraction} holds out {count} of the {length} tokens of"
            f" {store.name}: use another fraction, or give data.valid_source"
        )
    cut = length - count
    return (
        PartStore(f"{store.name} without its end", store, document, range(cut)),
        PartStore(
            f"what data.valid_fraction={fraction} holds out of {store.name}, its end",
            store,
            document,
            range(cut, length),
        ),
    )


def _check_split(chosen: npt.NDArray[np.bool_], fraction: float, name: str) -> None:
    if chosen.all() or not chosen.any():
        raise ValueError(
            f"data.valid_fraction={fraction} holds out {int(chosen.sum())} of the {len(chosen)} "
            f"documents of {name}: use another fraction, or give data.valid_source"
        )
