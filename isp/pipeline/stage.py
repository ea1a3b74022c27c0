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

[Note: Buffers between stages] torch makes a buffer for each micro-batch of a step and each
neighbour, and keeps them all, though only as many are in use as micro-batches are under way. The
stage here lets it make them without memory, gives one memory when its receive is posted, and takes
it away when it has been used. For this it overrides two of torch's private methods.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
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
        """On the last stage: what is differentiated, of no dimension and float64."""


class Pipeline:
    """This rank's stages of a pipeline over `channel`, for steps of `num_micro_batches`.

    `chunks` are this rank's parts of the model. `tokens` and `like` are the tokens of a micro-batch
    and what travels between stages, on any device; the last stage gives the loss. With `gradients`
    a step is forward and backward, without them it is forward alone. `put_off` has the weight
    gradients that a schedule with a split backward computes on their own.
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        channel: Channel,
        order: PipelineOrder,
        *,
        num_micro_batches: int,
        tokens: Tensor,
        like: Tensor,
        hook: SchedulerHook,
        gradients: MainGradients | None,
        put_off: DeferredWeightGradients | None,
        device: torch.device,
    ) -> None:
        self._num_micro_batches = num_micro_batches
        self._trains = gradients is not None
        self._hook = hook
        self._work: StageWork | None = None
        between = torch.empty_like(like, device="meta", requires_grad=True)
        first = torch.empty_like(tokens, device="meta", memory_format=torch.contiguous_format)
        loss = torch.empty((), dtype=torch.float64, device="meta")
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
                input_args=first if number == 0 else between,
                output_args=loss if number == order.num_stages - 1 else between,
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
            loss_fn=lambda output, target: output,
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
        for stage in self._stages:
            stage.clear_runtime_states()
        self._work = None
        return [loss.detach() for loss in losses]

    def _forward(self, chunk: int, x: Tensor) -> Tensor:
        assert self._work is not None
        stage = self._stages[chunk]
        self._hook.before_forward(chunk)
        y = self._work.forward(chunk, stage.micro_batch, x)
        self._hook.after_forward(chunk)
        # What a stage gives is kept until its backward: not the logits.
        return self._work.loss(stage.micro_batch, y) if stage.is_last else y


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

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        with self._without_memory():
            return super()._prepare_forward_infra(*args, **kwargs)

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        with self._without_memory():
            return super()._prepare_backward_infra(*args, **kwargs)

    @contextmanager
    def _without_memory(self) -> Iterator[None]:
        """Buffers made in this context have none [Note: Buffers between stages]."""
        device, self.device = self.device, torch.device("meta")
        try:
            yield
        finally:
            self.device = device

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[Any]:
        if not self.is_first:
            _remake(self.args_recv_info[fwd_chunk_id], self.device)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[Any]:
        if self.has_backward and not self.is_last:
            _remake(self.grad_recv_info[bwd_chunk_id], self.device)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self.micro_batch = fwd_chunk_id
        if self._gradients is None:
            self.fwd_cache.clear()  # nothing else takes what was sent out of it
        output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        if not self.is_first:  # a backward to come holds its input by itself
            _remake(self.args_recv_info[fwd_chunk_id], torch.device("meta"))
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
        if not self.is_last:
            _remake(self.grad_recv_info[bwd_chunk_id], torch.device("meta"))
        self._hook.after_backward(self._chunk)

    # torch hands gradients over between two stages of one rank in an evaluation, too, and fails.

    def get_local_bwd_output(self, mb_index: int) -> Any:
        return () if self._gradients is None else super().get_local_bwd_output(mb_index)

    def set_local_bwd_input(
        self, next_stage_bwd_outputs: tuple[Tensor | None, ...], mb_index: int
    ) -> None:
        if self._gradients is not None:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)


def _remake(buffers: Sequence[Any], device: torch.device) -> None:
    """Replace each of torch's receive buffers by an empty one like it, on `device`."""
    for info in buffers:
        info.buffer = torch.empty_like(
            info.buffer, device=device, requires_grad=info.buffer.requires_grad
        )
