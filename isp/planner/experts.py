"""Weights of experts or their tokens: which of the two are less to send.

[Note: Crossing] Gathering sends all E experts of a layer twice, and their gradients once;
exchanging sends each token to its k experts and back, forward and backward. An expert of SwiGLU has
3 H I numbers, so with all in one dtype they send the same at

    3 * E * 3 H I = 4 * tokens * k * H,  tokens of a rank = 9 I (E / k) / 4

and with more tokens gathering sends less. Of p ranks, p - 1 parts of p are sent in both.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:  # the rule is plain arithmetic
    from isp.config import JobConfig
    from isp.planner.case import PlanCase

__all__ = [
    "ExpertLayer",
    "ExpertTraffic",
    "crossing_tokens",
    "expert_layers",
    "expert_traffic",
    "spread_instead",
    "with_spread_experts",
]

PASSES, TRIPS = 3, 4
"""Of weights: two gathers and a reduction; of tokens: there and back, forward and backward."""


class ExpertLayer(NamedTuple):
    """Sizes of a layer's experts."""

    num_experts: int
    used: int
    """Experts of a token."""
    width: int
    """Features of a token."""
    numbers: int
    """Of the weights of an expert."""

    def gathered(self, passes: float = PASSES) -> float:
        """Numbers that travel with the weights, in a micro-batch."""
        return passes * self.num_experts * self.numbers

    def exchanged(self, tokens: int, trips: float = TRIPS) -> float:
        """Numbers that travel with a rank's tokens."""
        return trips * tokens * self.used * self.width


def crossing_tokens(
    layers: Iterable[ExpertLayer], *, passes: float = PASSES, trips: float = TRIPS
) -> float:
    """Tokens of a rank from which on gathering sends less [Note: Crossing]."""
    layers = list(layers)
    gathered = sum(layer.gathered(passes) for layer in layers)
    return gathered / sum(layer.exchanged(1, trips) for layer in layers)


class ExpertTraffic(NamedTuple):
    """What a rank would send for experts in a micro-batch, either way."""

    layers: tuple[ExpertLayer, ...]
    tokens: int
    """Of the rank, in a micro-batch."""
    crossing: float
    """Tokens with which both ways send the same."""
    gathered: int
    """Bytes, if all ranks gather all experts."""
    exchanged: int
    """Bytes, if each expert lies on one rank."""
    ranks: tuple[int, int]
    """Planned: those that tokens travel between, and those that gather the same experts."""
    gathers: bool
    """Whether weights can be gathered, as in isp mode."""

    @property
    def less(self) -> str:
        """The way that sends less; none where each rank has all experts and nothing is sent."""
        if not self.gathers or self.ranks == (1, 1):
            return "-"
        return "gather" if self.tokens >= self.crossing else "exchange"

    @property
    def way(self) -> str:
        """The planned way, with ! if the other sends less: of both together one alone does."""
        spread, gather = self.ranks
        worse = spread > 1 if self.less == "gather" else gather > 1 and self.less == "exchange"
        planned = f"{spread} x {gather}" if spread > 1 else "gather" if self.gathers else "-"
        return "-" if self.ranks == (1, 1) else planned + " !" * worse

    def __str__(self) -> str:
        kinds = dict.fromkeys(f"{x.num_experts}, {x.used} of a token" for x in self.layers)
        found = f"{' or '.join(kinds)}, in {len(self.layers)} layers; "
        spread, gather = self.ranks
        if spread == 1 and self.less == "-":
            return f"{found}all on every rank"
        planned = "gathered"
        if spread > 1:
            planned = f"tokens travel between {spread} ranks, and {gather} gather the same ones"
            planned += "\nall experts are taken to get equally many tokens"
        exchanged = f"exchanging its {self.tokens:,} tokens {self.exchanged / 2**30:,.2f} GiB"
        if not self.gathers:
            return f"{found}{planned}\n{exchanged} of a rank a micro-batch"
        return (
            f"{found}{planned}\ngathering would send {self.gathered / 2**30:,.2f} GiB of a rank a"
            f" micro-batch, {exchanged}; equal at {self.crossing:,.0f} tokens"
        )

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return {**self._asdict(), "layers": [x._asdict() for x in self.layers], "less": self.less}


def expert_layers(case: PlanCase) -> tuple[ExpertLayer, ...]:
    """The layers with experts that are gathered in isp mode, in order."""
    model, found = case.language_model, []
    for call in model.trace.calls:
        if call.route is not None:
            own = model.shape.get_submodule(call.module).parameters(recurse=False)
            stacks = [p.shape for p in own if p.dim() == 3]
            numbers = sum(shape[1] * shape[2] for shape in stacks)
            found.append(ExpertLayer(stacks[0][0], call.route, call.width, numbers))
    return tuple(found)


def expert_traffic(case: PlanCase) -> ExpertTraffic | None:
    """That of a case whose model has experts; None of another.

    Gradients count by the dtype that they are summed in, experts as if each rank had as many as the
    first, which is what is sent, and tokens of recomputed blocks go there and back once more.
    """
    layers = expert_layers(case)
    if not layers:
        return None
    is_wide = case.parallel.weight.reduce_dtype == "float32" and not case.sums_locally
    wide = case.wide_bytes if is_wide else case.item_bytes
    gathers = 1 / case.micro_num if case.keeps_gathered else PASSES - 1
    passes, trips = gathers + wide / case.item_bytes, TRIPS + 2 * case.model.checkpoint
    topology = case.topology
    tokens, ranks = case.rows * case.tokens // topology.tensor, topology.weight
    padded = [x._replace(num_experts=-(-x.num_experts // ranks) * ranks) for x in layers]
    sent = case.item_bytes * (ranks - 1) / ranks
    return ExpertTraffic(
        layers,
        tokens,
        crossing_tokens(padded, passes=passes, trips=trips),
        round(sent * sum(layer.gathered(passes) for layer in padded)),
        round(sent * sum(layer.exchanged(tokens, trips) for layer in padded)),
        (topology.expert, topology.expert_weight),
        case.mode.gathers_weights,
    )


def with_spread_experts(config: JobConfig, spread: int) -> JobConfig:
    """The configuration with tokens that travel between `spread` ranks to their experts."""
    expert = replace(config.parallel.expert, size=spread)
    rest = replace(config.parallel.expert_weight, size=None)
    parallel = replace(config.parallel, expert=expert, expert_weight=rest)
    return replace(config, parallel=parallel)


def spread_instead(case: PlanCase, config: JobConfig, *, fits: bool) -> Iterator[JobConfig]:
    """The layout with tokens that travel to experts on one rank each, where that may be better.

    That is where it sends less, and where experts that are gathered, or whole, do not fit.
    """
    found, ranks = expert_traffic(case), case.topology.weight
    if (
        found is not None
        and ranks > case.topology.expert
        and (not fits or found.less == "exchange")
    ):
        yield with_spread_experts(config, ranks)
