"""Configuration keys that were removed, and what to use instead. Commands: `isp.cli.program`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

__all__ = ["REMOVED_KEYS", "RemovedKey", "without_removed"]


class RemovedKey(NamedTuple):
    """A configuration key that was removed, and what to use instead."""

    ignored: Collection[Any] | None
    """Values of the key that are ignored in a configuration saved by a run; None: all values."""
    instead: str
    """Advice, which an error has after the name of the key."""


REMOVED_KEYS: Mapping[str, RemovedKey] = {
    "model.init_from": RemovedKey(
        # Ignore it in a saved configuration: the saved keys have the model's sizes, and the
        # checkpoints have its weights.
        ignored=None,
        instead="use model.hf=FOLDER, with model.hf_overrides for RoPE scaling and other keys of"
        " its config.json (InternLM2: rewrite the folder by tools/internlm2_to_llama.py first)",
    ),
    "parallel.expert.max_gathered_bytes": RemovedKey(
        (None,), "use parallel.expert.size, which spreads the experts of a layer over ranks"
    ),
}


def without_removed(kept: dict[str, Any]) -> None:
    """Delete removed keys from `kept`, the configuration of an earlier run, in place.

    Keys with a value that is not in `RemovedKey.ignored` stay, and validation then refuses them.
    """
    for path, removed in REMOVED_KEYS.items():
        *sections, name = path.split(".")
        values: Any = kept
        for section in sections:
            values = values.get(section) if isinstance(values, dict) else None
        if not isinstance(values, dict) or name not in values:
            continue
        if removed.ignored is None or values[name] in removed.ignored:
            del values[name]
