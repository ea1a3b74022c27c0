"""A weight group in one process whose other ranks hold the same data as this one, with its events.

Collectives are exact: a gather concatenates equal shards, and a reduction adds equal gradients. So
a step runs through the whole runtime in milliseconds, and tests can spell out its order of events.
Tests on several ranks check the numbers.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from isp.core.comm import Channel, Pending
from isp.core.comm.tag import UNNAMED, Tag
from isp.core.layers.linear import ParallelLinear
from isp.core.layers.module import bind_names
from isp.core.mesh.config import LaunchPoint, OverlapUnit, Prefetch
from isp.core.recompute.recompute import Recomputer
from isp.core.rng import RngStatesTracker
from isp.core.weights.communicator import ISPCommModelConfig, ISPCommunicator
from isp.core.weights.declare import DeclaredBlock, DeclaredUse
from isp.core.weights.uses import Use
from isp.core.weights.wp_communicator import WPCommunicator
from tests.toolkit import ToolkitLayers, init_weights

__all__ = ["CPU", "EchoChannel", "Net", "echo_layers", "echo_net", "leased_bytes", "plain_linear"]

CPU = torch.device("cpu")
D = 4


class EchoChannel(Channel):
    """One of two ranks with equal data; records launches and waits.

    Data arrive only when they are waited for: until then a buffer holds NaN.
    """

    def __init__(self, rank: int = 0) -> None:
        super().__init__(None, name="weight")
        self.size, self.rank = 2, rank
        self.events: list[str] = []
        self.labels: dict[int, str] = {}
        """The weight last gathered into the buffer at an address."""
        self.fail_at: str = ""
        """The event that raises instead of happening."""

    def note(self, event: str) -> None:
        """Append an event."""
        self.events.append(event)
        if event == self.fail_at:
            raise ConnectionError(f"{event}: connection lost")

    def all_gather_into(self, out: Tensor, x: Tensor, *, tag: Tag = UNNAMED) -> Pending:
        name = str(tag).removesuffix(".weight")
        self.labels[out.data_ptr()] = name
        self.note(f"gather {name}")
        out.fill_(math.nan)

        def arrive() -> Tensor:
            self.note(f"wait {name}")
            out.view(self.size, -1).copy_(sent.view(-1))
            return out

        sent = x.clone()
        return Pending(arrive, keep=(x,))

    def reduce_scatter_into(
        self, out: Tensor, x: Tensor, *, received: Tensor | None = None, tag: Tag = UNNAMED
    ) -> Pending:
        name = str(tag).removesuffix(".grad").removesuffix(".weight")
        self.note(f"reduce {name}")
        out.fill_(math.nan)

        def arrive() -> Tensor:
            self.note(f"sum {name}")
            return out.copy_(x.view(self.size, *out.shape)[self.rank] * self.size)

        return Pending(arrive, keep=(x,))

    def taken(self) -> list[str]:
        """Return the events since the last call."""
        events, self.events = self.events, []
        return events


def leased_bytes(communicator: ISPCommunicator) -> int:
    """Return the bytes leased from the communicator's pools."""
    pools = (communicator.pool, communicator.reduce_pool)
    return sum(pool.leased_bytes for pool in pools)


def spy_on_releases(communicator: ISPCommunicator, channel: EchoChannel) -> None:
    """Also record when the buffer of a gathered weight returns to the pool."""
    take_back = communicator.pool._take_back

    def noted(tensor: Tensor, kind: Any) -> None:
        if (name := channel.labels.pop(tensor.data_ptr(), "")) != "":
            channel.note(f"free {name}")
        take_back(tensor, kind)

    communicator.pool._take_back = noted  # type: ignore[method-assign]


def echo_layers(
    communicator: WPCommunicator,
    channel: Channel,
    *,
    dtype: torch.dtype = torch.float64,
    device: torch.device = CPU,
) -> ToolkitLayers:
    """Return layers in isp mode on this rank, whose sequences are not split."""
    return ToolkitLayers(weight=channel, communicator=communicator, device=device, dtype=dtype)


def plain_linear(x: Tensor, layer: ParallelLinear) -> Tensor:
    """Apply a layer in plain torch; its full weight is the shard twice, as an echo gathers it."""
    bias = None if layer.bias is None else layer.bias.repeat(2)
    return F.linear(x, layer.weight.repeat(2, 1), bias)


class Core(nn.Module):
    """A launch point without a weight between the two linears of a block."""

    def __init__(self, communicator: WPCommunicator) -> None:
        super().__init__()
        self.communicator = communicator

    def forward(self, x: Tensor) -> Tensor:
        self.communicator.pass_by(self)
        return torch.tanh(x)


