"""The toolkit as a whole: a small user model, and several toolkits in one process."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from isp import tensor_parallel as tp
from isp.core.comm import Channel
from tests.ranks import run_ranks

ROWS, WIDTH, INNER = 8, 8, 16
GROUPS = ([[0, 1], [2, 3]], [[0, 3], [1, 2]])
"""Two ways of cutting the same ranks into groups."""


def weights(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return x [N, D], w1 [D, F], w2 [F, D], equal on every rank."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((ROWS, WIDTH), (WIDTH, INNER), (INNER, WIDTH))
    x, w1, w2 = (torch.randn(s, dtype=torch.float64, generator=generator) for s in shapes)
    return x, w1, w2


class Toolkit:
    """An MLP over one group: replicated input, split hidden features, recomputation and dropout."""

    def __init__(self, channel: Channel, seed: int, *, dropout: float) -> None:
        self.channel, self.dropout = channel, dropout
        self.tracker = tp.model_parallel_manual_seed(
            seed, tensor_rank=channel.rank, device=torch.device("cpu")
        )
        x, w1, w2 = weights(seed)
        self.x = x.requires_grad_()
        self.w1 = w1.chunk(channel.size, 1)[channel.rank].clone().requires_grad_()
        self.w2 = w2.chunk(channel.size, 0)[channel.rank].clone().requires_grad_()
        self.y = torch.empty(0)

    def block(self, x: Tensor) -> Tensor:
        inner = torch.tanh(tp.copy_to_tensor_model_parallel_region(x, self.channel) @ self.w1)
        with self.tracker.fork():
            inner = F.dropout(inner, self.dropout)
        y = tp.reduce_from_tensor_model_parallel_region(inner @ self.w2, self.channel)
        with self.tracker.fork(tp.RngStream.EQUAL):
            return x + F.dropout(y, self.dropout)

    def forward(self) -> None:
        y = self.x
        for _ in range(2):
            y = tp.checkpoint(self.block, True, y, tracker=self.tracker, channel=self.channel)
        self.y = y

    def results(self) -> list[Tensor]:
        """Run backward; return the output and all gradients."""
        self.y.square().sum().backward()
        grads = [leaf.grad for leaf in (self.x, self.w1, self.w2) if leaf.grad is not None]
        return [self.y.detach(), *grads]


def plainly(seed: int) -> list[Tensor]:
    """Return the results of the unsharded MLP without dropout."""
    x, w1, w2 = (t.requires_grad_() for t in weights(seed))
    y = x
    for _ in range(2):
        y = y + torch.tanh(y @ w1) @ w2
    y.square().sum().backward()
    return [y.detach(), *(t.grad for t in (x, w1, w2) if t.grad is not None)]


def _channels(rank: int) -> list[Channel]:
    channels = []
    for cut in GROUPS:
        made = [(ranks, dist.new_group(ranks)) for ranks in cut]
        channels += [Channel(group) for ranks, group in made if rank in ranks]
    return channels


def _side_by_side(rank: int) -> list[list[list[float]]]:
    channels = _channels(rank)
    for dropout in (0.0, 0.4):
        alone = []
        for seed, channel in enumerate(channels):
            kit = Toolkit(channel, seed, dropout=dropout)
            kit.forward()
            alone.append(kit.results())
        together = [
            Toolkit(channel, seed, dropout=dropout) for seed, channel in enumerate(channels)
        ]
        for kit in together:
            kit.forward()
        for kit, expected in zip(reversed(together), reversed(alone), strict=True):
            assert all(torch.equal(a, b) for a, b in zip(kit.results(), expected, strict=True))
        if dropout == 0:
            for seed, (channel, found) in enumerate(zip(channels, alone, strict=True)):
                y, x, w1, w2 = plainly(seed)
                parts = (w1.chunk(channel.size, 1), w2.chunk(channel.size, 0))
                expected = [y, x, *(part[channel.rank] for part in parts)]
                # the ranks' products are added up in another order
                torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    return [numbers[0].tolist() for numbers in alone]


def test_toolkits_of_different_groups_are_independent() -> None:
    """Catches process-wide state: a group, a stream or a buffer that two toolkits share."""
    of_ranks = run_ranks(4, _side_by_side)
    for number, cut in enumerate(GROUPS):
        for ranks in cut:
            outputs = [of_ranks[rank][number] for rank in ranks]
            assert all(y == outputs[0] for y in outputs), "ranks that share it differ"
