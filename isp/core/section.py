"""A section of the configuration: a frozen dataclass that refuses values out of range."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import MISSING, field, fields
from enum import StrEnum
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple, TypeVar, dataclass_transform

from pydantic import ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass
from pydantic_core import ErrorDetails

from isp.utils.text import suggest

__all__ = [
    "Absent",
    "Count",
    "CountOrZero",
    "Fraction",
    "KeyRole",
    "NotNegative",
    "Positive",
    "Ranks",
    "Seconds",
    "Size",
    "Text",
    "absent_values",
    "defaults_of",
    "describe_value",
    "docs_of",
    "role_of",
    "section",
]

T = TypeVar("T")

_LARGEST = 2**31 - 1  # what an int32 holds
_FLOAT32 = 1e30  # far inside what a float32 holds

Count = Annotated[int, Field(ge=1, le=_LARGEST)]
CountOrZero = Annotated[int, Field(ge=0, le=_LARGEST)]
Size = Annotated[int, Field(ge=1, le=2**24)]
"""Of one dim of a tensor: two of them are the elements of one that an int64 counts."""
Ranks = Annotated[int, Field(ge=1, le=2**20)]
Seconds = Annotated[int, Field(ge=1, le=7 * 24 * 3600)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Text = Annotated[str, Field(min_length=1)]
Positive = Annotated[float, Field(gt=0, le=_FLOAT32)]
NotNegative = Annotated[float, Field(ge=0, le=_FLOAT32)]

_BOUNDS = {
    "greater_than": "must be above {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be below {lt}",
    "less_than_equal": "must be at most {le}",
    "finite_number": "must be finite",
    "string_too_short": "must not be empty",
}
_TYPES = {
    "bool_type": "must be true or false",
    "float_type": "must be a number",
    "int_type": "must be a whole number",
    "list_type": "must be a list, such as [a, b]",
    "string_type": "must be text: put it in quotes",
    "tuple_type": "must be a list, such as [a, b]",
}


class KeyRole(StrEnum):
    """What a key decides; whoever has to tell keys apart asks for it."""

    MODEL = "model"
    """What the model is: its parameters, as they begin, and the function that they compute."""
    DATA = "data"
    """What it is trained on, and in which order."""
    METHOD = "method"
    """How it is computed and trained."""
    PLACE = "place"
    """Where it runs, waits, reads and writes."""


class Absent(NamedTuple):
    """Annotates a key that came later and changes what a run did without it."""

    value: Any
    """Its value in a configuration that a run kept and that lacks the key."""


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(field,))
def section(key: str, role: KeyRole | None = None) -> Callable[[type[T]], type[T]]:
    """Make a class the frozen, keyword-only dataclass of the section `key`.

    `role` is that of its keys; one with another is `Annotated` with it.
    Its values have the types and ranges that its fields declare, whether they come from a file or
    from Python: making one raises ValueError, a line for each fault.
    """

    def decorate(cls: type[T]) -> type[T]:
        config = ConfigDict(
            strict=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
        )
        made: Any = dataclass(frozen=True, kw_only=True, config=config)(cls)
        validate = made.__init__

        @functools.wraps(validate)
        def init(self: T, **values: Any) -> None:
            try:
                validate(self, **values)
            except ValidationError as error:
                raise ValueError("\n".join(_describe(error.errors(), key, made))) from None

        made.__init__ = init
        for item in fields(made):
            given = made.__pydantic_fields__[item.name].metadata
            own = (x for x in given if type(x) is KeyRole)
            absent = (x for x in given if type(x) is Absent)
            item.metadata = MappingProxyType(
                {"role": next(own, role), "absent": next(absent, None)}
            )
        return made  # type: ignore[no-any-return]

    return decorate


def role_of(section: type, name: str) -> KeyRole | None:
    """The role of the key `name` of a section; None for one that has none, or is a section."""
    role: KeyRole | None = section.__dataclass_fields__[name].metadata["role"]  # type: ignore[attr-defined]
    return role


def docs_of(section: type) -> dict[str, str]:
    """Return the doc below each field of a section, by name."""
    found = section.__pydantic_fields__.items()  # type: ignore[attr-defined]
    return {name: field.description or "" for name, field in found}


def absent_values(section: type) -> dict[str, Any]:
    """Return what the keys of a section with `Absent` are where a kept configuration lacks them."""
    found = ((f.name, f.metadata["absent"]) for f in fields(section))
    return {name: absent.value for name, absent in found if absent is not None}


def defaults_of(section: type, *roles: KeyRole) -> dict[str, Any]:
    """The keys of a section that have one of these roles, with their defaults."""
    return {f.name: f.default for f in fields(section) if role_of(section, f.name) in roles}


def describe_value(key: str, error: ErrorDetails, default: Any) -> str:
    """`key=value`, which values are allowed and, for one out of range, the default (or MISSING)."""
    fault = f"{key}={json.dumps(error['input'], ensure_ascii=False, default=str)}"
    if error["type"] == "value_error":
        return f"{fault} {error['ctx']['error']}"
    if error["type"] in _BOUNDS:
        bounds = error.get("ctx", {}).items()
        shown = {name: f"{x:g}" if isinstance(x, float) else x for name, x in bounds}
        fault += f" {_BOUNDS[error['type']].format(**shown)}"
        return fault if default is MISSING else f"{fault} (default: {json.dumps(default)})"
    return f"{fault} {_TYPES.get(error['type'], error['msg'])}"


def _describe(errors: Sequence[ErrorDetails], key: str, made: type) -> list[str]:
    """A line for each key that was refused; members of unions all speak of the same one."""
    defaults = {f.name: f.default for f in fields(made)}
    lines: dict[str, str] = {}
    for error in errors:
        if error["loc"]:
            name = str(error["loc"][0])
            path = f"{key}.{name}".removeprefix(".")
            if error["type"] == "unexpected_keyword_argument":
                fault = f"{path}: no such key{suggest(name, tuple(defaults), section=key)}"
            elif error["type"] == "missing":
                fault = f"{path} is missing: it has no default"
            else:
                fault = describe_value(path, error, defaults.get(name, MISSING))
            lines.setdefault(path, fault)
        else:  # of several keys, by __post_init__
            lines[""] = str(error["ctx"]["error"])
    return list(lines.values())
