"""`SameRows`: a check that the ranks of a sequence were given the same rows.

N tokens of the rows

[Note: Same rows] A sampler by the rank, instead of the data rank, gives each rank of a tensor group
different rows: each takes its part of another sequence, and the loss looks plausible. So each rank
sends a checksum of its rows, in its own entry of a vector that is summed over the ranks. Where
labels are counted, the vector carries the count too. The host reads it where that costs no wait: on
CPU at once, on CUDA when the step reads its loss, or in the next call; in the first call it waits.
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
"""An odd factor, as are those above: a product with it modulo 2**64 loses no bits."""


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
        """The ranks of each sequence, ordered by pipeline stage."""
        self._ranks = topology.pipeline * topology.tensor
        """The number of ranks of each sequence."""
        self._found: tuple[pinned_memory.HostCopy, list[list[int]], list[int]] | None = None
        """Checksums not read yet, the ranks of each sequence, and the rank of each checksum."""
        self._is_first = True
        """True before the first comparison, for which the host waits."""

    def count(self, batches: Sequence[MicroBatch], own: Tensor) -> Tensor:
        """Sum the number `own` [] over data ranks, and compare the rows of all sequences.

        Returns the sum, []. Raises ValueError for the rows of this call or the previous one; see
        `check`.
        """
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

        Does not wait for other sequences: their ranks may compute another number of batches. Raises
        ValueError for the rows of this call or the previous one; see `check`.
        """
        if self._ranks == 1:
            return
        ranks = next(ranks for ranks in self._sequences if self._mesh.rank in ranks)
        device = batches[0].tokens.device
        found = torch.zeros(self._ranks, dtype=torch.int64, device=device)
        found[ranks.index(self._mesh.rank)] = _checksum(batches, more)
        # Tensor group, then pipeline: the sum reaches all ranks of the sequence, and only them.
        for axis in (Axis.TENSOR, Axis.PIPELINE):
            found = self._mesh[axis].all_reduce_(found, tag=_TAG).wait()
        self._note(found, [ranks], ranks)

    def _note(self, checksums: Tensor, sequences: list[list[int]], ranks: list[int]) -> None:
        """Keep checksums for `check`, and check at once if the host need not wait for them."""
        self.check()  # of the previous call: those checksums have arrived by now
        self._found = pinned_memory.HostCopy(checksums), sequences, ranks
        if self._is_first or self._found[0].is_there:
            self._is_first = False
            self.check()

    def check(self) -> None:
        """Raise ValueError, on all ranks that compared, if rows of a sequence differ.

        Waits for the checksums of the last call, if they have not been checked.
        """
        if self._found is None:
            return
        (copy, sequences, ranks), self._found = self._found, None
        of_rank = dict(zip(ranks, copy.wait().tolist(), strict=True))
        # The first rank of each sequence is the reference for the others.
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
    """Return a checksum [], int64 on the rows' device; equal rows give equal ones on all ranks.

    Wraps modulo 2**64. `more` has a further tensor for each micro-batch.
    """
    total = torch.zeros((), dtype=torch.int64, device=batches[0].tokens.device)
    for number, batch in enumerate(batches):
        rows = batch.tokens + _LABELS * batch.labels + _POSITIONS * batch.positions
        found = _weighted(rows)
        # Tokens and labels are in `rows` already.
        if more and more[number] is not batch.tokens and more[number] is not batch.labels:
            found = found + _MORE * _weighted(more[number].long())
        bounds = batch.cu_seqlens  # on the host
        crc = 0 if bounds is None else zlib.crc32(bounds.numpy().tobytes())
        # The shape, as the elements alone do not tell [2, 8] from [4, 4]; the odd factor, so that
        # micro-batches in another order give another sum.
        total += (found + zlib.crc32(repr(tuple(rows.shape)).encode(), crc)) * (2 * number + 1)
    return total


def _weighted(x: Tensor) -> Tensor:
    """Return the sum modulo 2**64 of the elements of x, each times a hash of its place; []."""
    # Without weights by place, the same tokens in another order would have the same sum.
    places = torch.arange(1, x.numel() + 1, device=x.device) * _SPREAD  # [N]
    places ^= places >> 29
    places *= _LABELS
    places ^= places >> 32
    return (x.flatten() * places).sum()
