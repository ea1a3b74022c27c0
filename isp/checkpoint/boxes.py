"""Planners for torch.distributed.checkpoint: which rank writes and reads which boxes of a tensor.

A rank's part of a parameter is a set of boxes: [Note: A shard is a set of boxes]. DTensor has no
placement for that, so torch gets tensors as boxes, which it calls chunks.
"""

from __future__ import annotations

import dataclasses
import io
import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from isp.core.layers.module import RowsOf
from isp.core.mesh.layout import Interval, ParameterLayout, boxes_of

__all__ = ["BoxLoadPlanner", "BoxSavePlanner", "Piece", "Shard"]


@dataclass(frozen=True, eq=False)
class Piece:
    """A box of a global tensor, with its data on this rank."""

    offsets: tuple[int, ...]
    """Index of the box's first element in the global tensor, one number for each dim."""
    data: Tensor
    """A view of the tensor that the rank trains, or a copy."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Shape of the box, one number for each dim."""
        return tuple(self.data.shape)


@dataclass(frozen=True, eq=False)
class Shard:
    """The boxes of one saved tensor that this rank has, with their values; there may be none."""

    key: str
    """Name of the tensor in the checkpoint."""
    global_shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[Piece, ...]

    @classmethod
    def of_rows(
        cls, key: str, local: Tensor, layout: ParameterLayout, rows: Interval | None = None
    ) -> Shard:
        """Return the shard whose data is `local`, with the boxes of the global tensor it covers.

        `layout` says which part of the global tensor this rank has. `rows` (start, stop on dim 0)
        says which rows of that part are in `local`; None: all of them. Optimizer states need
        `rows`, since zero1 splits a rank's part of a parameter over the ranks that replicate it.
        """
        boxes = boxes_of(layout, rows)
        pieces = tuple(Piece(box.offsets, box.view(local)) for box in boxes)
        return cls(key, layout.global_shape, local.dtype, pieces)

    @classmethod
    def whole(cls, key: str, data: Tensor) -> Shard:
        """Return the shard of a tensor that is entirely on this rank."""
        shape = tuple(data.shape)
        return cls(key, shape, data.dtype, (Piece((0,) * len(shape), data.detach()),))

    def with_data(self, data: Sequence[Tensor]) -> Shard:
        """Return a shard with the same boxes and other data, one tensor for each box."""
        pieces = tuple(Piece(p.offsets, d) for p, d in zip(self.pieces, data, strict=True))
        return Shard(self.key, self.global_shape, self.dtype, pieces)


