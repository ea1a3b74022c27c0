"""Text to a `.bin`/`.idx` pair, once, so that runs open it without tokenising."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from isp.data.config import BYTE_TOKENIZER
from isp.data.documents import find_files, read_documents
from isp.data.indexed import IndexedDatasetWriter, indexed_prefix, token_dtype
from isp.data.tokenizer import load_tokenizer

__all__ = ["PrepareSummary", "prepare"]


class PrepareSummary(NamedTuple):
    """Summary of `prepare`: `prefix` is what `data.source` takes, `num_bytes` the text read."""

    prefix: Path
    num_documents: int
    num_tokens: int
    num_bytes: int


def prepare(
    inputs: str | Sequence[str],
    output_prefix: str | Path,
    *,
    tokenizer: str = BYTE_TOKENIZER,
    text_key: str = "text",
    eos_token: str | None = None,
    progress: bool = True,
) -> PrepareSummary:
    """Tokenise `inputs` into `output_prefix`.bin and .idx, with eos at the end of each document.

    Documents are streamed, so memory holds one of them. The files appear when both are complete,
    and replace an older pair. `progress` shows a bar, in a terminal only.
    Raises FileNotFoundError or ValueError naming the input and the way out.
    """
    prefix = Path(output_prefix).expanduser()
    if prefix.suffix in (".bin", ".idx"):
        prefix = prefix.with_suffix("")
    for item in [inputs] if isinstance(inputs, str) else inputs:
        if indexed_prefix(item) is not None:
            raise ValueError(f"input={item} is tokenised already: use it as data.source as it is")
    if eos_token is not None and tokenizer == BYTE_TOKENIZER:
        raise ValueError(
            f"--eos-token={eos_token} has no meaning with --tokenizer={BYTE_TOKENIZER}, which has"
            f" an end of document of its own: leave it out, or name a tokenizer.json"
        )
    encoder = load_tokenizer(tokenizer, eos_token=eos_token)
    files = find_files(inputs, key="input")
    total_bytes = sum(file.stat().st_size for file in files)
    num_documents = num_bytes = 0
    with (
        IndexedDatasetWriter(prefix, dtype=token_dtype(encoder.vocab_size)) as writer,
        # disable=None: only where somebody can see it.
        tqdm(
            total=total_bytes, unit="B", unit_scale=True, disable=None if progress else True
        ) as bar,
    ):
        for file in files:
            for document in read_documents(file, text_key=text_key):
                tokens = encoder.encode(document.text)
                if not tokens.size or tokens[-1] != encoder.eos_id:
                    tokens = np.append(tokens.astype(np.int64), encoder.eos_id)
                writer.add_document(tokens)
                num_documents += 1
                num_bytes += document.num_bytes
                bar.update(document.num_bytes)
        if num_documents == 0:
            shown = inputs if isinstance(inputs, str) else ", ".join(inputs)
            raise ValueError(f"input={shown} holds no documents: every file of it is empty")
    return PrepareSummary(prefix, num_documents, writer.num_tokens, num_bytes)
