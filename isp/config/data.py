"""The `data` section of the configuration: sources, tokenizer, and the shape of micro-batches."""

import re
from enum import StrEnum
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field

from isp.core.section import Absent, Count, KeyRole, Positive, Text, section
from isp.utils.text import redacted

__all__ = [
    "BYTE_TOKENIZER",
    "PYTHON_STDLIB",
    "DataConfig",
    "ExcessLength",
    "Format",
    "SourcePart",
    "TrainOn",
]

T = TypeVar("T", bound="str | list[str] | list[SourcePart]")

BYTE_TOKENIZER = "bytes"
"""Value of `data.tokenizer` for the tokenizer of bytes, which needs no file."""
PYTHON_STDLIB = "python-stdlib"
"""Value of `data.source` for the source files of Python's library, which need no download."""
_MAX_TOKENS = 2**31 - 1
"""Most tokens in a micro-batch: attention counts them in int32."""


def _readable(source: T) -> T:
    """Return `source`; raise ValueError if it is empty or has an empty path."""
    if not source or not all(source):
        raise ValueError(
            f"names nothing to read: give a file, a folder, a glob, the prefix of a .bin/.idx pair,"
            f" or {PYTHON_STDLIB}"
        )
    return source


def _blend(source: Any) -> Any:
    """Convert Megatron-LM's [WEIGHT, PATH, ..] to entries; return other sources unchanged."""
    kinds = {type(item) for item in source} if isinstance(source, list) else set()
    if str not in kinds or not kinds & {int, float}:
        return source
    weights, paths = source[::2], source[1::2]
    if (
        len(weights) != len(paths)
        or not {*map(type, weights)} <= {int, float}
        or {*map(type, paths)} != {str}
    ):
        raise ValueError(
            "has to give a weight before each path, as Megatron's blends do: [0.3, PATH, 0.7, PATH]"
        )
    return [SourcePart(path=path, weight=x) for x, path in zip(weights, paths, strict=True)]


class Format(StrEnum):
    """Contents of each object of a JSON file, or each row of a table."""

    AUTO = "auto"
    TEXT = "text"
    MESSAGES = "messages"
    TOKENS = "tokens"
    PREFERENCES = "preferences"
    COMPLETIONS = "completions"


class TrainOn(StrEnum):
    """The tokens of a conversation on which the loss is computed."""

    ASSISTANT = "assistant"
    ALL = "all"
    LAST = "last"


class ExcessLength(StrEnum):
    """Treatment of examples that are longer than a sample."""

    TRUNCATE = "truncate"
    DROP = "drop"
    RAISE = "raise"


Source = Annotated[str | list[str], AfterValidator(_readable)]


@section("data.source", KeyRole.DATA)
class SourcePart:
    """One source of a mixture: an element of the list `data.source`."""

    path: Source
    """A path or a list of paths, in the forms that `source` accepts."""
    weight: Positive = 1.0
    """Share of the tokens, relative to the other weights."""
    epochs: Positive | None = None
    """Largest number of epochs over this source; then the other sources fill its share. null: no
    limit."""
    name: Annotated[str | None, Field(pattern=r"^\w[\w.-]*$"), KeyRole.PLACE] = None
    """Name in metrics: letters, digits and `._-`; null: its path."""

    @property
    def title(self) -> str:
        """Return the name, or else the path without characters that some tracker refuses."""
        given = redacted(self.path if isinstance(self.path, str) else "/".join(self.path))
        return self.name or "/".join(re.findall(r"\w[\w.-]*", given)) or given


Sources = Annotated[
    str | list[str] | list[SourcePart],
    BeforeValidator(
        _blend, json_schema_input_type=str | list[str] | list[SourcePart] | list[float | str]
    ),
    AfterValidator(_readable),
]


