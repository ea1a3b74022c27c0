"""One stage of a pipeline: torch's schedules, with the runtime told where each of them is.

B batch, S sequence, D hidden size; a micro-batch is [B, S'] tokens on the first stage and
[B, S', D] between stages.

`torch.distributed.pipelining` orders the micro-batches and sends what is between the stages. The
stage here calls the scheduler hooks around each of them, tells main gradients which backward pass
is the last, and leaves the rest of a micro-batch (positions, documents, labels) on its rank: a
schedule splits only the tokens, and says which micro-batch it is at.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from isp.comm import Channel
from isp.optim import MainGradients
from isp.scheduler_hook import SchedulerHook
from isp.weights.trace import Action, ActionKind, sequential_actions

__all__ = ["Pipeline", "StageWork", "one_forward_one_backward", "split_layers", "stage_actions"]

_CHUNK = 0
"""The one model chunk of a stage."""


class StageWork(Protocol):
    """What a stage does with micro-batch number `micro_batch` of a step."""

    def forward(self, micro_batch: int, x: Tensor) -> Tensor:
        """Through this stage's part of the model."""

    def loss(self, micro_batch: int, output: Tensor) -> Tensor:
        """On the last stage: what is differentiated, of no dimension."""


def split_layers(
    num_layers: int, stages: int, *, before: float = 0.0, after: float = 0.0
) -> list[tuple[int, int]]:
    """(first, stop) of the layers of each stage, so that the costliest stage costs least.

    `before` and `after` are the costs of what the first stage does before its layers and the last
    one after them, in layers. Raises ValueError if a stage would have no layer.
    """
    if not 1 <= stages <= num_layers:
        raise ValueError(
            f"{num_layers} layers cannot be cut into {stages} stages: use at most {num_layers}"
        )
    best: dict[int, tuple[float, float, list[int]]] = {0: (0.0, 0.0, [0])}
    for stage in range(stages):
        extra = before * (stage == 0) + after * (stage == stages - 1)
        reached: dict[int, tuple[float, float, list[int]]] = {}
        for start, (worst, squares, cuts) in best.items():
            for stop in range(start + 1, num_layers - (stages - stage - 1) + 1):
                cost = stop - start + extra
                candidate = (max(worst, cost), squares + cost * cost, [*cuts, stop])
                if stop not in reached or candidate[:2] < reached[stop][:2]:
                    reached[stop] = candidate
        best = reached
    cuts = best[num_layers][2]
    return list(pairwise(cuts))


def stage_actions(stage: int, stages: int, micro_batches: int) -> tuple[Action, ...]:
    """The order of work of a step on one stage; of the whole model, one micro-batch at a time."""
    if stages == 1:
        return sequential_actions(micro_batches)
    return one_forward_one_backward(stage, stages, micro_batches)


def one_forward_one_backward(stage: int, stages: int, micro_batches: int) -> tuple[Action, ...]:
    """1F1B on one stage: forwards to warm up, pairs, backwards to cool down.

    Source: Narayanan et al. 2019, PipeDream-Flush.
    """
    warm_up = min(stages - stage - 1, micro_batches)
    forward = [Action(ActionKind.FORWARD, m) for m in range(micro_batches)]
    backward = [Action(ActionKind.BACKWARD, m) for m in range(micro_batches)]
    steady = [a for pair in zip(forward[warm_up:], backward, strict=False) for a in pair]
    return (*forward[:warm_up], *steady, *backward[micro_batches - warm_up :])


class Pipeline:
    """This rank's stage of a pipeline over `channel`, for steps of `num_micro_batches`.

    `like` is a tensor as it travels between stages, on any device; the last stage keeps what it
    makes. With `gradients` a step is forward and backward, without them it is forward alone.
    """

    def __init__(
        self,
        model: nn.Module,
        channel: Channel,
        *,
        num_micro_batches: int,
        like: Tensor,
        hook: SchedulerHook,
        gradients: MainGradients | None,
        device: torch.device,
    ) -> None:
        self.channel = channel
        self.is_first, self.is_last = channel.rank == 0, channel.rank == channel.size - 1
        self._num_micro_batches = num_micro_batches
        self._gradients = gradients
        self._work: StageWork | None = None
        between = torch.empty_like(like, device="meta", requires_grad=True)
        tokens = torch.empty(like.shape[:2], dtype=torch.int64, device="meta")
        self._stage = _Stage(
            _Part(model, self._forward),
            hook=hook,
            gradients=gradients,
            stage_index=channel.rank,
            num_stages=channel.size,
            device=device,
            input_args=tokens if self.is_first else between,
            output_args=between,
            group=channel.group,
        )
        make: Callable[..., Any] = ScheduleGPipe if gradients is None else Schedule1F1B
        self._schedule = make(self._stage, num_micro_batches, loss_fn=self._loss, scale_grads=False)

    def run(self, work: StageWork, tokens: Sequence[Tensor]) -> list[Tensor]:
        """All micro-batches of a step; their losses on the last stage, nothing on the others.

        `tokens` are those of each micro-batch, [B, S']; only the first stage reads them.
        """
        self._work = work
        losses: list[Tensor] = []
        inputs = (torch.cat(list(tokens)),) if self.is_first else ()
        last: dict[str, Any] = {}
        if self.is_last:  # targets stay with `work`, the schedule asks for something to split
            last = {"target": torch.zeros(self._num_micro_batches), "losses": losses}
        run = self._schedule.eval if self._gradients is None else self._schedule.step
        run(*inputs, **last, return_outputs=False)
        self._work = None
        return [loss.detach() for loss in losses]

    def _forward(self, x: Tensor) -> Tensor:
        assert self._work is not None
        return self._work.forward(self._stage.micro_batch, x)

    def _loss(self, output: Tensor, target: Tensor) -> Tensor:
        assert self._work is not None
        return self._work.loss(self._stage.micro_batch, output)


class _Part(nn.Module):
    """A stage's part of the model, called by what knows the micro-batch."""

    def __init__(self, model: nn.Module, call: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.model = model
        self._call = call

    def forward(self, x: Tensor) -> Tensor:
        return self._call(x)


class _Stage(PipelineStage):
    """torch's stage, with our hooks around what it does to a micro-batch."""

    def __init__(
        self,
        module: nn.Module,
        *,
        hook: SchedulerHook,
        gradients: MainGradients | None,
        **stage: Any,
    ) -> None:
        super().__init__(module, **stage)
        self.micro_batch = -1
        """The one whose forward ran last."""
        self._hook = hook
        self._gradients = gradients

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self.micro_batch = fwd_chunk_id
        self._hook.before_forward(_CHUNK)
        output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        self._hook.after_forward(_CHUNK)
        return output

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Tensor | None = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        if self._gradients is None:
            return
        if last_backward:
            self._gradients.expect_last()
        self._hook.before_backward(_CHUNK)
        with nullcontext() if last_backward else self._gradients.no_sync():
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        self._hook.after_backward(_CHUNK)
