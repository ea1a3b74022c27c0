"""Data parallelism for any module: gradients are summed over replicas by the end of backward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from isp.core.autograd import after_gradients
from isp.core.comm import Channel
from isp.core.comm.channel import check_channel
from isp.core.comm.tag import Purpose, Tag
from isp.core.mesh import Axis
from isp.core.mesh.layout import ParameterLayout
from isp.core.optim.buckets import DEFAULT_BUCKET_BYTES, BucketManager
from isp.core.optim.main_grads import MainGradients
from isp.core.torch_private import call_after_backward
from isp.core.weights.sharded_parameter import ShardedParameter

__all__ = ["BucketManager", "DataParallelBucket", "DataParallelNaive"]


class _DataParallel(nn.Module):
    """A module with main gradients that are reduced by the end of a backward pass.

    The base of `DataParallelNaive` and `DataParallelBucket`.

    `finish` is called at the end of each backward pass in which a parameter gets a gradient.
    See [Note: End of backward] in docs/design/notes/communication.md.
    """

    def __init__(self, module: nn.Module, channel: Channel, *, bucket_bytes: int) -> None:
        super().__init__()
        check_channel("channel", channel)
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
        # Registered after the hooks of MainGradients, which must have added the gradient before.
        after_gradients(self, _DataParallel._end_with_this_pass, (item.parameter for item in items))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's output."""
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Return a context in which backward accumulates gradients without reducing them.

        Use it for all backward passes of a step except the last one.
        """
        before, self._sync = self._sync, False
        try:
            with self._gradients.no_sync():
                yield
        finally:
            self._sync = before

    def finish(self) -> None:
        """Reduce the remaining buckets, wait for all sums, and set `p.grad`.

        `p.grad` is the main gradient itself if the dtypes are equal, else a copy in the parameter's
        dtype. A parameter without a gradient on this rank contributes zeros. A second call in a
        step does nothing.
        """
        self._ending = False
        if self._gradients.reduced:
            return
        self._gradients.reduce()
        for item in self._gradients.parameters:
            item.parameter.grad = self.main_grad(item.parameter).to(item.parameter.dtype)

    def reset(self) -> None:
        """Discard all gradients; call this between steps, and after a backward that failed."""
        self._ending = False
        self._gradients.zero()

    def main_grad(self, parameter: nn.Parameter) -> Tensor:
        """Return the gradient in float32 or wider; after backward, the sum over the replicas."""
        return self._gradients.grad(parameter)

    def _end_with_this_pass(self, _: Tensor) -> None:
        """Make this backward pass call `finish` at its end.

        Called as a hook after the gradient of any parameter; only the first call of a pass counts.
        """
        if self._sync and not self._ending:
            self._ending = True
            call_after_backward(self.finish)  # [Note: End of backward]

    @torch.no_grad()
    def _start_equal(self, channel: Channel) -> None:
        """Broadcast the weights and buffers of the channel's first rank to every replica."""
        tensors = [*self.module.named_parameters(), *self.module.named_buffers()]
        # Launch all broadcasts before the wait for the first one.
        sent = [
            channel.broadcast_(x.detach(), tag=Tag(Purpose.PUBLISHED_WEIGHT, name))
            for name, x in tensors
        ]
        for pending in sent:
            pending.wait()


class DataParallelNaive(_DataParallel):
    """A module whose gradients are summed over `channel` after backward, each by an all-reduce.

    Use it for comparison, or to find out whether a bug is in the overlap. The channel's ranks are
    those with the same weights: data, or data x sequence. Gradients are summed, never averaged:
    divide the loss by the global number of tokens.
    """

    def __init__(self, module: nn.Module, channel: Channel) -> None:
        super().__init__(module, channel, bucket_bytes=0)


class DataParallelBucket(_DataParallel):
    """A module whose gradients are summed over `channel` in buckets, while backward still runs.

        model = DataParallelBucket(module, isp.Channel.from_mesh(mesh, "data"))
        model.reset()
        with model.no_sync():
            loss(model(first)).backward()
        loss(model(last)).backward()        # p.grad is the sum over both and over the ranks
        optimizer.step()

    Gradients are accumulated and reduced in float32 or wider. A bucket of about `bucket_bytes` is
    reduced as soon as its last gradient is final and earlier buckets are launched [Note: Launch
    order]; the result is bit-equal to that without overlap. As in `DataParallelNaive`, gradients
    are summed, never averaged.
    """

    def __init__(
        self, module: nn.Module, channel: Channel, *, bucket_bytes: int = DEFAULT_BUCKET_BYTES
    ) -> None:
        super().__init__(module, channel, bucket_bytes=bucket_bytes)
        self._gradients.expect_last()

    def reset(self) -> None:
        """Discard all gradients, and begin a new step; call this between steps."""
        super().reset()
        if self._sync:
            self._gradients.expect_last()
