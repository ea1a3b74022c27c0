"""What a run reads, and how it is cut into samples: the `data` section of the configuration."""

from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["BYTE_TOKENIZER", "PYTHON_STDLIB", "DataConfig"]

BYTE_TOKENIZER = "bytes"
PYTHON_STDLIB = "python-stdlib"


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where the text comes from and the shape of a micro-batch.

    Raises one ValueError for all values that can never work, a line each, with the way out.
    """

    source: str | list[str]
    """Text files, .jsonl files, folders, globs, Megatron .bin/.idx prefixes, or `python-stdlib`."""

    text_key: str = "text"
    """The key that holds the text in each line of a .jsonl file."""

    valid_source: str | list[str] | None = None
    """What evaluation reads, in the same forms as `source`."""

    valid_fraction: float = 0.0
    """Without `valid_source`: the fraction of the documents of `source` held out for evaluation."""

    tokenizer: str = BYTE_TOKENIZER
    """`bytes`, a Hugging Face tokenizer.json, or a folder that holds one."""

    eos_token: str | None = None
    """The token that ends a document, where the tokenizer's own files do not tell."""

    seq_len: int = 2048
    """Tokens in a sample."""

    micro_bsz: int = 1
    """Samples in a micro-batch."""

    micro_num: int = 1
    """Micro-batches that a rank accumulates in a step."""

    pack: bool = True
    """Keep attention, loss and positions inside each document; false: the plain stream, cut."""

    def __post_init__(self) -> None:
        if faults := list(self._faults()):
            raise ValueError("\n".join(faults))

    @property
    def tokens_per_micro_batch(self) -> int:
        """Tokens that one data rank reads in a micro-batch."""
        return self.micro_bsz * self.seq_len

    def _faults(self) -> Iterator[str]:
        """Everything that can never work, a line each."""
        for key, source in (("source", self.source), ("valid_source", self.valid_source)):
            if source is not None and not _names_something(source):
                yield (
                    f"data.{key}={source!r} names nothing to read: give a file, a folder, a glob, "
                    f"the prefix of a .bin/.idx pair, or {PYTHON_STDLIB}"
                )
        for key, count in (
            ("seq_len", self.seq_len),
            ("micro_bsz", self.micro_bsz),
            ("micro_num", self.micro_num),
        ):
            if count < 1:
                yield f"data.{key}={count} must be at least 1"
        if not 0.0 <= self.valid_fraction < 1.0:
            yield (
                f"data.valid_fraction={self.valid_fraction} must be at least 0 and less than 1: "
                "0 holds nothing out, 0.01 holds out one document in a hundred"
            )
        elif self.valid_source is not None and self.valid_fraction > 0.0:
            yield (
                f"data.valid_fraction={self.valid_fraction} and data.valid_source="
                f"{self.valid_source} both say what is held out: leave one of them out"
            )
        if not self.text_key:
            yield "data.text_key='' must name a key of the .jsonl lines, such as text"
        if not self.tokenizer:
            yield (
                f"data.tokenizer='' must be {BYTE_TOKENIZER} or the path of a tokenizer.json or of "
                "a folder that holds one"
            )
        if self.eos_token is not None and self.tokenizer == BYTE_TOKENIZER:
            yield (
                f"data.eos_token={self.eos_token} has no meaning with data.tokenizer="
                f"{BYTE_TOKENIZER}, whose end of document is token 256: leave it out"
            )


def _names_something(source: str | list[str]) -> bool:
    """Whether there is an item, and no item is empty."""
    items = [source] if isinstance(source, str) else source
    return bool(items) and all(items)
