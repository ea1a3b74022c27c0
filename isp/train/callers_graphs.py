"""`CallersGraphs`: forwards whose per-token results go into a loss of the caller's own.

B batch, S sequence, N tokens whose scores this rank computes in a row
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from isp.comm import Mesh
from isp.comm.tag import Tag
from isp.data.batch import MicroBatch
from isp.layers.loss import IGNORED
from isp.parallel import Axis
from isp.train.step import StepOutcome, TrainStep
from isp.train.step_work import arrange, slice_sequence
from isp.weights.trace import Action, ActionKind

__all__ = ["CallersGraphs", "TokenScores", "padded"]

_CHUNK = 0
_FORWARD, _BACKWARD = (Action(kind, 0) for kind in (ActionKind.FORWARD, ActionKind.BACKWARD))


class TokenScores(NamedTuple):
    """What is known of each token's distribution, [B, S] each; 0 where there is no label."""

    log_probs: Tensor
    """Of the label, by the tokens before it."""
    logsumexp: Tensor
    entropy: Tensor | None = None
    """In nats; None unless it is asked for."""


class _Graph(NamedTuple):
    """A forward that waits for the gradients of its scores."""

    own: Tensor
    """Those that this rank computed, [K, B, N], with their graph."""
    given: Tensor
    """All scores as the caller has them, [K, B S], a leaf."""
    places: Tensor
    """Of each of `own` in `given`, [B, N]; B S for those that nobody gets."""
    num_labels: Tensor


