"""Blocks that do unusual things that torch allows, against the same without ISP."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import isp
from tests.models.models import Rows, job, packed_rows, plain_loss
from tests.models.own import Own, OwnBlock
from tests.ranks import run_ranks


class _Writing(OwnBlock):
    """A block that writes in place into the result of each of its calls."""

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x)
        q += x
        k, v = self.k(x).mul_(2), self.v(x)
        q, k, v = (z.view(*z.shape[:-1], -1, self.head) for z in (q, k, v))
        y = isp.attention(q, k, v[..., : self.head - 3])
        y *= 2
        h = self.out(F.pad(y.view(*x.shape[:2], self.heads, -1), (0, 3)).flatten(2))
        h += x
        z = self.down(F.relu(self.up(h), inplace=True))
        return z.add_(h)


class _Twice(OwnBlock):
    """A block that attends twice with the same linears."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(super().forward(x))


class _ReadsLinear(OwnBlock):
    """A block that multiplies by a small linear's weight twice, the second time without
    calling it.
    """

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y + 0.1 * F.linear(y, self.out.weight.clamp(-0.2, 0.2))


class _Outside(OwnBlock):
    """A block with a linear that the model also calls outside of the block."""

    def __init__(self, *sizes: Any) -> None:
        super().__init__(*sizes)
        self.extra = nn.Linear(32, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y + F.silu(self.extra(F.silu(y)))


class _Model(Own):
    """A model that writes in place into the outputs of its tables and its head."""

    def __init__(self, block: type[OwnBlock]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block(32, 4, 2, 0.0) for _ in range(2))
        self.double()

    def forward(self, ids: Tensor, positions: Tensor) -> Any:
        x = self.tokens(ids)
        x += self.positions(positions)
        for block in self.blocks:
            x = block(x)
        if isinstance(block, _Outside):
            x = x + block.extra(x)
        logits = self.head(x)
        logits /= 2
        return logits


CASES: list[dict[str, Any]] = [
    {"loss_chunk_tokens": 0},
    {"loss_chunk_tokens": 5, "checkpoint": 1.0},
    {"checkpoint": 1.0, "checkpoint_keeps_attention": True},
    {"checkpoint_norm_outputs": True, "checkpoint_mlp_activation": True},
]


def _trained(rank: int, block: type[OwnBlock], rows: Rows, tensor: int, weight: int) -> list[Any]:
    """Return for each case the loss, and every shard's gradient with its layout."""
    found = []
    for keys in CASES:
        config = job(tensor, weight)
        config = replace(
            config,
            model=replace(config.model, **keys),
            training=replace(config.training, max_norm=0),
        )
        run = isp.parallelize(_Model(block), config)
        for _ in range(2):
            loss = run.loss(*rows.part(run.dp_rank, run.dp_size))
            run.step(loss, lr=0.0)
        gradients, trained = run.train_step.gradients, run.train_step.built.trained
        of_shards = {
            i.name: (gradients.whole(i.parameter).numpy().copy(), i.layout) for i in trained
        }
        run.train_step.drain()
        found.append((loss.item(), of_shards))
    return found


@pytest.mark.parametrize(
    ("tensor", "weight", "block"),
    [(1, 1, _Writing), (4, 2, _Writing), (4, 2, _Twice), (2, 2, _ReadsLinear), (2, 2, _Outside)],
)
def test_unusual_blocks_train_as_without_isp(
    tensor: int, weight: int, block: type[OwnBlock]
) -> None:
    """Catches a result that torch does not allow to be written in place, and a lost gradient."""
    rows = packed_rows(1, 32, [[20, 12]])
    of_ranks = run_ranks(tensor, _trained, block, rows, tensor, weight)
    model = _Model(block)
    expected = plain_loss(model, rows)
    expected.backward()
    for loss, gradients in (case for of_rank in of_ranks for case in of_rank):
        assert loss == pytest.approx(expected.item(), rel=1e-12)
        for name, (gradient, layout) in gradients.items():
            plain = model.get_parameter(name).grad
            plain = torch.zeros(layout.global_shape) if plain is None else plain
            own = layout.shard(plain.double())
            assert torch.allclose(torch.from_numpy(gradient), own, rtol=0, atol=1e-9), name
