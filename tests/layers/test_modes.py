"""Every mode's layers against plain torch: outputs and every gradient, in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from isp.comm import Mesh
from isp.layers.loss import IGNORED, vocab_parallel_cross_entropy
from isp.layers.module import named_parameters
from isp.parallel import Axis, Mode, ParallelConfig, TensorConfig, Topology, WeightConfig
from isp.weights.communicator import ISPCommModelConfig, ISPCommunicator
from isp.weights.wp import LocalWeights, WPCommunicator
from tests.ranks import run_ranks
from tests.toolkit import ToolkitLayers, init_weights

B, S, D, F_, V = 2, 8, 12, 16, 22
SEED = 5
CPU = torch.device("cpu")


def _layers(
    rank: int, mode: Mode, tensor: int, weight: int, world: int
) -> tuple[ToolkitLayers, Mesh]:
    parallel = ParallelConfig(
        tensor=TensorConfig(size=tensor, mode=mode), weight=WeightConfig(size=weight)
    )
    mesh = Mesh(Topology.create(world, parallel), rank)
    communicator: WPCommunicator = LocalWeights()
    if mode is Mode.ISP:
        communicator = ISPCommunicator(mesh[Axis.WEIGHT], ISPCommModelConfig(device=CPU))
    layers = ToolkitLayers(
        mode=mode,
        tensor=mesh[Axis.TENSOR],
        weight=mesh[Axis.WEIGHT],
        communicator=communicator,
        device=CPU,
        dtype=torch.float64,
    )
    return layers, mesh


class Small(nn.Module):
    """Embedding, a fused column linear, a norm over heads, a row linear, head and loss."""

    def __init__(self, layers: ToolkitLayers, *, tied: bool) -> None:
        super().__init__()
        self.embedding = layers.embedding(V, D, std=1.0)
        self.norm = layers.rms_norm(D, eps=1e-5)
        self.column = layers.column(D, (F_, F_ // 2), bias=True, std=0.5)
        self.head_norm = layers.rms_norm(2, eps=1e-5, per_head=True)
        self.row = layers.row(F_, D, bias=True, std=0.5)
        self.head = layers.head(D, V, std=0.5, tied_to=self.embedding if tied else None)
        self.parts = layers.feature_parts
        self.loss_channel = layers.loss_channel
        self.first = self.head.layouts["weight"].intervals()[0][0] if layers.splits_features else 0

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(ids)
        wide, narrow = self.column(self.norm(x)).split(
            (F_ // self.parts, F_ // 2 // self.parts), -1
        )
        wide = self.head_norm(wide.unflatten(-1, (-1, 2))).flatten(-2)
        x = x + self.row(wide * F.gelu(narrow).repeat_interleave(2, -1))
        logits = self.head(x)
        return vocab_parallel_cross_entropy(
            logits, labels, first=self.first, channel=self.loss_channel
        )


def _data(num_rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(V, (num_rows, S), generator=generator)
    labels = torch.randint(V, (num_rows, S), generator=generator)
    labels[0, :5] = IGNORED
    return ids, labels


def _reference(tied: bool, ids: Tensor, labels: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The same model in plain torch, from the same initial weights."""
    layers, _ = _layers(0, Mode.MTP, 1, 1, 1)
    model = Small(layers, tied=tied)
    init_weights(model, SEED)
    with torch.no_grad():
        model.column.bias += 0.1  # biases begin at zero, which would hide a lost one
        model.row.bias += 0.2
    p = {n.name: n.parameter.detach().clone().requires_grad_() for n in named_parameters(model)}
    x = F.embedding(ids, p["embedding.weight"])
    h = F.rms_norm(x, (D,), p["norm.weight"], 1e-5)
    wide, narrow = F.linear(h, p["column.weight"], p["column.bias"]).split((F_, F_ // 2), -1)
    wide = F.rms_norm(wide.unflatten(-1, (-1, 2)), (2,), p["head_norm.weight"], 1e-5).flatten(-2)
    x = x + F.linear(wide * F.gelu(narrow).repeat_interleave(2, -1), p["row.weight"], p["row.bias"])
    logits = F.linear(x, p["embedding.weight" if tied else "head.weight"])
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    losses.sum().backward()
    return losses.view_as(labels), {name: t.grad for name, t in p.items()}


def _run(rank: int, mode: Mode, tensor: int, weight: int, world: int, tied: bool) -> None:
    layers, mesh = _layers(rank, mode, tensor, weight, world)
    model = Small(layers, tied=tied)
    init_weights(model, SEED)
    with torch.no_grad():
        model.column.bias += 0.1
        model.row.bias += 0.2
    data = mesh[Axis.DATA]
    all_ids, all_labels = _data(B * data.size)
    expected, expected_grads = _reference(tied, all_ids, all_labels)
    ids, labels, expected = (t.chunk(data.size)[data.rank] for t in (all_ids, all_labels, expected))
    if mode is Mode.ISP:
        ids, labels, expected = (
            t.chunk(tensor, 1)[layers.tensor.rank] for t in (ids, labels, expected)
        )
    losses = model(ids, labels)
    torch.testing.assert_close(losses, expected, rtol=1e-12, atol=1e-12)
    losses.sum().backward()
    if isinstance(layers.communicator, ISPCommunicator):
        layers.communicator.finish()
    for item in named_parameters(model):
        name, parameter, layout = item.name, item.parameter, item.layout
        grad = mesh[layout.reduce_over].all_reduce(parameter.grad).wait()
        wanted = layout.shard(expected_grads[name])
        torch.testing.assert_close(
            grad, wanted, rtol=1e-11, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}"
        )


LAYOUTS = [
    *((mode, tensor, 1) for mode in (Mode.MTP, Mode.MSP, Mode.FSP) for tensor in (1, 2, 4)),
    *((Mode.ISP, tensor, weight) for tensor in (1, 2, 4) for weight in (1, 2, 4)),
]


def _run_all(rank: int, world: int, tied: bool) -> None:
    for mode, tensor, weight in LAYOUTS:
        if world % tensor == 0 and world % weight == 0:
            try:
                _run(rank, mode, tensor, weight, world, tied)
            except AssertionError as error:
                raise AssertionError(f"{mode=} {tensor=} {weight=}: {error}") from error


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("world", [2, 4])
def test_layers_match_plain_torch(world: int, tied: bool) -> None:
    """A move that is wrong, missing or doubled changes an output or a gradient."""
    run_ranks(world, _run_all, world, tied)
