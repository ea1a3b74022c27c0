"""`ParallelRun`: a model of the caller's, trained from the caller's own loop.

B batch, S sequence
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property, partial
from numbers import Real
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from isp.checkpoint import Checkpointer
from isp.checkpoint.plain import Plain
from isp.checkpoint.state import check_shapes
from isp.config import JobConfig
from isp.config.sections import CheckpointConfig
from isp.core.comm import Mesh
from isp.core.layers.vocab_loss import IGNORED
from isp.core.mesh import Axis
from isp.core.optim.torch_optimizer import MakeOptimizer
from isp.loop.asked import Asking
from isp.loop.callers_graphs import CallersGraphs
from isp.loop.gathered_weights import GatheredWeights
from isp.loop.off_device import OffDevice
from isp.loop.own_losses import OwnLosses
from isp.loop.parameter_guard import ParameterGuard
from isp.loop.peft_adapters import turned_off
from isp.loop.rows import RowReader
from isp.models.build import parameter_shapes
from isp.models.traced_model import TracedModel
from isp.step.saved_step import SavedStep
from isp.step.train_step import StepOutcome, make_train_step

__all__ = ["ParallelRun"]

_EXTRA = "extra"
"""The key of the caller's own values in a checkpoint."""


class ParallelRun(OwnLosses):
    """A model in training: its loss, its steps, its weights.

        run = isp.parallelize(model, "config.yaml")
        for input_ids, labels in data:  # e.g. by DistributedSampler(.., run.dp_size, run.dp_rank)
            loss = run.loss(input_ids, labels)
            run.step(loss)
        run.save_pretrained(folder)

    Give all ranks of a tensor group the same sequences, and each data rank its own. Between steps
    no transfer is in flight: you may read parameters (this rank's shards) and write them, if all
    ranks that hold a parameter write the same.
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
        self._saved = SavedStep(self.train_step)
        self.num_steps = self._num_tokens = 0
        """Steps so far, including skipped ones and those before `load`, and their tokens."""
        self._off_device = OffDevice(self.train_step, device)
        self._graphs = CallersGraphs(self.train_step, mesh)
        size, check_length = mesh[Axis.TENSOR].size, partial(traced.check_length, config.parallel)
        self._rows = RowReader(size, traced.vocab_rows, traced.vocab_size, device, check_length)
        self._asking = Asking(traced, self._rows)

    @property
    def dp_rank(self) -> int:
        """The data rank, from 0 to `dp_size` - 1; its ranks get the same sequences."""
        return self.mesh[Axis.DATA].rank

    @property
    def dp_size(self) -> int:
        """The number of data ranks, each with its own sequences."""
        return self.mesh[Axis.DATA].size

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer passed to `parallelize`; None: the configuration's update rule is used."""
        updates = self.train_step.optimizer.torch_updates
        return None if updates is None else updates.optimizer

    def loss(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        position_ids: Tensor | None = None,
        *,
        attention_mask: None = None,
    ) -> Tensor:
        """The mean loss over the labels of all ranks, a scalar to pass to `step` or `backward`.

        `input_ids`, `labels` and `position_ids` [B, S] are whole sequences. As in transformers,
        `labels` are the tokens themselves, -100 where no loss is computed, and are shifted here;
        None: all tokens but the first of each document. Without any label the loss is 0, and a
        warning says so once. Packed documents begin where
        `position_ids` restart. The host does not wait for inputs in its own memory to be copied:
        do not refill page-locked ones before the step is over. All ranks of a tensor group pass the
        same; if they differ, all raise ValueError, on CUDA from the second call on in `step`. The
        gradient is this rank's part; under `torch.no_grad()` this evaluates. Raises TypeError or
        ValueError for arguments that do not fit, among them an `attention_mask`, which only
        `log_probs`, `logits` and `hidden` take; RuntimeError if weights were frozen, unfrozen,
        replaced or converted since `parallelize`; so does its backward outside of `step` and
        `backward`.
        """
        if attention_mask is not None:
            raise ValueError(
                f"run.loss(.., attention_mask=..): leave it out, pad sequences at their end and set"
                f" the labels of padding to {IGNORED}; padding at the start needs"
                f" run.log_probs(.., attention_mask=..)"
            )
        self._asking.check_predicts("loss")
        self._check_stages("loss")
        batch = self._rows.read(input_ids, labels, position_ids)
        self._check(trains=torch.is_grad_enabled())
        self._check_trained("loss")
        return self._graphs.loss(batch)

    def train(self, mode: bool = True) -> Self:
        """Set training mode (dropout on) or evaluation mode, as `nn.Module.train`."""
        self.model.train(mode)
        return self

    def eval(self) -> Self:
        """The same as `train(False)`."""
        return self.train(False)

    @contextmanager
    def adapters_off(self) -> Iterator[None]:
        """A context without the LoRA adapters of PEFT: the reference of the trained model.

        Use it under `torch.no_grad()`, else it raises RuntimeError. Raises ValueError for a model
        without adapters, or with others than plain LoRA.
        """
        with turned_off(self.model):
            before, self._adapters_are_off = self._adapters_are_off, True
            try:
                yield
            finally:
                self._adapters_are_off = before

    def to(self, device: str | torch.device) -> Self:
        """Move weights, main gradients and optimizer states to "cpu", or back to the device.

        Use it to free the device for another phase, such as generation. On CPU ranks nothing
        moves. Until they are back, computing, saving or reading raises RuntimeError, and
        parameters have no memory. The host memory stays reserved. Raises ValueError for another
        device, MemoryError if the host has too little memory, and RuntimeError between `backward`
        and the step.
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
        self._guard.check(trains=False)
        self._off_device.leave()

    def zero_grad(self) -> None:
        """Drop results that wait for a backward, and the gradients since the last step."""
        self._graphs.drop()

    def step(self, loss: Tensor | None = None, lr: float | None = None) -> StepOutcome:
        """Backward of `loss`, reduction, clipping and update; `lr` None: `optimizer.lr`.

        Without a loss, it ends the step of `backward`, and the outcome's loss is the sum of the
        losses passed there, over data ranks. Raises RuntimeError for a loss that is not the result
        of the last call of `loss`, and if there was no `backward`; ValueError for `lr` with an
        optimizer of your own.
        """
        if lr is not None:
            _check_rate(lr)
        if lr is not None and self.optimizer is not None:
            raise ValueError(
                f"run.step(lr={lr}): run.optimizer's groups and schedulers have the rate"
            )
        lr = self.config.optimizer.lr if lr is None else lr
        self._check(trains=True)
        if loss is None:
            outcome = self._graphs.update(lr)
        else:
            outcome = self._graphs.step(loss, lr)
        self.num_steps += 1
        self._num_tokens += outcome.valid_tokens
        if not self._has_stepped:
            self.mesh.set_timeout(self.config.comm.train_timeout_seconds)
            self._has_stepped = True
        return outcome

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the weights as transformers does, so that `from_pretrained` loads them.

        All ranks call it; rank 0 writes, block by block, in the training dtype. PEFT adapters are
        written as PEFT does, without the base model. Raises CheckpointError on all ranks if rank 0
        cannot write.
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
        """Yield names and whole weights as `save_pretrained` writes them, e.g. for inference.

        All ranks must call it and iterate to the end. Tensors are on the device, belong to the
        caller, and have `dtype` if they are floating-point (None: the training dtype). They are
        yielded on all ranks, or on `to_rank` alone. One block is whole at a time. With PEFT, names
        are those of the PeftModel's `state_dict`, adapters are separate, and stacks of experts are
        whole; `merge_adapters` merges adapters into the base model's weights, as `merge_and_unload`
        does, named as in its folder. Raises ValueError for a rank that does not exist.
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
        """Write a checkpoint `step_<num_steps>` into `folder`; all ranks call it.

        It contains weights, optimizer states, random states, and `extra`: plain values (rank 0's)
        and tensors, in lists and dicts with string keys, of up to 98 levels. It is published by
        one rename, so a failure leaves earlier checkpoints intact. `keep` is the number of
        checkpoints to keep, 0: all. Gradients since the last step are not saved. Raises
        CheckpointError on all ranks if any rank cannot write.
        """
        self._check(trains=False)
        self.train_step.optimizer.take_up_weights(only_written=True)
        self._saved.save(
            self._checkpointer.at(Path(folder), keep_latest_k=keep),
            self.num_steps,
            tokens=self._num_tokens,
            shared={_EXTRA: dict(extra or {})},
            wait=True,
        )

    def load(self, path: str | Path, *, weights_only: bool = False) -> dict[str, Plain]:
        """Load a checkpoint of `save` or `isp train`, of any layout; returns its `extra`.

        All ranks call it. `path` is a checkpoint, or a folder of them: then the newest good one.
        Random states are loaded if the layout is the same. `weights_only` leaves out random states,
        optimizer states and the step count. Raises ValueError for another model or update rule,
        and CheckpointError if there is no good checkpoint.
        """
        self._check(trains=False)
        self._graphs.drop()
        own, model = self._checkpointer.at(Path(path)), self._traced
        info = own.choose() or own.choose_initial(Path(path))
        check_shapes(info, parameter_shapes(model), model.earlier_names)
        found = self._saved.load(own, info, weights_only=weights_only)
        self.num_steps, self._num_tokens = (0, 0) if weights_only else (found.step, found.tokens)
        return dict(found.shared.get(_EXTRA, {}))

    @cached_property
    def _checkpointer(self) -> Checkpointer:
        """Opened, which all ranks do together, by the first that is saved or loaded."""
        return Checkpointer("", CheckpointConfig(), world=self.mesh[Axis.WORLD])

    def _check(self, *, trains: bool) -> None:
        """Raise RuntimeError for what cannot be computed or trained now."""
        if self._off_device.away:
            raise RuntimeError(
                f"the weights are on the host: call run.to({str(self.device)!r}) to bring them back"
            )
        if trains and self._adapters_are_off:
            raise RuntimeError(
                "adapters have no gradient in run.adapters_off(): compute there under"
                " torch.no_grad(), and train after it"
            )
        self._guard.check(trains=trains)


def _check_rate(lr: object) -> None:
    """Raise TypeError or ValueError for a learning rate that is none."""
    if isinstance(lr, bool) or not isinstance(lr, Real):
        raise TypeError(
            f"run.step(lr={lr!r}): lr is a {type(lr).__name__}, pass a number such as 1e-5, or"
            f" leave it out for optimizer.lr"
        )
    if not 0 <= float(lr) < math.inf:
        raise ValueError(f"run.step(lr={lr}): lr must be a finite number of at least 0")
