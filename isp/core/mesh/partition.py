"""Arithmetic of cutting a dim into parts, and helpers to split tensors. Loads no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "VocabUtility",
    "any_of",
    "chunk_range",
    "divide",
    "divisors",
    "split_tensor_along_last_dim",
    "usable",
]


def divide(numerator: int, denominator: int) -> int:
    """Return the quotient. Raises ValueError if there is a remainder."""
    if numerator % denominator:
        raise ValueError(f"{numerator} is not divisible by {denominator}")
    return numerator // denominator


def divisors(whole: int) -> list[int]:
    """Return the sizes that divide `whole`, in ascending order."""
    return [n for n in range(1, whole + 1) if whole % n == 0]


def any_of(sizes: list[int]) -> str:
    """Return sizes in words, such as `1, 2 or 4`."""
    *others, last = (str(size) for size in sizes)
    return f"{', '.join(others)} or {last}" if others else last


def usable(whole: int, size: int) -> str:
    """Return the divisors of `whole` that are below twice `size`, in words, for an error text."""
    return any_of([n for n in range(1, 2 * size) if whole % n == 0])


def chunk_range(length: int, parts: int, index: int) -> range:
    """Return part `index` of a dim that is cut like `torch.chunk`, into ceil(length / parts) each.

    The last parts may be shorter or empty; unlike with `torch.chunk` there are always `parts`.
    """
    chunk = -(-length // parts)
    return range(min(length, index * chunk), min(length, (index + 1) * chunk))


def split_tensor_along_last_dim(
    x: Tensor, num_partitions: int, *, contiguous: bool = False
) -> tuple[Tensor, ...]:
    """Split x [.., N] into p tensors [.., N/p]: views, or copies if `contiguous`.

    Raises ValueError if p does not divide N.
    """
    parts: tuple[Tensor, ...] = x.split(divide(x.shape[-1], num_partitions), dim=-1)
    return tuple(part.contiguous() for part in parts) if contiguous else parts


class VocabUtility:
    """Functions that return the range [first, last) of a rank's vocabulary entries."""

    @staticmethod
    def vocab_range_from_per_partition_vocab_size(
        per_partition_vocab_size: int, rank: int, world_size: int
    ) -> tuple[int, int]:
        """Return a rank's range, if each rank has `per_partition_vocab_size` entries."""
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is not one of {world_size}")
        return rank * per_partition_vocab_size, (rank + 1) * per_partition_vocab_size

    @staticmethod
    def vocab_range_from_global_vocab_size(
        global_vocab_size: int, rank: int, world_size: int
    ) -> tuple[int, int]:
        """Return a rank's range of `global_vocab_size` entries; the last ranks may get fewer."""
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is not one of {world_size}")
        part = chunk_range(global_vocab_size, world_size, rank)
        return part.start, part.stop
