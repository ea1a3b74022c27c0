"""Data parallelism around any module: the replicas' gradients are summed by the end of backward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from isp.core.autograd import after_gradients
from isp.core.comm import Channel
from isp.core.comm.tag import Purpose, Tag
from isp.core.mesh import Axis
from isp.core.mesh.layout import ParameterLayout
from isp.core.optim.buckets import DEFAULT_BUCKET_BYTES, BucketManager
from isp.core.optim.main_grads import MainGradients
from isp.core.torch_private import call_after_backward
from isp.core.weights.sharded_parameter import ShardedParameter

__all__ = ["BucketManager", "DataParallelBucket", "DataParallelNaive"]


class _DataParallel(nn.Module):
    """The common base: main gradients that are reduced when a backward pass is over.

    [Note: End of backward] The first gradient of a pass asks the autograd engine to call `finish`
    when the pass is over. A rank on which no parameter at all got a gradient asks nobody: it has to
    call `finish` itself, or the others wait for it. A reentrant checkpoint is a pass within the
    pass and would end it too early; that is found out, and raises, at the next gradient.
    """

    def __init__(self, module: nn.Module, channel: Channel, *, bucket_bytes: int) -> None:
        super().__init__()
        self.module = module
        self._start_equal(channel)
        items = [
            ShardedParameter(
                name, p, ParameterLayout(global_shape=tuple(p.shape), reduce_over=Axis.DATA)
            )
            for name, p in module.named_parameters()
            if p.requires_grad
        ]
        self._gradients = MainGradients(items, {Axis.DATA: channel}, bucket_bytes=bucket_bytes)
        self._sync = True
        self._ending = False
        # After those of MainGradients.
        after_gradients(self, _DataParallel._end_with_this_pass, (item.parameter for item in items))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's output."""
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes in this context add up on this rank only: not the last of a step."""
        before, self._sync = self._sync, False
        try:
            with self._gradients.no_sync():
                yield
        finally:
            self._sync = before

    def finish(self) -> None:
        """Reduce what is left, wait for all sums, and put them into `p.grad`; free if that is done.

        `p.grad` is the main gradient itself where the dtypes agree, else a copy in the
        parameter's. A parameter without a gradient on this rank contributes zeros.
        """
        self._ending = False
        if self._gradients.reduced:
            return
        self._gradients.reduce()
        for item in self._gradients.parameters:
            item.parameter.grad = self.main_grad(item.parameter).to(item.parameter.dtype)

    def reset(self) -> None:
        """Begin a new step with no gradients; between steps, and after a backward that failed."""
        self._ending = False
        self._gradients.zero()

    def main_grad(self, parameter: nn.Parameter) -> Tensor:
        """The gradient in float32 at least: the sum over the replicas once backward is over."""
        return self._gradients.grad(parameter)

    def _end_with_this_pass(self, _: Tensor) -> None:
        if self._sync and not self._ending:
            self._ending = True
            call_after_backward(self.finish)  # [Note: End of backward]

    @torch.no_grad()
    def _start_equal(self, channel: Channel) -> None:
        """Give every replica the weights and buffers of the channel's first rank."""
        tensors = [*self.module.named_parameters(), *self.module.named_buffers()]
        sent = [
            channel.broadcast_(x.detach(), tag=Tag(Purpose.PUBLISHED_WEIGHT, name))
            for name, x in tensors
        ]
        for pending in sent:
            pending.wait()


class DataParallelNaive(_DataParallel):
    """The module with its gradients summed over `channel`, one all-reduce a parameter, at the end.

    For comparison, and to find out whether a fault lies in the overlap. The channel is that of the
    ranks that hold the same weights: data, or data x sequence. Sums, never means: divide the loss
    by the global number of tokens.
    """

    def __init__(self, module: nn.Module, channel: Channel) -> None:
        super().__init__(module, channel, bucket_bytes=0)


class DataParallelBucket(_DataParallel):
    """The module with its gradients summed over `channel` in buckets, while backward still runs.

        model = DataParallelBucket(module, mesh[Axis.DATA])
        model.reset()
        with model.no_sync():
            loss(model(first)).backward()
        loss(model(last)).backward()        # p.grad is the sum over both and over the ranks
        optimizer.step()

    Gradients add up and travel in float32 at least. A bucket of about `bucket_bytes` is reduced as
    soon as its last gradient is there [Note: Launch order]; the bits are those of no overlap. As in
    `DataParallelNaive`, all is summed and nothing averaged.
    """

    def __init__(
        self, module: nn.Module, channel: Channel, *, bucket_bytes: int = DEFAULT_BUCKET_BYTES
    ) -> None:
        super().__init__(module, channel, bucket_bytes=bucket_bytes)
        self._gradients.expect_last()

    def reset(self) -> None:
        """Begin a new step with no gradients; to be called between steps."""
        super().reset()
        if self._sync:
            self._gradients.expect_last()
