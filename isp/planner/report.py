"""Reports of a search over layouts, as text or JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from itertools import compress
from operator import attrgetter
from typing import Any

from isp.core.mesh import Mode
from isp.planner.case import PlanCase
from isp.planner.counts import scans, traffic
from isp.planner.experts import expert_traffic
from isp.planner.memory import Memory
from isp.planner.rank import DryRank, Heard
from isp.planner.search import Candidate, Found
from isp.profile.table import aligned

__all__ = [
    "as_json",
    "as_text",
    "largest",
    "model_of",
    "remedy_of",
    "size_of",
    "table_of",
    "time_of",
]

GIB = 2**30


def size_of(num_bytes: int) -> str:
    """Return a size in GiB or MiB."""
    if num_bytes >= GIB:
        return f"{num_bytes / GIB:,.1f} GiB"
    return f"{num_bytes / 2**20:,.1f} MiB"


def time_of(seconds: float) -> str:
    """Return a duration in seconds or milliseconds."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


def model_of(case: PlanCase) -> str:
    """Return the model's name, its number of parameters and their dtype."""
    name = case.model.hf or case.model.preset
    count = case.language_model.num_parameters
    return f"{f'{name}, ' if name else ''}{count:,} parameters, {case.dtype}"


def largest(memory: Memory) -> str:
    """Return a line with the bytes of `memory`, their moment in the step, and the largest owners.

    An owner is what the memory is for, such as weights or activations; three are named.
    """
    owners = sorted(memory.by_owner().items(), key=lambda item: -item[1])[:3]
    most = ", ".join(f"{name} {size_of(size)}" for name, size in owners)
    host = f", and {size_of(memory.host)} of the host" if memory.host else ""
    return f"{size_of(memory.total)} at {memory.moment}: {most}{host}"


def as_text(found: Found, top: int) -> str:
    """Return the ranking, what does not fit, and details of the fastest layout."""
    parts, shown = [_head(found)], _shown(found, top)
    if shown:
        marks = ["*" if _is_own(c, found) else "" for c in shown]
        table = table_of(shown, marks, found.world_size)
        parts.append(aligned(table, text_columns=2))
        parts.append(f"{len(shown)} of {found.num_fitting:,} layouts that fit\n{_legend(table)}")
    parts += [_verdict(found), _too_large(found), _refused(found)]
    parts.append(_details(shown[0]) if shown else remedy_of(found))
    return "\n\n".join(part for part in parts if part)


def as_json(found: Found, top: int) -> str:
    """Return the report as a JSON object, in bytes and seconds."""
    return json.dumps(
        {
            "world": found.world_size,
            "rows": found.rows,
            "fabric": found.fabric.name,
            "usable_bytes": found.fabric.device.usable_bytes,
            "configured": {"refused": found.own}
            if isinstance(found.own, str)
            else _plain(found.own),
            "num_fitting": found.num_fitting,
            "layouts": [_plain(candidate) for candidate in found.fitting[:top]],
            "too_large": [_plain(candidate) for candidate in found.too_large],
            "refused": list(found.refused),
        },
        indent=1,
    )


def _plain(candidate: Candidate) -> dict[str, Any]:
    """Return a layout as JSON values."""
    case, config, memory = candidate.case, candidate.config, candidate.memory
    sizes = "tensor", "head", "context", "head_first", "weight", "expert", "pipeline", "zero1"
    prediction = candidate.prediction
    return {
        "mode": case.mode.value,
        **{size: getattr(case.topology, size) for size in (*sizes, "data")},
        "reshard_after_forward": not case.keeps_gathered,
        "micro_bsz": config.data.micro_bsz,
        "micro_num": config.data.num_micro_batches,
        "checkpoint": config.model.checkpoint,
        "checkpoint_keeps_attention": config.model.checkpoint_keeps_attention,
        "memory_bytes": memory.by_owner(),
        "memory_moment": memory.moment,
        "host_bytes": memory.host,
        "seconds": None if prediction is None else asdict(prediction),
        "transfers": [
            {"kind": kind, "channel": channel, **count._asdict()}
            for (kind, channel), count in sorted(traffic(case, 0).by_channel.items())
        ],
        "scans": scans(case),
        "experts": (experts := expert_traffic(case)) and experts.plain(),
        "overrides": candidate.overrides,
    }


# -- parts of the text -----------------------------------------------------------------------


def _head(found: Found) -> str:
    """Return ranks, fabric, model, batch and memory."""
    lines = [f"{found.world_size} ranks  {found.fabric.title}"]
    own = () if isinstance(found.own, str) else (found.own,)
    for some in (*own, *found.fitting, *found.too_large)[:1]:
        length = some.config.data.seq_len
        step = f"{found.rows:,} sequences of {length:,} tokens, {found.rows * length:,} tokens"
        lines += [f"model     {model_of(some.case)}", f"step      {step}"]
    room = found.fabric.device.usable_bytes / GIB
    return "\n".join([*lines, f"memory    {room:.1f} GiB of a rank for tensors"])