class CallersGraphs:
    """The forwards that are alive, and the step that their backward passes belong to.

    The caller's graph begins at a leaf, all scores of the row; the model's ends at those that this
    rank computed. So the caller's code is the same on all ranks of a sequence, and backward takes
    of its gradients those of the rank's own tokens: equal scalars count once.
    """

    def __init__(self, step: TrainStep, mesh: Mesh) -> None:
        self._step, self._mesh = step, mesh
        self._alive: list[_Graph] = []
        self._begun = False
        """Whether there was a backward since the last step."""
        self._goes_backward = False
        self._loss = self._num_labels = torch.zeros(())

    def scores(self, batch: MicroBatch, rows: int, *, temperature: float, entropy: bool) -> Tensor:
        """The scores of a batch of `rows` whole rows, in their order: [K, B, S].

        Those of place t are of the label that the token at t - 1 predicts. K is 3 with `entropy`.
        """
        step, (chunk,) = self._step, self._step.chunks
        trains = torch.is_grad_enabled()
        if trains and chunk.routers is not None:
            raise ValueError(
                "losses of routers belong to run.loss: set model.router_aux_loss_coef and"
                " model.router_z_loss_coef to 0 for losses of your own"
            )
        if not self._begun and not self._alive:
            step.begin()
        own = arranged = arrange(batch, step.built.sequence)
        if step.mesh.topology.mode.facts.slices_batch:
            own = slice_sequence(arranged, self._mesh[Axis.TENSOR])
        step.hook.before_step((_FORWARD,))
        step.hook.before_forward(_CHUNK)
        output = chunk(own.tokens, own.positions, own.cu_seqlens)
        labels = (arranged if chunk.splits_logits else own).labels
        step.hook.before_criterion()
        found = chunk.scores(output, labels, temperature=temperature, entropy=entropy)  # [K, B, N]
        step.hook.after_criterion()
        step.hook.after_step()
        places = self._places(batch, rows)
        every = found.detach()
        if labels.shape[1] < arranged.labels.shape[1]:
            tensor = self._mesh[Axis.TENSOR]
            every = tensor.all_gather(every, 2, tag=Tag(tensor="scores")).wait()
            own_places = places.chunk(tensor.size, 1)[tensor.rank]
        else:
            own_places = places
        leaf = every.new_zeros(len(every), places.numel() + 1)
        leaf = leaf.index_copy_(1, places.flatten(), every.flatten(1))[:, :-1].contiguous()
        if trains and found.requires_grad:
            leaf.requires_grad_()
            leaf.register_hook(self._check_backward)
            num_labels = (batch.labels != IGNORED).sum().double()
            self._alive.append(_Graph(found, leaf, own_places, num_labels))
        return leaf.view(len(leaf), rows, -1)

    def _places(self, batch: MicroBatch, rows: int) -> Tensor:
        """Where the caller has the score of each arranged token: one place on, in its row."""
        total = batch.tokens.numel()
        length = total // rows
        places = torch.arange(1, total + 1, device=batch.tokens.device).view(rows, length)
        places[:, -1] = total  # the last token of a row predicts nothing
        places = places.view(batch.tokens.shape)
        (arranged,) = self._step.built.sequence.arranged([places], batch.cu_seqlens)
        return arranged

    def backward(self, loss: Tensor) -> None:
        """As `ParallelRun.backward`."""
        if self._begun and self._step.gradients.reduced:
            raise RuntimeError(
                "run.backward behind run.grad_norm(), which has summed the gradients over the"
                " ranks: call run.step() first, or run.zero_grad() to drop them"
            )
        if loss.dim():
            raise ValueError(f"run.backward takes a scalar, got a loss of shape {[*loss.shape]}")
        self._goes_backward = True
        try:
            if loss.requires_grad:
                loss.backward()
            reached = [graph for graph in self._alive if graph.given.grad is not None]
            if not reached:
                raise RuntimeError(
                    "the loss is made of no result of run.log_probs that waits for a backward: each"
                    " goes backward once, in one call of run.backward, and was computed with"
                    " gradients"
                )
            if not self._begun:
                zero = torch.zeros((), dtype=torch.float64, device=loss.device)
                self._begun, self._loss, self._num_labels = True, zero, zero
            for graph in reversed(reached):
                self._go_backward(graph)
        finally:
            self._goes_backward = False
            self._alive = [graph for graph in self._alive if graph.given.grad is None]
        self._loss = self._loss + loss.detach().double()

    def _go_backward(self, graph: _Graph) -> None:
        step, gradient = self._step, graph.given.grad
        assert gradient is not None
        gradient = F.pad(gradient, (0, 1))[:, graph.places]  # [K, B, N]
        step.hook.before_step((_BACKWARD,))
        step.hook.before_backward(_CHUNK)
        graph.own.backward(step.optimizer.scale_loss(gradient))
        step.hook.after_backward(_CHUNK)
        step.hook.after_step()
        self._num_labels = self._num_labels + graph.num_labels

    def grad_norm(self) -> float:
        """As `ParallelRun.grad_norm`."""
        if not self._begun:
            raise RuntimeError("run.grad_norm() comes between run.backward(loss) and run.step()")
        self._step.reduce()
        return self._step.optimizer.grad_norm()

    def update(self, lr: float) -> StepOutcome:
        """As `ParallelRun.step` without a loss."""
        if not self._begun:
            raise RuntimeError("step() without a loss comes behind run.backward(loss)")
        self._alive = []
        totals = torch.stack((self._loss, self._num_labels))
        tag, data = Tag(tensor="metrics"), self._mesh[Axis.DATA]
        self._begun = False
        return self._step.update(lambda: data.all_reduce(totals, tag=tag).wait(), lr)

    def drop(self) -> None:
        """Forget all graphs and gradients; the next step begins with none."""
        self._alive, self._begun = [], False

    def refuse(self, name: str) -> None:
        """Raise RuntimeError where there are gradients of `backward`, which `name` would drop."""
        if self._begun:
            raise RuntimeError(
                f"run.{name} comes between run.backward and the step: call run.step(), or"
                f" run.zero_grad() to drop the gradients"
            )
        self._alive = []

    def _check_backward(self, _: Tensor) -> None:
        if not self._goes_backward:
            raise RuntimeError(
                "a loss made of run.log_probs went backward by itself: call run.backward(loss)"
            )


def padded(
    multiple: int,
    input_ids: Tensor,
    labels: Tensor | None,
    position_ids: Tensor | None,
    attention_mask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows that are a `multiple` of tokens long, in which each token of padding stands alone.

    Raises ValueError for shapes that do not fit.
    """
    given = {"labels": labels, "position_ids": position_ids, "attention_mask": attention_mask}
    for name, tensor in given.items():
        if tensor is not None and tensor.shape != input_ids.shape:
            raise ValueError(
                f"{name} must be of the shape of input_ids, {list(input_ids.shape)}, got"
                f" {list(tensor.shape)}"
            )
    seen = torch.ones_like(input_ids, dtype=torch.bool)
    if attention_mask is not None:
        seen = attention_mask.to(input_ids.device).bool()
    if position_ids is None:
        position_ids = seen.long().cumsum(1) - 1
    position_ids = position_ids.to(input_ids.device).masked_fill(~seen, 0)
    labels = (input_ids if labels is None else labels).masked_fill(~seen, IGNORED)
    more = (0, -input_ids.shape[1] % multiple)
    return (
        F.pad(input_ids, more),
        F.pad(labels, more, value=IGNORED),
        F.pad(position_ids, more).cpu(),
    )
