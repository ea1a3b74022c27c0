"""The datasets of a run, opened as its configuration says."""

from typing import NamedTuple

import numpy as np

from isp.data.chat import ChatTemplate
from isp.data.config import DataConfig, Format
from isp.data.dataset import Dataset, PackedDataset
from isp.data.documents import find_files, iterate_documents, read_documents
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
    TokenStore,
    held_out,
)
from isp.data.tokenizer import Tokenizer, load_tokenizer

__all__ = ["Datasets", "check_sources", "open_datasets"]

AnyStore = TokenStore | ExampleStore

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

    Of the files no more is read than the first lines.
    """
    for key, items in _sources(config).items():
        form = find_format(items, config.format, text_key=config.text_key, key=key)
        is_chat = form is Format.MESSAGES
        template = ChatTemplate(tokenizer, config.chat_template) if is_chat else None
        for item in items:
            if (prefix := indexed_prefix(item)) is not None:
                check_pair(prefix)
                continue
            for path in find_files(item, key=key):
                form = file_format(path, config.format, config.text_key)
                if form is not Format.TEXT:
                    next(read_examples(path, form, tokenizer, template), None)
                elif path.suffix == ".jsonl":
                    next(read_documents(path, text_key=config.text_key), None)


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
    is_chat = form is Format.MESSAGES
    template = ChatTemplate(tokenizer, config.chat_template) if is_chat else None
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
    held = f"what data.valid_fraction={fraction} holds out of {tokens.name}"
    texts = np.flatnonzero(tokens.lengths)
    if tokens is store and len(texts) == 1:
        length = int(tokens.lengths[texts[0]])
        cut = length - round(fraction * length)
        _check_split(length - cut, length, "tokens", fraction, tokens.name)
        name = f"{tokens.name} without its end"
        return (
            PartStore(name, tokens, texts, range(cut)),
            PartStore(f"{held}, its end", tokens, texts, range(cut, length)),
        )
    chosen = held_out(len(tokens.lengths), fraction)
    _check_split(int(chosen.sum()), len(chosen), "documents", fraction, tokens.name)
    kept, taken = (
        ExampleStore(*(PartStore(name, part, documents) for part in store))
        if isinstance(store, ExampleStore)
        else PartStore(name, store, documents)
        for name, documents in (
            (f"{tokens.name} without its held-out documents", np.flatnonzero(~chosen)),
            (held, np.flatnonzero(chosen)),
        )
    )
    return kept, taken


def _check_split(count: int, total: int, units: str, fraction: float, name: str) -> None:
    if count in (0, total):
        raise ValueError(
            f"data.valid_fraction={fraction} holds out {count} of the {total} {units} of {name}:"
            " use another fraction, or give data.valid_source"
        )
