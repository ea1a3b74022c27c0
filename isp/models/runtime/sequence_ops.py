"""`TracedMixers`: what mixes tokens in a traced model, on one rank.

B batch, S' the tokens of this rank, C channels
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from isp.core.attention.api import AttentionOptions
from isp.core.attention.backend import AttentionBackend
from isp.core.attention.kinds import AttentionKind, make_attention
from isp.core.attention.local import LocalAttention
from isp.core.attention.sequence import SequenceRanks
from isp.core.attention.ulysses import DistributedAttention
from isp.core.layers.rank_layers import RankLayers
from isp.core.mesh.config import SequenceScan
from isp.core.mixers.convolution import convolve
from isp.core.mixers.key_choice import Indexer, choose
from isp.core.mixers.placement import Placement
from isp.core.mixers.recurrence import Inputs, Recurrence
from isp.core.mixers.scan import cheaper_way, scan_by_heads, scan_by_state
from isp.models.tracing.calls import AttentionSizes, Kind

if TYPE_CHECKING:
    from isp.models.runtime.call_follower import CallFollower

__all__ = ["LocalOf", "TracedMixers", "local_of"]

logger = logging.getLogger(__name__)

LocalOf = Callable[[AttentionKind], LocalAttention]


def local_of(
    layers: RankLayers, backend: AttentionBackend, given: LocalAttention | None
) -> LocalOf:
    """The attention of whole sequences on a rank: what is `given`, or what each kind needs."""

    def local(kind: AttentionKind) -> LocalAttention:
        if given is not None:
            return given
        return make_attention(
            kind,
            backend,
            device=layers.device,
            dtype=layers.dtype,
            everyone=layers.everyone,
        )

    return local


class TracedMixers:
    """Where a traced model's calls of `isp.attention` and `isp.core.mixers` go; a `Mixers`.

    A recompute may take the results of those that it has made before. Attention of every kind in
    the model, whichever stage has it, is made here: all ranks choose backends together, and in a
    forward those of a pipeline would wait for each other.
    """

    def __init__(
        self,
        layers: RankLayers,
        follower: CallFollower,
        local_attention: LocalOf,
        attentions: Iterable[AttentionSizes],
    ) -> None:
        self._layers = layers
        self._sequence = layers.sequence or SequenceRanks.by_heads(layers.token_ranks)
        self._follower = follower
        self._local_attention = local_attention
        self._cores: dict[AttentionKind, DistributedAttention] = {}
        for sizes in attentions:
            self._core(sizes.attention_kind)
        self._reported = False

    def attend(self, *given: Any) -> Tensor:
        """As `isp.core.attention.api.Attend`."""
        return self._follower.kept(Kind.ATTENTION, None, partial(self._attend, *given))

    def convolve(self, *given: Any) -> Tensor:
        """As `Mixers.convolve`."""
        return self._follower.kept(Kind.CONVOLUTION, None, partial(self._convolve, *given))

    def scan(self, *given: Any) -> Tensor:
        """As `Mixers.scan`."""
        return self._follower.kept(Kind.SCAN, None, partial(self._scan, *given))

    def choose(self, indexer: Indexer) -> Tensor:
        """As `Mixers.choose`; goes with attention, and is not followed."""
        forward_pass = self._follower.under_way("an indexer")
        return forward_pass.keep(Kind.ATTENTION, partial(self._choose, indexer))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
        causal, window, scale, softcap, _, chunk, chosen, _ = options
        forward_pass, call = self._follower.mix(Kind.ATTENTION, q)
        extras: dict[str, Any] = {"sinks": options.of_heads(q.shape[2]), "chosen": chosen}
        extras = {name: extra for name, extra in extras.items() if extra is not None}
        assert call.sizes is not None
        core = self._core(call.sizes.attention_kind._replace(scale=scale, softcap=softcap))
        parts = 1 if self._layers.splits_features else self._layers.tensor.size
        mask = forward_pass.masks(causal, window, chunk, (len(q), q.shape[1] * parts))
        out = core(q, k, v, mask=mask, **extras)
        return out.clone() if call.written else out.contiguous()

    def _core(self, kind: AttentionKind) -> DistributedAttention:
        if kind not in self._cores:
            local = self._local_attention(kind)
            self._cores[kind] = self._layers.attention(
                local, scale=kind.scale, softcap=kind.softcap
            )
        return self._cores[kind]

    def _convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None, dilation: int) -> Tensor:
        placement = self._placement(Kind.CONVOLUTION, x)
        return convolve(x.flatten(0, 1), weight, bias, placement, dilation).view(x.shape)

    def _scan(self, recurrence: Recurrence, inputs: Inputs) -> Tensor:
        x, flat = inputs.of_heads[0], inputs.flat()
        placement = self._placement(Kind.SCAN, x)
        way = self._sequence.scan
        if way is SequenceScan.AUTO:
            way = cheaper_way(recurrence, flat, placement)
            if not self._reported and placement.channel.size > 1:
                self._reported = True
                logger.info("scans: by %s (auto: fewest bytes received per rank)", way)
        scan = scan_by_heads if way is SequenceScan.HEADS else scan_by_state
        return scan(self._layers.recurrence(recurrence), flat, placement).view(x.shape)

    def _choose(self, indexer: Indexer) -> Tensor:
        """Raises ValueError in modes that split features."""
        keys, forward_pass = indexer.keys, self._follower.under_way("an indexer")
        layers = self._layers
        if layers.splits_features:
            raise ValueError(f"{forward_pass.name} uses an indexer to choose keys for attention")
        placement = forward_pass.masks.placement(self._sequence, layers.tensor, keys)
        numbers = choose(indexer, placement, on_cpu=layers.on_cpu, tiles=layers.tiles)
        return numbers.view(*keys.shape[:2], indexer.num_choices, -1)

    def _placement(self, kind: Kind, x: Tensor) -> Placement:
        """That of the micro-batch."""
        forward_pass, _ = self._follower.mix(kind, x)
        return forward_pass.masks.placement(self._sequence, self._layers.token_ranks, x)