def _shown(found: Found, top: int) -> list[Candidate]:
    """Return the fastest layouts, the fastest of each mode, and the configuration's own if it fits.

    At most two layouts are shown of those that differ only in weight and zero1 size.
    """
    shown: list[Candidate] = []
    of_kind: Counter[tuple[object, ...]] = Counter()
    for candidate in found.fitting:
        t, data = candidate.case.topology, candidate.config.data
        sizes = t.tensor, t.context, t.head_first, t.expert > 1, t.pipeline, data.micro_bsz
        kind = t.mode, sizes, candidate.case.keeps_gathered
        of_kind[kind] += 1
        if of_kind[kind] <= 2 and len(shown) < top:
            shown.append(candidate)
    for mode in Mode:
        of_mode = [c for c in found.fitting if c.case.mode is mode]
        shown += [c for c in of_mode[:1] if c not in shown]
    if shown and isinstance(found.own, Candidate) and found.fits(found.own):
        shown += [] if any(_is_own(c, found) for c in shown) else [found.own]
    return sorted(shown, key=attrgetter("seconds"))


def _is_own(candidate: Candidate, found: Found) -> bool:
    """Return True if `candidate` is the configuration as it is."""
    return isinstance(found.own, Candidate) and found.own.overrides == candidate.overrides


def _verdict(found: Found) -> str:
    """Return the verdict on the configuration; if it does not fit, the fewest keys to change."""
    own = found.own
    if isinstance(own, str):
        return f"the configuration as it is: {own}"
    if found.fits(own):
        return "the configuration as it is is marked *"
    changes = ([word for word in c.overrides if word not in own.overrides] for c in found.fitting)
    fewest = min(changes, key=len, default=None)
    remedy = "" if fewest is None else f"\n  it fits with {' '.join(fewest)}"
    return f"the configuration as it is does not fit: {largest(own.memory)}{remedy}"


def remedy_of(found: Found) -> str:
    """Return advice for a search in which nothing fits, by the layout with the least memory."""
    if not found.too_large:
        return "nothing fits: there is no layout at all"
    least = min(found.too_large, key=lambda candidate: candidate.memory.total)
    room, tokens = found.fabric.device.usable_bytes, least.config.data.seq_len
    states, total = least.memory.states, least.memory.total
    if states >= room:
        return (
            f"nothing fits: weights, gradients and optimizer alone take {size_of(states)} of a"
            f" rank: use {-(-states * found.world_size // room)} ranks or more"
        )
    # Leave 1% in reserve: buffers and the largest weight gradient do not shrink with the tokens.
    fitting = int(0.99 * tokens * (room - states) / (total - states))
    return (
        f"nothing fits: a sequence takes {size_of(total - states)} of a rank, in addition to"
        f" {size_of(states)} of weights, gradients and optimizer: use --data.seq_len of about"
        f" {fitting // 1024 * 1024 or fitting} or less, or more ranks and a larger"
        f" parallel.tensor.size"
    )


_COLUMNS = (
    *("", "mode", "tensor", "weight", "pipeline", "zero1", "data", "micro", "recompute"),
    *("experts", "memory", "step", "exposed", "bubble", "tgs", "tflops"),
)
_LEGEND = """\
kept: weights, which are gathered once a step; recompute: of the blocks;
micro: sequences of a micro-batch x micro-batches of a step;
exposed, bubble: shares of the step in which transfers, or other stages, are waited for;
tgs, tflops: tokens and model TFLOP/s of a rank a second"""


_OF_EXPERTS = """
experts: gather, or tokens travel between so many ranks x those that gather the same ones;
!: the other way would send less"""


def _legend(table: Sequence[Sequence[str]]) -> str:
    """Return the meaning of the columns of a table."""
    return _LEGEND + _OF_EXPERTS * ("experts" in table[0])


def table_of(
    shown: Sequence[Candidate], marks: Iterable[str], world_size: int
) -> list[tuple[str, ...]]:
    """Return `_COLUMNS` and a row for each layout, without columns that are empty in all rows."""
    rows = [_row_of(c, mark, world_size) for c, mark in zip(shown, marks, strict=True)]
    _, *columns = zip(*rows, strict=True)
    there = [True, *map(any, columns)]
    return [tuple(compress(row, there)) for row in (_COLUMNS, *rows)]


