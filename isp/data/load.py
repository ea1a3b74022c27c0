"""From a `DataConfig` to the datasets of a run."""

import logging
from typing import NamedTuple

import numpy as np

from isp.data.config import DataConfig
from isp.data.dataset import PackedDataset
from isp.data.documents import find_files, iterate_documents
from isp.data.indexed import IndexedDataset, check_pair, indexed_prefix, token_dtype
from isp.data.stores import ConcatStore, EndedStore, MemoryStore, SubsetStore, TokenStore, held_out
from isp.data.tokenizer import Tokenizer, load_tokenizer

__all__ = ["Datasets", "check_sources", "open_datasets"]

logger = logging.getLogger(__name__)

# Evaluation must not change with the training seed: curves of two seeds are compared on it.
HELD_OUT_SEED = 0


class Datasets(NamedTuple):
    """The run's datasets: `valid` is None where nothing is held out."""

    tokenizer: Tokenizer
    train: PackedDataset
    valid: PackedDataset | None


def open_datasets(config: DataConfig, *, seed: int) -> Datasets:
    """The tokenizer and the datasets that `config` names; text is tokenised here, in memory.

    Raises FileNotFoundError or ValueError naming the key, the path and the way out.
    """
    tokenizer = load_tokenizer(config.tokenizer, eos_token=config.eos_token)
    train_store = _open_store(config.source, tokenizer, text_key=config.text_key)
    valid_store: TokenStore | None = None
    if config.valid_source is not None:
        valid_store = _open_store(
            config.valid_source, tokenizer, text_key=config.text_key, key="data.valid_source"
        )
    elif config.valid_fraction > 0.0:
        train_store, valid_store = _split(train_store, config.valid_fraction)
    train, valid = (
        None
        if store is None
        else PackedDataset(
            store,
            vocab_size=tokenizer.vocab_size,
            seq_len=config.seq_len,
            pack=config.pack,
            seed=store_seed,
        )
        for store, store_seed in ((train_store, seed), (valid_store, HELD_OUT_SEED))
    )
    assert train is not None
    return Datasets(tokenizer, train, valid)


def check_sources(config: DataConfig) -> None:
    """Raise FileNotFoundError or ValueError for a source that is not there; opens no file."""
    sources = {"data.source": config.source, "data.valid_source": config.valid_source or []}
    for key, source in sources.items():
        for item in [source] if isinstance(source, str) else source:
            prefix = indexed_prefix(item)
            if prefix is not None:
                check_pair(prefix)
            else:
                find_files(item, key=key)


def _open_store(
    source: str | list[str], tokenizer: Tokenizer, *, text_key: str, key: str = "data.source"
) -> TokenStore:
    """The documents of a source: text is tokenised into memory, a .bin/.idx pair is mapped.

    Each document ends with eos. `key` is the name of `source` in messages.
    """
    stores: list[TokenStore] = []
    for item in [source] if isinstance(source, str) else source:
        opened: TokenStore
        prefix = indexed_prefix(item)
        if prefix is not None:
            opened = IndexedDataset(prefix)
        else:
            documents = map(tokenizer.encode, iterate_documents(item, text_key=text_key, key=key))
            dtype = token_dtype(tokenizer.vocab_size)
            opened = MemoryStore(f"{key}={item}", documents, dtype=dtype)
        stores.append(EndedStore(opened, tokenizer.eos_id))
    store = stores[0] if len(stores) == 1 else ConcatStore(stores)
    logger.info("%s: %d documents, %d tokens", store.name, len(store.lengths), store.lengths.sum())
    return store


def _split(store: TokenStore, fraction: float) -> tuple[SubsetStore, SubsetStore]:
    """The documents to train on and those held out; ValueError if either would be empty."""
    chosen = held_out(len(store.lengths), fraction)
    if chosen.all() or not chosen.any():
        raise ValueError(
            f"data.valid_fraction={fraction} holds out {int(chosen.sum())} of the {len(chosen)} "
            f"documents of {store.name}: use another fraction, or give data.valid_source"
        )
    kept, taken = np.flatnonzero(~chosen), np.flatnonzero(chosen)
    return (
        SubsetStore(f"{store.name} without its held-out documents", store, kept),
        SubsetStore(f"what data.valid_fraction={fraction} holds out of {store.name}", store, taken),
    )
