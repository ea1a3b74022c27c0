"""One training step: micro-batches in, updated weights and a few numbers out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from isp.comm import Mesh
from isp.data.batch import MicroBatch
from isp.layers.loss import IGNORED
from isp.optim import MainGradients, Zero1Optimizer
from isp.parallel import Axis, Mode
from isp.train.batches import slice_sequence
from isp.train.build import BuiltModel
from isp.weights.trace import sequential_actions

__all__ = ["StepOutcome", "TrainStep"]


@dataclass(frozen=True, kw_only=True)
class StepOutcome:
    """What a step did; the same on every rank."""

    loss: float
    """Mean loss of the valid tokens of the global batch, before the update."""
    grad_norm: float
    """Global gradient norm before clipping."""
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
        self.model, self.communicator = built
        self.gradients = gradients
        self.optimizer = optimizer
        self.mesh = mesh
        self._actions = sequential_actions(micro_num)
        if self.communicator is not None:
            self.communicator.deliver_to(gradients)
            self.communicator.begin(self._actions)

    def weights_changed(self) -> None:
        """Weights were loaded: what was gathered of the old ones is dropped."""
        if self.communicator is not None:
            self.communicator.begin(self._actions)

    def __call__(self, batches: Sequence[MicroBatch], lr: float) -> StepOutcome:
        """Train on this rank's `batches` (whole rows, the same on a tensor group) at rate `lr`."""
        valid = self._sum(Axis.DATA, _count_valid(batches))
        self.gradients.zero()
        total = torch.zeros((), dtype=torch.float64, device=valid.device)
        for index, batch in enumerate(batches):
            if index == len(batches) - 1:
                self.gradients.expect_last()
            loss = self._loss_sum(batch) / valid.clamp(min=1)
            loss.backward()
            total += loss.detach()
        if self.communicator is not None:
            self.communicator.finish()
        self.gradients.reduce()
        result = self.optimizer.step(lr)
        if self.communicator is not None:
            self.communicator.begin(self._actions)
        return StepOutcome(
            loss=self._sum(self._loss_axis, total).item(),
            grad_norm=result.grad_norm,
            skipped=result.skipped,
            valid_tokens=int(valid.item()),
        )

    @torch.no_grad()
    def evaluate(self, batches: Sequence[MicroBatch]) -> float:
        """The mean loss of the valid tokens of `batches` over all data ranks; changes nothing."""
        if self.communicator is not None:
            self.communicator.begin(sequential_actions(len(batches), training=False))
        valid = self._sum(Axis.DATA, _count_valid(batches))
        total = torch.zeros((), dtype=torch.float64, device=valid.device)
        for batch in batches:
            total += self._loss_sum(batch)
        if self.communicator is not None:
            self.communicator.begin(self._actions)
        return (self._sum(self._loss_axis, total) / valid.clamp(min=1)).item()

    def _loss_sum(self, batch: MicroBatch) -> Tensor:
        """The summed loss of the tokens that this rank computes."""
        if self.mesh.topology.mode is Mode.ISP:
            batch = slice_sequence(batch, self.mesh[Axis.TENSOR])
        logits = self.model(batch.tokens, batch.positions, batch.cu_seqlens)
        return self.model.token_losses(logits, batch.labels).sum()

    @property
    def _loss_axis(self) -> Axis:
        """The ranks whose losses are of different tokens: in isp mode also those of a sequence."""
        return Axis.STAGE if self.mesh.topology.mode is Mode.ISP else Axis.DATA

    def _sum(self, axis: Axis, x: Tensor) -> Tensor:
        return self.mesh[axis].all_reduce(x, label="metrics").wait()


def _count_valid(batches: Sequence[MicroBatch]) -> Tensor:
    return torch.stack([(batch.labels != IGNORED).sum() for batch in batches]).sum().double()
