"""The checkpoint that a run resumes from: the newest good one, or the one of `load_step`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from isp.checkpoint.agreement import CheckpointError, attempt, attempt_first
from isp.checkpoint.folder import CheckpointFolder, checkpoints_at
from isp.checkpoint.manifest import Damaged, Manifest
from isp.core.comm import Channel

__all__ = [
    "LAUNCH",
    "Candidates",
    "CheckpointInfo",
    "candidates_at",
    "candidates_in",
    "choose",
    "newest_at",
    "preview",
]

LAUNCH = "launch"
"""Key of a manifest's shared values with the time of the launch that saved it."""


@dataclass(frozen=True, kw_only=True)
class CheckpointInfo:
    """A checkpoint that was chosen, after a check of its sizes or of every byte."""

    path: Path
    manifest: Manifest
    reason: str
    """Reason for the choice, as part of a sentence."""
    passed_over: tuple[str, ...]
    """Lines on newer checkpoints that are damaged, and on saves that did not end."""

    @property
    def step(self) -> int:
        """Steps done when it was saved."""
        return self.manifest.step

    def describe(self) -> str:
        """Return its path, the reason, and a line for each that was passed over."""
        skipped = "".join(f"\n  passed over {line}" for line in self.passed_over)
        return f"{self.path}, {self.reason}{skipped}"


class Candidates(NamedTuple):
    """Checkpoints to choose from, the preferred one first."""

    place: str
    """Path that was searched."""
    paths: list[str]
    reason: str
    """Reason for these, as part of a sentence."""
    leftovers: list[str]
    """Lines on saves that did not end."""


def candidates_in(
    folder: CheckpointFolder, load_step: int | None = None, *, launch: float | None = None
) -> Candidates:
    """Return the checkpoint of `load_step`, or all from the newest on; called on one rank.

    Checkpoints that `launch` has saved come before `load_step`: the run has already gone back to
    it, and was then started again. Raises ValueError if there is no checkpoint of `load_step`.
    """
    folder.restore()
    steps, reason = folder.steps(), "the newest good one"
    leftovers = [
        f"{path.name}: left over from a save that did not end" for path in folder.leftovers()
    ]
    if load_step is not None:
        # By the launch that saved them, not by time: if a clock was set back, new saves look old.
        newer = [
            step for step in steps if launch is not None and _launch_of(folder, step) == launch
        ]
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
    paths = [str(folder.published(step)) for step in steps]
    return Candidates(str(folder.path), paths, reason, leftovers)


def candidates_at(path: Path) -> Candidates:
    """Return the checkpoint at `path`, or all in it; raise ValueError if there is none."""
    return Candidates(str(path), [str(p) for p in checkpoints_at(path)], "as asked", [])


def newest_at(path: Path) -> CheckpointInfo:
    """Return the newest of `candidates_at` that `preview` finds sound."""
    found = preview(candidates_at(path))
    assert found is not None
    return found


def choose(find: Callable[[], Candidates], channel: Channel) -> CheckpointInfo | None:
    """Return the first undamaged one of the candidates that `find` returns on rank 0.

    None if it returns none. A collective that verifies every byte, each rank a share of the files.
    Raises CheckpointError if `find` raises, or all are damaged.
    """
    found = Candidates(*attempt_first(channel, "looking for checkpoints", find))
    return _first_good(found, lambda path: _verified(path, channel))


def preview(found: Candidates) -> CheckpointInfo | None:
    """Return the choice of `choose` by manifests and file sizes alone, without reading contents."""
    return _first_good(found, Manifest.sound)


def _first_good(found: Candidates, verify: Callable[[Path], Manifest]) -> CheckpointInfo | None:
    """Return the first candidate that `verify` accepts; None if there are no candidates.

    Raises CheckpointError, with the fault of each, if `verify` refuses all.
    """
    passed_over = list(found.leftovers)
    for path in map(Path, found.paths):
        try:
            manifest = verify(path)
        except CheckpointError as fault:
            passed_over.append(f"{path.name}: {fault}")
            continue
        return CheckpointInfo(
            path=path, manifest=manifest, reason=found.reason, passed_over=tuple(passed_over)
        )
    if found.paths:
        reasons = "".join(f"\n  {line}" for line in passed_over)
        raise CheckpointError(
            f"no usable checkpoint in {found.place}:{reasons}\nchoose another one (in training by"
            f" checkpoint.load_step), or start a new run: another job.name, or"
            f" checkpoint.auto_resume=false"
        )
    return None


def _verified(path: Path, channel: Channel) -> Manifest:
    """Return the manifest of a checkpoint after verifying every byte; a collective.

    Raises CheckpointError on all ranks if it is damaged.
    """
    manifests: list[Manifest] = []

    def check_share() -> None:
        manifest = Manifest.read(path)
        # Sorted by size, so that every rank's share has about as many bytes.
        by_size = sorted(manifest.files, key=lambda name: manifest.files[name].num_bytes)
        manifest.check(path, by_size[channel.rank :: channel.size])
        manifests.append(manifest)

    attempt(channel, "verifying", check_share)
    return manifests[0]


def _launch_of(folder: CheckpointFolder, step: int) -> float | None:
    """Return the launch that saved the checkpoint of `step`; None if it is not known."""
    try:
        return Manifest.read(folder.published(step)).shared.get(LAUNCH)
    except Damaged:
        return None
