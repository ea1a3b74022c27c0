"""`open_datasets`: opens the data sets that the `data` section of a configuration names."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from isp.config.data import DataConfig, SourcePart
from isp.data.dataset import Dataset, PackedDataset
from isp.data.examples import ExampleStore, SourceReader
from isp.data.indexed import indexed_prefix
from isp.data.mixture import MixedDataset, MixedPart
from isp.data.packing import ExampleDataset
from isp.data.stores import PartStore, TokenStore, hashed, held_out
from isp.data.stream import StreamDataset
from isp.data.tokenizer import Tokenizer, load_tokenizer

__all__ = ["Datasets", "check_sources", "describe_source", "open_datasets", "takes_bos"]

_HELD_OUT_SEED = 0
"""Seed of the order of held-out samples: the same in all runs, so that losses are comparable."""

_Opened = tuple[ExampleStore | None, SourceReader]
"""Type of an opened source: its documents, or None if they are streamed, and its reader."""


class Datasets(NamedTuple):
    """Tokenizer and data sets of a run."""

    tokenizer: Tokenizer
    train: Dataset
    valid: Dataset | None
    """Held-out samples; None if nothing is held out."""
    has_chats: bool
    """True if `train` has conversations that a chat template renders."""


def open_datasets(config: DataConfig, *, seed: int) -> Datasets:
    """Return the tokenizer and the data sets of `config`; text files are tokenized into memory.

    Raises FileNotFoundError or ValueError, with the key and the path.
    """
    tokenizer = load_tokenizer(config.tokenizer, eos_token=config.eos_token)
    readers = _readers(config, tokenizer)
    count = len(config.parts)
    train: list[_Opened] = [
        (None if config.streaming else reader.open(), reader) for reader in readers[:count]
    ]
    valid: list[_Opened] = [(reader.open(), reader) for reader in readers[count:]]
    if config.valid_fraction > 0.0:
        # Split each source alone: what is held out of it does not depend on the others.
        split = [_split(store, config.valid_fraction, reader) for store, reader in train if store]
        valid = [(stores[1], reader) for stores, reader in zip(split, readers, strict=True)]
        train = [(stores[0], reader) for stores, reader in zip(split, readers, strict=True)]
    return Datasets(
        tokenizer,
        _mixture(train, config.parts, seed, config, tokenizer),
        _mixture(valid, config.valid_parts, None, config, tokenizer) if valid else None,
        any(reader.has_chats for reader in readers[:count]),
    )


def describe_source(config: DataConfig) -> str:
    """Return a description of `data.source` for a terminal: sizes, lengths, and an example.

    `source` must not be a mixture. Raises the errors of `open_datasets`.
    """
    tokenizer = load_tokenizer(config.tokenizer, eos_token=config.eos_token)
    (reader,) = _readers(config, tokenizer)
    store = reader.open()
    dataset = _dataset(store, reader, 0, config, tokenizer)
    lengths = store.tokens.lengths
    # Bin p has the number of documents of 2^(p - 1) + 1 to 2^p tokens.
    bins = np.bincount(np.ceil(np.log2(np.maximum(lengths, 1))).astype(np.int64))
    first = int(np.flatnonzero(bins)[0])
    bars = [
        f"  up to {2**power:>10,} tokens  {count:>10,}  {'#' * -(-40 * count // bins.max())}"
        for power, count in enumerate(bins.tolist())
        if power >= first
    ]
    if isinstance(dataset, ExampleDataset):
        example = dataset.shown(tokenizer)
    else:
        example = repr(tokenizer.decode(dataset.sample(0).tokens, special=True)[:400])
    used = dataset.tokens_per_sample / config.seq_len
    return "\n".join(
        [
            dataset.summary,
            f"lengths     median {int(np.median(lengths)):,}, longest {lengths.max():,}",
            *bars,
            f"packing     {used:.1%} of the tokens of a sample are used, the rest is padding",
            f"example     {example}",
        ]
    )


def check_sources(config: DataConfig, tokenizer: Tokenizer, *, objective: str = "sft") -> None:
    """Check the sources and the chat template of `config`; reads the first line of each file.

    Raises FileNotFoundError or ValueError for a source that cannot be read, or that has no examples
    for `training.objective`.
    """
    for reader in _readers(config, tokenizer):
        reader.check()
        if reader.is_pairs != (objective in ("dpo", "reward")):
            held = "pairs of preferences" if reader.is_pairs else "no pairs of preferences"
            raise ValueError(
                f"training.objective={objective}: {', '.join(reader.items)} holds {held}: use"
                f" {'dpo or reward' if reader.is_pairs else 'sft, or chosen and rejected'}"
            )


def takes_bos(config: DataConfig) -> bool:
    """Return True if `data.add_bos` changes the tokens of a run.

    Reads the first line of each file at most.
    """
    tokenizer = load_tokenizer(config.tokenizer, eos_token=config.eos_token)
    return bool(tokenizer.bos) and any(r.takes_bos for r in _readers(config, tokenizer))


def _readers(config: DataConfig, tokenizer: Tokenizer) -> list[SourceReader]:
    """Return a reader for each part of `source`, followed by those of `valid_source`, if given.

    Raises ValueError for a source that cannot be streamed although `data.streaming` is set.
    """
    given = [("data.source", part.path) for part in config.parts]
    if config.valid_source is not None:
        given += [("data.valid_source", part.path) for part in config.valid_parts]
    readers = [
        SourceReader(
            source,
            tokenizer,
            asked=config.format,
            text_key=config.text_key,
            template=config.chat_template,
            train_on=config.train_on,
            add_bos=config.add_bos,
            key=key,
        )
        for key, source in given
    ]
    # With `streaming` all training sources are streamed; held-out text never is.
    for reader in readers[: len(config.parts) * config.streaming]:
        if not reader.is_text or any(map(indexed_prefix, reader.items)):
            raise ValueError(
                f"data.streaming is for text, but data.source={', '.join(reader.items)} holds"
                f" examples, which are packed in advance, or a .bin/.idx pair, which is not loaded"
                f" into memory anyway: leave data.streaming out"
            )
    return readers


def _mixture(
    opened: Sequence[_Opened],
    parts: Sequence[SourcePart],
    seed: int | None,
    config: DataConfig,
    tokenizer: Tokenizer,
) -> Dataset:
    """Return the data set of a single source, or a mixture of all `parts`.

    `seed` None is for held-out data: each source then has the same order as if it were alone, and
    no limit of epochs.
    """
    own = _HELD_OUT_SEED if seed is None else seed
    if len(opened) == 1:
        return _dataset(*opened[0], own, config, tokenizer)

    def part_seed(index: int) -> int:
        # Hash: with seed + index, part 1 of one seed would have the order of part 0 of the next.
        return own if seed is None else hashed(hashed(seed) + index) >> 1

    datasets = [
        _dataset(*found, part_seed(index), config, tokenizer) for index, found in enumerate(opened)
    ]
    return MixedDataset(
        [
            MixedPart(part.title, dataset, part.weight, None if seed is None else part.epochs)
            for part, dataset in zip(parts, datasets, strict=True)
        ],
        seed=own,
    )


def _dataset(
    store: ExampleStore | None,
    reader: SourceReader,
    seed: int,
    config: DataConfig,
    tokenizer: Tokenizer,
) -> Dataset:
    """Return the data set of one source: streamed, cut from text, or packed from examples."""
    cut: Any = {"seq_len": config.seq_len, "pack": config.pack, "seed": seed, "note": reader.note}
    if store is None:
        name = f"data.source={', '.join(reader.items)}"
        cut |= {"eos_id": tokenizer.eos_id, "text_key": config.text_key}
        return StreamDataset(name, reader.files, reader.encode, **cut)
    if reader.is_text:
        return PackedDataset(store.tokens, vocab_size=tokenizer.vocab_size, **cut)
    return ExampleDataset(
        store,
        vocab_size=tokenizer.vocab_size,
        pad_id=tokenizer.eos_id,
        excess_length=config.excess_length_strategy,
        group=2 if reader.is_pairs else 1,
        **cut,
    )


def _split(store: ExampleStore, fraction: float, reader: SourceReader) -> list[ExampleStore]:
    """Return two stores: the documents to train on, and those held out, about `fraction` of all.

    Of a single text the end is held out. The two examples of a pair of preferences stay together.
    Raises ValueError if one of the two stores would be empty.
    """
    tokens = store.tokens
    held = f"held out of {tokens.name} (data.valid_fraction={fraction})"
    texts = np.flatnonzero(tokens.lengths)
    if reader.is_text and len(texts) == 1:
        length = int(tokens.lengths[texts[0]])
        cut = length - round(fraction * length)
        _check_split(length - cut, length, "tokens", fraction, tokens.name)
        parts: list[TokenStore] = [
            PartStore(f"{tokens.name} without its end", tokens, texts, range(cut)),
            PartStore(f"end {held}", tokens, texts, range(cut, length)),
        ]
        return [ExampleStore(part, part) for part in parts]
    group = 2 if reader.is_pairs else 1  # keep chosen and rejected together
    chosen = np.repeat(held_out(len(tokens.lengths) // group, fraction), group)
    _check_split(int(chosen.sum()), len(chosen), "documents", fraction, tokens.name)
    return [
        ExampleStore(*(PartStore(name, part, np.flatnonzero(documents)) for part in store))
        for name, documents in (
            (f"{tokens.name} without held-out documents", ~chosen),
            (held, chosen),
        )
    ]


def _check_split(count: int, total: int, units: str, fraction: float, name: str) -> None:
    """Raise ValueError if `count`, the number that is held out, is none or all of `total`.

    `units` says what is counted: documents or tokens.
    """
    if count in (0, total):
        raise ValueError(
            f"data.valid_fraction={fraction} holds out {count} of the {total} {units} of {name}:"
            " use another fraction, or give data.valid_source"
        )
