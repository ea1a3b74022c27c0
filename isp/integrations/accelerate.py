"""An `Accelerator` whose processes are the data ranks of a run.

[Note: Processes are data ranks] The ranks of a sequence have the same batches. So what accelerate
does by process (sharding of batches, gathering of metrics, means over processes) has to be done by
data rank, and what it does to models and gradients is done by the run.
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
    """See [Note: Processes are data ranks]; made of an accelerator, by `take_over`."""

    run: ParallelRun
    _first_ranks: list[int]
    """Of each data rank, one rank that has its batches."""

    @classmethod
    def take_over(cls, accelerator: Accelerator, run: ParallelRun) -> None:
        """Make `accelerator`, which others may hold already, one of `run`. All ranks call it."""
        own = torch.tensor([run.dp_rank], device=accelerator.device)
        data_ranks = accelerator.gather(own).tolist()
        accelerator.__class__ = cls
        accelerator.run = run
        accelerator._first_ranks = [data_ranks.index(rank) for rank in range(run.dp_size)]
        accelerator.dataloader_config.dispatch_batches = False  # else rank 0 reads for all

    @property
    def num_processes(self) -> int:
        """Data ranks."""
        return self.run.dp_size

    @property
    def process_index(self) -> int:
        """The data rank."""
        return self.run.dp_rank

    def gather(self, tensor: Any) -> Any:
        """As accelerate's, of each data rank once."""
        found, size, first = super().gather(tensor), self.state.num_processes, self._first_ranks
        if len(first) == size:
            return found

        def of_data_ranks(x: Tensor) -> Tensor:
            by_rank: Tensor = x.unflatten(0, (size, -1))
            return by_rank[first].flatten(0, 1)

        return recursively_apply(of_data_ranks, found)

    def backward(self, loss: Tensor, **_: Any) -> None:
        """Gradients of the mean of `loss` over data ranks, as DDP has them."""
        self.run.backward(loss / self.run.dp_size, last=self.sync_gradients)

    def clip_grad_norm_(self, *_: Any, **__: Any) -> Tensor:
        """The norm; `run.step` clips."""
        return torch.tensor(self.run.grad_norm(), dtype=torch.float64)

    def prepare_model(self, model: nn.Module, *_: Any, **__: Any) -> nn.Module:
        """As it is: the run has wrapped it."""
        return model

    def prepare_optimizer(self, optimizer: Any, *_: Any, **__: Any) -> Any:
        """As it is: its step is the run's."""
        return optimizer
