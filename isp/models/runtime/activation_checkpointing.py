"""`BlockRecomputer`: decides what blocks keep for backward, and recomputes the rest."""

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
    """Runs the blocks of a rank, and recomputes in backward what they do not keep."""

    def __init__(
        self,
        recomputation: Recomputation,
        blocks: tuple[str, ...],
        stages: Iterable[Stage],
        layers: RankLayers,
    ) -> None:
        """`blocks`: all blocks of the model, in order; `stages`: pipeline stages of the rank."""
        what, tracker = recomputation, RngStatesTracker(layers.device)
        recomputed = recomputed_blocks(len(blocks), what.checkpoint)
        self.recomputed = dict(zip(blocks, recomputed, strict=True))
        """By block: True if it is recomputed, as a whole or except for its kept calls."""
        self.input_kept: dict[str, bool] = {}
        """By block of the rank's stages: True if its input is kept; False inside of a segment."""
        self._whole: dict[str, Recomputer] = {}
        """The recomputer of each block of the rank; the blocks of a stage share one."""
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
        """The kinds of kept calls in recomputed blocks."""
        self._of_others = tuple(Kind) if what.between_linears else ()
        """The kinds of kept calls in other blocks: all, so that only what lies between is
        recomputed."""
        self._between = Recomputer(tracker=tracker, announce=layers.recomputing)
        self._known: dict[Hashable, Needs] = {}
        """The needs of blocks, found in their first pass and shared by all later ones."""

    @property
    def learns(self) -> bool:
        """True if the first forward finds out what later ones need not keep [Note: Watched]."""
        return bool(self._of_recomputed or self.between_linears)

    def begin(self, first: str) -> None:
        """Begin a forward pass through the stage whose first block is `first`."""
        self._whole[first].begin()

    def calls(self, block: str, module: nn.Module, args: tuple[Any, ...]) -> KeptCalls | None:
        """Return the kept calls of one forward of a block with `args`; None: no call is kept."""
        kinds = self._of_recomputed if self.recomputed[block] else self._of_others
        if not kinds or not torch.is_grad_enabled():
            return None
        # The key of what is known: which results a recompute reads depends on the operations, so on
        # the mode of the block and on which tensors have gradients.
        tensors = (*args, *module.parameters())
        trained = tuple(x.requires_grad for x in tensors if isinstance(x, Tensor))
        return KeptCalls(kinds, self._known, (block, module.training, trained))

    def __call__(self, block: str, run: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Return `run(*args)`, a pass through the block, which backward repeats if need be."""
        if self.recomputed[block] and torch.is_grad_enabled():
            return self._whole[block](run, *args)
        return self._between(run, *args) if self.between_linears else run(*args)
