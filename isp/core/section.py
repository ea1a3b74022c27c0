"""`section`, a decorator that makes frozen dataclasses with validation for the configuration."""

from __future__ import annotations

import copy
import functools
import json
import typing
from collections.abc import Callable, Sequence
from dataclasses import MISSING, field, fields, is_dataclass
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
    "names_of",
    "role_of",
    "section",
]

T = TypeVar("T")

_LARGEST = 2**31 - 1  # the largest int32
_FLOAT32 = 1e30  # well below the largest float32, 3.4e38

Count = Annotated[int, Field(ge=1, le=_LARGEST)]
CountOrZero = Annotated[int, Field(ge=0, le=_LARGEST)]
Size = Annotated[int, Field(ge=1, le=2**24)]
"""Size of one dim of a tensor; the product of two fits well into an int64."""
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
    """The kind of decision that a key makes, by which checks and comparisons select keys."""

    MODEL = "model"
    """A key of the model itself: its parameters, their initial values, its function."""
    DATA = "data"
    """A key of the training data and their order."""
    METHOD = "method"
    """A key of how the model is computed and trained."""
    PLACE = "place"
    """A key of where the run takes place: devices, files, timeouts."""


class Absent(NamedTuple):
    """The annotation of a key that older saved configurations lack.

    It is for a key whose default would change how a run from before the key existed continues.
    """

    value: Any
    """Value that the key gets if a saved configuration lacks it."""


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(field,))
def section(key: str, role: KeyRole | None = None) -> Callable[[type[T]], type[T]]:
    """Return a decorator that makes a class the frozen, keyword-only dataclass of section `key`.

    `role` is the `KeyRole` of the section's keys; a key with another role is `Annotated` with it.
    The constructor of the dataclass checks types and ranges of the fields, for values from a file
    and from Python, and raises ValueError with a line for each fault. A class may extend another
    section: inherited keys keep their roles and docs, and are listed after its own.
    """

    def decorate(cls: type[T]) -> type[T]:
        _declare_inherited(cls)
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

        made.__init__ = init  # so that Python code gets the same error texts as a file
        # Keep roles and absent values where `dataclasses.fields` finds them.
        for item in fields(made):
            given = made.__pydantic_fields__[item.name].metadata
            own = (x for x in given if type(x) is KeyRole)
            absent = (x for x in given if type(x) is Absent)
            item.metadata = MappingProxyType(
                {"role": next(own, role), "absent": next(absent, None)}
            )
        return made  # type: ignore[no-any-return]

    return decorate


def _declare_inherited(cls: type) -> None:
    """Declare the keys that `cls` inherits from another section again in `cls`, with role and doc.

    Otherwise pydantic would lose the docs, and both classes would share each field's metadata.
    """
    (base,) = cls.__bases__
    if not is_dataclass(base):
        return
    docs, hints = docs_of(base), typing.get_type_hints(base, include_extras=True)
    for item in fields(base):
        if item.name not in cls.__annotations__:  # skip keys that `cls` gives another type
            hint, doc = hints[item.name], Field(description=docs[item.name])
            cls.__annotations__[item.name] = Annotated[hint, doc, role_of(base, item.name)]
            setattr(cls, item.name, copy.copy(item))


def role_of(section: type, name: str) -> KeyRole | None:
    """Return the `KeyRole` of the key `name` of a section; None for a key that is a section."""
    role: KeyRole | None = section.__dataclass_fields__[name].metadata["role"]  # type: ignore[attr-defined]
    return role


def docs_of(section: type) -> dict[str, str]:
    """Return the docstring below each field of a section, by the field's name."""
    found = section.__pydantic_fields__  # type: ignore[attr-defined]
    return {name: found[name].description or "" for name in names_of(section)}


def names_of(section: type) -> tuple[str, ...]:
    """Return the names of a section's keys: its own, then those it inherits."""
    return tuple(name for name in section.__annotations__ if name in section.__dataclass_fields__)  # type: ignore[attr-defined]


def absent_values(section: type) -> dict[str, Any]:
    """Return the section's keys that have an `Absent` annotation, each with its value.

    These are the values that the keys get if a saved configuration lacks them.
    """
    found = ((f.name, f.metadata["absent"]) for f in fields(section))
    return {name: absent.value for name, absent in found if absent is not None}


def defaults_of(section: type, *roles: KeyRole) -> dict[str, Any]:
    """Return the defaults, by name, of the keys of a section whose `KeyRole` is one of `roles`."""
    return {f.name: f.default for f in fields(section) if role_of(section, f.name) in roles}


def describe_value(key: str, error: ErrorDetails, default: Any) -> str:
    """Return an error text: `key=value`, the allowed values and, if out of range, the default.

    `default` is MISSING for a key without one.
    """
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
    """Return an error line for each refused key; of several errors of a key only the first."""
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
        else:  # an error that `__post_init__` raised, which may be about several keys
            lines[""] = str(error["ctx"]["error"])
    return list(lines.values())
