"""Traffic of mixture-of-experts layers: gather the experts' weights, or exchange tokens.

Gathering sends less if a rank has more tokens than 9/4 x features of an expert x experts / experts
of a token. See [Note: Crossing] in docs/design/notes/planner.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

# `crossing_tokens` is plain arithmetic, so importing this file must not import torch.
if TYPE_CHECKING:
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
"""How often weights are sent (two gathers and a reduction), and tokens (to the experts and back, in
forward and in backward), per micro-batch."""


class ExpertLayer(NamedTuple):
    """Number of experts of one layer, and their sizes."""

    num_experts: int
    used: int
    """Number of experts that each token goes to."""
    width: int
    """Number of features of a token that is sent to an expert."""
    numbers: int
    """Number of elements of all parameters of one expert."""

    def gathered(self, passes: float = PASSES) -> float:
        """Return how many elements are sent per micro-batch to gather and reduce the weights.

        The weights are sent `passes` times, reductions of their gradients included.
        """
        return passes * self.num_experts * self.numbers

    def exchanged(self, tokens: int, trips: float = TRIPS) -> float:
        """Return how many elements a rank sends to have `tokens` computed by experts elsewhere.

        Each token is sent `trips` times: to its experts and back, in forward and in backward.
        """
        return trips * tokens * self.used * self.width


def crossing_tokens(
    layers: Iterable[ExpertLayer], *, passes: float = PASSES, trips: float = TRIPS
) -> float:
    """Return the number of tokens per rank and micro-batch at which both exchanges send the same.

    One exchange gathers the weights of experts, the other sends tokens to the ranks of experts.

    With more tokens, gathering experts sends less than exchanging tokens: [Note: Crossing].
    """
    layers = list(layers)
    gathered = sum(layer.gathered(passes) for layer in layers)
    return gathered / sum(layer.exchanged(1, trips) for layer in layers)


class ExpertTraffic(NamedTuple):
    """Bytes that a rank would send for experts in a micro-batch, by gathering and by exchanging."""

    layers: tuple[ExpertLayer, ...]
    tokens: int
    """Tokens of the rank in a micro-batch."""
    crossing: float
    """Tokens of a rank in a micro-batch at which `gathered` and `exchanged` would be equal."""
    gathered: int
    """Bytes sent if all ranks gather all experts."""
    exchanged: int
    """Bytes sent if each expert is on one rank."""
    ranks: tuple[int, int]
    """In this layout: ranks that exchange tokens, and ranks that gather the same experts."""
    gathers: bool
    """True if weights can be gathered, as in isp mode."""

    @property
    def less(self) -> str:
        """Return "gather" or "exchange", whichever sends less; "-" if there is no choice.

        There is none if every rank has all experts, or the mode gathers no weights.
        """
        if not self.gathers or self.ranks == (1, 1):
            return "-"
        return "gather" if self.tokens >= self.crossing else "exchange"

    @property
    def way(self) -> str:
        """Return whether this layout gathers experts or exchanges tokens, as a table's cell.

        The cell ends with "!" if the other way would send less.

        Combining both ways always sends more than one of them alone.
        """
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
        """Return the values for JSON."""
        return {**self._asdict(), "layers": [x._asdict() for x in self.layers], "less": self.less}


def expert_layers(case: PlanCase) -> tuple[ExpertLayer, ...]:
    """Return the sizes of the model's expert layers, in order."""
    model, found = case.language_model, []
    for call in model.trace.calls:
        if call.route is not None:
            own = model.shape.get_submodule(call.module).parameters(recurse=False)
            stacks = [p.shape for p in own if p.dim() == 3]
            # The stacked weights of experts are the layer's parameters of three dims, [E, .., ..].
            numbers = sum(shape[1] * shape[2] for shape in stacks)
            found.append(ExpertLayer(stacks[0][0], call.route, call.width, numbers))
    return tuple(found)


def expert_traffic(case: PlanCase) -> ExpertTraffic | None:
    """Return the expert traffic of `case`; None if its model has no experts.

    Gradients count in the dtype that they are reduced in. All ranks count with as many experts as
    the first one has, since uneven shards are padded. A recomputed block sends its tokens to the
    experts and back once more.
    """
    layers = expert_layers(case)
    if not layers:
        return None
    is_wide = case.parallel.weight.reduce_dtype == "float32" and not case.sums_locally
    wide = case.wide_bytes if is_wide else case.item_bytes
    # Weights that stay gathered are sent once a step instead of twice a micro-batch.
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
    """Return `config` with tokens exchanged between `spread` ranks."""
    expert = replace(config.parallel.expert, size=spread)
    rest = replace(config.parallel.expert_weight, size=None)
    parallel = replace(config.parallel, expert=expert, expert_weight=rest)
    return replace(config, parallel=parallel)


def spread_instead(case: PlanCase, config: JobConfig, *, fits: bool) -> Iterator[JobConfig]:
    """Yield `config` with each expert on one rank, if that may be better, else nothing.

    It may be better if exchanging tokens sends less, or if the layout of `config` does not fit.
    """
    found, ranks = expert_traffic(case), case.topology.weight
    if (
        found is not None
        and ranks > case.topology.expert
        and (not fits or found.less == "exchange")
    ):
        yield with_spread_experts(config, ranks)
