"""One training step: micro-batches in, updated weights and a few numbers out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from isp.comm import Mesh
from isp.data.batch import MicroBatch
from isp.layers.loss import IGNORED
from isp.optim import MainGradients, Zero1Optimizer
from isp.parallel import Axis, Mode
from isp.scheduler_hook import ISPCommunicatorSchedulerHook, SchedulerHook
from isp.train.batches import slice_sequence
from isp.train.build import BuiltModel
from isp.weights.trace import sequential_actions

__all__ = ["StepOutcome", "TrainStep"]

_CHUNK = 0
"""The one model chunk of a run without a pipeline."""


@dataclass(frozen=True, kw_only=True)
class StepOutcome:
    """What a step did; the same on every rank."""

    loss: float
    """Mean loss of the valid tokens of the global batch, before the update."""
    grad_norm: float
    """Global gradient norm, without the loss scale and before clipping."""
    skipped: bool
    """Whether the update was left out because the gradients were not finite."""
    valid_tokens: int
    """Tokens of the global batch that had a label."""


class TrainStep:
    """Forward, backward, reduction and update over the micro-batches of a step.

    [Note: One normalisation] A loss is the sum over valid tokens, divided once by the number of
    valid tokens in the global batch; every reduction is a SUM. So masks of any shape, a rank
    without a valid token, and groups of any size give the gradient of the global mean.
    """

    def __init__(
        self,
        built: BuiltModel,
        gradients: MainGradients,
        optimizer: Zero1Optimizer,
        mesh: Mesh,
        *,
        micro_num: int,
    ) -> None:
        self.model = built.model
        self.gradients = gradients
        self.optimizer = optimizer
        self.mesh = mesh
        self.hook = SchedulerHook()
        self._actions = sequential_actions(micro_num)
        if built.communicator is not None:
            built.communicator.deliver_to(gradients)
            built.communicator.register_prerequisite_for_forward_prefetch_hooks(self._published)
            self.hook = ISPCommunicatorSchedulerHook(built.communicator)
        for part in self.model.parts():
            part.register_forward_pre_hook(lambda part, _: self._published(part))
        self._unfinished = False
        """Whether the last step ended with an exception."""
        self.hook.before_step(self._actions)

    def weights_changed(self) -> None:
        """Weights were loaded: what was gathered of the old ones is dropped."""
        self.hook.before_step(self._actions)

    def __call__(self, batches: Sequence[MicroBatch], lr: float) -> StepOutcome:
        """Train on this rank's `batches` (whole rows, the same on a tensor group) at rate `lr`.

        The new weights may still be on their way afterwards: each part of the model waits for its
        own when it is needed. A step that ended with an exception changed nothing, and leaves no
        gradient behind, if all ranks left it at the same place.
        """
        if self._unfinished:
            self.hook.after_step()  # what was still travelling, and was promised to `gradients`
            self.hook.before_step(self._actions)
        self._unfinished = True
        valid = self._sum(Axis.DATA, _count_valid(batches))
        self.gradients.zero()
        total = torch.zeros((), dtype=torch.float64, device=valid.device)
        for index, batch in enumerate(batches):
            if index == len(batches) - 1:
                self.gradients.expect_last()
            total += self._forward_backward(batch, valid.clamp(min=1))
        self.hook.after_step()
        self.gradients.reduce()
        result = self.optimizer.step(lr, wait=False)
        self.hook.before_step(self._actions)
        self._unfinished = False
        return StepOutcome(
            loss=self._sum(self._loss_axis, total).item(),
            grad_norm=result.grad_norm,
            skipped=result.skipped,
            valid_tokens=int(valid.item()),
        )

    @torch.no_grad()
    def evaluate(self, batches: Sequence[MicroBatch]) -> float:
        """The mean loss of the valid tokens of `batches` over all data ranks; changes nothing."""
        self.hook.before_step(sequential_actions(len(batches), training=False))
        valid = self._sum(Axis.DATA, _count_valid(batches))
        total = torch.zeros((), dtype=torch.float64, device=valid.device)
        for batch in batches:
            total += self._forward(batch)
        self.hook.before_step(self._actions)
        return (self._sum(self._loss_axis, total) / valid.clamp(min=1)).item()

    def _forward_backward(self, batch: MicroBatch, divisor: Tensor) -> Tensor:
        """Adds the gradient of a micro-batch; its part of the loss."""
        loss = self._forward(batch) / divisor
        self.hook.before_backward(_CHUNK)
        self.optimizer.scale_loss(loss).backward()
        self.hook.after_backward(_CHUNK)
        return loss.detach()

    def _forward(self, batch: MicroBatch) -> Tensor:
        """The summed loss of the tokens that this rank computes."""
        part = batch
        if self.mesh.topology.mode is Mode.ISP:
            part = slice_sequence(batch, self.mesh[Axis.TENSOR])
        self.hook.before_forward(_CHUNK)
        logits = self.model(part.tokens, part.positions, part.cu_seqlens)
        self.hook.after_forward(_CHUNK)
        labels = batch.labels if self.model.splits_logits else part.labels
        self.hook.before_criterion()
        loss = self.model.token_losses(logits, labels).sum()
        self.hook.after_criterion()
        return loss

    def _published(self, part: nn.Module) -> None:
        for parameter in part.parameters():
            self.optimizer.published(parameter)

    @property
    def _loss_axis(self) -> Axis:
        """The ranks whose losses are of different tokens; a sequence's ranks may have the same."""
        return Axis.DATA if self.model.splits_logits else Axis.STAGE

    def _sum(self, axis: Axis, x: Tensor) -> Tensor:
        return self.mesh[axis].all_reduce(x, label="metrics").wait()


def _count_valid(batches: Sequence[MicroBatch]) -> Tensor:
    return torch.stack([(batch.labels != IGNORED).sum() for batch in batches]).sum().double()
