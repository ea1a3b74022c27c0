"""Boxes tile the whole tensor, and the planner writes each of them once."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan

from isp.checkpoint.boxes import BoxLoadPlanner, BoxSavePlanner, Shard
from isp.core.layers.module import RowsOf
from isp.core.mesh import Axis
from isp.core.mesh.layout import ParameterLayout, boxes_of
from isp.core.mesh.partition import chunk_range

CASES = {
    "rows": ((7, 3), 0, ()),
    "columns": ((4, 7), 1, ()),
    "fused": ((14, 3), 0, (8, 3, 3)),
    "vector": ((5,), 0, ()),
    "fused vector": ((6,), 0, (4, 1, 1)),
}
PARTS = (1, 2, 3, 4, 8)


def _layout(case: str, parts: int, index: int) -> ParameterLayout:
    shape, dim, segments = CASES[case]
    return ParameterLayout(
        global_shape=shape,
        dim=dim,
        segments=segments,
        parts=parts,
        index=index,
        reduce_over=Axis.WEIGHT_DATA,
    )


def _shards(case: str, parts: int, zero1: int) -> list[Shard]:
    """Return the rows of every rank of a weight group of `parts`, each split over `zero1` ranks."""
    shape = CASES[case][0]
    whole = torch.arange(math.prod(shape)).view(shape)
    shards = []
    for index, rank in itertools.product(range(parts), range(zero1)):
        layout = _layout(case, parts, index)
        local = layout.shard(whole)
        own = chunk_range(local.shape[0], zero1, rank)
        rows = own.start, own.stop
        shards.append(Shard.of_rows("x", local[slice(*rows)], layout, rows))
    return shards


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("zero1", [1, 2, 5])
def test_boxes_tile_the_whole_tensor(case: str, parts: int, zero1: int) -> None:
    """Catches an element that is in no box, in two boxes, or at another element's place."""
    shape = CASES[case][0]
    joined = torch.full(shape, -1)
    for piece in (p for shard in _shards(case, parts, zero1) for p in shard.pieces):
        place = joined[tuple(slice(o, o + n) for o, n in zip(piece.offsets, piece.sizes))]  # noqa: B905
        assert piece.data.numel() > 0
        assert (place == -1).all()
        place.copy_(piece.data)
    assert torch.equal(joined, torch.arange(math.prod(shape)).view(shape))


def test_adjacent_intervals_are_merged_into_one_box() -> None:
    """Catches a fused weight that is whole on a rank but is written in three parts."""
    assert len(boxes_of(_layout("fused", 1, 0))) == 1
    assert len(boxes_of(_layout("fused", 2, 0))) == 3


def _plan(shards: list[Shard]) -> SavePlan:
    planner = BoxSavePlanner()
    planner.set_up_planner({shard.key: shard for shard in shards})
    return planner.create_local_plan()


def test_replicated_tensors_are_written_once_by_ranks_in_turn() -> None:
    """Catches a replicated tensor that every rank writes, and a first rank that writes all of
    them.
    """
    shards = [Shard.whole(f"x{i}", torch.zeros(10)) for i in range(8)]
    plans, metadata = BoxSavePlanner().create_global_plan([_plan(shards) for _ in range(4)])
    assert [len(plan.items) for plan in plans] == [2, 2, 2, 2]
    assert len({item.index for plan in plans for item in plan.items}) == 8
    assert metadata.state_dict_metadata.keys() == {shard.key for shard in shards}


@pytest.mark.parametrize("missing", [0, 3])
def test_a_missing_shard_is_refused(missing: int) -> None:
    """Catches a checkpoint that lacks a shard, which only the next load would notice."""
    shards = _shards("rows", 4, 1)
    plans = [_plan([shard]) for i, shard in enumerate(shards) if i != missing]
    with pytest.raises(ValueError, match="of the 21 elements of x"):
        BoxSavePlanner().create_global_plan(plans)


def test_elements_that_were_not_saved_are_refused() -> None:
    """Catches a shard that is loaded in part and keeps its old values elsewhere."""
    shards = _shards("rows", 2, 1)
    _, metadata = BoxSavePlanner().create_global_plan([_plan([shard]) for shard in shards])
    saved = metadata.state_dict_metadata["x"]
    assert isinstance(saved, TensorStorageMetadata)
    planner = BoxLoadPlanner({"x": RowsOf("x")})
    planner.set_up_planner({"x": Shard.whole("x", torch.zeros(7, 3))}, metadata)
    assert len(planner.create_local_plan().items) == 2
    del saved.chunks[0]
    with pytest.raises(ValueError, match="x has only 9 of 21 needed elements"):
        planner.create_local_plan()


def test_boxes_that_differ_between_ranks_are_refused() -> None:
    """Catches ranks whose boxes begin at the same corner but differ in size or dtype."""
    plans = [_plan([Shard.whole("x", torch.zeros(4, dtype=d))]) for d in (torch.half, torch.float)]
    with pytest.raises(ValueError, match="disagree about x"):
        BoxSavePlanner().create_global_plan(plans)
