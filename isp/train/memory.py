"""Who holds the memory of a rank, by the sizes of the things themselves."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor

from isp.optim import MainGradients, Zero1Optimizer
from isp.weights.communicator import ISPCommunicator

__all__ = ["MemoryOwner", "describe_owners", "memory_owners"]


class MemoryOwner(NamedTuple):
    """What a part of the run holds on this rank."""

    name: str
    num_bytes: int


def memory_owners(
    gradients: MainGradients, optimizer: Zero1Optimizer, communicator: ISPCommunicator | None
) -> list[MemoryOwner]:
    """Weights, gradients, optimizer states and the communicator's buffers of this rank.

    A tensor that two of them share, such as master weights that are the weights, counts once.
    """
    seen: set[int] = set()
    parameters = [item.parameter for item in gradients.parameters]
    weights = _storage_bytes(parameters, seen)
    of_autograd = _storage_bytes((p.grad for p in parameters if p.grad is not None), seen)
    shards = optimizer.state_dict()["parameters"].values()
    states = _storage_bytes((x for shard in shards for x in shard["tensors"].values()), seen)
    pools = []
    if communicator is not None:
        pools = [
            MemoryOwner("gathered weights", communicator.pool.counters().reserved_bytes),
            MemoryOwner("gradients travelling", communicator.reduce_pool.counters().reserved_bytes),
        ]
    return [
        MemoryOwner("weights", weights),
        MemoryOwner("gradients", gradients.num_bytes + of_autograd),
        MemoryOwner("optimizer states", states),
        *pools,
    ]


def describe_owners(owners: Iterable[MemoryOwner], peak_bytes: float) -> str:
    """A line for each owner, the largest first; the rest of `peak_bytes` is activations."""
    rest = peak_bytes - sum(owner.num_bytes for owner in owners)
    named = [*owners, MemoryOwner("activations and the rest", max(0, round(rest)))]
    named.sort(key=lambda owner: owner.num_bytes, reverse=True)
    return "\n".join(f"  {name:<25} {_size(num_bytes):>10}" for name, num_bytes in named)


def _storage_bytes(tensors: Iterable[Tensor], seen: set[int]) -> int:
    """Bytes of the storages behind `tensors`, but for those in `seen`, which they are added to."""
    total = 0
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            total += storage.nbytes()
    return total


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"
