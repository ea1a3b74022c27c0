"""A profile as text: the modes side by side, and the worst waits of each with what would help."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from isp.profile.schema import ModeProfile, Profile, Totals, Wait

__all__ = ["aligned", "describe", "sentence"]

_IN = " " * 4
_EXPLANATION = """\
comm: at least one transfer under way; exposed: compute waited for one, share: of the step
bound: what no order of the transfers could hide = first gather + last reduction + chain (needed at
once) + excess (longer than the compute beside it), without waiting for other ranks"""


def describe(profile: Profile, *, num_waits: int = 5) -> str:
    """The whole profile, for a terminal of about 120 columns."""
    head = (
        f"{profile.world_size} ranks on {profile.device}, torch {profile.torch}; the step of median"
        f" length of {profile.num_steps}, after {profile.warmup_steps} to warm up: means over"
        f" ranks, in milliseconds"
    )
    if profile.shared_cores:
        head += f"; {profile.shared_cores}, so ranks wait for each other"
    parts = [
        textwrap.fill(head, 112),
        _modes(profile),
        _EXPLANATION,
        _kinds(profile),
        _losses(profile),
    ]
    parts += [_waits(mode, num_waits) for mode in profile.modes]
    return "\n\n".join(parts)


def sentence(mode: ModeProfile) -> str:
    """Say what a mode exposes, and why, in one sentence."""
    s = mode.summary
    if not s.num_transfers:
        return f"{mode.mode}: nothing travels."
    head = (
        f"{mode.mode}: {s.exposed_share:.0%} of the step is exposed ({s.exposed_ms:.1f} of"
        f" {s.step_ms:.1f} ms; transfers were under way for {s.comm_ms:.1f} ms)"
    )
    causes = mode.exposed_by_cause
    if not causes:
        return f"{head}."
    cause, exposed = next(iter(causes.items()))
    return f"{head}, {exposed / sum(causes.values()):.0%} of it in {cause}."


def _modes(profile: Profile) -> str:
    names = "mode tensor weight step comm exposed share first last chain excess bound exp./bound"
    header = [*names.split(), "sent MiB", "mem GiB", "loss"]
    rows = [header]
    for mode in profile.modes:
        s = mode.summary
        ratio = s.exposed_over_bound
        rows.append(
            [
                mode.mode,
                str(mode.tensor),
                str(mode.weight),
                *(_ms(x) for x in (s.step_ms, s.comm_ms, s.exposed_ms)),
                f"{s.exposed_share:.0%}",
                *(_ms(x) for x in _bound_parts(s)),
                _ms(s.bound_ms),
                "" if ratio is None else f"{ratio:.2f}",
                f"{s.sent_bytes / 2**20:.2f}",
                f"{mode.peak_memory_gib:.2f}",
                "" if mode.losses[-1] is None else f"{mode.losses[-1]:.5f}",
            ]
        )
    return aligned(rows)


def _bound_parts(totals: Totals) -> tuple[float, ...]:
    return totals.first_edge_ms, totals.last_edge_ms, totals.chain_ms, totals.excess_ms


def _kinds(profile: Profile) -> str:
    rows = [["by kind", "", "number", "sent MiB", "comm", "exposed"]]
    for mode in profile.modes:
        for kind, t in mode.summary.by_kind.items():
            rows.append(
                [
                    mode.mode,
                    kind,
                    f"{t.num_transfers:g}",
                    f"{t.sent_bytes / 2**20:.3f}",
                    _ms(t.comm_ms),
                    _ms(t.exposed_ms),
                ]
            )
    return aligned(rows, text_columns=2)


def _losses(profile: Profile) -> str:
    if len(profile.modes) == 1:
        return textwrap.fill(sentence(profile.modes[0]), 112)
    difference = profile.largest_loss_difference
    equal = f"the losses of all modes agree within {difference:.1e} in every step"
    return "\n".join([equal, *(textwrap.fill(sentence(m), 112) for m in profile.modes)])


def _waits(mode: ModeProfile, at_most: int) -> str:
    waits = mode.waits[:at_most]
    if not waits:
        return f"{mode.mode}: nothing is waited for"
    rows = [["exposed", "moving", "times", "what", "where", "why"]]
    rows += [
        [
            _ms(wait.exposed_ms),
            _ms(wait.moving_ms),
            f"{wait.count:g}",
            f"{wait.kind} of {wait.label}",
            _where(wait),
            wait.reason,
        ]
        for wait in waits
    ]
    table = aligned(rows, text_columns=0, text_from=3).split("\n")
    lines = [f"{mode.mode}, the worst waits of a step", table[0]]
    for row, wait in zip(table[1:], waits, strict=True):
        lines += [row, *textwrap.wrap(wait.advice, 112, initial_indent=_IN, subsequent_indent=_IN)]
    return "\n".join(lines)


def _where(wait: Wait) -> str:
    return f"{wait.phase} of {wait.block}" if wait.block else wait.phase


def _ms(milliseconds: float) -> str:
    return f"{milliseconds:.1f}"


def aligned(
    rows: Sequence[Sequence[str]], *, text_columns: int = 1, text_from: int | None = None
) -> str:
    """The first `text_columns` and those from `text_from` on to the left, the others right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    numbers = range(text_columns, len(widths) if text_from is None else text_from)
    return "\n".join(
        "  ".join(
            f"{cell:>{width}}" if i in numbers else f"{cell:{width}}"
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )
