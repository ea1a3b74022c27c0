"""What `isp plan` says of a layout's memory, its longest row and the ladder: text, or JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from isp.planner.counts import scans
from isp.planner.fabric import Fabric
from isp.planner.generation import GenerationPlan
from isp.planner.ladder import LadderStep, changes
from isp.planner.lengths import HOST, Budget, Growth, Longest, Planned
from isp.planner.memory import Memory
from isp.profile.table import aligned

__all__ = ["Said", "lengths_as_json", "lengths_as_text"]

GIB, KIB = 2**30, 2**10


class Said(NamedTuple):
    """What was found of a configuration."""

    planned: Planned
    exchange: str
    """How keys and values reach context ranks, and why so; empty without any."""
    fabric: Fabric
    budget: Budget
    memory: Memory
    """Of the configuration as it is."""
    growth: Growth
    longest: Longest | Memory | None
    """None if it was not asked for."""
    steps: Sequence[LadderStep]
    generation: GenerationPlan

    @property
    def fits(self) -> bool:
        """Whether there is a row that fits: the configuration's, or any, if it was asked for."""
        if self.longest is not None:
            return isinstance(self.longest, Longest)
        return self.budget.excess(self.memory) <= 0


def lengths_as_text(said: Said) -> str:
    parts = [_head(said), _owners(said), _verdict(said), _generation(said)]
    if said.longest is not None:
        parts += [_end(said), _ladder(said), _advice(said)]
    return "\n\n".join(part for part in parts if part)


def lengths_as_json(said: Said) -> str:
    """The same as one JSON object; bytes and tokens."""
    plain: dict[str, Any] = {
        "world": said.planned.world_size,
        "fabric": said.fabric.name,
        "device_bytes": said.budget.device,
        "host_bytes": said.budget.host,
        "seq_len": said.planned.config.data.seq_len,
        "memory": _plain(said.memory),
        "growth": _plain_growth(said.growth),
        "generation": said.generation._asdict(),
    }
    if said.longest is not None:
        plain["longest"] = _plain_longest(said.longest)
        plain["ladder"] = [
            {
                "rung": step.rung.name,
                "keys": dict(step.keys),
                "taken": step.taken,
                "overrides": changes(said.planned.config, step.keys),
                "growth": _plain_growth(step.growth),
                "longest": _plain_longest(step.longest),
            }
            for step in said.steps
        ]
    return json.dumps(plain, indent=1)


def _plain(memory: Memory) -> dict[str, Any]:
    return {"bytes": memory.by_owner(), HOST: memory.host, "moment": memory.moment}


def _plain_growth(growth: Growth) -> dict[str, Any]:
    return {
        "seq_len": growth.seq_len,
        "moment": growth.memory.moment,
        "fixed_bytes": {name: round(size) for name, size in growth.fixed.items()},
        "bytes_per_token": growth.per_token,
    }


def _plain_longest(longest: Longest | Memory) -> dict[str, Any]:
    if isinstance(longest, Memory):
        return {"seq_len": 0, "beyond": _plain(longest)}
    beyond = longest.beyond
    return {
        "seq_len": longest.seq_len,
        "memory": _plain(longest.memory),
        "beyond": beyond if isinstance(beyond, str) else _plain(beyond),
    }


# -- pieces of the text ----------------------------------------------------------------------


def _head(said: Said) -> str:
    config, budget = said.planned.config, said.budget
    case = said.planned.case(config.data.seq_len)
    topology, model = case.topology, config.model
    name = f"{model.hf or model.preset}, " if model.hf or model.preset else ""
    host = "" if budget.host is None else f", {_gib(budget.host)} GiB of its host's"
    ranks = "1 rank" if topology.world_size == 1 else f"{topology.world_size} ranks"
    return "\n".join(
        [
            f"{ranks}  {said.fabric.name}",
            f"model     {name}{case.language_model.num_parameters:,} parameters,"
            f" {config.training.dtype}",
            f"layout    {topology.mode}  tensor {topology.tensor}  weight {topology.weight}"
            f"  pipeline {topology.pipeline}  zero1 {topology.zero1}",
            *([f"context   {topology.context} ranks, {said.exchange}"] if said.exchange else []),
            *([f"scans     {split}"] if (split := scans(case)) else []),
            f"memory    {_gib(budget.device)} GiB of a rank for tensors{host}",
        ]
    )


def _owners(said: Said) -> str:
    growth, memory = said.growth, said.growth.memory
    sizes = {**memory.by_owner(), HOST: memory.host}
    shown = [name for name, size in sizes.items() if size and name != HOST]
    rows = [("", "fixed GiB", "KiB a token", f"GiB at {growth.seq_len:,}")]
    rows += [_line(name, growth.fixed[name], growth.per_token[name], sizes[name]) for name in shown]
    rows.append(_line("in all", growth.device_fixed, growth.device_per_token, memory.total))
    if sizes[HOST]:
        rows.append(_line(HOST, growth.fixed[HOST], growth.per_token[HOST], sizes[HOST]))
    return (
        f"{aligned(rows)}\nat {memory.moment}, of the rank that takes most; tokens are those that"
        f" a rank holds, {growth.tokens:,} here"
    )


def _line(name: str, fixed: float, per_token: float, size: int) -> tuple[str, str, str, str]:
    return name, _gib(fixed), f"{per_token / KIB:,.1f}", _gib(size)


def _verdict(said: Said) -> str:
    seq_len, excess = said.planned.config.data.seq_len, said.budget.excess(said.memory)
    if excess <= 0:
        return f"data.seq_len={seq_len} fits as it is"
    return f"data.seq_len={seq_len} does not fit: {_too_much(said.memory, said)}"


def _generation(said: Said) -> str:
    found, length = said.generation, said.planned.config.data.seq_len
    ranks = "1 rank" if found.ranks == 1 else f"{found.ranks} ranks in {found.mode}"
    buffers = f" and {_gib(found.buffers)} GiB to read a prompt" if found.buffers else ""
    return (
        f"generation by {ranks}: the cache of {length:,} tokens takes {_gib(found.cache)} GiB"
        f" of a rank,\nbeside {_gib(found.weights)} GiB of weights{buffers}, and the next token at"
        f" least {found.seconds * 1e3:.3g} ms,\nin which cache and weights are read"
    )


def _end(said: Said) -> str:
    longest = said.longest
    assert longest is not None
    if isinstance(longest, Memory):
        return f"no row of {said.planned.unit:,} tokens fits: {_too_much(longest, said)}"
    beyond = longest.beyond
    why = beyond if isinstance(beyond, str) else _too_much(beyond, said)
    return f"longest data.seq_len: {longest.seq_len:,}\n  {longest.next_len:,} do not fit: {why}"


def _too_much(memory: Memory, said: Said) -> str:
    if said.budget.on_host(memory):
        copies = ", with the copies that checkpoint.async_mode=disabled does without"
        found = copies if said.planned.config.checkpoint.copies_state else ""
        return f"{_gib(memory.host)} GiB in the memory of the host{found}"
    owners = sorted(memory.by_owner().items(), key=lambda item: -item[1])[:3]
    most = ", ".join(f"{name} {_gib(size)}" for name, size in owners)
    return f"{_gib(memory.total)} GiB at {memory.moment}: {most}"


def _ladder(said: Said) -> str:
    head = ("with", "fixed GiB", "KiB a token", "longest row", "GiB", "host GiB", "ends with")
    rows = [head, *(_rung(step, said.budget) for step in said.steps)]
    table = aligned(rows, text_from=len(head) - 1)
    return f"the ladder, each rung with all above it that are of use\n{table}"


def _rung(step: LadderStep, budget: Budget) -> tuple[str, str, str, str, str, str, str]:
    growth, longest = step.growth, step.longest
    fits = isinstance(longest, Longest)
    there = longest.memory if isinstance(longest, Longest) else longest
    beyond = longest.beyond if isinstance(longest, Longest) else longest
    return (
        step.rung.name if step.taken else f"{step.rung.name} (no use)",
        _gib(growth.device_fixed),
        f"{growth.device_per_token / KIB:,.1f}",
        f"{longest.seq_len:,}" if isinstance(longest, Longest) else "none",
        _gib(there.total) if fits else f"({_gib(there.total)})",
        _gib(there.host),
        _reason(beyond, budget),
    )


def _reason(beyond: Memory | str, budget: Budget) -> str:
    if isinstance(beyond, str):
        return "a length that is refused"
    if budget.on_host(beyond):
        return HOST
    owner, _ = max(beyond.by_owner().items(), key=lambda item: item[1])
    return f"{owner}, at {beyond.moment}"


def _advice(said: Said) -> str:
    """The keys with which the configuration's rows fit, if it needs any, and of the longest."""
    config, wanted = said.planned.config, said.planned.config.data.seq_len
    found = [s for s in said.steps if isinstance(s.longest, Longest)]
    fits = said.budget.excess(said.memory) <= 0
    enough = None if fits else next((s for s in found if _length(s) >= wanted), None)
    lines = []
    if enough is not None:
        words = " ".join(changes(config, enough.keys))
        lines.append(f"data.seq_len={wanted} fits with `{enough.rung.name}`: {words}")
    if found:
        best = max(found, key=_length)
        own = said.longest.seq_len if isinstance(said.longest, Longest) else 0
        if best is not enough and _length(best) > own:
            words = " ".join(changes(config, best.keys))
            lines.append(f"the longest: --data.seq_len {_length(best)} {words}")
    if not fits and enough is None:
        lines.append(
            f"data.seq_len={wanted} fits with none of them: use more ranks (--world), over which"
            f" parallel.tensor.size shares a row and parallel.weight.size the weights"
        )
    return "\n".join(lines)


def _length(step: LadderStep) -> int:
    return step.longest.seq_len if isinstance(step.longest, Longest) else 0


def _gib(num_bytes: float) -> str:
    """Two decimals, of little four; 0 has no sign."""
    size = num_bytes / GIB
    digits = 4 if 0.00005 <= abs(size) < 0.1 else 2
    return f"{round(size, digits) + 0.0:,.{digits}f}"
