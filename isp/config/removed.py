"""Keys, commands and options that earlier versions had, and what to use in their place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

__all__ = ["REMOVED_KEYS", "RemovedKey", "check_command", "without_removed"]


class RemovedKey(NamedTuple):
    """A key that was removed."""

    default: Any
    """Its default, which a configuration kept by a run may have."""
    instead: str
    """What to use, which follows the name of the key in an error."""
    is_spent: bool = False
    """Whether no value has an effect on a run that has begun."""


REMOVED_KEYS: Mapping[str, RemovedKey] = {}

_REMOVED_COMMANDS: Mapping[str, str] = {}
"""What to use, by command (`checkpoint import`)."""

_REMOVED_OPTIONS: Mapping[tuple[str, str], str] = {}
"""What to use, by command and option (`evaluate`, `--tasks`)."""


def without_removed(kept: dict[str, Any]) -> None:
    """Drop the removed keys that had no effect from `kept`, the sections of an earlier run.

    Others stay, and are refused where the configuration is validated.
    """
    for path, removed in REMOVED_KEYS.items():
        *sections, name = path.split(".")
        values: Any = kept
        for section in sections:
            values = values.get(section) if isinstance(values, dict) else None
        is_kept = isinstance(values, dict) and name in values
        if is_kept and (removed.is_spent or values[name] == removed.default):
            del values[name]


def check_command(words: Sequence[str]) -> None:
    """Raise ValueError if the words of a command line name a removed command or option."""
    for command, instead in _REMOVED_COMMANDS.items():
        if list(words[: len(command.split())]) == command.split():
            raise ValueError(f"isp {command} was removed: {instead}")
    given = {word.partition("=")[0] for word in words}
    for (command, option), instead in _REMOVED_OPTIONS.items():
        if list(words[: len(command.split())]) == command.split() and option in given:
            raise ValueError(f"isp {command} {option} was removed: {instead}")
