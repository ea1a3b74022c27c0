"""One rank's stages of a pipeline: torch's schedules, with the runtime told where each of them is.

B batch, S sequence, D hidden size; a micro-batch is [B, S'] tokens on the first stage and
[B, S', D] between stages.

`torch.distributed.pipelining` orders the micro-batches and sends what is between the stages. The
stage here calls the scheduler hooks around each of them, tells main gradients which backward pass
is the last, and leaves the rest of a micro-batch (positions, documents, labels) on its rank: a
schedule splits only the tokens, and says which micro-batch it is at.

[Note: Split backward] torch can split a backward by searching the autograd graph, but a linear of
ours computes both gradients in one custom function. So the whole graph runs in the first half, with
each linear's two factors put off, and the second half is to multiply them (`dw_builder`, torch's
seam for it). Gradients of norms, biases and the embedding are there after the first half.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from isp.comm import Channel
from isp.layers.weight_gradients import DeferredWeightGradients
from isp.optim import MainGradients
from isp.pipeline.order import PipelineOrder, schedule_class
from isp.scheduler_hook import SchedulerHook

__all__ = ["Pipeline", "StageWork"]


class StageWork(Protocol):
    """What a rank does with micro-batch number `micro_batch` of a step."""

    def forward(self, chunk: int, micro_batch: int, x: Tensor) -> Tensor:
        """Through the part of the model that is this rank's chunk number `chunk`."""

    def loss(self, micro_batch: int, output: Tensor) -> Tensor:
        """On the last stage: what is differentiated, of no dimension."""


class Pipeline:
    """This rank's stages of a pipeline over `channel`, for steps of `num_micro_batches`.

    `chunks` are this rank's parts of the model. `like` is a tensor as it travels between stages, on
    any device; the last stage keeps what it makes. With `gradients` a step is forward and backward,
    without them it is forward alone. `put_off` has the weight gradients that a schedule with a
    split backward computes on their own.
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        channel: Channel,
        order: PipelineOrder,
        *,
        num_micro_batches: int,
        like: Tensor,
        hook: SchedulerHook,
        gradients: MainGradients | None,
        put_off: DeferredWeightGradients | None,
        device: torch.device,
    ) -> None:
        self._num_micro_batches = num_micro_batches
        self._trains = gradients is not None
        self._work: StageWork | None = None
        between = torch.empty_like(like, device="meta", requires_grad=True)
        tokens = torch.empty(like.shape[:2], dtype=torch.int64, device="meta")
        numbers = order.stages_of(channel.rank)
        self._stages = [
            _Stage(
                _Part(model, partial(self._forward, chunk)),
                chunk=chunk,
                num_micro_batches=num_micro_batches,
                hook=hook,
                gradients=gradients,
                stage_index=number,
                num_stages=order.num_stages,
                device=device,
                input_args=tokens if number == 0 else between,
                output_args=between,
                group=channel.group,
                dw_builder=None if put_off is None else put_off.take,
            )
            for chunk, (model, number) in enumerate(zip(chunks, numbers, strict=True))
        ]
        schedule = schedule_class(order.config, training=self._trains)
        single = issubclass(schedule, PipelineScheduleSingle)
        self._schedule = schedule(
            self._stages[0] if single else self._stages,
            num_micro_batches,
            loss_fn=self._loss,
            scale_grads=False,
        )

    def run(self, work: StageWork, tokens: Sequence[Tensor]) -> list[Tensor]:
        """All micro-batches of a step; their losses where the last stage is, nothing elsewhere.

        `tokens` are those of each micro-batch, [B, S']; only the first stage reads them.
        """
        self._work = work
        losses: list[Tensor] = []
        for stage in self._stages:
            stage.backwards_left = self._num_micro_batches
        inputs = (torch.cat(list(tokens)),) if self._stages[0].is_first else ()
        last: dict[str, Any] = {}
        if self._stages[-1].is_last:  # targets stay with `work`; there must be some to split
            last = {"target": torch.zeros(self._num_micro_batches), "losses": losses}
        run = self._schedule.step if self._trains else self._schedule.eval
        run(*inputs, **last, return_outputs=False)
        self._work = None
        return [loss.detach() for loss in losses]

    def _forward(self, chunk: int, x: Tensor) -> Tensor:
        assert self._work is not None
        return self._work.forward(chunk, self._stages[chunk].micro_batch, x)

    def _loss(self, output: Tensor, target: Tensor) -> Tensor:
        assert self._work is not None
        return self._work.loss(self._stages[-1].micro_batch, output)


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
        chunk: int,
        num_micro_batches: int,
        hook: SchedulerHook,
        gradients: MainGradients | None,
        **stage: Any,
    ) -> None:
        super().__init__(module, **stage)
        self.micro_batch = -1
        """The one whose forward ran last."""
        self.backwards_left = num_micro_batches
        self._chunk = chunk
        self._hook = hook
        self._gradients = gradients

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self.micro_batch = fwd_chunk_id
        self._hook.before_forward(self._chunk)
        output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        self._hook.after_forward(self._chunk)
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
        self.backwards_left -= 1
        is_last = self.backwards_left == 0  # `last_backward` is of the second halves, if there are
        if is_last:
            self._gradients.expect_last()
        self._hook.before_backward(self._chunk)
        with nullcontext() if is_last else self._gradients.no_sync():
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        self._hook.after_backward(self._chunk)

    # torch hands gradients over between two stages of one rank in an evaluation, too, and fails.

    def get_local_bwd_output(self, mb_index: int) -> Any:
        return () if self._gradients is None else super().get_local_bwd_output(mb_index)

    def set_local_bwd_input(
        self, next_stage_bwd_outputs: tuple[Tensor | None, ...], mb_index: int
    ) -> None:
        if self._gradients is not None:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)
