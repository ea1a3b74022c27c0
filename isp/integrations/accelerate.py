"""An `Accelerator` whose processes are the data ranks of a run.

Ranks with the same data rank get the same batches, which accelerate alone would not give them. See
[Note: Processes are data ranks] in docs/design/notes/train.md.
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
    """An `Accelerator` that leaves models, optimizers and gradients to a `ParallelRun`.

    Make one with `take_over`. It reports data ranks as processes [Note: Processes are data ranks].
    """

    run: ParallelRun
    _first_ranks: list[int]
    """The first process of each data rank, by data rank."""

    @classmethod
    def take_over(cls, accelerator: Accelerator, run: ParallelRun) -> None:
        """Turn `accelerator` into a `RunAccelerator` of `run`; a collective.

        The class of the object is changed in place: a Trainer and its callbacks already refer to
        this object.
        """
        own = torch.tensor([run.dp_rank], device=accelerator.device)
        data_ranks = accelerator.gather(own).tolist()
        accelerator.__class__ = cls
        accelerator.run = run
        accelerator._first_ranks = [data_ranks.index(rank) for rank in range(run.dp_size)]
        # Each rank has to read its own data: accelerate would let rank 0 read and send it.
        accelerator.dataloader_config.dispatch_batches = False

    @property
    def num_processes(self) -> int:
        """Number of data ranks, which accelerate takes for processes."""
        return self.run.dp_size

    @property
    def process_index(self) -> int:
        """Data rank of this process, which accelerate takes for its rank."""
        return self.run.dp_rank

    def gather(self, tensor: Any) -> Any:
        """Gather tensors over the data ranks, each once, joined on dim 0 as accelerate does."""
        found, size, first = super().gather(tensor), self.state.num_processes, self._first_ranks
        if len(first) == size:
            return found

        def of_data_ranks(x: Tensor) -> Tensor:
            by_rank: Tensor = x.unflatten(0, (size, -1))  # [size * n, ..] -> [size, n, ..]
            return by_rank[first].flatten(0, 1)  # [data ranks * n, ..]

        return recursively_apply(of_data_ranks, found)

    def backward(self, loss: Tensor, **_: Any) -> None:
        """Run backward such that gradients are those of the mean of `loss` over data ranks.

        This is what DDP computes, while the run sums gradients over data ranks.
        """
        self.run.backward(loss / self.run.dp_size, last=self.sync_gradients)

    def clip_grad_norm_(self, *_: Any, **__: Any) -> Tensor:
        """Return the gradient norm and clip nothing: `run.step` clips."""
        return torch.tensor(self.run.grad_norm(), dtype=torch.float64)

    def prepare_model(self, model: nn.Module, *_: Any, **__: Any) -> nn.Module:
        """Return the model unchanged: the run has prepared it."""
        return model

    def prepare_optimizer(self, optimizer: Any, *_: Any, **__: Any) -> Any:
        """Return the optimizer unchanged: its `step` calls that of the run."""
        return optimizer
