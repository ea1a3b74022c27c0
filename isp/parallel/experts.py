"""Keys of experts: the ranks that have them, and how many of a layer are gathered together."""

from __future__ import annotations

from math import ceil
from typing import Annotated, NamedTuple

from pydantic import Field

from isp.settings.section import KeyRole, Ranks, section

__all__ = ["ExpertConfig", "ExpertParts", "ExpertWeightConfig"]


@section("parallel.expert", KeyRole.PLACE)
class ExpertConfig:
    """`parallel.expert`: the ranks over which the experts of a layer are sharded."""

    size: Ranks = 1
    """Number of ranks that share the experts of a layer, to which tokens are sent: a divisor of
    the weight size in isp mode, 1 or the tensor size in other modes; 1: weights of experts are
    gathered instead.  Name: InternEvo."""
    num_chunks: Ranks = 1
    """Number of parts of a rank's tokens; each is sent while the one before is computed."""
    max_gathered_bytes: Annotated[int, Field(ge=1, le=2**50)] | None = None
    """Gather the experts of a layer in groups so that at most this many bytes of them, prefetched
    ones included, are unsharded on a rank; null: all at once. Recomputed layers gather them once
    more. Groups without tokens are gathered too, because the gather begins before the router runs.
    isp mode only."""

    def check_gathers(self, *, gathers: bool, keeps: bool) -> None:
        """Raise ValueError for a limit where weights stay, on one rank each or gathered."""
        limit = f"parallel.expert.max_gathered_bytes={self.max_gathered_bytes}"
        if self.max_gathered_bytes is None:
            return
        if not gathers:
            raise ValueError(f"{limit} needs isp mode, in which experts are gathered: leave it out")
        if keeps:
            raise ValueError(
                f"{limit} cannot be combined with parallel.weight.reshard_after_forward=false,"
                f" which keeps all gathered weights: use true, or leave the limit out"
            )
        if self.num_chunks > 1:
            raise ValueError(
                f"{limit} cannot be combined with parallel.expert.num_chunks={self.num_chunks},"
                f" because every chunk would gather all groups: use num_chunks=1"
            )


@section("parallel.expert_weight", KeyRole.PLACE)
class ExpertWeightConfig:
    """`parallel.expert_weight`: the ranks over which the weights of an expert rank are sharded."""

    size: Ranks | None = None
    """Number of ranks that gather experts from each other; null: weight size / expert size.  Name:
    InternEvo."""


class ExpertParts(NamedTuple):
    """The limit of gathered experts on a rank, and what it is divided by."""

    max_bytes: int
    alive: int
    """Groups of experts that are whole at once: with prefetch two."""
    spread: int
    """Ranks that have different experts."""
    ranks: int
    """Ranks that gather the same ones."""
    item_bytes: int
    """Of a number of weights."""

    def experts_of_group(self, num_experts: int, numbers: int) -> int:
        """Experts of a group, such that a layer has as few groups as may be.

        `num_experts` in the layer, each of so many `numbers`. Each rank has equally many of a full
        group, so that nothing is padded. Raises ValueError if one of each rank is over the limit.
        """
        least = self.ranks * numbers * self.item_bytes
        rows = ceil(ceil(num_experts / self.spread) / self.ranks)
        if rows * least <= self.max_bytes:
            return rows * self.ranks
        most = self.max_bytes // (self.alive * least)
        if not most:
            ahead = " twice, as the next ones are gathered ahead" * (self.alive > 1)
            raise ValueError(
                f"parallel.expert.max_gathered_bytes={self.max_bytes} is less than one expert of"
                f" {numbers * self.item_bytes} bytes from each of {self.ranks} ranks{ahead}: use"
                f" {self.alive * least} or more"
            )
        return ceil(rows / ceil(rows / most)) * self.ranks
