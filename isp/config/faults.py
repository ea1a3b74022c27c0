"""`describe_faults`: error texts for what is wrong in a configuration."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from pydantic_core import ErrorDetails

from isp.config.keys import KeyTable, general
from isp.config.removed import REMOVED_KEYS
from isp.config.yaml_file import KeyPath
from isp.core.section import describe_value

__all__ = ["describe_faults", "place"]

_QK_CLIP = (
    "clipping of query and key weights is not supported, as no attention kernel gives the largest"
    " logit of each head: use model.qk_norm=true, or a lower optimizer.muon.lr"
)
_REFUSED = dict.fromkeys(("qk_clip", "clip_qk", "qk_clip_alpha", "qk_clip_threshold"), _QK_CLIP)
"""Advice about keys of other projects that ISP does not have, by the last part of the key."""

_MOST_SHOWN = 60
"""Number of characters of a value that an error shows."""


def describe_faults(
    errors: Sequence[ErrorDetails], origins: Mapping[KeyPath, str], keys: KeyTable
) -> list[str]:
    """Return a line for each fault: where the key was given, `key=value`, and what is allowed.

    `errors` are pydantic's. `origins`: where each key was given, such as `run.yaml, line 3`.
    """
    lines: list[str] = []
    described: set[KeyPath] = set()
    for error in errors:
        path = _known_part(error["loc"], keys)
        if _is_member(error, path) and path in described:
            continue  # pydantic reports one error for each type of a union: show the first
        described.add(path)
        for fault in _describe(error, path, keys):
            lines.append(place(fault, path, origins))
    return lines


def place(fault: str, path: KeyPath, origins: Mapping[KeyPath, str]) -> str:
    """Return `fault` after where its key was given: a line of the file, or an override.

    The key is the one with which `fault` begins, else `path`. If it is inside a mapping that was
    given as a whole, the place of the mapping is used.
    """
    # First look up the key that the text names, then `path`. Shorten each part by part until it is
    # in `origins`.
    named = tuple(fault.split("=")[0].split(":")[0].split("."))
    of_fault = [named[:end] for end in range(len(named), 1, -1)]
    for candidate in (*of_fault, *(path[:end] for end in range(len(path), 0, -1))):
        if candidate in origins:
            return f"{origins[candidate]}: {fault}"
    return fault


def _is_member(error: ErrorDetails, path: KeyPath) -> bool:
    """Return True if `error` is about one type of a union, or one entry of a list, at `path`."""
    return len(error["loc"]) > len(path)


def _describe(error: ErrorDetails, path: KeyPath, keys: KeyTable) -> list[str]:
    """Return the lines about one of pydantic's errors, which is about the key `path`."""
    key, given = ".".join(path), json.dumps(error["input"], ensure_ascii=False)
    match error["type"]:
        case "value_error" if general(path) in keys.sections:  # __post_init__ raised it
            return str(error["ctx"]["error"]).splitlines()
        case "unexpected_keyword_argument":
            if removed := REMOVED_KEYS.get(".".join(general(path))):
                return [f"{key} was removed: {removed.instead}"]
            return [f"{key}: {_REFUSED.get(path[-1]) or f'no such key{keys.suggest(path)}'}"]
        case "missing":
            return [f"{key} is missing: it has no default"]
        case "dataclass_type":
            shown = given if len(given) <= _MOST_SHOWN else f"{given[:_MOST_SHOWN]}..."
            return [
                f"{key}={shown} must be a section: set keys in it, such as"
                f" {key}.{keys.example_in(path)}"
            ]
        case "enum" | "literal_error":
            return [f"{key}={given} must be {error['ctx']['expected']}"]
    if _is_member(error, path):
        return [f"{key} must be {keys.type_of(general(path))}"]
    return [describe_value(key, error, keys.defaults[general(path)])]


def _known_part(loc: tuple[int | str, ...], keys: KeyTable) -> KeyPath:
    """Return the key in `loc`, pydantic's place of an error.

    pydantic adds names of types, for unions, and indices of list entries; these are cut off.
    """
    path: KeyPath = ()
    for part in loc:
        place = general((*path, str(part)))
        is_key = place[:-1] in keys.hints and place[:-1] not in keys.sections
        if is_key and place not in keys.sections:  # `path` is a whole key: cut off the rest
            break
        path = (*path, str(part))
    return path
