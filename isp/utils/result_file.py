"""Results of commands in files of JSON, for programs that read them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

from pydantic import ConfigDict, TypeAdapter, ValidationError

from isp.utils.files import LARGE_FILE_BYTES, read_limited
from isp.utils.text import redacted

__all__ = ["Result", "first_fault"]


@dataclass(frozen=True, kw_only=True)
class _Head:
    """The part of a result that can be read in any version."""

    version: int
    """Version of the format."""


@dataclass(frozen=True, kw_only=True)
class Result(_Head):
    """The result of a command in a JSON file; each kind is a dataclass with versions of its own."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")
    newest: ClassVar[int]
    """Version that is written and read."""
    name: ClassVar[str]
    """Name of the kind in errors, such as `a profile`."""
    again: ClassVar[str]
    """What to do about a file of another version, for errors."""

    def to_json(self, *, indent: int | None = None) -> str:
        """Return the text of the file, without credentials."""
        return redacted(TypeAdapter(type(self)).dump_json(self, indent=indent).decode()) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Return the result that `to_json` wrote; raise ValueError for any other text."""
        try:
            # The version first: other fields of another version would be reported as wrong.
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
        """Return the result in the file at `path`.

        Raises ValueError, naming the file, if it has none, and OSError if it cannot be read.
        """
        try:
            return cls.from_json(read_limited(path, LARGE_FILE_BYTES))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error


def first_fault(error: ValidationError) -> str:
    """Return the place and the text of the first fault that pydantic found."""
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc'])) or 'the text'}: {first['msg']}"
