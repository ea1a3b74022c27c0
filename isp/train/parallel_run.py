"""`ParallelRun`: a model of the caller's, trained from the caller's own loop.

B batch, S sequence
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from isp.checkpoint.plain import Plain
from isp.comm import Mesh
from isp.config import JobConfig
from isp.models.model import TracedModel
from isp.optim.torch_optimizer import MakeOptimizer
from isp.parallel import Axis
from isp.train.asked import Asking
from isp.train.callers_graphs import CallersGraphs
from isp.train.gathered_weights import GatheredWeights
from isp.train.loop_checkpoints import LoopCheckpoints, LoopProgress
from isp.train.off_device import OffDevice
from isp.train.own_losses import OwnLosses
from isp.train.parameter_guard import ParameterGuard
from isp.train.peft_adapters import turned_off
from isp.train.rows import RowReader
from isp.train.step import make_train_step
from isp.train.step_work import StepOutcome, StepWork

__all__ = ["ParallelRun"]


class ParallelRun(OwnLosses):
    """A model under way: its loss, its steps, its weights.

        run = isp.parallelize(model, "config.yaml")
        for input_ids, labels in data:  # e.g. by DistributedSampler(.., run.dp_size, run.dp_rank)
            loss = run.loss(input_ids, labels)
            run.step(loss)
        run.save_pretrained(folder)

    The ranks of a tensor group are given the same rows, the data ranks each their own. Between
    steps nothing is under way: parameters (this rank's shards) may be read, and what is written
    into them, on all ranks that have them, counts.
    """

    def __init__(
        self,
        traced: TracedModel,
        config: JobConfig,
        mesh: Mesh,
        device: torch.device,
        make_optimizer: MakeOptimizer | None = None,
    ) -> None:
        self.model = traced.model
        self._traced = traced
        self.config = config
        self.mesh = mesh
        self.device = device
        self.train_step = make_train_step(
            config,
            mesh,
            device,
            model=traced,
            weights_may_change=True,
            make_optimizer=make_optimizer,
        )
        mesh.set_timeout(config.comm.init_timeout_seconds)
        self._has_stepped = self._adapters_are_off = False
        self._guard = ParameterGuard(self.model, self.train_step.built.parameters)
        self.weights = GatheredWeights(traced, self.train_step.built, mesh, config.training.dtype)
        self._checkpoints = LoopCheckpoints(self.train_step, mesh, device)
        self._done = LoopProgress()
        self._off_device = OffDevice(self.train_step, device)
        self._graphs = CallersGraphs(self.train_step, mesh)
        self._rows = RowReader(mesh[Axis.TENSOR].size, traced.vocab_size, device)
        self._asking = Asking(traced, self._rows)
        self._pending: tuple[Tensor, StepWork, RemovableHandle] | None = None
        """The loss to go backward from, what it was found of, and what keeps others from it."""

    @property
    def dp_rank(self) -> int:
        """The data rank, of `dp_size`; those of one rank share their rows."""
        return self.mesh[Axis.DATA].rank

    @property
    def dp_size(self) -> int:
        """Data ranks, each with rows of its own."""
        return self.mesh[Axis.DATA].size

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """What `parallelize` was given; None: `optimizer` of the configuration says the update."""
        updates = self.train_step.optimizer.torch_updates
        return None if updates is None else updates.optimizer

    @property
    def num_steps(self) -> int:
        """Steps so far, skipped ones and those before `load` too."""
        return self._done.steps

    def loss(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> Tensor:
        """The mean loss over the labels of all ranks, to be given to `step`; [].

        `input_ids`, `labels` and `position_ids` [B, S] are whole rows. As in transformers, `labels`
        are the tokens themselves, -100 where there is nothing to predict, and are shifted here;
        None: every token but the first of each document. Documents that are packed in a row begin
        where `position_ids` restart. The host waits for none of them that are in its own memory, so
        page-locked ones are not to be filled again before the step is over. Its gradient
        is this rank's part; without gradients it is an evaluation. Raises ValueError for shapes
        that do not fit, RuntimeError for weights that since `parallelize` were frozen, thawed,
        replaced or converted; so does its backward outside of `step`.
        """
        self._graphs.refuse("loss")
        self._asking.check_predicts("loss")
        self._pending = None  # what the last call began is dropped
        self._check_stages("loss")
        batch = self._rows.read(input_ids, labels, position_ids)
        self._check(trains=torch.is_grad_enabled())
        self._check_trained("loss")
        if not torch.is_grad_enabled():
            found = self.train_step.evaluate([[batch]])
            return torch.tensor(math.nan if found is None else found, dtype=torch.float64)
        step = self.train_step
        work = step.start([batch])
        loss = step.forward(work, 0)
        loss = loss + (step.over_ranks(work.total) - loss.detach())
        self._pending = loss, work, loss.register_hook(_refuse_backward)
        return loss

    def train(self, mode: bool = True) -> Self:
        """Modules in the mode of training (dropout is on) or not, as `nn.Module.train`."""
        self.model.train(mode)
        return self

    def eval(self) -> Self:
        """As `train(False)`."""
        return self.train(False)

    @contextmanager
    def adapters_off(self) -> Iterator[None]:
        """In this context LoRA adapters of PEFT add nothing: the reference of the trained model.

        What is computed has to be under `torch.no_grad()`, else it raises RuntimeError. Raises
        ValueError for a model without adapters, or with others than plain LoRA.
        """
        with turned_off(self.model):
            before, self._adapters_are_off = self._adapters_are_off, True
            try:
                yield
            finally:
                self._adapters_are_off = before

    def to(self, device: str | torch.device) -> Self:
        """Weights, main gradients and optimizer states leave the device for "cpu", or come back.

        For a phase of others, such as generation; on a rank that computes on the CPU nothing is
        moved. Until they are back nothing may be computed, saved or read, which raises RuntimeError
        here, and parameters have no memory. The memory that it takes of the host stays reserved.
        Raises ValueError for another device, MemoryError if the host has too little memory, and
        RuntimeError between `backward` and the step.
        """
        target = torch.device(device)
        home = target.type == self.device.type and target.index in (None, self.device.index)
        if not home and target.type != "cpu":
            raise ValueError(f"run.to({str(device)!r}): a run is on {self.device}, or on 'cpu'")
        if home and self._off_device.away:
            self._off_device.come_back()
        elif not home and not self._off_device.away:
            self._leave()
        return self

    def _leave(self) -> None:
        self._graphs.refuse("to")
        self._graphs.drop()
        self._pending = None
        self._guard.check(trains=False)
        self._off_device.leave()

    def zero_grad(self) -> None:
        """Drop what waits for a backward, and the gradients since the last step."""
        self._graphs.drop()

    def step(self, loss: Tensor | None = None, lr: float | None = None) -> StepOutcome:
        """Reduction, clipping and update, after the backward of `loss`; `lr` None: `optimizer.lr`.

        Without a loss, behind `backward`; the outcome's loss is the sum of what that was given,
        over data ranks. Raises RuntimeError for any loss but the one that the last call of `loss`
        gave, as it is, and where there was no `backward`; ValueError for a rate beside an optimizer
        of the caller's own.
        """
        if lr is not None and self.optimizer is not None:
            raise ValueError(
                f"run.step(lr={lr}): run.optimizer's groups and schedulers have the rate"
            )
        lr = self.config.optimizer.lr if lr is None else lr
        self._check(trains=True)
        if loss is None:
            outcome = self._graphs.update(lr)
        else:
            if self._pending is None or self._pending[0] is not loss:
                raise RuntimeError(
                    "step takes the loss that the last call of loss gave, as it is, once; what was"
                    " made of other results goes to backward, and step() is called without it"
                )
            (_, work, refusal), self._pending = self._pending, None
            refusal.remove()
            self.train_step.backward(loss, last=True)
            outcome = self.train_step.finish(work, lr)
            self._graphs.drop()
        steps, tokens = self._done
        self._done = LoopProgress(steps + 1, tokens + outcome.valid_tokens)
        if not self._has_stepped:
            self.mesh.set_timeout(self.config.comm.train_timeout_seconds)
            self._has_stepped = True
        return outcome

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the weights as transformers does, so that `from_pretrained` loads them.

        All ranks call it; rank 0 writes, block by block, in the dtype of training. Adapters
        of PEFT are written as PEFT writes them, alone. Raises CheckpointError on all ranks if rank
        0 cannot write.
        """
        self._check(trains=False)
        self.weights.save_pretrained(Path(folder))

    def named_weights(
        self,
        dtype: torch.dtype | None = None,
        *,
        to_rank: int | None = None,
        merge_adapters: bool = False,
    ) -> Iterator[tuple[str, Tensor]]:
        """Names and whole weights as `save_pretrained` writes them, for an engine of inference.

        All ranks call it, and iterate to the end. Tensors are on the device, in `dtype` if they are
        floating-point (None: that of training), the iterator's caller's own, and on all ranks or
        `to_rank` alone; of the model a block is whole at a time. Of a model of PEFT names are its
        own, adapters apart; `merge_adapters`: those of the model below, with the adapters in its
        weights, as `merge_and_unload` gives them. Raises ValueError for a rank that is none.
        """
        world = self.mesh.topology.world_size
        if to_rank is not None and not 0 <= to_rank < world:
            raise ValueError(f"to_rank={to_rank} must be a rank, from 0 to {world - 1}")
        self._check(trains=False)
        wanted = to_rank in (None, self.mesh.rank)
        return self.weights.named(dtype, wanted=wanted, merge_adapters=merge_adapters)

    def save(
        self, folder: str | Path, extra: Mapping[str, Plain] | None = None, *, keep: int = 0
    ) -> None:
        """Write a checkpoint `step_<num_steps>` into `folder`, each rank its part; all call it.

        Weights, states of the optimizer, random states, and `extra`: plain values (rank 0's) and
        tensors, in lists and dicts by strings. Its name is given when all is written, so what was
        there before stays good until then; `keep`: only as many of the newest, 0: all. What
        `backward` has found since the last step is not saved. Raises CheckpointError on all ranks
        if any cannot write.
        """
        self._check(trains=False)
        self._checkpoints.save(Path(folder), self._done, dict(extra or {}), keep=keep)

    def load(self, path: str | Path, *, weights_only: bool = False) -> dict[str, Plain]:
        """Load a checkpoint of `save` or `isp train`, of any layout; its `extra`. All call it.

        `path` is a checkpoint, or a folder of them: then the newest good one. Random states are
        loaded where the layout is the same. `weights_only`: neither these nor the optimizer's
        states and count of steps. Raises ValueError for another model or update rule, and
        CheckpointError if there is no good one.
        """
        self._check(trains=False)
        self._pending = None
        self._graphs.drop()
        self._done, extra = self._checkpoints.load(Path(path), weights_only=weights_only)
        return extra

    def _check(self, *, trains: bool) -> None:
        """Raise RuntimeError for what cannot be computed or trained now."""
        if self._off_device.away:
            raise RuntimeError(
                f"the weights are on the host: call run.to({str(self.device)!r}) to bring them back"
            )
        if trains and self._adapters_are_off:
            raise RuntimeError(
                "adapters have no gradient in run.adapters_off(): compute there under"
                " torch.no_grad(), and train behind it"
            )
        self._guard.check(trains=trains)


def _refuse_backward(_: Tensor) -> None:
    """Raise RuntimeError where a loss goes backward by itself: no gradient would be used."""
    raise RuntimeError(
        "the loss went backward outside of step: leave out loss.backward(), clipping and an"
        " optimizer of your own, all of which run.step(loss, lr=..) does"
    )