@section("data", KeyRole.DATA)
class DataConfig:
    """`data`: where the text comes from, and the shape of a micro-batch."""

    source: Sources
    """Text files, JSON lines and arrays, Parquet, Arrow and CSV files, folders (also of
    `save_to_disk`), globs, prefixes of Megatron .bin/.idx files, s3:// and other URLs,
    hf://OWNER/NAME[:SPLIT], `python-stdlib`; or a mixture: entries with `path`, `weight`,
    `epochs` and `name`, or Megatron's [WEIGHT, PATH, WEIGHT, PATH]."""

    format: Format = Format.AUTO
    """Content of each object of a JSON file or row of a table: `text`, `messages` (conversations),
    `tokens` (`input_ids` and `labels`), `preferences` (`chosen` and `rejected`) or `completions`
    (`prompt` and `completion`); `auto`: chosen by the keys of the first object or row."""

    text_key: Text = "text"
    """Key of a JSON object, or column of a table, that holds the text."""

    valid_source: Annotated[Sources | None, KeyRole.METHOD] = None
    """Held-out text for evaluation, in the same forms as `source`. Each source of a mixture is
    evaluated on its own; `val_loss` is their weighted mean."""

    valid_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Without `valid_source`: the fraction of the documents in `source` that is held out for
    evaluation; if `source` is a single text, the end of that text."""

    streaming: bool = False
    """Read the text in a stream, for sources that are too large for memory. Files and blocks of
    documents are shuffled, and checkpoints save the position in the stream."""

    streaming_restart: Annotated[bool, KeyRole.METHOD] = False
    """Resume even from a checkpoint without a position in this stream, which was saved without
    `streaming`, or with another `source`, `text_key` or training.seed: every source is read again
    from its beginning."""

    tokenizer: Text = BYTE_TOKENIZER
    """`bytes`, a Hugging Face tokenizer.json, or a folder that holds one."""

    eos_token: str | None = None
    """Token that ends a document, if the tokenizer's files do not say."""

    add_bos: Annotated[bool, Absent(False)] = True
    """Begin each text, and each `prompt` that is text, with the special tokens that the tokenizer
    puts before a text (a BOS, by the post-processor of tokenizer.json), as transformers and TRL do.
    Chat templates write their own; .bin/.idx pairs stay as they were prepared."""

    chat_template: Text | None = None
    """Path of a Jinja template that renders `messages`, instead of the tokenizer's own."""

    train_on: TrainOn = TrainOn.ASSISTANT
    """Tokens of `messages` on which the loss is computed: `assistant`: those of the assistant's
    messages; `last`: those of its last message; `all`: every token."""

    excess_length_strategy: ExcessLength = ExcessLength.TRUNCATE
    """What to do with examples of any format but `text` that are longer than `seq_len` (each of a
    pair of `preferences`: than half of it): `truncate` the end, `drop` the example (the pair), or
    `raise` an error."""

    seq_len: Count = 2048
    """Tokens in a sample."""

    micro_bsz: Annotated[Count, KeyRole.METHOD] = 1
    """Samples in a micro-batch."""

    micro_num: Annotated[int | None, Field(ge=1, le=65_536), KeyRole.METHOD] = None
    """Number of micro-batches that a rank accumulates in a step; null: as many as
    training.global_batch_size needs, or 1 without it."""

    pack: bool = True
    """Pack documents into sequences, with attention, loss and positions inside each document;
    false: cut the plain stream of text, or put one example of `messages` or `tokens` into each
    sample."""

    @property
    def parts(self) -> list[SourcePart]:
        """The sources of the mixture; a list of one if `source` is not a mixture."""
        return _parts(self.source)

    @property
    def valid_parts(self) -> list[SourcePart]:
        """The sources of held-out data; empty if nothing is held out."""
        if self.valid_source is not None:
            return _parts(self.valid_source)
        return self.parts if self.valid_fraction > 0 else []

    @property
    def num_micro_batches(self) -> int:
        """`micro_num`, or 1 if null. `JobConfig.for_ranks` sets it for a global batch size."""
        return 1 if self.micro_num is None else self.micro_num

    def __post_init__(self) -> None:
        for parts in (self.parts, self.valid_parts):
            titles = [part.title for part in parts]
            if twice := next((x for x in titles if titles.count(x) > 1), None):
                raise ValueError(f"data.source has two entries named {twice}: give each a name")
        if self.valid_source is not None and any(part.epochs for part in self.valid_parts):
            raise ValueError(
                "data.valid_source gives epochs, but evaluation reads each sample once: leave them"
                " out (validation.steps limits how many are read)"
            )
        if all(part.epochs is not None for part in self.parts):
            raise ValueError(
                "data.source limits every entry by epochs, so the data would end: leave epochs out"
                " of one entry (training.steps says how long a run is)"
            )
        if self.valid_source is not None and self.valid_fraction > 0:
            raise ValueError(
                f"data.valid_fraction={self.valid_fraction} and data.valid_source="
                f"{self.valid_source} both say what is held out: leave one of them out"
            )
        if self.streaming and (self.valid_fraction or any(part.epochs for part in self.parts)):
            raise ValueError(
                "data.streaming=true cannot be combined with data.valid_fraction or epochs, since"
                " the number of documents is not known: give data.valid_source in place of"
                " data.valid_fraction, and leave epochs out"
            )
        if self.eos_token is not None and self.tokenizer == BYTE_TOKENIZER:
            raise ValueError(
                f"data.eos_token={self.eos_token} has no meaning with data.tokenizer="
                f"{BYTE_TOKENIZER}, whose end of document is token 256: leave it out"
            )
        if self.micro_bsz * self.seq_len > _MAX_TOKENS:
            raise ValueError(
                f"data.seq_len={self.seq_len} x data.micro_bsz={self.micro_bsz} is more than the"
                f" {_MAX_TOKENS:,} tokens that a micro-batch can have: use smaller values"
            )


def _parts(source: str | list[str] | list[SourcePart]) -> list[SourcePart]:
    """Return the entries of a source; several paths without weights are one entry."""
    if isinstance(source, str):
        return [SourcePart(path=source)]
    named = [item for item in source if isinstance(item, str)]
    return [SourcePart(path=named)] if named else source  # type: ignore[return-value]
