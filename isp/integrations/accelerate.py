"""An `Accelerator` whose processes are the data ranks of a run.

[Note: Processes are data ranks] All ranks of a sequence have the same batches. So what accelerate
does per process (sharding batches, gathering metrics, averaging) must happen per data rank, and
what it does to models and gradients is left to the run.
"""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import recursively_apply
from torch import Tensor, nn

from isp.loop.parallel_run import ParallelRun

__all__ = ["RunAccelerator"]


class RunAccelerator(Accelerator):
    """Accelerator of a run, made with `take_over`: [Note: Processes are data ranks]."""

    run: ParallelRun
    _first_ranks: list[int]
    """One rank of each data rank, by data rank."""

    @classmethod
    def take_over(cls, accelerator: Accelerator, run: ParallelRun) -> None:
        """Turn `accelerator` into one of `run`; a collective.

        Its class is changed in place, since others may hold a reference to it already.
        """
        own = torch.tensor([run.dp_rank], device=accelerator.device)
        data_ranks = accelerator.gather(own).tolist()
        accelerator.__class__ = cls
        accelerator.run = run
        accelerator._first_ranks = [data_ranks.index(rank) for rank in range(run.dp_size)]
        accelerator.dataloader_config.dispatch_batches = False  # else rank 0 reads for all ranks

    @property
    def num_processes(self) -> int:
        """Number of data ranks."""
        return self.run.dp_size

    @property
    def process_index(self) -> int:
        """This process's data rank."""
        return self.run.dp_rank

    def gather(self, tensor: Any) -> Any:
        """Gather as accelerate does, but each data rank only once."""
        found, size, first = super().gather(tensor), self.state.num_processes, self._first_ranks
        if len(first) == size:
            return found

        def of_data_ranks(x: Tensor) -> Tensor:
            by_rank: Tensor = x.unflatten(0, (size, -1))
            return by_rank[first].flatten(0, 1)

        return recursively_apply(of_data_ranks, found)

    def backward(self, loss: Tensor, **_: Any) -> None:
        """Compute gradients of the mean of `loss` over data ranks, as DDP does."""
        self.run.backward(loss / self.run.dp_size, last=self.sync_gradients)

    def clip_grad_norm_(self, *_: Any, **__: Any) -> Tensor:
        """Return the gradient norm; clipping is left to `run.step`."""
        return torch.tensor(self.run.grad_norm(), dtype=torch.float64)

    def prepare_model(self, model: nn.Module, *_: Any, **__: Any) -> nn.Module:
        """Return the model unchanged: the run has prepared it."""
        return model

    def prepare_optimizer(self, optimizer: Any, *_: Any, **__: Any) -> Any:
        """Return the optimizer unchanged: its step is that of the run."""
        return optimizer
