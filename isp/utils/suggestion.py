"""Suggestions of the name that was meant, for one that is not known."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

__all__ = ["nearest", "suggest"]

_MOST_LISTED = 300
"""Characters of a list of names; a longer one hides the fault before it."""


def nearest(name: str, known: Sequence[str], cutoff: float = 0.75) -> list[str]:
    """Return the closest of `known` as a list, which is empty if none is close."""
    return difflib.get_close_matches(name, known, n=1, cutoff=cutoff)


def suggest(name: str, known: Sequence[str], *, section: str, paths: Sequence[str] = ()) -> str:
    """Return `; did you mean ...?` for a `name` that `section` lacks, or the names it has.

    `paths`: full names of all keys, tried after close names in `known`.
    """
    near = nearest(name, known)
    near = near or [path for path in paths if path.split(".")[-1] == name]
    near = near or nearest(f"{section}.{name}".lstrip("."), paths, 0.8) or nearest(name, known, 0.6)
    if near:
        return f"; did you mean {' or '.join(map(repr, near))}?"
    listed = ", ".join(known)
    if len(listed) > _MOST_LISTED:
        return f"; `isp config --help-keys {section}` lists the keys of {section}"
    return f"; {section or 'the configuration'} has {listed}"
