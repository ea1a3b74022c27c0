"""The embedding's table and the head with its logits, against plain torch in float64.

B batch, S sequence, D hidden size, V vocabulary; /p = split over the ranks of a sequence.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from isp.comm import Mesh
from isp.layers.linear import Moves, ParallelLinear
from isp.layers.module import bind_names
from isp.parallel import Axis, ParallelConfig, TensorConfig, Topology, WeightConfig
from isp.parallel.config import Prefetch
from isp.weights.communicator import ISPCommModelConfig, ISPCommunicator
from isp.weights.declare import DeclaredBlock, DeclaredUse
from isp.weights.trace import sequential_actions
from isp.weights.wp import EmbeddingWeightParallelCommunicator, HeadWeightParallelCommunicator
from tests.ranks import run_ranks
from tests.toolkit import Table

CPU = torch.device("cpu")
B, S, D, V = 2, 8, 6, 12
close = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12)


class Ends(nn.Module):
    """Embedding, tanh, head."""

    def __init__(
        self, mesh: Mesh, *, retain: bool | None, split_hidden: bool, overlap: bool, tied: bool
    ) -> None:
        super().__init__()
        weight = mesh[Axis.WEIGHT]
        self.runtime = ISPCommunicator(
            weight, ISPCommModelConfig(device=CPU), prefetch=Prefetch(overlap=overlap), poison=True
        )
        table = EmbeddingWeightParallelCommunicator(self.runtime, weight, split_hidden=split_hidden)
        last = HeadWeightParallelCommunicator(
            self.runtime, weight, mesh[Axis.TENSOR], retain_out_sharded=retain
        )
        assert table.communication_mode == last.communication_mode == "isp"
        assert table.gathers_weights
        assert last.gathers_weights
        with table.recomputing():
            assert table.is_recomputing
            assert last.is_recomputing
        assert not last.is_recomputing
        place = {"device": CPU, "dtype": torch.float64}
        layout = table.table_layout(V, D)
        self.embedding = Table(table, Moves())
        self.embedding.add_shard("weight", layout, **place)  # type: ignore[arg-type]
        self.head = ParallelLinear(
            layout if tied else last.layout((V, D)),
            communicator=last,
            moves=Moves(y=last.output_hook, dy=last.grad_output_hook),
            has_weight=not tied,
            **place,  # type: ignore[arg-type]
        )
        if tied:
            self.head.weight = self.embedding.weight
        bind_names(self)
        self.runtime.declare(
            [
                [
                    DeclaredBlock(
                        name=name,
                        module=layer,
                        uses=(
                            DeclaredUse(name=name, layer=layer, weight_in_backward=name == "head"),
                        ),
                    )
                    for name, layer in (("embedding", self.embedding), ("head", self.head))
                ]
            ]
        )

    def forward(self, ids: Tensor) -> Tensor:
        y: Tensor = self.head(torch.tanh(self.embedding(ids)))
        return y


def full_weights() -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(1)
    weights = (torch.randn(V, D, generator=random, dtype=torch.float64) for _ in range(2))
    table, head = (w.requires_grad_() for w in weights)
    return table, head


def batch() -> tuple[Tensor, Tensor]:
    """ids [B, S], and a gradient of the logits [B, S, V]."""
    random = torch.Generator().manual_seed(2)
    ids = torch.randint(V, (B, S), generator=random)
    return ids, torch.randn(B, S, V, generator=random, dtype=torch.float64)


def run_logits(mesh: Mesh, *, tied: bool, split_hidden: bool, overlap: bool) -> None:
    """Logits in each of the three forms, and the gradients of both weights."""
    tensor = mesh[Axis.TENSOR]
    ids, dy = batch()
    for retain in (True, False, None):
        table, head = full_weights()
        head = table if tied else head
        logits = F.linear(torch.tanh(F.embedding(ids, table)), head)
        logits.backward(dy)
        model = Ends(mesh, retain=retain, split_hidden=split_hidden, overlap=overlap, tied=tied)
        with torch.no_grad():
            model.embedding.weight.copy_(model.embedding.layouts["weight"].shard(table))
            if not tied:
                model.head.weight.copy_(model.head.layouts["weight"].shard(head))
        model.runtime.begin(sequential_actions(1))
        found = model(ids.chunk(tensor.size, 1)[tensor.rank])
        # V/p of all tokens, all of all tokens, or all of its own tokens
        expected, grad = (
            t.chunk(tensor.size, 2 if retain else 1)[tensor.rank] if retain is not False else t
            for t in (logits.detach(), dy)
        )
        close(found, expected)
        found.backward(grad)
        model.runtime.finish()
        for layer, weight in ((model.embedding, table), (model.head, head)):
            assert layer.weight.grad is not None
            assert weight.grad is not None
            close(layer.weight.grad, layer.layouts["weight"].shard(weight.grad))


def run_ends(rank: int, world: int) -> None:
    parallel = ParallelConfig(tensor=TensorConfig(size=world), weight=WeightConfig(size=world))
    mesh = Mesh(Topology.create(world, parallel), rank)
    run_logits(mesh, tied=False, split_hidden=False, overlap=True)
    run_logits(mesh, tied=True, split_hidden=False, overlap=True)
    run_logits(mesh, tied=True, split_hidden=True, overlap=True)
    run_logits(mesh, tied=False, split_hidden=True, overlap=False)
    head = HeadWeightParallelCommunicator(
        ISPCommunicator(mesh[Axis.WEIGHT], ISPCommModelConfig(device=CPU)),
        mesh[Axis.WEIGHT],
        mesh[Axis.TENSOR],
        retain_out_sharded=True,
    )
    with pytest.raises(ValueError, match=f"does not divide by the {world} ranks"):
        head.output_hook(torch.zeros(B, S // world, V + 1))


def test_ends_match_plain_torch() -> None:
    """Catches logits or their gradient cut along the wrong dim, or counted once for each rank."""
    run_ranks(4, run_ends, 4)
