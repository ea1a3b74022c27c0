"""Keys of experts: the ranks that have them, and those that gather the same ones."""

from __future__ import annotations

from isp.core.section import KeyRole, Ranks, section

__all__ = ["ExpertConfig", "ExpertWeightConfig"]


@section("parallel.expert", KeyRole.PLACE)
class ExpertConfig:
    """`parallel.expert`: the ranks over which the experts of a layer are sharded."""

    size: Ranks = 1
    """Number of ranks that share the experts of a layer, to which tokens are sent: a divisor of
    the weight size in isp mode, 1 or the tensor size in other modes; 1: weights of experts are
    gathered instead.  Name: InternEvo."""
    num_chunks: Ranks = 1
    """Number of parts of a rank's tokens; each is sent while the one before is computed."""


@section("parallel.expert_weight", KeyRole.PLACE)
class ExpertWeightConfig:
    """`parallel.expert_weight`: the ranks over which the weights of an expert rank are sharded."""

    size: Ranks | None = None
    """Number of ranks that gather experts from each other; null: weight size / expert size.  Name:
    InternEvo."""
