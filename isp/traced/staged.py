"""`TracedStage`: one pipeline stage of a traced model on a rank.

B batch, S' the tokens of this rank, D hidden size
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from isp.traced.chunk import TracedChunk
from isp.traced.stages import Stage
from isp.weights.declare import DeclaredBlock
from isp.weights.parameter import ShardedParameter

__all__ = ["TracedStage"]


class TracedStage:
    """A stage of the model that a `TracedChunk` has, which may have others; a `Chunk`."""

    def __init__(self, chunk: TracedChunk, stage: Stage) -> None:
        self.splits_logits = chunk.splits_logits
        self._chunk = chunk
        self._stage = stage

    def __call__(self, x: Tensor, positions: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        """As `Chunk.__call__`."""
        return self._chunk.through_stage(self._stage, x, positions, cu_seqlens)

    def loss(self, output: Tensor, labels: Tensor, expected: Tensor | None = None) -> Tensor:
        """As `TracedChunk.loss`, on the last stage."""
        return self._chunk.loss(output, labels, expected)

    def losses(self, output: Tensor, labels: Tensor) -> Tensor:
        """As `TracedChunk.losses`, on the last stage."""
        return self._chunk.losses(output, labels)

    def shards(self) -> Iterator[ShardedParameter]:
        """The parameters that the stage reads, with their names in the whole model."""
        return (item for item in self._chunk.shards() if item.name in self._stage.parameters)

    def init_weights(self, seed: int | None) -> None:
        """As `Chunk.init_weights`; a weight that two stages of a rank have is filled twice."""
        self._chunk.init_weights(seed, self._stage.parameters)

    def parts(self) -> dict[str, nn.Module]:
        """The blocks, and what has parameters outside of them."""
        own = {id(item.parameter) for item in self.shards()}
        return {
            name: part
            for name, part in self._chunk.parts().items()
            if any(id(parameter) in own for parameter in part.parameters())
        }

    def weight_blocks(self) -> tuple[DeclaredBlock, ...]:
        """Those of the stage's blocks and of its side of them."""
        return self._chunk.weight_blocks(self._stage)
