"""The transfers of a step one by one, each with the bytes that its rank sends.

B rows, S tokens of a row, D hidden size, V vocabulary; t ranks of a tensor group

    mode   forward of a block                       backward of a block, besides a recompute
    mtp    2 all-reduces of [B, S, D]               2 all-reduces
    msp    2 all-gathers, 2 reduce-scatters         2 reduce-scatters, 2 all-gathers
    fsp    as msp                                   as msp, and 2 all-gathers again
    isp    its weights gathered, 2 to 4             its weights gathered, its gradients
           all-to-alls of heads                     reduce-scattered, 2 to 4 all-to-alls

Bytes are those that `isp.comm.Channel` logs: what a rank has to send to others by the collective's
definition. They agree with the volumes of InternEvo's modes: an all-reduce of n bytes sends
2 n (t - 1) / t, an all-gather or reduce-scatter to or from n bytes n (t - 1) / t, an all-to-all of
a rank's n bytes n (t - 1) / t.

Source: Korthikanti et al. 2022 (mtp, msp), Jacobs et al. 2023 (the all-to-all), Chen et al. 2024,
InternEvo, arXiv 2401.09149 (the modes); the counts follow from `isp.layers.moves`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from isp.attention.distributed import TOGETHER_BELOW_BYTES
from isp.attention.heads import HeadPlan
from isp.parallel import Axis, Mode
from isp.parallel.layout import ParameterLayout
from isp.planner.case import Case, Place
from isp.weights.rows import piece_shape

__all__ = ["LinearTrips", "Trip", "Trips"]


class Trip(NamedTuple):
    """One collective of a rank, as `isp.comm.Transfer` records it."""

    kind: str
    channel: str
    sent_bytes: int
    what: str
    """What travels, for people."""


class LinearTrips(NamedTuple):
    """What moves around a linear; see `isp.layers.moves`."""

    x: Trip | None = None
    y: Trip | None = None
    dy: Trip | None = None
    dx: Trip | None = None
    regathers_x: bool = False

    @property
    def forward(self) -> list[Trip]:
        """What moves in forward, and again in a recompute."""
        return [trip for trip in (self.x, self.y) if trip is not None]

    @property
    def backward(self) -> list[Trip]:
        """What moves in backward."""
        again = self.x if self.regathers_x else None
        return [trip for trip in (self.dy, again, self.dx) if trip is not None]


@dataclass(frozen=True)
class Trips:
    """The transfers of the rank at `place`; those over one rank are none."""

    case: Case
    place: Place

    # -- activations -------------------------------------------------------------------------

    def column(self) -> LinearTrips:
        """A linear from the hidden size to features that are split (wqkv, w13, head)."""
        mode = self.case.mode
        if mode is Mode.MTP:
            return LinearTrips(dx=self._all_reduce(self._hidden(), "activations"))
        if mode in (Mode.MSP, Mode.FSP):
            gather, scatter = self._gather_tokens(), self._scatter_tokens()
            return LinearTrips(x=gather, dx=scatter, regathers_x=mode is Mode.FSP)
        return LinearTrips()

    def row(self) -> LinearTrips:
        """A linear from split features to the hidden size (wo, w2), and the embedding."""
        mode = self.case.mode
        if mode is Mode.MTP:
            return LinearTrips(y=self._all_reduce(self._hidden(), "activations"))
        if mode in (Mode.MSP, Mode.FSP):
            return LinearTrips(y=self._scatter_tokens(), dy=self._gather_tokens())
        return LinearTrips()

    def head(self) -> LinearTrips:
        """The linear to the logits."""
        case = self.case
        if case.mode is not Mode.ISP:
            return self.column()
        if not case.splits_logits or case.topology.tensor == 1:
            return LinearTrips()
        logits = case.rows * case.tokens_inside * case.model.vocab_size * case.item_bytes
        share = logits // case.topology.tensor * (case.topology.tensor - 1)
        trip = Trip("all_to_all", Axis.TENSOR, share, "logits")
        return LinearTrips(y=trip, dy=trip)

    def loss(self) -> list[Trip]:
        """The three reductions of a loss over split logits."""
        if not self.case.splits_logits:
            return []
        per_token = self.case.rows * self.case.tokens * self.case.wide_bytes
        trip = self._all_reduce(per_token, "loss")
        return [] if trip is None else [trip] * 3

    def attention(self) -> tuple[list[Trip], list[Trip]]:
        """The exchange of tokens for heads, forward and backward."""
        case, size = self.case, self.case.topology.tensor
        if case.mode is not Mode.ISP or size == 1:
            return [], []
        model = case.model
        plan = HeadPlan.of(model.num_heads, model.kv_heads, size)
        head = case.rows * case.tokens_inside * model.head_size * case.item_bytes
        own, bytes_of_qkv = self.place.tensor, (model.num_heads + 2 * model.kv_heads) * head
        cuts = [plan.query, plan.kv, plan.kv]
        groups = [cuts] if bytes_of_qkv <= TOGETHER_BELOW_BYTES else [[c] for c in cuts]

        def out(cuts: list[tuple[range, ...]]) -> Trip:
            heads = sum(len(r) for cut in cuts for i, r in enumerate(cut) if i != own)
            return Trip("all_to_all", Axis.TENSOR, heads * head, "heads")

        def back(cuts: list[tuple[range, ...]]) -> Trip:
            heads = sum(len(cut[own]) for cut in cuts) * (size - 1)
            return Trip("all_to_all", Axis.TENSOR, heads * head, "heads")

        forward = [*(out(group) for group in groups), back([plan.query])]
        backward = [out([plan.query]), *(back(group) for group in groups)]
        return forward, backward

    def recomputed_inputs(self) -> list[Trip]:
        """What a recomputed block gathers of the inputs that it kept a part of."""
        case, size = self.case, self.case.topology.tensor
        if not case.model.checkpoint_distribute_activations or size == 1:
            return []
        share = self._hidden() // size * (size - 1)
        trip = Trip("all_gather", Axis.TENSOR, share, "activations")
        return [trip] * (2 if case.model.checkpoint_keeps_attention else 1)

    def between_stages(self) -> Trip:
        """What a stage sends to the next for a micro-batch, and receives the gradient of."""
        case = self.case
        tokens = case.rows * case.tokens_between
        sent = tokens * case.model.hidden_size * case.item_bytes
        return Trip("send", Axis.PIPELINE, sent, "activations")

    # -- weights and gradients ---------------------------------------------------------------

    def gather(self, layout: ParameterLayout) -> Trip:
        """The gather of a weight or bias; `layout` is that of the rank's shard."""
        sent = prod(piece_shape(layout)) * self.case.item_bytes * (layout.parts - 1)
        return Trip("all_gather", Axis.WEIGHT, sent, "weights")

    def reduce(self, layout: ParameterLayout) -> Trip:
        """The sum of a gradient over the weight group."""
        case, weight = self.case, self.case.parallel.weight
        item = case.item_bytes
        if not case.sums_locally and weight.reduce_dtype == "float32":
            item = case.wide_bytes  # the collective itself has to sum in it
        sent = prod(piece_shape(layout)) * item * (layout.parts - 1)
        own_group = weight.own_reduce_group or weight.reduce_by != "auto"
        channel = "weight_reduce" if own_group else Axis.WEIGHT.value
        return Trip("reduce_scatter", channel, sent, "weight gradients")

    def over(self, axis: Axis, num_bytes: int, what: str) -> Trip | None:
        """An all-reduce along `axis`."""
        return self._all_reduce(num_bytes, what, axis)

    def publish(self, num_elements: int) -> Trip:
        """A bucket of updated weights on its way to the zero1 group."""
        size = self.case.topology.zero1
        sent = num_elements * self.case.item_bytes * (size - 1)
        return Trip("all_gather", Axis.ZERO1, sent, "updated weights")

    def data(self) -> Trip | None:
        """Tokens, labels and positions of a step, from the first rank of a sequence."""
        case = self.case
        if case.topology.tensor == 1:
            return None
        sent = case.micro_num * 3 * case.rows * case.tokens * 8
        return Trip("broadcast", Axis.TENSOR, 0 if self.place.tensor else sent, "data")

    # -- inside ------------------------------------------------------------------------------

    def _hidden(self) -> int:
        """Bytes of [B, S, D]."""
        return (
            self.case.rows * self.case.tokens * self.case.model.hidden_size * self.case.item_bytes
        )

    def _all_reduce(self, num_bytes: int, what: str, axis: Axis = Axis.TENSOR) -> Trip | None:
        size = self.case.size(axis)
        if size == 1:
            return None
        return Trip("all_reduce", axis.value, num_bytes * 2 * (size - 1) // size, what)

    def _gather_tokens(self) -> Trip | None:
        return self._along_sequence("all_gather")

    def _scatter_tokens(self) -> Trip | None:
        return self._along_sequence("reduce_scatter")

    def _along_sequence(self, kind: str) -> Trip | None:
        size = self.case.topology.tensor
        if size == 1:
            return None
        return Trip(kind, Axis.TENSOR.value, self._hidden() // size * (size - 1), "activations")
