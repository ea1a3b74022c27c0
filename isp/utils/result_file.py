"""Results of commands in files of JSON, for programs that read them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

from pydantic import ConfigDict, TypeAdapter, ValidationError

from isp.utils.files import LARGE_FILE_BYTES, read_limited
from isp.utils.safe_text import redacted

__all__ = ["Result", "first_fault"]


@dataclass(frozen=True, kw_only=True)
class _Head:
    """The part of a result that can be read of any version."""

    version: int


@dataclass(frozen=True, kw_only=True)
class Result(_Head):
    """A result; of each kind a dataclass, with a `version` of its own."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")
    newest: ClassVar[int]
    """The version that is written and read."""
    name: ClassVar[str]
    """Such as `a profile`."""
    again: ClassVar[str]
    """How one of another version is made anew."""

    def to_json(self, *, indent: int | None = None) -> str:
        """The text of the file, without credentials."""
        return redacted(TypeAdapter(type(self)).dump_json(self, indent=indent).decode()) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """The result that `to_json` wrote.  Raises ValueError if `text` is anything else."""
        try:
            version = TypeAdapter(_Head).validate_json(text).version
            if version == cls.newest:
                return TypeAdapter(cls).validate_json(text)
        except ValidationError as error:
            raise ValueError(f"not {cls.name}: {first_fault(error)}") from error
        raise ValueError(
            f"{cls.name} of version {version}, this program reads version {cls.newest}: {cls.again}"
        )

    @classmethod
    def load(cls, path: Path) -> Self:
        """The result in the file at `path`.  Raises ValueError if it holds none, or OSError."""
        try:
            return cls.from_json(read_limited(path, LARGE_FILE_BYTES))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error


def first_fault(error: ValidationError) -> str:
    """Where a text of JSON is wrong first, and how."""
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc'])) or 'the text'}: {first['msg']}"
