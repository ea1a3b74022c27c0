"""`OffDevice`: moves a run's tensors to the host and back, keeping the tensor objects."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, UntypedStorage

from isp.core.comm import pinned_memory
from isp.step.train_step import TrainStep

__all__ = ["OffDevice"]


class OffDevice:
    """Empties the storages of a run's tensors on the device, and fills them again later.

    Tensors and their views stay the same objects, so references in the optimizer, buckets and
    guards stay valid. The host memory is kept for the next time.
    """

    def __init__(self, train_step: TrainStep, device: torch.device) -> None:
        self._train_step, self._device = train_step, device
        self._kept: dict[UntypedStorage, int] = {}
        """Emptied storages whose contents are on the host, with their sizes in bytes."""
        self._dropped: dict[UntypedStorage, int] = {}
        """Emptied storages that are filled with zeros later, with their sizes in bytes."""
        self._host = torch.empty(0, dtype=torch.uint8)
        """Host memory for the contents; page-locked for CUDA."""

    def leave(self) -> None:
        """Move weights and optimizer states to the host; free the main gradients without a copy.

        Raises MemoryError if the host has too little memory; nothing has moved then.
        """
        step, on_cuda = self._train_step, self._device.type == "cuda"
        step.drain()
        # Wait for all streams: those that gather or publish weights may still read these storages.
        if on_cuda:
            torch.cuda.synchronize(self._device)
        if (communicator := step.communicator) is not None:
            communicator.pool.reset_lazy_pools()
            communicator.reduce_pool.reset_lazy_pools()
        of_states = step.optimizer.state_dict()["parameters"].values()
        states = (tensor for state in of_states for tensor in state["tensors"].values())
        weights = (item.parameter.detach() for item in step.built.parameters)
        kept = self._storages((*weights, *states))
        total = sum(storage.nbytes() for storage in kept)
        if self._host.nbytes < total:
            self._host = self._host.new_empty(0)  # free the old memory before allocating more
            self._host = pinned_memory.zeros(total, torch.uint8, self._device)
        for storage, place in zip(kept, self._places(kept), strict=True):
            place.copy_(self._bytes(storage))
        self._kept = {storage: storage.nbytes() for storage in kept}
        dropped = self._storages(step.gradients.memory)
        self._dropped = {storage: storage.nbytes() for storage in dropped}
        for storage in (*kept, *dropped):
            storage.resize_(0)
        if on_cuda:  # give the memory to other processes, such as an inference server
            torch.cuda.empty_cache()

    def come_back(self) -> None:
        """Move the contents back to the device, with zeros in the main gradients."""
        for storage, size in (self._kept | self._dropped).items():
            storage.resize_(size)
        for storage, place in zip(self._kept, self._places(self._kept), strict=True):
            self._bytes(storage).copy_(place)
        for storage in self._dropped:
            self._bytes(storage).zero_()
        self._kept, self._dropped = {}, {}

    def _storages(self, tensors: Iterable[Tensor]) -> list[UntypedStorage]:
        """Return the storages of `tensors` that are on the run's device, each once."""
        found = {x.untyped_storage().data_ptr(): x.untyped_storage() for x in tensors if x.numel()}
        return [storage for storage in found.values() if storage.device == self._device]

    def _places(self, storages: Iterable[UntypedStorage]) -> tuple[Tensor, ...]:
        """Return, for each storage, a view of the host memory with the size of the storage.

        The views follow one another in the host memory.
        """
        sizes = [storage.nbytes() for storage in storages]
        places: tuple[Tensor, ...] = self._host[: sum(sizes)].split(sizes)
        return places

    def _bytes(self, storage: UntypedStorage) -> Tensor:
        """Return a storage as a tensor of bytes."""
        empty = torch.empty(0, dtype=torch.uint8, device=self._device)
        return empty.set_(storage)
