"""Which keys a configuration has, and what is wrong with one that was refused, in words."""

from __future__ import annotations

import difflib
import json
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from pydantic_core import ErrorDetails

from isp.yaml_file import KeyPath

__all__ = ["KeyTable", "describe_faults", "place"]

_ENTRY = "*"
"""Stands for the number of an entry in a list."""

READABLE = {
    "NoneType": "null",
    "bool": "true or false",
    "float": "a number",
    "int": "a whole number",
    "list[str]": "a list of texts",
    "str": "text",
}
EXPECTED = {
    "bool_type": "must be true or false",
    "float_type": "must be a number",
    "int_type": "must be a whole number",
    "list_type": "must be a list, such as [a, b]",
    "string_type": "must be text: put it in quotes",
    "tuple_type": "must be a list, such as [a, b]",
}


@dataclass(frozen=True, kw_only=True)
class KeyTable:
    """Every key of a tree of dataclasses."""

    sections: Mapping[KeyPath, tuple[str, ...]]
    """The names below each section, () being the whole, and * any entry of a list of sections."""
    hints: Mapping[KeyPath, Any]
    """The type of each key that need not be a section; a section or null is in both."""

    @classmethod
    def of(cls, root: type) -> KeyTable:
        """The keys of the dataclass `root` and of the dataclasses in it."""
        sections: dict[KeyPath, tuple[str, ...]] = {}
        hints: dict[KeyPath, Any] = {}
        pending: list[tuple[KeyPath, type]] = [((), root)]
        for path, section in pending:
            types_by_name = typing.get_type_hints(section)
            names = tuple(f.name for f in fields(section) if f.init)
            sections[path] = names
            for name in names:
                hint = types_by_name[name]
                pending += [((*path, name), type_) for type_ in _sections_of(hint)]
                pending += [((*path, name, _ENTRY), type_) for type_ in _entries_of(hint)]
                if not is_dataclass(hint):
                    hints[*path, name] = hint
        return cls(sections=sections, hints=hints)

    def takes_text(self, path: KeyPath) -> bool:
        """Whether `path` is a key whose value may be plain text."""
        return str in _members(self.hints.get(path))

    def suggest(self, path: KeyPath) -> str:
        """`; did you mean ...?` for an unknown `path`, or the keys that its section has."""
        *section, name = path
        siblings = self.sections[_general(tuple(section))]
        near = difflib.get_close_matches(name, siblings, n=1, cutoff=0.75)
        if not near:
            paths = (*self.hints, *self.sections)
            every = [".".join(p) for p in paths if p and _ENTRY not in p]
            near = [key for key in every if key.split(".")[-1] == name]
            near = near or difflib.get_close_matches(".".join(path), every, n=1, cutoff=0.8)
            near = near or difflib.get_close_matches(name, siblings, n=1)
        if near:
            return f"; did you mean {' or '.join(repr(key) for key in near)}?"
        return f"; {'.'.join(section) or 'the configuration'} has {', '.join(siblings)}"


def describe_faults(
    errors: Sequence[ErrorDetails], origins: Mapping[KeyPath, str], keys: KeyTable
) -> list[str]:
    """A line for each fault: where it comes from, `key=value`, what would do."""
    lines: list[str] = []
    told: set[KeyPath] = set()
    for error in errors:
        path = _known_part(error["loc"], keys)
        if _is_member(error, path) and path in told:
            continue  # each type of a union says why the value is not of that type
        told.add(path)
        for fault in _describe(error, path, keys):
            lines.append(place(fault, path, origins))
    return lines


def place(fault: str, path: KeyPath, origins: Mapping[KeyPath, str]) -> str:
    """`fault` after the line or override it is about: of the key it begins with, or of `path`."""
    named = tuple(fault.split("=")[0].split(":")[0].split("."))
    for candidate in (named, *(path[:end] for end in range(len(path), 0, -1))):
        if candidate in origins:
            return f"{origins[candidate]}: {fault}"
    return fault


def _general(path: KeyPath) -> KeyPath:
    """`path` with * for the number of an entry."""
    return tuple(_ENTRY if part.isdecimal() else part for part in path)


def _is_member(error: ErrorDetails, path: KeyPath) -> bool:
    """Whether `error` is about one type of a union, or one entry of a list."""
    return len(error["loc"]) > len(path)


def _members(hint: Any) -> tuple[Any, ...]:
    """The types that a value of type `hint` may have."""
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return typing.get_args(hint) if is_union else (hint,)


def _sections_of(hint: Any) -> list[type]:
    return [t for t in _members(hint) if isinstance(t, type) and is_dataclass(t)]


def _entries_of(hint: Any) -> list[type]:
    """The sections that a list of type `hint` holds."""
    is_list = typing.get_origin(hint) in (list, tuple)
    return [t for member in typing.get_args(hint) for t in _sections_of(member)] if is_list else []


def _describe(error: ErrorDetails, path: KeyPath, keys: KeyTable) -> list[str]:
    key, given = ".".join(path), json.dumps(error["input"], ensure_ascii=False)
    match error["type"]:
        case "value_error":
            return str(error["ctx"]["error"]).splitlines()
        case "unexpected_keyword_argument":
            return [f"{key}: no such key{keys.suggest(path)}"]
        case "missing":
            return [f"{key} is missing: it has no default"]
        case "dataclass_type":
            return [
                f"{key}={given} must be a section with keys"
                f" {', '.join(keys.sections[_general(path)])}"
            ]
        case "enum" | "literal_error":
            return [f"{key}={given} must be {error['ctx']['expected']}"]
    if _is_member(error, path):
        names = [
            t.__name__ if isinstance(t, type) else str(t)
            for t in _members(keys.hints[_general(path)])
        ]
        return [f"{key} must be {' or '.join(READABLE.get(name, name) for name in names)}"]
    return [f"{key}={given} {EXPECTED.get(error['type'], error['msg'])}"]


def _known_part(loc: tuple[int | str, ...], keys: KeyTable) -> KeyPath:
    """The key that `loc` is about, without what pydantic adds for members of unions and lists."""
    path: KeyPath = ()
    for part in loc:
        general = _general((*path, str(part)))
        is_key = general[:-1] in keys.hints and general[:-1] not in keys.sections
        if is_key and general not in keys.sections:  # that would be an entry of a list
            break
        path = (*path, str(part))
    return path
