"""The changes in the configuration of a run since a checkpoint was saved."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from isp.checkpoint.choice import CheckpointInfo
from isp.config import JobConfig, to_plain
from isp.parallel import Axis, Topology

__all__ = ["check_changes", "saved_values"]

CONFIG = "config"
SEQUENCES = "sequences_per_step"

_HOW_TO_COMPUTE = (
    "model.preset",
    "model.init_std",
    "model.attention_backend",
    "model.checkpoint",
)
"""Beginnings of keys of `model` that do not change a model which has weights."""
_ORDER_OF_DATA = {
    "training.seed",
    "data.source",
    "data.text_key",
    "data.valid_fraction",
    "data.tokenizer",
    "data.eos_token",
    "data.seq_len",
    "data.pack",
}


def saved_values(config: JobConfig, topology: Topology) -> dict[str, Any]:
    """The values a checkpoint keeps, plain, to be compared when a run goes on."""
    return {CONFIG: to_plain(config), SEQUENCES: _sequences(config, topology)}


def check_changes(info: CheckpointInfo, config: JobConfig, topology: Topology) -> list[str]:
    """The differences from the run that saved a checkpoint, a line each, in words.

    Raises ValueError for what makes another model or another order of the data, unless
    `checkpoint.allow_changes` says that it may.
    """
    saved = info.manifest.shared
    if not isinstance(saved.get(CONFIG), dict):
        return ["it does not say its configuration, so nothing was compared"]
    lines: list[str] = []
    refused: list[str] = []
    for key, there, here in _differences(saved[CONFIG], to_plain(config)):
        line = f"{key}: {there} there, {here} now"
        (refused if _is_refused(key) else lines).append(line)
    there, here = saved.get(SEQUENCES), _sequences(config, topology)
    if there != here:
        refused.append(f"sequences in a step, over all ranks: {there} there, {here} now")
    if (there := info.manifest.topology.world_size) != topology.world_size:
        lines.append(f"ranks: {there} there, {topology.world_size} now")
    if refused and not config.checkpoint.allow_changes:
        listed = "".join(f"\n  {line}" for line in refused)
        raise ValueError(
            f"{info.path} is of a run with another model, or other data:{listed}\n"
            "for a run of its own use another job.name (or checkpoint.folder) or"
            f" checkpoint.auto_resume=false, and checkpoint.initial_load_path={info.path} to begin"
            " from these weights; to go on with the changes, checkpoint.allow_changes=true"
        )
    return [*refused, *lines]


def _sequences(config: JobConfig, topology: Topology) -> int:
    """Samples of a step, over all ranks."""
    return config.data.micro_bsz * config.data.micro_num * topology.size(Axis.DATA)


def _is_refused(key: str) -> bool:
    if key.startswith("model"):
        return not key.startswith(_HOW_TO_COMPUTE)
    return key in _ORDER_OF_DATA


def _differences(
    there: Mapping[str, Any], here: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, Any, Any]]:
    """Keys whose values differ, with both; keys that only one version of the project has do not."""
    for name in [name for name in here if name in there]:
        both = there[name], here[name]
        if all(isinstance(value, dict) for value in both):
            yield from _differences(*both, f"{prefix}{name}.")
        elif both[0] != both[1]:
            yield f"{prefix}{name}", *both
