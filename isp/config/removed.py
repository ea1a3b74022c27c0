"""Keys that earlier versions had, and what to use in their place; commands: `isp.cli.removed`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

__all__ = ["REMOVED_KEYS", "RemovedKey", "without_removed"]


class RemovedKey(NamedTuple):
    """A key that was removed."""

    default: Any
    """Its default, which a configuration kept by a run may have."""
    instead: str
    """The replacement, in words that follow the name of the key in an error."""
    is_spent: bool = False
    """True if no value has an effect on a run that has begun."""


REMOVED_KEYS: Mapping[str, RemovedKey] = {
    "model.init_from": RemovedKey(
        default=None,
        is_spent=True,
        instead="use model.hf=FOLDER, with model.hf_overrides for RoPE scaling and other keys of"
        " its config.json (InternLM2: rewrite the folder by tools/internlm2_to_llama.py first)",
    ),
    "parallel.expert.max_gathered_bytes": RemovedKey(
        None, "use parallel.expert.size, which spreads the experts of a layer over ranks"
    ),
}


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
