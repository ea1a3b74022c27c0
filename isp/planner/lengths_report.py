"""Reports of `isp plan` as text or JSON: memory of a layout, longest sequence, options."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from isp.planner.case import PlanCase
from isp.planner.counts import scans
from isp.planner.experts import expert_traffic
from isp.planner.fabric import Fabric
from isp.planner.lengths import Budget, Growth, LadderStep, Longest, Planned, changes
from isp.planner.memory import Memory
from isp.planner.report import largest, model_of
from isp.profile.table import aligned
from isp.utils.text import counted

__all__ = ["MemoryPlan", "lengths_as_json", "lengths_as_text"]

GIB, KIB = 2**30, 2**10


class MemoryPlan(NamedTuple):
    """Results of `isp plan` for one configuration."""

    planned: Planned
    exchange: str
    """How context ranks exchange keys and values, with the reason; empty without context ranks."""
    fabric: Fabric
    budget: Budget
    memory: Memory
    """Memory of the configuration as it is."""
    growth: Growth
    longest: Longest | None
    """The longest sequence; None if it was not searched for."""
    steps: Sequence[LadderStep]
    """Steps of the ladder; empty if it was not searched for."""

    @property
    def fits(self) -> bool:
        """Return True if the configuration fits, or any length if the longest was searched for."""
        if self.longest is not None:
            return self.longest.seq_len > 0
        return self.budget.fits(self.memory)


def lengths_as_text(plan: MemoryPlan) -> str:
    """Return the report as text."""
    parts = [_head(plan), _owners(plan.growth), _verdict(plan)]
    if plan.longest is not None:
        parts += [_end(plan, plan.longest), _ladder(plan), _advice(plan, plan.longest)]
    return "\n\n".join(part for part in parts if part)


def lengths_as_json(plan: MemoryPlan) -> str:
    """Return the report as a JSON object, in bytes and tokens."""
    plain: dict[str, Any] = {
        "world": plan.planned.world_size,
        "fabric": plan.fabric.name,
        "device_bytes": plan.budget.device,
        "host_bytes": plan.budget.host,
        "seq_len": plan.planned.config.data.seq_len,
        "memory": _plain(plan.memory),
        "growth": _plain_growth(plan.growth),
        "experts": (experts := expert_traffic(_case(plan))) and experts.plain(),
    }
    if plan.longest is not None:
        plain["longest"] = _plain_longest(plan.longest)
        plain["ladder"] = [
            {
                "option": step.option,
                "keys": dict(step.keys),
                "taken": step.taken,
                "overrides": changes(plan.planned.config, step.keys),
                "growth": _plain_growth(step.growth),
                "longest": _plain_longest(step.longest),
            }
            for step in plan.steps
        ]
    return json.dumps(plain, indent=1)


def _plain(memory: Memory | str) -> dict[str, Any] | str:
    """Return memory as JSON values, or the reason why there is none."""
    if isinstance(memory, str):
        return memory
    return {"bytes": memory.by_owner(), "host": memory.host, "moment": memory.moment}


def _plain_growth(growth: Growth) -> dict[str, Any]:
    """Return the growth as JSON values, in bytes."""
    return {
        "seq_len": growth.seq_len,
        "moment": growth.memory.moment,
        "fixed_bytes": {name: round(size) for name, size in _sizes(growth.fixed).items()},
        "bytes_per_token": _sizes(growth.per_token),
    }


def _plain_longest(longest: Longest) -> dict[str, Any]:
    """Return the longest sequence as JSON values."""
    fitting = {"memory": _plain(longest.memory)} if longest.seq_len else {}
    return {"seq_len": longest.seq_len, **fitting, "beyond": _plain(longest.beyond)}


def _sizes(memory: Memory) -> dict[str, int]:
    """Return the bytes by owner, those in host memory included."""
    return {**memory.by_owner(), "host": memory.host}


def _case(plan: MemoryPlan) -> PlanCase:
    """Return the case of the configuration as it is."""
    return plan.planned.case(plan.planned.config.data.seq_len)


# -- parts of the text -----------------------------------------------------------------------


def _head(plan: MemoryPlan) -> str:
    """Return model, layout and memory in lines of a title and a value."""
    budget, case = plan.budget, _case(plan)
    t = case.topology
    host = "" if budget.host is None else f", {_gib(budget.host)} GiB of its host's"
    lines = {
        "": f"{counted(t.world_size, 'rank')}  {plan.fabric.name}",
        "model": model_of(case),
        "layout": f"{t.mode}  tensor {t.tensor}  weight {t.weight}  pipeline {t.pipeline}"
        f"  zero1 {t.zero1}",
        "context": f"{t.context} ranks, {plan.exchange}" if plan.exchange else "",
        "scans": scans(case),
        "experts": str(expert_traffic(case) or "").replace("\n", f"\n{'':10}"),
        "memory": f"{_gib(budget.device)} GiB of a rank for tensors{host}",
    }
    return "\n".join(f"{head:<10}{line}" if head else line for head, line in lines.items() if line)


def _owners(growth: Growth) -> str:
    """Return the table of memory by owner, fixed and per token."""
    memory, fixed, per_token = growth.memory, _sizes(growth.fixed), _sizes(growth.per_token)
    rows = [
        (name, _gib(fixed[name]), f"{per_token[name] / KIB:,.1f}", _gib(size))
        for name, size in _sizes(memory).items()
        if size
    ]
    whole = "in all", *_line(growth), _gib(memory.total)
    rows.insert(len(rows) - (memory.host > 0), whole)
    head = "", "fixed GiB", "KiB a token", f"GiB at {growth.seq_len:,}"
    return (
        f"{aligned([head, *rows])}\nat {memory.moment}, of the rank that takes most; tokens are"
        f" those that a rank holds, {growth.tokens:,} here"
    )


def _line(growth: Growth) -> tuple[str, str]:
    """Return two cells of the table: GiB that any length takes, and KiB that each token adds."""
    return _gib(growth.fixed.total), f"{growth.per_token.total / KIB:,.1f}"


def _verdict(plan: MemoryPlan) -> str:
    """Return whether the configuration fits as it is, and if not, why."""
    seq_len = plan.planned.config.data.seq_len
    if plan.budget.fits(plan.memory):
        return f"data.seq_len={seq_len} fits as it is"
    return f"data.seq_len={seq_len} does not fit: {_too_much(plan.memory, plan)}"


def _end(plan: MemoryPlan, longest: Longest) -> str:
    """Return the longest sequence of the configuration as it is, and why none is longer."""
    beyond = longest.beyond
    why = beyond if isinstance(beyond, str) else _too_much(beyond, plan)
    if not longest.seq_len:
        return f"no sequence of {longest.next_len:,} tokens fits: {why}"
    return f"longest data.seq_len: {longest.seq_len:,}\n  {longest.next_len:,} do not fit: {why}"


def _too_much(memory: Memory, plan: MemoryPlan) -> str:
    """Return why `memory` does not fit: the largest owners, or the bytes in host memory."""
    if plan.budget.on_host(memory):
        copies = ", with the copies that checkpoint.async_mode=disabled does without"
        found = copies if plan.planned.config.checkpoint.copies_state else ""
        return f"{_gib(memory.host)} GiB in the memory of the host{found}"
    return largest(memory)


def _ladder(plan: MemoryPlan) -> str:
    """Return the table of the ladder, a row for each step."""
    head = ("with", "fixed GiB", "KiB a token", "longest sequence", "GiB", "host GiB", "ends with")
    rows = [head]
    for step in plan.steps:
        length, there = step.longest.seq_len, step.longest.memory
        rows.append(
            (
                step.option if step.taken else f"{step.option} (does not help)",
                *_line(step.growth),
                f"{length:,}" if length else "none",
                _gib(there.total) if length else f"({_gib(there.total)})",
                _gib(there.host),
                _reason(step.longest.beyond, plan.budget),
            )
        )
    table = aligned(rows, text_from=len(head) - 1)
    return f"the ladder, cumulative: each option includes those above it that help\n{table}"


def _reason(beyond: Memory | str, budget: Budget) -> str:
    """Return why the next length does not fit, for a cell of the table."""
    if isinstance(beyond, str):
        return "a length that is refused"
    if budget.on_host(beyond):
        return "host"
    owner, _ = max(beyond.by_owner().items(), key=lambda item: item[1])
    return f"{owner}, at {beyond.moment}"


def _advice(plan: MemoryPlan, longest: Longest) -> str:
    """Return the overrides with which the configuration fits, and those of the longest length."""
    config, seq_len = plan.planned.config, plan.planned.config.data.seq_len
    fits, lines, enough = plan.budget.fits(plan.memory), [], None
    if not fits:
        enough = next((s for s in plan.steps if s.longest.seq_len >= seq_len), None)
    if enough is not None:
        words = " ".join(changes(config, enough.keys))
        lines.append(f"data.seq_len={seq_len} fits with `{enough.option}`: {words}")
    best = max(plan.steps, key=lambda s: s.longest.seq_len, default=None)
    if best is not None and best is not enough and best.longest.seq_len > longest.seq_len:
        words = " ".join(changes(config, best.keys))
        lines.append(f"the longest: --data.seq_len {best.longest.seq_len} {words}")
    if not fits and enough is None:
        lines.append(
            f"data.seq_len={seq_len} fits with none of them: use more ranks (--world), over which"
            f" parallel.tensor.size shares a sequence and parallel.weight.size the weights"
        )
    return "\n".join(lines)


def _gib(num_bytes: float) -> str:
    """Return GiB with two decimals, or four for small sizes; zero has no sign."""
    size = num_bytes / GIB
    digits = 4 if 0.00005 <= abs(size) < 0.1 else 2
    return f"{round(size, digits) + 0.0:,.{digits}f}"
