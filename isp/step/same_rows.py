"""`SameRows`: a check that the ranks of a sequence were given the same rows.

[Note: Same rows] A sampler by the rank, not the data rank, gives each rank of a tensor group rows
of its own: each takes its part of another sequence, and the loss looks plausible. So each rank
sends a checksum of its rows, in a place of its own in a vector that is summed over the ranks: where
labels are counted, together with the count. The host reads it where that costs no wait: on CPU at
once, on CUDA when the step reads its loss, or in the next call; in the first call it waits.

N tokens of the rows
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from isp.core.comm import Mesh, pinned_memory
from isp.core.comm.tag import Tag
from isp.core.mesh import Axis
from isp.core.micro_batch import MicroBatch

__all__ = ["SameRows"]

_TAG = Tag(tensor="rows")
_LABELS, _POSITIONS, _MORE = 0x2545F4914F6CDD1D, 0x369DEA0F31A53F85, 0x106689D45497FDB5
_SPREAD = 0x1E3779B97F4A7C15
"""Odd, so that a product modulo 2**64 loses nothing."""


class SameRows:
    """Compares checksums of rows over the ranks of each sequence, in all pipeline stages."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        topology = mesh.topology
        self._sequences = [
            [
                stage * topology.stage + data * topology.tensor + place
                for stage in range(topology.pipeline)
                for place in range(topology.tensor)
            ]
            for data in range(topology.data)
        ]
        """The ranks of each sequence, stage by stage."""
        self._ranks = topology.pipeline * topology.tensor
        """Of each sequence."""
        self._found: tuple[pinned_memory.HostCopy, list[list[int]], list[int]] | None = None
        """Checksums, the ranks of each sequence, and the rank of each checksum."""
        self._is_first = True

    def count(self, batches: Sequence[MicroBatch], own: Tensor) -> Tensor:
        """Sum the number `own` [] over data ranks, and compare the rows of all sequences; []."""
        if self._ranks == 1:
            return self._mesh[Axis.DATA].all_reduce(own, tag=_TAG).wait()
        size = self._mesh.topology.world_size
        found = torch.zeros(size + 1, dtype=torch.int64, device=own.device)
        found[self._mesh.rank], found[-1] = _checksum(batches), own
        found = self._mesh[Axis.WORLD].all_reduce_(found, tag=_TAG).wait()
        self._note(found[:-1], self._sequences, list(range(size)))
        return found[-1] // self._ranks  # each of a sequence has counted its labels

    def compare(self, batches: Sequence[MicroBatch], more: Sequence[Tensor]) -> None:
        """Compare the rows of this rank's sequence, and a further tensor for each micro-batch.

        Other sequences are not waited for: their ranks may compute another number of batches.
        """
        if self._ranks == 1:
            return
        ranks = next(ranks for ranks in self._sequences if self._mesh.rank in ranks)
        device = batches[0].tokens.device
        found = torch.zeros(self._ranks, dtype=torch.int64, device=device)
        found[ranks.index(self._mesh.rank)] = _checksum(batches, more)
        for axis in (Axis.TENSOR, Axis.PIPELINE):
            found = self._mesh[axis].all_reduce_(found, tag=_TAG).wait()
        self._note(found, [ranks], ranks)

    def _note(self, checksums: Tensor, sequences: list[list[int]], ranks: list[int]) -> None:
        self.check()  # the call before, whose checksums the device has by now
        self._found = pinned_memory.HostCopy(checksums), sequences, ranks
        if self._is_first or self._found[0].is_there:
            self._is_first = False
            self.check()

    def check(self) -> None:
        """Raise ValueError, on all ranks that compared, for rows that differ within a sequence."""
        if self._found is None:
            return
        (copy, sequences, ranks), self._found = self._found, None
        of_rank = dict(zip(ranks, copy.wait().tolist(), strict=True))
        other = [
            f"rank {rank} than rank {own[0]}"
            for own in sequences
            for rank in own
            if of_rank[rank] != of_rank[own[0]]
        ]
        if not other:
            return
        shown = ", ".join(other[:8]) + (f" and {len(other) - 8} more" if other[8:] else "")
        raise ValueError(
            f"ranks of one tensor group were given different rows ({shown}): pass the same"
            f" input_ids, labels, position_ids, attention_mask and pick on all ranks of a tensor"
            f" group, for example by DistributedSampler(data, num_replicas=run.dp_size,"
            f" rank=run.dp_rank)"
        )


def _checksum(batches: Sequence[MicroBatch], more: Sequence[Tensor] = ()) -> Tensor:
    """Return a checksum [] of rows, on their device: equal rows have equal ones on all ranks."""
    total = torch.zeros((), dtype=torch.int64, device=batches[0].tokens.device)
    for number, batch in enumerate(batches):
        rows = batch.tokens + _LABELS * batch.labels + _POSITIONS * batch.positions
        found = _weighted(rows)
        if more and more[number] is not batch.tokens and more[number] is not batch.labels:
            found = found + _MORE * _weighted(more[number].long())
        bounds = batch.cu_seqlens  # on the host
        crc = 0 if bounds is None else zlib.crc32(bounds.numpy().tobytes())
        total += (found + zlib.crc32(repr(tuple(rows.shape)).encode(), crc)) * (2 * number + 1)
    return total


def _weighted(x: Tensor) -> Tensor:
    """Sum the elements of x, each multiplied by a number drawn from its place, modulo 2**64; []."""
    places = torch.arange(1, x.numel() + 1, device=x.device) * _SPREAD  # [N]
    places ^= places >> 29
    places *= _LABELS
    places ^= places >> 32
    return (x.flatten() * places).sum()
