"""Uses of a rank's memory, and the error that reports it when memory runs out."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from isp.core.torch_private import record_memory_history, write_memory_history
from isp.metrics import peak_memory_gib
from isp.step.train_step import TrainStep
from isp.train.folder.environment import RankPlace
from isp.utils.files import written_whole

__all__ = ["MemoryGuard", "OutOfMemory", "describe_owners", "memory_owners"]

logger = logging.getLogger(__name__)

_HISTORY = 100_000
"""Most allocations and frees that a snapshot keeps, as in torchtitan."""


def memory_owners(step: TrainStep) -> dict[str, int]:
    """Return the bytes that weights, gradients, optimizer states and buffers take, by name.

    Frozen weights are not counted. Tensors that share a storage, such as master weights that are
    the weights themselves, count once.
    """
    gradients, communicator, host = step.gradients, step.communicator, step.built.host
    seen: set[int] = set()
    parameters = [item.parameter for item in gradients.parameters]
    weights = _storage_bytes(parameters, seen)
    # Gradients that autograd has accumulated and no hook has moved to the main gradients yet.
    of_autograd = _storage_bytes((p.grad for p in parameters if p.grad is not None), seen)
    shards, device = step.optimizer.state_dict()["parameters"].values(), parameters[0].device
    # Only states on the device: others are in host memory, which did not run out.
    tensors = (x for shard in shards for x in shard["tensors"].values() if x.device == device)
    states = _storage_bytes(tensors, seen)
    owners = {
        "weights": weights,
        "gradients": gradients.num_bytes + of_autograd,
        "optimizer states": states,
    }
    if communicator is not None:
        owners["gathered weights"] = communicator.pool.reserved_bytes
        owners["gradients in transfer"] = communicator.reduce_pool.reserved_bytes
    if not host.is_apart and host.reserved_bytes:
        # On CPU, host memory for block inputs is part of the memory that ran out.
        owners["block inputs on the host"] = host.reserved_bytes
    return owners


def describe_owners(owners: Mapping[str, int], peak_bytes: float) -> str:
    """Return a line for each owner, largest first; the rest of `peak_bytes` is activations."""
    rest = max(0, round(peak_bytes - sum(owners.values())))
    sizes = {**owners, "activations and the rest": rest}
    ordered = sorted(sizes.items(), key=lambda item: item[1], reverse=True)
    return "\n".join(f"  {name:<25} {_size(num_bytes):>10}" for name, num_bytes in ordered)


def _storage_bytes(tensors: Iterable[Tensor], seen: set[int]) -> int:
    """Return the bytes of the storages of `tensors`, each counted once.

    `seen`: addresses of storages that were counted before; the new ones are added.
    """
    total = 0
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            total += storage.nbytes()
    return total


def _size(num_bytes: int) -> str:
    """Return a number of bytes as text, in GiB or MiB."""
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"


class OutOfMemory(ValueError):
    """A rank ran out of memory; the text says where, what takes the memory, and how to use less."""


class MemoryGuard:
    """Context that turns an error about memory into `OutOfMemory`.

    With a folder for `snapshots`, CUDA allocations are recorded all the time, and written to
    `rank_<r>.pickle` there when memory runs out, for https://pytorch.org/memory_viz.
    """

    def __init__(self, device: torch.device, *, rank: int, snapshots: Path | None) -> None:
        self._device = device
        self._rank = rank
        self._snapshots = snapshots
        self._where: Callable[[], str] = lambda: "while the model was built"
        self._owners: Callable[[], Mapping[str, int]] = dict

    def watch(self, where: Callable[[], str], owners: Callable[[], Mapping[str, int]]) -> None:
        """Set the functions that are called for the text of `OutOfMemory` when memory runs out.

        `where` returns what the rank is doing, in words; `owners` returns what takes the memory, as
        `memory_owners` does. Before this call, the error says that the model was being built.
        """
        self._where, self._owners = where, owners

    def __enter__(self) -> Self:
        if self._snapshots is not None and self._device.type == "cuda":
            record_memory_history(_HISTORY)
        elif self._snapshots is not None:
            logger.info(
                "profiler.enable_memory_snapshot has no effect on CPU: it records only CUDA memory"
            )
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        cause = _memory_error(error) if isinstance(error, Exception) else None
        if cause is None:
            return
        text = self._explain(cause)
        if self._snapshots is not None and self._device.type == "cuda":
            text += f"\n{_dump(self._snapshots / f'rank_{self._rank}.pickle')}"
        raise OutOfMemory(text) from error

    def _explain(self, error: BaseException) -> str:
        """Return the text of `OutOfMemory` for `error`, which torch or Python has raised."""
        first_line = str(error).strip().split("\n")[0] or type(error).__name__
        peak = peak_memory_gib(self._device) * 2**30
        return (
            f"rank {self._rank} on {RankPlace.here(self._device).hostname} ran out of memory"
            f" {self._where()}: {first_line}\n{describe_owners(self._owners(), peak)}\n"
            f"use a smaller data.micro_bsz (and a larger data.micro_num), a shorter data.seq_len,"
            f" more recomputation (model.checkpoint=1), or more ranks; isp plan CONFIG"
            f" --max-seq-len shows what each key that saves memory makes room for"
        )


def _memory_error(error: BaseException) -> BaseException | None:
    """Return the error about memory among `error` and the errors that led to it; None if none is.

    Code that cleans up after an error about memory may raise another one.
    """
    found: BaseException | None = error
    while found is not None and not _is_about_memory(found):
        found = found.__cause__ or found.__context__
    return found


def _is_about_memory(error: BaseException) -> bool:
    """Return True if `error` was raised because memory could not be allocated."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    # CPU's allocator, and CUDA outside of torch's allocator, raise no type of their own.
    signs = ("you tried to allocate", "CUDA error: out of memory")
    return isinstance(error, RuntimeError) and any(words in str(error) for words in signs)


def _dump(path: Path) -> str:
    """Write the history of CUDA memory to `path`; return a sentence about it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        written_whole(path, lambda new: write_memory_history(str(new)))
    except OSError as error:
        return f"its history could not be written to {path}: {error.strerror}"
    return f"its history is in {path}, to be seen on https://pytorch.org/memory_viz"
