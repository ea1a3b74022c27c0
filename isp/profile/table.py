"""A profile as text: modes side by side, and each mode's worst waits with advice."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from typing import NamedTuple

from isp.profile.schema import ModeProfile, Profile, Wait

__all__ = [
    "EXPLANATION",
    "Table",
    "aligned",
    "describe",
    "head",
    "kinds",
    "losses",
    "modes",
    "sentence",
    "unsaid",
    "waits",
]

_IN = " " * 4
EXPLANATION = """\
comm: at least one transfer in flight; exposed: compute waited for one, share: of the step
bound: what no order of the transfers could hide = first gather + last reduction + chain (needed at
once) + excess (longer than the compute they overlap), without waiting for other ranks"""


class Table(NamedTuple):
    """Table of text with titles in its first row.

    The first `text_columns` columns hold text, and those from index `text_from` on (None: none).
    The columns between hold numbers, which are aligned to the right.
    """

    rows: Sequence[Sequence[str]]
    text_columns: int = 1
    text_from: int | None = None

    def __str__(self) -> str:
        return aligned(*self)


def describe(profile: Profile, *, num_waits: int = 5) -> str:
    """Return the whole profile for a terminal of about 120 columns."""
    parts = [textwrap.fill(head(profile), 112), str(modes(profile)), EXPLANATION]
    parts += [str(kinds(profile)), _sentences(profile)]
    said = set[str]()
    parts += [_waits(mode, num_waits, said) for mode in profile.modes]
    return "\n\n".join(parts)


def head(profile: Profile) -> str:
    """Return a sentence on what was measured, and where."""
    text = (
        f"{profile.world_size} ranks on {profile.device}, torch {profile.torch}; the step of median"
        f" length of {profile.num_steps}, after {profile.warmup_steps} to warm up: means over"
        f" ranks, in milliseconds"
    )
    if profile.shared_cores:
        text += f"; {profile.shared_cores}, so ranks wait for each other"
    return text


def sentence(mode: ModeProfile) -> str:
    """Return a sentence on how much a mode exposes, and its main cause."""
    s = mode.summary
    if not s.num_transfers:
        return f"{mode.mode}: nothing is transferred."
    text = (
        f"{mode.mode}: {s.exposed_share:.0%} of the step is exposed ({s.exposed_ms:.1f} of"
        f" {s.step_ms:.1f} ms; transfers were in flight for {s.comm_ms:.1f} ms)"
    )
    causes = mode.exposed_by_cause
    if not causes:
        return f"{text}."
    cause, exposed = next(iter(causes.items()))
    return f"{text}, {exposed / sum(causes.values()):.0%} of it in {cause}."


def modes(profile: Profile) -> Table:
    """Return the modes side by side, with times in milliseconds."""
    names = "mode tensor weight step comm exposed share first last chain excess bound exp./bound"
    rows = [[*names.split(), "sent MiB", "mem GiB", "loss"]]
    for mode in profile.modes:
        s, last = mode.summary, mode.losses[-1]
        bound = s.first_edge_ms, s.last_edge_ms, s.chain_ms, s.excess_ms, s.bound_ms
        rows.append(
            [
                *(mode.mode, str(mode.tensor), str(mode.weight)),
                *(_ms(s.step_ms), _ms(s.comm_ms), _ms(s.exposed_ms)),
                f"{s.exposed_share:.0%}",
                *map(_ms, bound),
                "" if s.exposed_over_bound is None else f"{s.exposed_over_bound:.2f}",
                f"{s.sent_bytes / 2**20:.2f}",
                f"{mode.peak_memory_gib:.2f}",
                "not finite" if last is None else f"{last:.5f}",
            ]
        )
    return Table(rows)


def kinds(profile: Profile) -> Table:
    """Return a table of the transfers: a line for each mode and kind, such as all_gather."""
    rows = [["by kind", "", "number", "sent MiB", "comm", "exposed"]]
    for mode in profile.modes:
        for kind, t in mode.summary.by_kind.items():
            sent = f"{t.sent_bytes / 2**20:.3f}"
            times = _ms(t.comm_ms), _ms(t.exposed_ms)
            rows.append([mode.mode, kind, f"{t.num_transfers:g}", sent, *times])
    return Table(rows, text_columns=2)


def losses(profile: Profile) -> str:
    """Return a sentence on how well the losses of several modes agree."""
    difference = profile.largest_loss_difference
    if difference == float("inf"):
        return "not all modes have a finite loss in every step"
    return f"the losses of all modes agree within {difference:.1e} in every step"


def waits(mode: ModeProfile, at_most: int) -> Table:
    """Return the tensors that were waited for longest, per step and rank."""
    rows = [["exposed", "moving", "times", "what", "where", "why"]]
    for wait in mode.waits[:at_most]:
        what = f"{wait.kind} of {wait.label}"
        numbers = _ms(wait.exposed_ms), _ms(wait.moving_ms), f"{wait.count:g}"
        rows.append([*numbers, what, _where(wait), wait.reason])
    return Table(rows, text_columns=0, text_from=3)


def _sentences(profile: Profile) -> str:
    """Return a sentence for each mode, after the one about losses."""
    several = [losses(profile)] if len(profile.modes) > 1 else []
    return "\n".join([*several, *(textwrap.fill(sentence(m), 112) for m in profile.modes)])


def _waits(mode: ModeProfile, at_most: int, said: set[str]) -> str:
    """Return the table of a mode's waits with the advice below each row.

    `said`: the advice that is above already, which is not repeated.
    """
    if not mode.waits:
        return f"{mode.mode}: nothing is waited for"
    title, *rows = str(waits(mode, at_most)).split("\n")
    lines = [f"{mode.mode}, the worst waits of a step", title]
    for row, wait in zip(rows, mode.waits, strict=False):
        text = unsaid(wait.advice, said)
        lines += [row, *textwrap.wrap(text, 112, initial_indent=_IN, subsequent_indent=_IN)]
    return "\n".join(lines)


def unsaid(advice: str, said: set[str]) -> str:
    """Return the part of `advice` that is new, and add its remedy to `said`.

    An advice is a remedy, or a fact and a remedy: `each takes 3 ms: 2.0x the tokens would hide it`.
    Remedies that differ only in numbers are the same.
    """
    fact, _, remedy = advice.partition(": ")
    key = re.sub(r"[\d.]+", "", remedy or fact)
    if key not in said:
        said.add(key)
        return advice
    # The remedy stands above already. Its fact is repeated only if it has numbers, which are about
    # this row of the table.
    return fact if re.search(r"\d", fact) else ""


def _where(wait: Wait) -> str:
    """Return in which phase of the step, and for which part of the model, a wait was."""
    return f"{wait.phase} of {wait.block}" if wait.block else wait.phase


def _ms(milliseconds: float) -> str:
    """Return milliseconds with one decimal, for a cell."""
    return f"{milliseconds:.1f}"


def aligned(
    rows: Sequence[Sequence[str]], text_columns: int = 1, text_from: int | None = None
) -> str:
    """Return rows as lines with aligned columns, as in `Table`."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    numbers = range(text_columns, len(widths) if text_from is None else text_from)
    return "\n".join(
        "  ".join(
            f"{cell:>{width}}" if i in numbers else f"{cell:{width}}"
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )
