"""`KeyTable`, all keys of a configuration with types, defaults and documentation."""

from __future__ import annotations

import copy
import inspect
import json
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import Enum
from typing import Any

from isp.config.removed import without_removed
from isp.config.yaml_file import KeyPath, parse_value
from isp.core.section import KeyRole, absent_values, docs_of, names_of, role_of
from isp.utils.text import suggest

__all__ = ["KeyTable", "general"]

_ENTRY = "*"
"""The part of a `KeyPath` in place of the number of a list entry."""

_NULLS = ("", "~", "null", "Null", "NULL")
"""All spellings of null in YAML."""

_TYPES = {
    "NoneType": "null",
    "bool": "true or false",
    "dict[str, typing.Any]": "a mapping",
    "float": "a number",
    "int": "a whole number",
    "list[str]": "a list of texts",
    "str": "text",
    "tuple[str, ...]": "a list of texts",
}
"""Descriptions of types for users, by the name of the type."""


@dataclass(frozen=True, kw_only=True)
class KeyTable:
    """All keys of a tree of dataclasses."""

    sections: Mapping[KeyPath, tuple[str, ...]]
    """Names of the fields of each section; () is the root, * any entry of a list of sections."""
    hints: Mapping[KeyPath, Any]
    """Type of each key whose value may be something else than a section. A key that takes a section
    or null is in `sections`, too."""
    defaults: Mapping[KeyPath, Any]
    """Default of each key in `hints`; MISSING if it has none, or a factory makes it."""
    classes: Mapping[KeyPath, type]
    """Dataclass of each section."""

    def role(self, path: KeyPath) -> KeyRole | None:
        """Return what a key decides (`KeyRole`: model, data, method or place); None if unknown."""
        path = general(path)
        return role_of(self.classes[path[:-1]], path[-1]) if path in self.hints else None

    @classmethod
    def of(cls, root: type) -> KeyTable:
        """Return the table of the dataclass `root` and the dataclasses in it."""
        sections: dict[KeyPath, tuple[str, ...]] = {}
        hints: dict[KeyPath, Any] = {}
        defaults: dict[KeyPath, Any] = {}
        pending: list[tuple[KeyPath, type]] = [((), root)]
        for path, section in pending:  # The loop appends the sections that it finds.
            types_by_name = typing.get_type_hints(section)
            sections[path] = names_of(section)
            made = {f.name: f.default for f in fields(section)}
            for name in sections[path]:
                hint, default = types_by_name[name], made[name]
                pending += [((*path, name), type_) for type_ in _sections_of(hint)]
                pending += [((*path, name, _ENTRY), type_) for type_ in _entries_of(hint)]
                if not is_dataclass(hint):
                    hints[*path, name], defaults[*path, name] = hint, default
        return cls(sections=sections, hints=hints, defaults=defaults, classes=dict(pending))

    def upgraded(self, kept: Mapping[str, Any]) -> dict[str, Any]:
        """Return the configuration `kept`, saved by an earlier version, with this version's keys.

        A key that was added later gets the value that matches the run's behavior (`Absent`). Keys
        that were removed, and had no effect, are dropped.
        """
        filled = copy.deepcopy(dict(kept))
        without_removed(filled)
        for path, section in self.classes.items():
            values: Any = filled
            for name in path:
                values = values.get(name) if isinstance(values, dict) else None
            if isinstance(values, dict):
                values.update({**absent_values(section), **values})
        return filled

    def differences(
        self, there: Mapping[str, Any], here: Mapping[str, Any], section: KeyPath = ()
    ) -> Iterator[tuple[str, Any, Any]]:
        """Yield each key whose values differ, with both; skip keys that either side lacks.

        `there` and `here` are the values of `section`, saved and current.
        """
        for name in [name for name in here if name in there]:
            both, path = (there[name], here[name]), (*section, name)
            # Compare lists of sections entry by entry, unless their lengths differ.
            if all(isinstance(x, list) and x and _entries(x) for x in both) and len(both[0]) == len(
                both[1]
            ):
                both = _entries(both[0]), _entries(both[1])
            # Compare sections key by key. Any other mapping is one value: a missing entry counts.
            place = general(path)
            has_sections = place in self.sections or (*place, _ENTRY) in self.sections
            if (has_sections or place not in self.hints) and all(
                isinstance(value, dict) for value in both
            ):
                yield from self.differences(*both, path)
            elif both[0] != both[1]:
                yield ".".join(path), *both

    def typed(self, path: KeyPath, text: str) -> Any:
        """Return the value of `text`, given on a command line for the key `path`.

        A key of type text takes it verbatim, except null and lists if its type allows them. For any
        other key it is read as YAML; raises ValueError if it is not YAML.
        """
        members = _members(self.hints.get(path))
        if str not in members:
            return parse_value(text)
        stripped = text.strip()
        if stripped in _NULLS and type(None) in members:
            return None
        if stripped[:1] == "[" and any(typing.get_origin(x) in (list, tuple) for x in members):
            with suppress(ValueError):  # `[ab].txt` is not YAML but a glob: take it verbatim
                return parse_value(text)
        return text

    def as_whole(self, path: KeyPath, value: Any) -> Any:
        """Return `value`, as an int if it is a whole float such as `1e3` and `path` takes ints.

        Keys that take floats, too, keep the float.
        """
        members = _members(self.hints.get(general(path)))
        takes_whole = int in members and float not in members
        is_whole = isinstance(value, float) and value.is_integer()
        return int(value) if takes_whole and is_whole else value

    def needs_value(self, path: KeyPath) -> bool:
        """Return whether `path` is a key that does not take true, the value of a bare `--key`."""
        return path in self.hints and bool not in _members(self.hints[path])

    def type_of(self, path: KeyPath) -> str:
        """Return a description of the type of the key `path`."""
        return " or ".join(_type_name(member) for member in _members(self.hints[path]))

    def reference(self, name: str | None) -> str:
        """Return a text with type, default and documentation of all keys, or of a section's.

        The section `name` includes the sections in it.
        Raises ValueError if there is no such section.
        """
        prefix = () if name is None else tuple(name.split("."))
        chosen = [path for path in self.sections if path[: len(prefix)] == prefix]
        if not chosen:
            known = ", ".join(".".join(path) for path in self.sections if path)
            raise ValueError(f"{name} is not a section: use one of {known}")
        return "\n\n".join(dict.fromkeys(self._section_text(path) for path in chosen if path))

    def _section_text(self, path: KeyPath) -> str:
        section = self.classes[path]
        lines = [inspect.cleandoc(section.__doc__ or "")]
        for name, meaning in docs_of(section).items():
            if (*path, name) not in self.hints:  # it is a section, and listed separately
                continue
            default = self.defaults[*path, name]
            shown = default if isinstance(default, str) else json.dumps(default, default=str)
            ending = "" if default is MISSING else f"; default: {shown}"
            lines.append(f"  {name}: {self.type_of((*path, name))}{ending}")
            lines += textwrap.wrap(meaning, 96, initial_indent=" " * 6, subsequent_indent=" " * 6)
        return "\n".join(lines)

    def example_in(self, path: KeyPath) -> str:
        """Return the name of some key in the section `path`, relative to it."""
        begin = found = general(path)
        while found == begin or found not in self.hints:  # go down into a section
            found = (*found, self.sections[found][0])
        return ".".join(found[len(begin) :])

    def suggest(self, path: KeyPath) -> str:
        """Return `; did you mean ...?` for an unknown `path`, or a list of its section's keys."""
        *section, name = path
        known = self.sections[general(tuple(section))]
        paths = (*self.hints, *self.sections)
        every = [".".join(p) for p in paths if p and _ENTRY not in p]
        return suggest(name, known, section=".".join(section), paths=every)


