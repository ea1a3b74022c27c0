"""Which checkpoint a run goes on from: the newest good one, or the one that is asked for."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from isp.checkpoint.agreement import CheckpointError, attempt, attempt_first
from isp.checkpoint.folder import CheckpointFolder
from isp.checkpoint.manifest import Damaged, Manifest
from isp.comm import Channel

__all__ = ["CheckpointInfo", "choose"]


@dataclass(frozen=True, kw_only=True)
class CheckpointInfo:
    """A checkpoint whose every byte has been verified."""

    path: Path
    manifest: Manifest
    reason: str
    """Why it was chosen."""
    passed_over: tuple[str, ...]
    """Newer ones that are not good, and what became of saves that did not end: a line each."""

    @property
    def step(self) -> int:
        """Steps done when it was saved."""
        return self.manifest.step

    def describe(self) -> str:
        """Which it is and why, for people."""
        skipped = "".join(f"\n  passed over {line}" for line in self.passed_over)
        return f"{self.path}, {self.reason}{skipped}"


def choose(
    folder: CheckpointFolder,
    channel: Channel,
    load_step: int | None = None,
    *,
    launched_at: float = math.inf,
) -> CheckpointInfo | None:
    """The checkpoint of `load_step`, or the newest good one; None if there is none at all.

    Those that were saved after `launched_at` (seconds since 1970) come before `load_step`: the run
    has gone back to it already, and was then started again. A collective; reads and verifies every
    byte, each rank a share. Raises ValueError if there is no checkpoint of `load_step`, and
    CheckpointError if it is damaged or all are.
    """
    since = math.inf if load_step is None else launched_at
    steps, newer, leftovers = attempt_first(
        channel, f"reading {folder.path}", lambda: _listing(folder, since)
    )
    passed_over = [f"{name}: left over from a save that did not end" for name in leftovers]
    reason = "the newest good one"
    if load_step is not None:
        if load_step not in steps and not newer:
            there = ", ".join(str(s) for s in steps) or "none at all"
            raise ValueError(
                f"checkpoint.load_step={load_step}: {folder.path} has no such checkpoint;"
                f" there are: {there}"
            )
        reason = f"as load_step={load_step} says"
        if newer:
            reason = f"the newest good one since the run went back to load_step={load_step}"
        steps = [*newer, *({load_step} & set(steps) - set(newer))]
    for step in steps:
        path = folder.published(step)
        try:
            manifest = _verified(path, channel)
        except CheckpointError as fault:
            passed_over.append(f"{path.name}: {fault}")
            continue
        return CheckpointInfo(
            path=path, manifest=manifest, reason=reason, passed_over=tuple(passed_over)
        )
    if steps:
        reasons = "".join(f"\n  {line}" for line in passed_over)
        raise CheckpointError(
            f"no good checkpoint in {folder.path}, where there should be one:{reasons}\n"
            f"choose another by checkpoint.load_step, or start anew in another folder"
        )
    return None


def _verified(path: Path, channel: Channel) -> Manifest:
    """What a checkpoint consists of, verified; raises CheckpointError on all ranks if damaged."""
    manifests: list[Manifest] = []

    def check_share() -> None:
        try:
            manifest = Manifest.read(path)
            by_size = sorted(manifest.files, key=lambda name: manifest.files[name].num_bytes)
            manifest.check(path, by_size[channel.rank :: channel.size])
        except Damaged as fault:
            raise CheckpointError(str(fault)) from None
        manifests.append(manifest)

    attempt(channel, "verifying", check_share)
    return manifests[0]


def _listing(folder: CheckpointFolder, since: float) -> tuple[list[int], list[int], list[str]]:
    """The published steps, newest first; those saved later than `since`; what else is there."""
    folder.restore()
    steps = folder.steps()
    newer = [step for step in steps if since < math.inf and _saved_at(folder, step) > since]
    return steps, newer, [path.name for path in folder.leftovers()]


def _saved_at(folder: CheckpointFolder, step: int) -> float:
    try:
        return Manifest.read(folder.published(step)).saved_at
    except Damaged:
        return -math.inf