class BoxSavePlanner(SavePlanner):
    """Plans a save in which each box is written once, by the rank with the least to write so far.

    The state dict is {key: Shard}; several ranks may have the same box. Raises ValueError on the
    coordinator, which torch raises on all ranks, if the boxes do not add up to whole tensors.
    """

    def set_up_planner(
        self,
        state_dict: Mapping[str, Shard],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        self._shards = state_dict
        self._pieces = _by_index(state_dict)

    def create_local_plan(self) -> SavePlan:
        return SavePlan(
            [_write_item(shard, piece) for shard in self._shards.values() for piece in shard.pieces]
        )

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Choose the writer of each box, on the coordinator; return a plan for each rank."""
        owners: dict[MetadataIndex, list[int]] = defaultdict(list)
        items: dict[MetadataIndex, WriteItem] = {}
        for rank, plan in enumerate(all_plans):
            for item in plan.items:
                owners[item.index].append(rank)
                # Ranks with the same box (key and offsets) must also agree on its size and dtype.
                if items.setdefault(item.index, item).tensor_data != item.tensor_data:
                    raise ValueError(f"ranks disagree about {item.index.fqn}: {item.tensor_data}")
        loads = [0] * len(all_plans)
        plans: list[list[WriteItem]] = [[] for _ in all_plans]
        # Assign large boxes first: small ones can then even out what each rank writes.
        for item in sorted(items.values(), key=_num_bytes, reverse=True):
            writer = min(owners[item.index], key=lambda rank: loads[rank])
            loads[writer] += _num_bytes(item)
            plans[writer].append(item)
        return [SavePlan(plan) for plan in plans], _metadata(list(items.values()))

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self._pieces[write_item.index].data


class BoxLoadPlanner(LoadPlanner):
    """Plans a load in which each box of this rank is read from the saved boxes that overlap it.

    The layout of the save does not matter. The state dict is {key: Shard}. Values are converted to
    the dtype of the box.

    `sources`: for each key, the saved tensor to read, and which rows (dim 0) of that tensor.
    `required`: for a saved tensor, the keys that have to be read from it; each key has to be loaded
    by at least one rank. A saved tensor whose keys no rank loads shows that the checkpoint is of
    another model. Raises ValueError if the checkpoint lacks a box, and, on the coordinator, if no
    rank loads a required key.
    """

    def __init__(
        self,
        sources: Mapping[str, RowsOf],
        *,
        required: Mapping[str, Collection[str]] | None = None,
    ) -> None:
        self._sources = sources
        self._required = required or {}

    def set_up_planner(
        self,
        state_dict: Mapping[str, Shard],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        assert metadata is not None
        self._shards = state_dict
        self._pieces = _by_index(state_dict)
        self._saved = metadata.state_dict_metadata

    def create_local_plan(self) -> LoadPlan:
        return LoadPlan([item for shard in self._shards.values() for item in self._reads(shard)])

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Check on the coordinator that the ranks load all required keys; change no plan."""
        loaded = {item.dest_index.fqn for plan in global_plan for item in plan.items}
        unread = [key for key, needed in self._required.items() if not loaded.issuperset(needed)]
        if unread:
            raise ValueError(
                f"the checkpoint has weights that the run's model lacks, so it is of another model:"
                f" {', '.join(sorted(unread))}"
            )
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise AssertionError(f"{read_item.storage_index.fqn} is no tensor")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """Return the part of a box of this rank that `read_item` fills: a view to copy into."""
        block = self._pieces[read_item.dest_index].data
        for dim, start in enumerate(read_item.dest_offsets):
            block = block.narrow(dim, start, read_item.lengths[dim])
        return block

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Do nothing: `tensor` is a view of the box, which is filled already."""

    def _reads(self, shard: Shard) -> list[ReadItem]:
        """Return torch's read items that fill the boxes of one shard.

        Raises ValueError if the saved tensor has another shape, or lacks elements of a box.
        """
        # The saved tensor may have more rows (dim 0) than the parameter: earlier versions joined
        # some parameters in one tensor. Row `first` of that tensor is row 0 of the parameter.
        source, first, _ = rows = self._sources[shard.key]
        saved = self._saved[source]
        assert isinstance(saved, TensorStorageMetadata)
        if tuple(saved.size) != (shape := rows.whole_shape(shard.global_shape)):
            raise ValueError(
                f"{source} has shape {tuple(saved.size)} in the checkpoint, which is of another"
                f" model: the run needs {shape}"
            )
        # torch's function uses one key, `source`, for what is read and for what is filled. The box
        # to fill has another key: set that as the destination.
        reads = [
            dataclasses.replace(read, dest_index=MetadataIndex(shard.key, piece.offsets))
            for piece in shard.pieces
            for read in create_read_items_for_chunk_list(source, saved, [_chunk(piece, first)])
        ]
        # Saved boxes do not overlap (`BoxSavePlanner`). So if the reads have as many elements as
        # the boxes, they fill them.
        needed = sum(p.data.numel() for p in shard.pieces)
        found = sum(math.prod(read.lengths) for read in reads)
        if found != needed:
            raise ValueError(
                f"{source} has only {found} of {needed} needed elements in the checkpoint"
            )
        return reads


def _by_index(shards: Mapping[str, Shard]) -> dict[MetadataIndex, Piece]:
    """Return all boxes of `shards`, by what torch finds a box with: key and offsets."""
    return {
        MetadataIndex(shard.key, piece.offsets): piece
        for shard in shards.values()
        for piece in shard.pieces
    }


def _chunk(piece: Piece, first: int = 0) -> ChunkStorageMetadata:
    """Return torch's description of a box: its offsets in the saved tensor, and its sizes.

    `first` is the index along dim 0 of the saved tensor at which the parameter of `piece` begins.
    """
    row, *others = piece.offsets
    return ChunkStorageMetadata(torch.Size((row + first, *others)), torch.Size(piece.sizes))


def _write_item(shard: Shard, piece: Piece) -> WriteItem:
    """Return torch's `WriteItem` by which this rank offers to write the box `piece`.

    Other ranks may offer the same box; `BoxSavePlanner` chooses one of them.
    """
    return WriteItem(
        index=MetadataIndex(shard.key, piece.offsets),
        type=WriteItemType.SHARD,  # torch then asks `resolve_data` for the data
        tensor_data=TensorWriteData(
            chunk=_chunk(piece),
            properties=TensorProperties(dtype=shard.dtype),
            size=torch.Size(shard.global_shape),
        ),
    )


def _num_bytes(item: WriteItem) -> int:
    """Return the number of bytes of the box that the `WriteItem` would write."""
    assert item.tensor_data is not None
    return math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize


def _metadata(items: list[WriteItem]) -> Metadata:
    """Return torch's table of contents for the boxes in `items`.

    Raises ValueError if the boxes of a tensor do not have as many elements as the tensor.
    """
    saved: dict[str, TensorStorageMetadata] = {}
    for item in items:
        data = item.tensor_data
        assert data is not None
        tensor = saved.setdefault(
            item.index.fqn, TensorStorageMetadata(data.properties, data.size, [])
        )
        tensor.chunks.append(data.chunk)
    for key, tensor in saved.items():
        there = sum(math.prod(chunk.sizes) for chunk in tensor.chunks)
        if there != math.prod(tensor.size):
            whole = math.prod(tensor.size)
            raise ValueError(f"the ranks hold {there} of the {whole} elements of {key}")
    # The identity mapping lets torch's own tools (`dcp_to_torch_save`) read the checkpoint.
    return Metadata(dict(saved), planner_data={key: (key,) for key in saved})
