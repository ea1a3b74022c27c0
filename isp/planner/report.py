"""Reports of a search, as text for people and as JSON for machines."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from operator import attrgetter
from typing import Any

from isp.parallel import Mode, Topology
from isp.planner.counts import scans, traffic
from isp.planner.fabric import Fabric
from isp.planner.lengths import Budget
from isp.planner.memory import Memory
from isp.planner.search import Candidate, Found
from isp.profile.table import aligned

__all__ = [
    "COLUMNS",
    "LEGEND",
    "as_json",
    "as_text",
    "details_of",
    "row_of",
    "shown_of",
    "size_of",
    "time_of",
    "verdict_of",
]

GIB = 2**30


def size_of(num_bytes: int) -> str:
    """For people."""
    if num_bytes >= GIB:
        return f"{num_bytes / GIB:,.1f} GiB"
    return f"{num_bytes / 2**20:,.1f} MiB"


def as_text(
    found: Found, own: Candidate | str, fabric: Fabric, *, world_size: int, rows: int, top: int
) -> str:
    """The ranking, what does not fit, and the fastest layout in detail.

    `own` is the configuration as it is, or why that is no layout.
    """
    parts = [_head(found, own, fabric, world_size, rows)]
    shown = shown_of(found, own, fabric, top)
    if found.fitting:
        parts.append(_table(shown, own, world_size))
        parts.append(_legend(found, len(shown)))
    parts.append(verdict_of(own, found, fabric))
    parts += [part for part in (_too_large(found, fabric), _refused(found)) if part]
    if found.fitting:
        parts.append(details_of(shown[0]))
    else:
        parts.append(_remedy(found, fabric))
    return "\n\n".join(parts)


def as_json(
    found: Found, own: Candidate | str, fabric: Fabric, *, world_size: int, rows: int, top: int
) -> str:
    """The same as one JSON object; bytes and seconds."""
    return json.dumps(
        {
            "world": world_size,
            "rows": rows,
            "fabric": fabric.name,
            "usable_bytes": fabric.device.usable_bytes,
            "configured": {"refused": own} if isinstance(own, str) else _plain(own),
            "num_fitting": found.num_fitting,
            "layouts": [_plain(candidate) for candidate in found.fitting[:top]],
            "too_large": [_plain(candidate) for candidate in found.too_large],
            "refused": list(found.refused),
        },
        indent=1,
    )


def _plain(candidate: Candidate) -> dict[str, Any]:
    topology, prediction = candidate.case.topology, candidate.prediction
    transfers = traffic(candidate.case, 0)
    return {
        "mode": topology.mode.value,
        "tensor": topology.tensor,
        "head": topology.head,
        "context": topology.context,
        "head_first": topology.head_first,
        "weight": topology.weight,
        "reshard_after_forward": not candidate.case.stays,
        "pipeline": topology.pipeline,
        "zero1": topology.zero1,
        "data": topology.data,
        "micro_bsz": candidate.config.data.micro_bsz,
        "micro_num": candidate.config.data.num_micro_batches,
        "checkpoint": candidate.config.model.checkpoint,
        "checkpoint_keeps_attention": candidate.config.model.checkpoint_keeps_attention,
        "memory_bytes": candidate.memory.by_owner(),
        "memory_moment": candidate.memory.moment,
        "host_bytes": candidate.memory.host,
        "seconds": None if prediction is None else asdict(prediction),
        "transfers": [
            {"kind": kind, "channel": channel, "calls": count.calls, "sent_bytes": count.sent_bytes}
            for (kind, channel), count in sorted(transfers.by_channel.items())
        ],
        "scans": scans(candidate.case),
        "overrides": candidate.overrides,
    }


# -- pieces of the text ----------------------------------------------------------------------


def _head(found: Found, own: Candidate | str, fabric: Fabric, world_size: int, rows: int) -> str:
    some = (
        own if isinstance(own, Candidate) else next(iter((*found.fitting, *found.too_large)), None)
    )
    lines = [f"{world_size} ranks  {fabric.title}"]
    if some is not None:
        config = some.config
        model = config.model
        name = f"{model.hf or model.preset}, " if model.hf or model.preset else ""
        parameters = some.case.language_model.num_parameters
        tokens = rows * config.data.seq_len
        lines += [
            f"model     {name}{parameters:,} parameters, {config.training.dtype}",
            f"step      {rows:,} sequences of {config.data.seq_len:,} tokens, {tokens:,} tokens",
        ]
    lines.append(f"memory    {fabric.device.usable_bytes / GIB:.1f} GiB of a rank for tensors")
    return "\n".join(lines)


def shown_of(found: Found, own: Candidate | str, fabric: Fabric, top: int) -> list[Candidate]:
    """The fastest, the fastest of each mode, and the configuration's own if it fits."""
    shown: list[Candidate] = []
    of_kind: Counter[tuple[object, ...]] = Counter()
    for candidate in found.fitting:  # no more than two that differ in weight and zero1 alone
        of_kind[candidate.kind] += 1
        if of_kind[candidate.kind] <= 2 and len(shown) < top:
            shown.append(candidate)
    for mode in Mode:
        of_mode = [c for c in found.fitting if c.case.mode is mode]
        shown += [c for c in of_mode[:1] if c not in shown]
    if isinstance(own, Candidate) and _fits(own, fabric) and own.key not in {c.key for c in shown}:
        shown.append(own)
    return sorted(shown, key=attrgetter("seconds"))


