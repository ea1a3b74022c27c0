"""`isp data prepare`: tokenizes text or examples once, into a `.bin`/`.idx` pair for many runs."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from isp.config.data import BYTE_TOKENIZER, Format, TrainOn
from isp.data.chat import Example
from isp.data.examples import (
    LABEL_DTYPE,
    SourceReader,
    check_any,
    check_trained,
    count_trained,
    labels_prefix,
)
from isp.data.indexed import (
    IndexedDatasetWriter,
    existing_file,
    indexed_prefix,
    record_path,
    remove_pair,
    token_dtype,
    tokenizer_name,
    write_record,
)
from isp.data.tokenizer import Tokenizer, load_tokenizer

__all__ = ["PrepareSummary", "prepare"]


class PrepareSummary(NamedTuple):
    """Result of `prepare`: which .bin/.idx files were written, and how much they have."""

    prefix: Path
    """Path of these files without suffix, to use as `data.source`."""
    num_documents: int
    num_tokens: int
    num_bytes: int
    """Size in bytes of the text that was read."""
    num_trained: int | None = None
    """Number of tokens with a label; None for text, where all tokens have one."""
    num_dropped: int = 0
    """Number of examples left out because none of their tokens has a label."""
    note: str = ""
    """Sentences about the token that begins texts, and keys of rows that were not used."""
    tokenizer: str = BYTE_TOKENIZER
    """Name of the tokenizer, to use as `data.tokenizer`."""
    vocab_size: int = 0
    """Size of the tokenizer's vocabulary."""


def prepare(
    inputs: str | Sequence[str],
    output_prefix: str | Path,
    *,
    tokenizer: str = BYTE_TOKENIZER,
    form: Format = Format.AUTO,
    text_key: str = "text",
    eos_token: str | None = None,
    chat_template: str | None = None,
    train_on: TrainOn = TrainOn.ASSISTANT,
    add_bos: bool = True,
    overwrite: bool = False,
) -> PrepareSummary:
    """Tokenize `inputs` into `output_prefix`.bin and .idx, and return what was written.

    Texts begin with the tokenizer's BOS unless `add_bos` is false, and end with eos. Examples get
    no eos, and a second pair for their labels [Note: Labels on disk]. One document is in memory at
    a time. The files get their names when all are complete; `output_prefix`.tokenizer.json records
    the tokenizer. `overwrite` replaces older files. In a terminal, a bar shows the progress. Raises
    FileNotFoundError or ValueError, with the input and the remedy.
    """
    prefix = Path(output_prefix).expanduser()
    if prefix.suffix in (".bin", ".idx"):
        prefix = prefix.with_suffix("")
    items = [inputs] if isinstance(inputs, str) else list(inputs)
    for item in items:
        if indexed_prefix(item) is not None:
            raise ValueError(f"input={item} is already tokenized: use it directly as data.source")
    older = [
        p for whole in (prefix, labels_prefix(prefix)) if (p := existing_file(whole)) is not None
    ]
    if older and not overwrite:
        raise ValueError(
            f"output={prefix}: {older[0]} exists already: name another --output, or replace it with"
            f" --overwrite"
        )
    if eos_token is not None and tokenizer == BYTE_TOKENIZER:
        raise ValueError(
            f"--eos-token={eos_token} has no effect with --tokenizer={BYTE_TOKENIZER}, which has"
            f" its own end-of-document token: leave it out, or name a tokenizer.json"
        )
    encoder = load_tokenizer(tokenizer, eos_token=eos_token)
    reader = SourceReader(
        items,
        encoder,
        asked=form,
        text_key=text_key,
        template=chat_template,
        key="input",
        train_on=train_on,
        add_bos=add_bos,
    )
    if reader.is_pairs:
        raise ValueError(
            f"input={', '.join(items)} holds preference pairs, which cannot be prepared: use"
            f" the .jsonl files directly as data.source"
        )
    files = reader.files
    with tqdm(
        total=sum(file.stat().st_size for file in files),
        unit="B",
        unit_scale=True,
        disable=None,  # no bar if stderr is not a terminal
    ) as bar:
        done = _write(
            prefix,
            (found for file in files for found in reader.read(file)),
            tokenizer=encoder,
            labeled=not reader.is_text,
            name=f"input={', '.join(items)}",
            progress=bar.update,
        )
    return done._replace(note=reader.note)


def _write(
    prefix: Path,
    documents: Iterable[tuple[list[Example], int]],
    *,
    tokenizer: Tokenizer,
    labeled: bool,
    name: str,
    progress: Callable[[float], object],
) -> PrepareSummary:
    """Write the tokens of the examples in `documents`, and their labels if `labeled`.

    `name` names the input in errors; `progress` is called with the size of each item in bytes.
    """
    num_documents = num_bytes = num_trained = num_dropped = 0
    with ExitStack() as stack:
        dtype = token_dtype(tokenizer.vocab_size)
        writer = stack.enter_context(IndexedDatasetWriter(prefix, dtype=dtype))
        # Enter the writer of labels last: it is then left first, and the labels have their names
        # before the tokens. A pair without labels would count as text, all of it trained.
        of_labels = IndexedDatasetWriter(labels_prefix(prefix), dtype=LABEL_DTYPE)
        if labeled:
            stack.enter_context(of_labels)
        for examples, size in documents:
            num_bytes += size
            progress(size)
            for tokens, labels in examples:
                if labeled and not (trained := count_trained(labels)):
                    num_dropped += 1
                    continue
                if labeled:
                    num_trained += trained
                    of_labels.add_document(labels)
                elif not len(tokens) or tokens[-1] != tokenizer.eos_id:
                    tokens = np.append(tokens.astype(np.int64), tokenizer.eos_id)
                writer.add_document(tokens)
                num_documents += 1
        if labeled:
            check_trained(num_trained > 0, name)
        else:
            check_any(num_documents, name)
        # Delete the record of an older pair: if the process is killed here, it would be taken for
        # that of the new pair.
        record_path(prefix).unlink(missing_ok=True)
    if not labeled:
        # Labels of an older pair with this name would count as the labels of the new one.
        remove_pair(labels_prefix(prefix))
    write_record(prefix, tokenizer)
    trained_tokens = num_trained if labeled else None
    return PrepareSummary(
        prefix,
        num_documents,
        writer.num_tokens,
        num_bytes,
        trained_tokens,
        num_dropped,
        tokenizer=tokenizer_name(tokenizer),
        vocab_size=tokenizer.vocab_size,
    )
