"""`TracedMixers`: compute a traced model's attention, convolutions and scans over the ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

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
from isp.core.mixers.recurrence import Inputs, Recurrence
from isp.core.mixers.scan import cheaper_way, scan_by_heads, scan_by_state
from isp.models.tracing.calls import AttentionSizes, Kind
from isp.models.tracing.position import Position

__all__ = ["LocalOf", "TracedMixers", "local_of"]

logger = logging.getLogger(__name__)

LocalOf = Callable[[AttentionKind], LocalAttention]
"""A function that returns the implementation of a kind of attention over whole sequences."""


def local_of(
    layers: RankLayers, backend: AttentionBackend, given: LocalAttention | None
) -> LocalOf:
    """Return a function from a kind of attention to its implementation on one rank.

    The implementation is `given` for all kinds; or, if that is None, the one that `backend` has for
    the kind on the device of `layers`.
    """

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
    """The mixers of a traced model on a rank, which implement the `Mixers` protocol.

    `isp.attention` and the functions of `isp.core.mixers` call these methods while the model runs.
    Each call is counted in the trace, and a recompute may reuse its kept result.

    `__init__` makes attention of every kind in the model, also of other pipeline stages. All ranks
    choose backends together by a collective; in a forward, the stages of a pipeline would wait in
    it for each other.
    """

    def __init__(
        self,
        layers: RankLayers,
        position: Position,
        local_attention: LocalOf,
        attentions: Iterable[AttentionSizes],
    ) -> None:
        """`attentions`: the sizes of all calls of attention in the model."""
        self._layers = layers
        self._sequence = layers.sequence or SequenceRanks.by_heads(layers.token_ranks)
        self._position = position
        self._local_attention = local_attention
        self._cores: dict[AttentionKind, DistributedAttention] = {}
        for sizes in attentions:
            self._core(sizes.attention_kind)
        self._reported = False
        """True once the log says how scans exchange data."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
        """Compute attention over the sequence of all ranks; for the arguments see
        `Mixers.attend`."""
        now, call = self._position.mix(Kind.ATTENTION, q)
        causal, window, scale, softcap, _, chunk, chosen, _ = options

        def compute() -> Tensor:
            extras: dict[str, Any] = {"sinks": options.of_heads(q.shape[2]), "chosen": chosen}
            extras = {name: extra for name, extra in extras.items() if extra is not None}
            assert call.sizes is not None
            # Take the sizes of heads from the trace, and scale and softcap from this call, which
            # may have others than the traced one.
            core = self._core(call.sizes.attention_kind._replace(scale=scale, softcap=softcap))
            # The mask must be that of all tokens of the sequence. If features are split, attention
            # is in a region, where q has all tokens. Otherwise q has this rank's tokens.
            parts = 1 if self._layers.splits_features else self._layers.tensor.size
            mask = now.masks(causal, window, chunk, (len(q), q.shape[1] * parts))
            out = core(q, k, v, mask=mask, **extras)
            # Backward reads the output, so a model that writes into it gets a copy.
            return out.clone() if call.written else out.contiguous()

        return now.keep(Kind.ATTENTION, compute)

    def convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None, dilation: int) -> Tensor:
        """Compute a causal convolution over all ranks; for the arguments see `Mixers.convolve`."""
        now, _ = self._position.mix(Kind.CONVOLUTION, x)

        def compute() -> Tensor:
            # The rows of the batch are joined; `placement` knows where each of them ends.
            placement = now.masks.placement(self._sequence, self._layers.token_ranks, x)
            return convolve(x.flatten(0, 1), weight, bias, placement, dilation).view(x.shape)

        return now.keep(Kind.CONVOLUTION, compute)

    def scan(self, recurrence: Recurrence, inputs: Inputs) -> Tensor:
        """Compute a scan over all ranks; for the arguments see `Mixers.scan`.

        Ranks either exchange tokens for heads, or pass states on from rank to rank, as
        `parallel.sequence_scan` says; auto chooses the way that receives fewer bytes.
        """
        x = inputs.of_heads[0]
        now, _ = self._position.mix(Kind.SCAN, x)

        def compute() -> Tensor:
            flat = inputs.flat()
            placement = now.masks.placement(self._sequence, self._layers.token_ranks, x)
            way = self._sequence.scan
            # Choose by sizes that are equal on all ranks, so that all ranks choose the same way.
            if way is SequenceScan.AUTO:
                way = cheaper_way(recurrence, flat, placement)
                if not self._reported and placement.channel.size > 1:
                    self._reported = True
                    logger.info(
                        "parallel.sequence_scan=auto: the first scan runs by %s, so that a rank"
                        " receives the fewest bytes; each later scan chooses by its own sizes",
                        way,
                    )
            scan = scan_by_heads if way is SequenceScan.HEADS else scan_by_state
            return scan(self._layers.recurrence(recurrence), flat, placement).view(x.shape)

        return now.keep(Kind.SCAN, compute)

    def choose(self, indexer: Indexer) -> Tensor:
        """Return the indices of the keys that an indexer chooses; see `Mixers.choose`.

        The trace has no call for this. A recompute reuses the indices whenever it reuses results of
        attention. Raises ValueError in modes that split features.
        """
        now, keys, layers = self._position.current("an indexer"), indexer.keys, self._layers

        def compute() -> Tensor:
            if layers.splits_features:
                raise ValueError(f"{now.name} uses an indexer to choose keys for attention")
            placement = now.masks.placement(self._sequence, layers.tensor, keys)
            numbers = choose(indexer, placement, on_cpu=layers.on_cpu, tiles=layers.tiles)
            return numbers.view(*keys.shape[:2], indexer.num_choices, -1)

        return now.keep(Kind.ATTENTION, compute)

    def _core(self, kind: AttentionKind) -> DistributedAttention:
        """Return the distributed attention of a kind; make it at the first call."""
        if kind not in self._cores:
            local = self._local_attention(kind)
            self._cores[kind] = self._layers.attention(
                local, scale=kind.scale, softcap=kind.softcap
            )
        return self._cores[kind]