def _row_of(candidate: Candidate, mark: str, world_size: int) -> tuple[str, ...]:
    """Return a row of `_COLUMNS`; a tensor group with context ranks is shown as heads x context."""
    t, prediction, config = candidate.case.topology, candidate.prediction, candidate.config
    assert prediction is not None
    tensor, weight, recompute = str(t.tensor), "-", "none"
    if t.context > 1:
        tensor = f"{t.head} x {t.context}{'' if t.head_first else ', context first'}"
    if t.mode.gathers_weights:
        weight = f"{t.weight}{', kept' if candidate.case.keeps_gathered else ''}"
    if fraction := config.model.checkpoint:
        recompute = "all" if fraction == 1 else f"{fraction:.0%}"
        recompute += " but attn" if config.model.checkpoint_keeps_attention else ""
    return (
        *(mark, t.mode.value, tensor, weight, str(t.pipeline), str(t.zero1), str(t.data)),
        f"{config.data.micro_bsz} x {config.data.num_micro_batches}",
        recompute,
        "" if (experts := expert_traffic(candidate.case)) is None else experts.way,
        size_of(candidate.memory.total),
        time_of(prediction.step),
        f"{prediction.exposed / prediction.step:.0%}",
        f"{prediction.bubble / prediction.step:.0%}" if t.pipeline > 1 else "-",
        f"{prediction.tgs(world_size):,.0f}",
        f"{prediction.tflops:.0f}" if prediction.tflops >= 10 else f"{prediction.tflops:.3f}",
    )


def _too_large(found: Found) -> str:
    """Return the smallest layout of each group that does not fit, with its memory."""
    if not found.too_large:
        return ""
    room = found.fabric.device.usable_bytes / GIB
    lines = [f"does not fit in {room:.1f} GiB, with all recomputed and the best sizes otherwise:"]
    for candidate in found.too_large:
        sizes = f"{candidate.case.mode} tensor {candidate.case.topology.tensor}"
        lines.append(f"  {sizes:<14} {largest(candidate.memory)}")
    return "\n".join(lines)


def _refused(found: Found) -> str:
    """Return why layouts were refused: each reason about the model once, and one line on the batch.

    A batch that cannot be divided is refused with another text for each size. All these are one
    line here, which names the modes that are left without any layout.
    """
    about_batch = (" sequences a step cannot ", " needs as many micro-batches ")
    about_model = [r for r in found.refused if not any(part in r for part in about_batch)]
    reasons: dict[str, str] = {}
    seen = {c.case.mode for c in (*found.fitting, *found.too_large)}
    own = "a model's own layers", "splits the features of"
    of_folder = any(part in reason for reason in about_model for part in own)
    if not of_folder and (absent := [mode.value for mode in Mode if mode not in seen]):
        reasons[""] = (
            f"{', '.join(absent)}: no sizes share the sequences of a step evenly over data ranks:"
            f" use more sequences (--batch)"
        )
    # Reasons that differ only in numbers and modes are shown once.
    for reason in about_model:
        before_mode = reason.split(":")[0].split(" in ")[0]
        reasons.setdefault("".join(c for c in before_mode if not c.isdigit()), reason)
    return "\n  ".join(["no layouts:", *reasons.values()]) if reasons else ""


def newton_schulz_of(case: PlanCase) -> str:
    """Return the FLOPs of Newton-Schulz on rank 0 in words; "" without muon."""
    if "muon" not in case.optimizer.rules:
        return ""
    buckets = DryRank(case, case.place(0), Heard()).optimizer.matrices.buckets
    own, whole = (sum(f(b) for b in buckets) for f in (lambda b: b.flops, lambda b: b.all_flops))
    return (
        f"Newton-Schulz takes rank 0 {own / 1e9:,.1f} GFLOP an update; all matrices of its"
        f" stage, which every rank would multiply without homes, {whole / 1e9:,.1f}"
    )


def _details(best: Candidate) -> str:
    """Return keys, memory and transfers of the layout in the first row."""
    memory, split, experts = best.memory, scans(best.case), expert_traffic(best.case)
    matrices = newton_schulz_of(best.case)
    sizes = [(f"  {name}", size_of(size)) for name, size in memory.by_owner().items() if size]
    table = aligned([*sizes, ("  in all", size_of(memory.total))])
    lines = ["the first one", *(f"  {words}" for words in best.overrides), ""]
    lines += ["its memory, of the rank that takes most", f"{table}  at {memory.moment}"]
    lines += [f"  and in the host's memory {size_of(memory.host)}"] if memory.host else []
    lines += ["", f"its scans: {split}"] if split else []
    lines += ["", f"its experts: {experts}"] if experts else []
    lines += ["", f"its matrices: {matrices}"] if matrices else []
    sent = traffic(best.case, 0).by_purpose.items()
    rows = [(f"  {of}", f"{count.calls:,}", size_of(count.sent_bytes)) for of, count in sent]
    lines += ["", "its transfers of a step, rank 0", aligned([("  of", "calls", "sent"), *rows])]
    return "\n".join(lines)
