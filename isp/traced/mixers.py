"""`TracedMixers`: the convolutions and scans of a traced model on one rank.

B batch, S' the tokens of this rank, C channels
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from torch import Tensor

from isp.comm.tag import Purpose, Tag
from isp.layers.factory import LayerFactory
from isp.layers.sequence import SequenceRanks
from isp.mixers.choice import Indexer, choose, choose_next
from isp.mixers.convolution import Convolution, convolve
from isp.mixers.placement import Placement
from isp.mixers.recurrence import Inputs, Recurrence, Stateful
from isp.mixers.scan import cheaper_way, scan_by_heads, scan_by_state, scan_on
from isp.parallel.config import SequenceScan
from isp.traced.calls import Call, Kind
from isp.traced.forward_pass import ForwardPass

__all__ = ["TracedMixers"]

logger = logging.getLogger(__name__)


class TracedMixers:
    """Where a traced model's calls of `isp.mixers` go; a `Mixers`."""

    def __init__(
        self,
        layers: LayerFactory,
        arrive: Callable[[Kind, Tensor], tuple[ForwardPass, Call]],
        under_way: Callable[[str], ForwardPass],
    ) -> None:
        """`arrive` follows a call, given its kind and what it mixes: the pass that it lies in.

        `under_way`: the pass in which what it names is called.
        """
        self._layers = layers
        self._sequence = layers.sequence or SequenceRanks.by_heads(layers.token_ranks)
        self._arrive = arrive
        self._under_way = under_way
        self._reported = False

    def convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None, dilation: int) -> Tensor:
        """As `Mixers.convolve`."""
        placement = self._placement(Kind.CONVOLUTION, x)
        if self._keeps_states:
            inputs = Inputs((x.flatten(0, 1),), (), (weight, bias))
            return self._go_on(Convolution(dilation), inputs, placement).view(x.shape)
        return convolve(x.flatten(0, 1), weight, bias, placement, dilation).view(x.shape)

    def scan(self, recurrence: Recurrence, inputs: Inputs) -> Tensor:
        """As `Mixers.scan`."""
        x, flat = inputs.of_heads[0], inputs.flat()
        placement = self._placement(Kind.SCAN, x)
        if self._keeps_states:
            return self._go_on(recurrence, flat, placement).view(x.shape)
        way = self._sequence.scan
        if way is SequenceScan.AUTO:
            way = cheaper_way(recurrence, flat, placement)
            if not self._reported and placement.channel.size > 1:
                self._reported = True
                logger.info("scans: by %s (auto, by the bytes that a rank receives)", way)
        scan = scan_by_heads if way is SequenceScan.HEADS else scan_by_state
        return scan(self._layers.recurrence(recurrence), flat, placement).view(x.shape)

    def choose(self, indexer: Indexer) -> Tensor:
        """As `Mixers.choose`; ValueError in modes that split features."""
        keys, forward_pass = indexer.keys, self._under_way("an indexer")
        layers = self._layers
        if layers.splits_features:
            raise ValueError(f"{forward_pass.name} chooses the keys that its attention sees")
        cache, tensor = layers.cache, layers.tensor
        documents = []
        if cache is not None and cache.keeps:
            tag = Tag(Purpose.KEYS, tensor="indexer.k")
            documents = cache.index_keys(tensor.all_gather(keys, 1, tag=tag).wait())
        if cache is not None and cache.decodes:
            numbers = choose_next(indexer, documents, tensor.rank * keys.shape[1])
        else:
            placement = forward_pass.masks.placement(self._sequence, tensor, keys)
            numbers = choose(indexer, placement, on_cpu=layers.on_cpu, tiles=layers.tiles)
        return numbers.view(*keys.shape[:2], indexer.num_choices, -1)

    def _placement(self, kind: Kind, x: Tensor) -> Placement:
        """That of the micro-batch."""
        forward_pass, _ = self._arrive(kind, x)
        cache = self._layers.cache
        alone = cache is not None and cache.decodes
        return forward_pass.masks.placement(
            self._sequence, self._layers.token_ranks, x, alone=alone
        )

    @property
    def _keeps_states(self) -> bool:
        return self._layers.cache is not None and self._layers.cache.keeps

    def _go_on(self, by: Stateful, inputs: Inputs, placement: Placement) -> Tensor:
        """By heads: a rank keeps the states of the same heads, whoever has the tokens."""
        assert self._layers.cache is not None
        copies = None if self._layers.mode.facts.splits_sequence else self._layers.tensor
        return self._layers.cache.go_on(partial(scan_on, by, inputs, placement, copies=copies))
