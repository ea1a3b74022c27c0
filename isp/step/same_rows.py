"""`SameRows`: a check that the ranks of a sequence were given the same rows, by checksums.

See [Note: Same rows] in docs/design/notes/step.md. N tokens of the rows.
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
"""A factor of a hash. Like `_LABELS`, `_POSITIONS` and `_MORE` it is odd, so that a multiplication
modulo 2**64 can be undone: products of different numbers are different."""


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
        """Checksums that are not read yet, the ranks of each sequence, and the rank of each
        checksum."""
        self._is_first = True
        """True before the first comparison, in which the host waits for the checksums."""

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
        # Each rank of a sequence has added the same number, so divide the sum by the number of
        # ranks of a sequence.
        return found[-1] // self._ranks

    def compare(self, batches: Sequence[MicroBatch], more: Sequence[Tensor]) -> None:
        """Compare the rows of this rank's sequence over its ranks.

        `more`: a further tensor to compare for each micro-batch. No collective over other
        sequences, whose ranks may compute another number of batches. Raises ValueError for the rows
        of this call or the previous one; see `check`.
        """
        if self._ranks == 1:
            return
        ranks = next(ranks for ranks in self._sequences if self._mesh.rank in ranks)
        device = batches[0].tokens.device
        found = torch.zeros(self._ranks, dtype=torch.int64, device=device)
        found[ranks.index(self._mesh.rank)] = _checksum(batches, more)
        # Over the tensor group, then the pipeline: these are all ranks of the sequence.
        for axis in (Axis.TENSOR, Axis.PIPELINE):
            found = self._mesh[axis].all_reduce_(found, tag=_TAG).wait()
        self._note(found, [ranks], ranks)

    def _note(self, checksums: Tensor, sequences: list[list[int]], ranks: list[int]) -> None:
        """Keep checksums for `check`, and check at once if the host need not wait for them."""
        # First compare the checksums of the previous call; they have arrived by now.
        self.check()
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
    """Return a checksum [] of rows, int64 on their device, the same on all ranks with equal rows.

    Arithmetic is modulo 2**64. `more`: a further tensor for each micro-batch.
    """
    total = torch.zeros((), dtype=torch.int64, device=batches[0].tokens.device)
    for number, batch in enumerate(batches):
        rows = batch.tokens + _LABELS * batch.labels + _POSITIONS * batch.positions
        found = _weighted(rows)
        # Tokens and labels are in `rows` already.
        if more and more[number] is not batch.tokens and more[number] is not batch.labels:
            found = found + _MORE * _weighted(more[number].long())
        bounds = batch.cu_seqlens  # this tensor is on the host, so numpy can read it at once
        crc = 0 if bounds is None else zlib.crc32(bounds.numpy().tobytes())
        # With the shape, because the elements of [2, 8] and [4, 4] may be the same. With a factor
        # by number, so that micro-batches in another order give another sum.
        total += (found + zlib.crc32(repr(tuple(rows.shape)).encode(), crc)) * (2 * number + 1)
    return total


def _weighted(x: Tensor) -> Tensor:
    """Return the sum [] modulo 2**64 of the elements of x, each times a hash of its index."""
    # Without these factors, the same tokens in another order would have the same sum.
    places = torch.arange(1, x.numel() + 1, device=x.device) * _SPREAD  # [N]
    places ^= places >> 29
    places *= _LABELS
    places ^= places >> 32
    return (x.flatten() * places).sum()
