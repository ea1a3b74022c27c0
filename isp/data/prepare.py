"""Text, or examples, to a `.bin`/`.idx` pair, once, so that runs open it without tokenising."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from isp.data.chat import ChatTemplate
from isp.data.config import BYTE_TOKENIZER, Format
from isp.data.documents import find_files, read_documents
from isp.data.examples import (
    LABEL_DTYPE,
    check_trained,
    count_trained,
    file_format,
    find_format,
    labels_prefix,
    read_examples,
)
from isp.data.indexed import IndexedDatasetWriter, indexed_prefix, remove_pair, token_dtype
from isp.data.tokenizer import TokenArray, Tokenizer, load_tokenizer

__all__ = ["PrepareSummary", "prepare"]


class PrepareSummary(NamedTuple):
    """Summary of `prepare`: `prefix` is what `data.source` takes, `num_bytes` the text read."""

    prefix: Path
    num_documents: int
    num_tokens: int
    num_bytes: int
    num_trained: int | None = None
    """Tokens with a label; None for text, where all are trained."""
    num_dropped: int = 0
    """Examples left out because no token of them has one."""


class _Document(NamedTuple):
    tokens: TokenArray
    labels: TokenArray | None
    num_bytes: int


def prepare(
    inputs: str | Sequence[str],
    output_prefix: str | Path,
    *,
    tokenizer: str = BYTE_TOKENIZER,
    form: Format = Format.AUTO,
    text_key: str = "text",
    eos_token: str | None = None,
    chat_template: str | None = None,
    progress: bool = True,
) -> PrepareSummary:
    """Tokenise `inputs` into `output_prefix`.bin and .idx, with eos at the end of each document.

    Examples stay as they are, without another eos, and get a second pair: [Note: Labels on disk].
    Documents are streamed, so memory holds one of them. The files appear when all are complete,
    and replace older ones. `progress` shows a bar, in a terminal only.
    Raises FileNotFoundError or ValueError naming the input and the way out.
    """
    prefix = Path(output_prefix).expanduser()
    if prefix.suffix in (".bin", ".idx"):
        prefix = prefix.with_suffix("")
    items = [inputs] if isinstance(inputs, str) else list(inputs)
    for item in items:
        if indexed_prefix(item) is not None:
            raise ValueError(f"input={item} is tokenised already: use it as data.source as it is")
    if eos_token is not None and tokenizer == BYTE_TOKENIZER:
        raise ValueError(
            f"--eos-token={eos_token} has no meaning with --tokenizer={BYTE_TOKENIZER}, which has"
            f" an end of document of its own: leave it out, or name a tokenizer.json"
        )
    encoder = load_tokenizer(tokenizer, eos_token=eos_token)
    files = find_files(items, key="input")
    kind = find_format(items, form, text_key=text_key, key="input")
    template = ChatTemplate(encoder, chat_template) if kind is Format.MESSAGES else None
    documents = (
        document
        for file in files
        for document in _read(file, file_format(file, form, text_key), encoder, template, text_key)
    )
    with tqdm(
        total=sum(file.stat().st_size for file in files),
        unit="B",
        unit_scale=True,
        disable=None if progress else True,  # None: only where somebody can see it.
    ) as bar:
        return _write(
            prefix,
            documents,
            dtype=token_dtype(encoder.vocab_size),
            labelled=kind is not Format.TEXT,
            name=f"input={', '.join(items)}",
            progress=bar.update,
        )


def _write(
    prefix: Path,
    documents: Iterator[_Document],
    *,
    dtype: np.dtype[Any],
    labelled: bool,
    name: str,
    progress: Callable[[float], object],
) -> PrepareSummary:
    """Write the tokens, and the labels if they are `labelled`; `name` is the source in messages."""
    num_documents = num_bytes = num_trained = num_dropped = 0
    with ExitStack() as stack:
        writer = stack.enter_context(IndexedDatasetWriter(prefix, dtype=dtype))
        # Entered last, so published first: tokens never stand without the labels they have.
        labels = IndexedDatasetWriter(labels_prefix(prefix), dtype=LABEL_DTYPE)
        if labelled:
            stack.enter_context(labels)
        for document in documents:
            num_bytes += document.num_bytes
            progress(document.num_bytes)
            if document.labels is not None:
                trained = count_trained(document.labels)
                if not trained:
                    num_dropped += 1
                    continue
                num_trained += trained
                labels.add_document(document.labels)
            writer.add_document(document.tokens)
            num_documents += 1
        if labelled:
            check_trained(num_trained > 0, name)
        elif num_documents == 0:
            raise ValueError(f"{name} holds no documents: every file of it is empty")
    if not labelled:
        remove_pair(labels_prefix(prefix))  # Those of older examples.
    return PrepareSummary(
        prefix,
        num_documents,
        writer.num_tokens,
        num_bytes,
        num_trained if labelled else None,
        num_dropped,
    )


def _read(
    file: Path, form: Format, tokenizer: Tokenizer, template: ChatTemplate | None, text_key: str
) -> Iterator[_Document]:
    """The documents of one file, tokenised."""
    if form is not Format.TEXT:
        for examples, line in read_examples(file, form, tokenizer, template):
            sizes = [line.num_bytes, *[0] * (len(examples) - 1)]
            for example, num_bytes in zip(examples, sizes, strict=True):
                yield _Document(example.tokens, example.labels, num_bytes)
        return
    for text, num_bytes in read_documents(file, text_key=text_key):
        tokens = tokenizer.encode(text)
        if not tokens.size or tokens[-1] != tokenizer.eos_id:
            tokens = np.append(tokens.astype(np.int64), tokenizer.eos_id)
        yield _Document(tokens, None, num_bytes)