class NetBlock(nn.Module):
    """x + wo(core(wqkv(x))), and optionally a third linear."""

    def __init__(self, layers: ToolkitLayers, *, bias: bool, mlp: bool) -> None:
        super().__init__()
        self.wqkv = layers.column(D, (D,), bias=bias, std=0.5)
        self.core = Core(layers.communicator)
        self.wo = layers.row(D, D, bias=bias, std=0.5)
        self.w1 = layers.column(D, (D,), std=0.5) if mlp else None

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.wo(self.core(self.wqkv(x)))
        return x if self.w1 is None else x + torch.sin(self.w1(x))

    def plainly(self, x: Tensor) -> Tensor:
        """Return the same in plain torch; see `Net.plainly`."""
        x = x + plain_linear(torch.tanh(plain_linear(x, self.wqkv)), self.wo)
        return x if self.w1 is None else x + torch.sin(plain_linear(x, self.w1))

    def uses(self) -> tuple[DeclaredUse, ...]:
        at = LaunchPoint
        last = (DeclaredUse(Use("w1", launch_point=at.W1), self.w1),) if self.w1 else ()
        return (
            DeclaredUse(Use("wqkv", launch_point=at.WQKV), self.wqkv),
            DeclaredUse(Use("attn", launch_point=at.ATTN), key=self.core),
            DeclaredUse(Use("wo", launch_point=at.WO), self.wo),
            *last,
        )


class Net(nn.Module):
    """Embedding, blocks a, b, c ..., head; the first `recomputed` blocks are recomputed."""

    def __init__(
        self,
        layers: ToolkitLayers,
        *,
        num_blocks: int = 3,
        num_recomputed: int = 0,
        bias: bool = False,
        mlp: bool = False,
        vocab_size: int = 8,
    ) -> None:
        super().__init__()
        self.embedding = layers.embedding(vocab_size, D, std=1.0)
        self.blocks = [NetBlock(layers, bias=bias, mlp=mlp) for _ in range(num_blocks)]
        for name, block in zip("abcdefgh", self.blocks, strict=False):
            self.add_module(name, block)
        self.head: ParallelLinear = layers.head(D, vocab_size, std=0.5)
        self.num_recomputed = num_recomputed
        self.recomputing = layers.communicator.recomputing
        bind_names(self)
        init_weights(self, seed=3)
        self.fail_in: NetBlock | None = None
        self.leave_out: NetBlock | None = None

    def forward(self, ids: Tensor) -> Tensor:
        again = Recomputer(tracker=RngStatesTracker(ids.device), announce=self.recomputing)
        x = self.embedding(ids)
        for i, block in enumerate(self.blocks):
            if block is self.fail_in:
                raise ArithmeticError("bad block")
            if block is self.leave_out:
                continue
            x = again(block, x) if i < self.num_recomputed else block(x)
        y: Tensor = self.head(x)
        return y

    def plainly(self, ids: Tensor) -> Tensor:
        """Return the same in plain torch; each full tensor is the shard twice, as an echo gathers
        it.
        """
        x = F.embedding(ids, self.embedding.weight.repeat(2, 1))
        for block in self.blocks:
            if block is not self.leave_out:
                x = block.plainly(x)
        return plain_linear(x, self.head)

    def declared(self) -> tuple[DeclaredBlock, ...]:
        table = DeclaredUse(Use("embedding", weight_in_backward=False), self.embedding)
        head = DeclaredUse(Use("head"), self.head)
        return (
            DeclaredBlock(name="embedding", module=self.embedding, uses=(table,)),
            *(
                DeclaredBlock(
                    name=name, module=block, uses=block.uses(), recomputed=i < self.num_recomputed
                )
                for i, (name, block) in enumerate(zip("abcdefgh", self.blocks, strict=False))
            ),
            DeclaredBlock(name="head", module=self.head, uses=(head,)),
        )


def echo_net(
    *,
    num_blocks: int = 3,
    num_recomputed: int = 0,
    bias: bool = False,
    mlp: bool = False,
    overlap: bool = True,
    pool: bool = True,
    launch: LaunchPoint = LaunchPoint.WO,
    unit: OverlapUnit = OverlapUnit.LAYER,
    max_reduce_bytes: int = 1 << 28,
) -> tuple[Net, ISPCommunicator, EchoChannel]:
    """Return a declared net, its communicator with poisoned buffers, and the recording channel."""
    channel = EchoChannel()
    communicator = ISPCommunicator(
        channel,
        ISPCommModelConfig(device=CPU, max_reduce_bytes=max_reduce_bytes),
        prefetch=Prefetch(unit=unit, launch=launch, overlap=overlap),
        enable_memory_pool=pool,
        poison=True,
    )
    spy_on_releases(communicator, channel)
    net = Net(
        echo_layers(communicator, channel),
        num_blocks=num_blocks,
        num_recomputed=num_recomputed,
        bias=bias,
        mlp=mlp,
    )
    communicator.declare([net.declared()])
    return net, communicator, channel