def _entries(values: list[Any]) -> dict[str, Any]:
    """Return the entries of a list of sections by their numbers; nothing for other lists."""
    return {str(i): x for i, x in enumerate(values)} if isinstance(values[0], dict) else {}


def general(path: KeyPath) -> KeyPath:
    """Return `path` with * in place of the numbers of list entries."""
    return tuple(_ENTRY if part.isdecimal() else part for part in path)


def _members(hint: Any) -> tuple[Any, ...]:
    """Return the members of the union `hint`, or `hint` itself."""
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return typing.get_args(hint) if is_union else (hint,)


def _type_name(member: Any) -> str:
    if typing.get_origin(member) is typing.Literal:
        return " or ".join(typing.get_args(member))
    if isinstance(member, type) and issubclass(member, Enum):
        return " or ".join(str(value) for value in member)
    name = (
        member.__name__ if isinstance(member, type) and not typing.get_args(member) else str(member)
    )
    keys = ", ".join(f.name for section in _entries_of(member) for f in fields(section))
    return _TYPES.get(name, f"a list of sections of {keys}" if keys else "a section")


def _sections_of(hint: Any) -> list[type]:
    return [t for t in _members(hint) if isinstance(t, type) and is_dataclass(t)]


def _entries_of(hint: Any) -> list[type]:
    """Return the dataclasses of the entries of a list of type `hint`."""
    lists = [member for member in _members(hint) if typing.get_origin(member) in (list, tuple)]
    return [t for found in lists for member in typing.get_args(found) for t in _sections_of(member)]
