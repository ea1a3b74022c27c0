"""`Result`: the base class of results that commands write to JSON files, for other programs."""

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
    """The fields of a result file that are the same in all versions of its format."""

    version: int
    """Version of the format."""


@dataclass(frozen=True, kw_only=True)
class Result(_Head):
    """Base class of a command's result in a JSON file; each subclass counts its own versions."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")
    newest: ClassVar[int]
    """Version of the format that this version of ISP writes and reads."""
    name: ClassVar[str]
    """Name of such a result in errors: `a profile`."""
    again: ClassVar[str]
    """Remedy for a file of another version, for errors: `profile the run again`."""

    def to_json(self, *, indent: int | None = None) -> str:
        """Return the text of the file, without credentials."""
        return redacted(TypeAdapter(type(self)).dump_json(self, indent=indent).decode()) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Return the result that `to_json` wrote; raise ValueError for any other text."""
        try:
            # Read the version first: of a file of another version, an error should say so, and not
            # name one of its fields.
            version = TypeAdapter(_Head).validate_json(text).version
            if version == cls.newest:
                return TypeAdapter(cls).validate_json(text)
        except ValidationError as error:
            raise ValueError(f"not {cls.name}: {first_fault(error)}") from error
        raise ValueError(
            f"this is {cls.name} of version {version}, and this version of ISP reads version"
            f" {cls.newest}: {cls.again}"
        )

    @classmethod
    def load(cls, path: Path) -> Self:
        """Return the result in the file at `path`.

        Raises ValueError, with the file's name, if it is no such result, and OSError if reading it
        fails.
        """
        try:
            return cls.from_json(read_limited(path, LARGE_FILE_BYTES))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error


def first_fault(error: ValidationError) -> str:
    """Return the first of pydantic's errors as text: the field, and what is wrong with it."""
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc'])) or 'the text'}: {first['msg']}"
