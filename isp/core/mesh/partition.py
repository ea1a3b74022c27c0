"""Cutting a dim into parts: arithmetic, and cutting a tensor on one rank. Loads no torch."""

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
    """The quotient. Raises ValueError if there is a remainder."""
    if numerator % denominator:
        raise ValueError(f"{numerator} does not divide by {denominator}")
    return numerator // denominator


def divisors(whole: int) -> list[int]:
    """The sizes that divide `whole`, from 1 up."""
    return [n for n in range(1, whole + 1) if whole % n == 0]


def any_of(sizes: list[int]) -> str:
    """Such as `1, 2 or 4`."""
    *others, last = (str(size) for size in sizes)
    return f"{', '.join(others)} or {last}" if others else last


def usable(whole: int, size: int) -> str:
    """The sizes near `size` that divide `whole`, in words."""
    return any_of([n for n in range(1, 2 * size) if whole % n == 0])


def chunk_range(length: int, parts: int, index: int) -> range:
    """Part `index` of a dim, cut as `torch.chunk` cuts: ceil(length / parts), the last ones less.

    Unlike `torch.chunk` there are always `parts` of them; the last may be empty.
    """
    chunk = -(-length // parts)
    return range(min(length, index * chunk), min(length, (index + 1) * chunk))


def split_tensor_along_last_dim(
    x: Tensor, num_partitions: int, *, contiguous: bool = False
) -> tuple[Tensor, ...]:
    """x [.., N] -> p of [.., N/p]: views, or copies if they are to be `contiguous`.

    Raises ValueError if N does not divide.
    """
    parts: tuple[Tensor, ...] = x.split(divide(x.shape[-1], num_partitions), dim=-1)
    return tuple(part.contiguous() for part in parts) if contiguous else parts


class VocabUtility:
    """The entries [first, last) of a vocabulary that a rank holds."""

    @staticmethod
    def vocab_range_from_per_partition_vocab_size(
        per_partition_vocab_size: int, rank: int, world_size: int
    ) -> tuple[int, int]:
        """From the number of entries on each rank."""
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is not one of {world_size}")
        return rank * per_partition_vocab_size, (rank + 1) * per_partition_vocab_size

    @staticmethod
    def vocab_range_from_global_vocab_size(
        global_vocab_size: int, rank: int, world_size: int
    ) -> tuple[int, int]:
        """From the number of entries in all; where it does not divide, as tables are cut here."""
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is not one of {world_size}")
        part = chunk_range(global_vocab_size, world_size, rank)
        return part.start, part.stop