def _fits(candidate: Candidate, fabric: Fabric) -> bool:
    return Budget.of(fabric, candidate.case.topology.world_size).excess(candidate.memory) <= 0


def verdict_of(own: Candidate | str, found: Found, fabric: Fabric) -> str:
    """The verdict on the configuration given."""
    if isinstance(own, str):
        return f"the configuration as it is: {own}"
    if not _fits(own, fabric):
        return f"the configuration as it is does not fit: {_largest(own)}{_nearest(own, found)}"
    return "the configuration as it is is marked *"


def _nearest(own: Candidate, found: Found) -> str:
    """Of the layouts that fit, what changes fewest keys of `own`; the fastest of these."""
    changes = sorted(
        ([word for word in c.overrides if word not in own.overrides] for c in found.fitting),
        key=len,
    )
    return f"\n  it fits with {' '.join(changes[0])}" if changes else ""


def _remedy(found: Found, fabric: Fabric) -> str:
    """The remedy where nothing fits, by the layout that takes least."""
    if not found.too_large:
        return "nothing fits: there is no layout at all"
    least = min(found.too_large, key=lambda candidate: candidate.memory.total)
    room, memory, tokens = fabric.device.usable_bytes, least.memory, least.config.data.seq_len
    if memory.states >= room:
        ranks = -(-memory.states * least.case.topology.world_size // room)
        return (
            f"nothing fits: weights, gradients and optimizer alone take {size_of(memory.states)}"
            f" of a rank: use --world {ranks} or more"
        )
    # A hundredth less, as buffers and the largest gradient of a weight do not shrink with tokens.
    fitting = int(0.99 * tokens * (room - memory.states) / (memory.total - memory.states))
    return (
        f"nothing fits: a sequence takes {size_of(memory.total - memory.states)} of a rank, beside"
        f" {size_of(memory.states)} of weights, gradients and optimizer: use --data.seq_len of"
        f" about {fitting // 1024 * 1024 or fitting} or less, or more ranks (--world), over which"
        f" parallel.tensor.size shares it"
    )


def _largest(candidate: Candidate) -> str:
    """Its memory, and the owners that have most."""
    owners = sorted(candidate.memory.by_owner().items(), key=lambda item: -item[1])[:3]
    most = ", ".join(f"{name} {size_of(size)}" for name, size in owners)
    host = f", and {size_of(candidate.memory.host)} of the host" if candidate.memory.host else ""
    return f"{size_of(candidate.memory.total)} at {candidate.memory.moment}: {most}{host}"


COLUMNS = (
    *("", "mode", "tensor", "weight", "pipeline", "zero1", "data", "micro", "recompute"),
    *("memory", "step", "exposed", "bubble", "tgs", "tflops"),
)


def _table(shown: Sequence[Candidate], own: Candidate | str, world_size: int) -> str:
    mine = own.key if isinstance(own, Candidate) else None
    rows = [row_of(c, "*" if c.key == mine else "", world_size) for c in shown]
    return aligned([COLUMNS, *rows], text_columns=2)


def row_of(candidate: Candidate, mark: str, world_size: int) -> tuple[str, ...]:
    topology, prediction, config = candidate.case.topology, candidate.prediction, candidate.config
    assert prediction is not None
    return (
        mark,
        topology.mode.value,
        _tensor(topology),
        _weight(candidate),
        str(topology.pipeline),
        str(topology.zero1),
        str(topology.data),
        f"{config.data.micro_bsz} x {config.data.num_micro_batches}",
        _recompute(candidate),
        size_of(candidate.memory.total),
        time_of(prediction.step),
        f"{prediction.exposed / prediction.step:.0%}",
        f"{prediction.bubble / prediction.step:.0%}" if topology.pipeline > 1 else "-",
        f"{prediction.tgs(world_size):,.0f}",
        f"{prediction.tflops:.0f}" if prediction.tflops >= 10 else f"{prediction.tflops:.3f}",
    )


def _tensor(topology: Topology) -> str:
    """The tensor size, as heads x context if that is what it is."""
    if topology.context == 1:
        return str(topology.tensor)
    first = "" if topology.head_first else ", context first"
    return f"{topology.head} x {topology.context}{first}"


def _weight(candidate: Candidate) -> str:
    if not candidate.case.mode.facts.gathers_weights:
        return "-"
    return f"{candidate.case.topology.weight}{', stay' if candidate.case.stays else ''}"


def _recompute(candidate: Candidate) -> str:
    model = candidate.config.model
    if not model.checkpoint:
        return "none"
    part = "all" if model.checkpoint == 1 else f"{model.checkpoint:.0%}"
    return f"{part} but attn" if model.checkpoint_keeps_attention else part


def time_of(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


LEGEND = """\
stay: weights, which are gathered once a step; recompute: of the blocks;
micro: sequences of a micro-batch x micro-batches of a step;
exposed, bubble: shares of the step in which transfers, or other stages, are waited for;
tgs, tflops: tokens and model TFLOP/s of a rank a second"""


def _legend(found: Found, num_shown: int) -> str:
    shown = f"{num_shown} of {found.num_fitting:,} layouts that fit"
    return f"{shown}\n{LEGEND}"


def _too_large(found: Found, fabric: Fabric) -> str:
    if not found.too_large:
        return ""
    room = fabric.device.usable_bytes / GIB
    lines = [f"does not fit in {room:.1f} GiB, with all recomputed and the best sizes otherwise:"]
    for candidate in found.too_large:
        sizes = f"{candidate.case.mode} tensor {candidate.case.topology.tensor}"
        lines.append(f"  {sizes:<14} {_largest(candidate)}")
    return "\n".join(lines)


def _refused(found: Found) -> str:
    """Reasons about the model, each once; those about the batch are as many as there are sizes."""
    about_batch = (" sequences a step cannot ", " needs as many micro-batches ")
    about_model = [r for r in found.refused if not any(part in r for part in about_batch)]
    reasons: list[str] = []
    seen = {c.case.mode for c in (*found.fitting, *found.too_large)}
    own = "a model's own layers", "splits the features of"
    of_folder = any(part in reason for reason in about_model for part in own)
    if not of_folder and (absent := [mode.value for mode in Mode if mode not in seen]):
        reasons.append(
            f"{', '.join(absent)}: no sizes share the sequences of a step evenly over data ranks:"
            f" use more sequences (--batch)"
        )
    firsts: dict[str, str] = {}
    for reason in about_model:
        firsts.setdefault(_without_numbers(reason), reason)
    reasons += firsts.values()
    return "\n".join(["no layouts:", *(f"  {reason}" for reason in reasons)]) if reasons else ""


def _without_numbers(text: str) -> str:
    """The common part of reasons that differ in sizes and modes."""
    before_mode = text.split(":")[0].split(" in ")[0]
    return "".join(c for c in before_mode if not c.isdigit())


def details_of(best: Candidate) -> str:
    """Keys, memory and transfers of the layout of the table's first line."""
    lines = ["the first one", *(f"  {words}" for words in best.overrides), ""]
    lines += ["its memory, of the rank that takes most", _memory(best.memory), ""]
    if split := scans(best.case):
        lines += [f"its scans: {split}", ""]
    lines.append("its transfers of a step, rank 0")
    rows = [("  of", "calls", "sent")]
    for what, count in traffic(best.case, 0).by_purpose.items():
        rows.append((f"  {what}", f"{count.calls:,}", size_of(count.sent_bytes)))
    lines.append(aligned(rows))
    return "\n".join(lines)


def _memory(memory: Memory) -> str:
    rows = [(f"  {name}", size_of(size)) for name, size in memory.by_owner().items() if size]
    rows.append(("  in all", size_of(memory.total)))
    table = f"{aligned(rows)}  at {memory.moment}"
    return f"{table}\n  and in the host's memory {size_of(memory.host)}" if memory.host else table
