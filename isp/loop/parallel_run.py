"""`ParallelRun`: a user's model in training, driven by the user's own loop.

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
"""Key of the caller's own values in a checkpoint."""


class ParallelRun(OwnLosses):
    """A sharded model in training, with its loss, steps, weights and checkpoints.

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
        """Number of steps so far, including skipped ones and those of a loaded checkpoint."""
        self._off_device = OffDevice(self.train_step, device)
        self._graphs = CallersGraphs(self.train_step, mesh)
        size, check_length = mesh[Axis.TENSOR].size, partial(traced.check_length, config.parallel)
        self._rows = RowReader(size, traced.vocab_rows, traced.vocab_size, device, check_length)
        self._asking = Asking(traced, self._rows)

    @property
    def dp_rank(self) -> int:
        """The data rank, from 0 to `dp_size` - 1; ranks with the same one share their sequences."""
        return self.mesh[Axis.DATA].rank

    @property
    def dp_size(self) -> int:
        """The number of data ranks, each with sequences of its own."""
        return self.mesh[Axis.DATA].size

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The torch optimizer that updates; None if an update rule of ISP does."""
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
        """Return the mean loss over the labels of all ranks, to pass to `step` or `backward`.

        The loss is a float64 scalar [], the same on all ranks. `input_ids`, `labels` and
        `position_ids` [B, S] are whole sequences; S is a multiple of `parallel.tensor.size`. As in
        transformers, `labels` are the tokens themselves, -100 where no loss is computed, and are
        shifted here; None: all tokens but the first of each document. Without any label the loss is
        0, and a warning is logged once. Packed documents begin where `position_ids` restart. All
        ranks of a tensor group pass the same. The gradient is this rank's part. Under
        `torch.no_grad()` it evaluates, without dropout if you called `eval`.

        Copies of inputs from the host may still run when this returns: do not refill page-locked
        inputs before the step is over.

        Raises TypeError or ValueError for arguments that do not fit, among them an
        `attention_mask`, which only `log_probs`, `logits` and `hidden` take; ValueError on all
        ranks if those of a tensor group differ (on CUDA, from the second call on, in `step`);
        ValueError with gradients for pipeline stages: use `forward_backward`; RuntimeError if
        weights were frozen, unfrozen, replaced or converted since `parallelize`, and with gradients
        if all are frozen. The backward of the loss raises RuntimeError outside of `step` and
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
        """Set training mode (dropout on) or evaluation mode, as `nn.Module.train`; returns self."""
        self.model.train(mode)
        return self

    def eval(self) -> Self:
        """Set evaluation mode (dropout off): `train(False)`."""
        return self.train(False)

    @contextmanager
    def adapters_off(self) -> Iterator[None]:
        """Turn PEFT's LoRA adapters off in this context: the model is then its own reference.

        Compute in it under `torch.no_grad()`: with gradients the run's methods raise RuntimeError.
        Raises ValueError for a model without adapters, or with others than plain LoRA.
        """
        with turned_off(self.model):
            before, self._adapters_are_off = self._adapters_are_off, True
            try:
                yield
            finally:
                self._adapters_are_off = before

    def to(self, device: str | torch.device) -> Self:
        """Move weights and optimizer states to "cpu", or back to the run's device; returns self.

        Use it to free the device for another phase, such as generation. The memory of main
        gradients is freed too. On CPU ranks nothing moves. Until the weights are back, computing,
        saving or reading them raises RuntimeError, and parameters have no memory. The host memory
        stays reserved. Raises ValueError for another device, MemoryError if the host has too little
        memory, and RuntimeError between `backward` and the step.
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
        """Move the run's tensors to the host."""
        self._graphs.refuse("to")
        self._graphs.drop()
        self._guard.check(trains=False)
        self._off_device.leave()

    def zero_grad(self) -> None:
        """Drop the gradients since the last step, and results that wait for a backward."""
        self._graphs.drop()

    def step(self, loss: Tensor | None = None, lr: float | None = None) -> StepOutcome:
        """Run the backward of `loss`, sum gradients over ranks, clip them, and update the weights.

        `lr` None: `optimizer.lr` of the configuration. Returns loss, global gradient norm and
        number of labels of the step, the same on all ranks. Without a `loss`, it ends the step of
        `backward`, and the outcome's loss is the sum of the losses passed there, over data ranks. A
        step whose gradients are not finite, or without any label, is skipped: `outcome.skipped`.
        Raises RuntimeError for a loss that is not the result of the last call of `loss`, and if
        there was no `backward`; TypeError or ValueError for an `lr` that is no rate, and ValueError
        for `lr` with a torch optimizer.
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
        if not self._has_stepped:  # the first step, with more time, also loads kernels
            self.mesh.set_timeout(self.config.comm.train_timeout_seconds)
            self._has_stepped = True
        return outcome

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the weights as transformers does, so that `from_pretrained` loads them.

        All ranks call it; rank 0 writes, block by block, in the dtypes of training. Of a PEFT
        model, only the adapters are written, as PEFT does. Raises CheckpointError on all ranks if
        rank 0 cannot write.
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
        """Yield names and full weights as `save_pretrained` writes them, e.g. for inference.

        All ranks must call it and iterate to the end. Tensors are on the device, belong to the
        caller, and have `dtype` if they are floating-point (None: that of training, in
        which routers may be float32). They are
        yielded on all ranks, or on `to_rank` only. One block at a time is gathered. With PEFT,
        names are those of the PeftModel's `state_dict`, adapters are separate, and experts are
        stacked; `merge_adapters` merges adapters into the base model's weights, as
        `merge_and_unload` does, with the names that the base model is saved with. Raises ValueError
        for a rank that does not exist, or for an adapter on a tied weight.
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
        and tensors, in lists and dicts with string keys, up to 98 levels deep. It is published by
        one rename, so a failure leaves earlier checkpoints intact. `keep` is the number of
        checkpoints to keep, 0: all. Gradients since the last step are not saved. Raises
        CheckpointError on all ranks if any rank cannot write.
        """
        self._check(trains=False)
        # The caller may have written weights; checkpoints hold the float32 masters.
        self.train_step.optimizer.take_up_weights(only_written=True)
        self._saved.save(
            self._checkpointer.at(Path(folder), keep_latest_k=keep),
            self.num_steps,
            tokens=self._num_tokens,
            shared={_EXTRA: dict(extra or {})},
            wait=True,
        )

    def load(self, path: str | Path, *, weights_only: bool = False) -> dict[str, Plain]:
        """Load a checkpoint of `save` or `isp train`, saved in any layout; return its `extra`.

        All ranks call it. `path` is a checkpoint, or a folder of which the newest good one is
        loaded. Random states are loaded if the layout is the same. `weights_only` leaves out random
        states, optimizer states and the step count. Gradients since the last step are dropped.
        Raises ValueError for another model or update rule, and CheckpointError if there is no good
        checkpoint.
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
        """The checkpointer; opening it is a collective, done at the first save or load."""
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
    """Raise TypeError for a learning rate that is no number, ValueError if infinite or negative."""
    if isinstance(lr, bool) or not isinstance(lr, Real):
        raise TypeError(
            f"run.step(lr={lr!r}): lr is a {type(lr).__name__}, pass a number such as 1e-5, or"
            f" leave it out for optimizer.lr"
        )
    if not 0 <= float(lr) < math.inf:
        raise ValueError(f"run.step(lr={lr}): lr must be a finite number of at least 0")
