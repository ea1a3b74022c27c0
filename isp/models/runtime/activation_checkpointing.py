"""What the blocks of a traced model keep for backward, and what is recomputed."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from isp.core.layers.rank_layers import RankLayers
from isp.core.recompute.config import Recomputation
from isp.core.recompute.kept_calls import KeptCalls, Needs
from isp.core.recompute.recompute import Recomputer
from isp.core.rng import RngStatesTracker
from isp.core.weights.uses import inputs_kept, recomputed_blocks
from isp.models.sharding.pipeline_split import Stage
from isp.models.tracing.calls import Kind

__all__ = ["BlockRecomputer"]


class BlockRecomputer:
    """Computes blocks, and in backward again what of them is not kept."""

    def __init__(
        self,
        recomputation: Recomputation,
        blocks: tuple[str, ...],
        stages: Iterable[Stage],
        layers: RankLayers,
    ) -> None:
        """`blocks`: of the model; `stages`: those that the rank has."""
        what, tracker = recomputation, RngStatesTracker(layers.device)
        recomputed = recomputed_blocks(len(blocks), what.checkpoint)
        self.recomputed = dict(zip(blocks, recomputed, strict=True))
        """Whether a block is recomputed, as a whole or all of it but attention."""
        self.input_kept: dict[str, bool] = {}
        """Whether a block's input is kept for its recompute; of the rank's stages alone."""
        self._whole: dict[str, Recomputer] = {}
        """What recomputes each block: one for all blocks of a stage."""
        for stage in stages:
            recomputer = Recomputer(
                tracker=tracker,
                announce=layers.recomputing,
                distribute_over=layers.tensor if what.distributed else None,
                offload_to=layers.host if what.offload else None,
                segment=what.segment,
            )
            self._whole |= dict.fromkeys(stage.blocks, recomputer)
            kept = inputs_kept(tuple(self.recomputed[b] for b in stage.blocks), what.segment)
            self.input_kept |= dict(zip(stage.blocks, kept, strict=True))
        self.between_linears = what.between_linears
        tiled = (Kind.TILED,) if what.mlp_tile_tokens else ()
        self._of_recomputed = (*tiled, Kind.ATTENTION) if what.keeps_attention else tiled
        """The kinds of calls in recomputed blocks that are not made again."""
        self._of_others = tuple(Kind) if what.between_linears else ()
        """Those in other blocks."""
        self._between = Recomputer(tracker=tracker, announce=layers.recomputing)
        self._known: dict[Hashable, Needs] = {}

    @property
    def learns(self) -> bool:
        """Whether a first forward shows what later ones need not keep [Note: Watched]."""
        return bool(self._of_recomputed or self.between_linears)

    def begin(self, first: str) -> None:
        """A forward pass through the stage of this first block begins."""
        self._whole[first].begin()

    def calls(self, block: str, module: nn.Module, args: tuple[Any, ...]) -> KeptCalls | None:
        """What one forward of a block, called with `args`, keeps of its calls; None: nothing."""
        kinds = self._of_recomputed if self.recomputed[block] else self._of_others
        if not kinds or not torch.is_grad_enabled():
            return None
        tensors = (*args, *module.parameters())
        trained = tuple(x.requires_grad for x in tensors if isinstance(x, Tensor))
        return KeptCalls(kinds, self._known, (block, module.training, trained))

    def __call__(self, block: str, run: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """`run(*args)`, a pass through the block."""
        if self.recomputed[block] and torch.is_grad_enabled():
            return self._whole[block](run, *args)
        return self._between(run, *args) if self.between_linears else run(*args)
