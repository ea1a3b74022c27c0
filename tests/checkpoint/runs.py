"""Small runs in any layout, with weights and moments that are a known function of their index."""

from __future__ import annotations

import hashlib
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from isp.checkpoint import Checkpointer, CheckpointInfo, TrainState
from isp.checkpoint.folder import candidates_in
from isp.core.comm import Channel
from isp.core.layers.module import RowsOf, bind_names, named_parameters
from isp.core.mesh import Axis, Topology
from isp.core.optim.config import OptimizerConfig
from isp.core.optim.main_grads import MainGradients
from isp.core.optim.zero1 import Zero1Optimizer
from tests.toolkit import ToolkitLayers

__all__ = ["LION", "Run", "chosen", "clear", "expect", "fill", "make_run", "whole_value"]

ADAMW, LION = OptimizerConfig(), OptimizerConfig(name="lion")


_FROZEN = {"rows": (0, 0), "tensors": {}}
"""Placeholder for the states of a parameter without any."""


class Run(NamedTuple):
    """The objects of a trainer on one rank."""

    world: Channel
    state: TrainState
    optimizer: Zero1Optimizer


_APART = {"q": 8, "k": 4, "v": 4}
"""Number of rows of each part of the fused parameter."""


def _earlier_names() -> dict[str, RowsOf]:
    """Return the place of each separate parameter in a checkpoint that has the fused parameter."""
    first, whole = dict(zip(_APART, accumulate(_APART.values(), initial=0), strict=False)), 16
    return {
        f"{name}.{kind}": RowsOf(f"wqkv.{kind}", first[name], whole)
        for name in _APART
        for kind in ("weight", "bias")
    }


class _Model(nn.Module):
    """Parameters of each kind: fused, biased, uneven, tied, replicated, empty on the last ranks."""

    def __init__(self, layers: ToolkitLayers, *, wide: int, apart: bool = False) -> None:
        """Create the parameters; with `apart`, q, k and v are separate instead of fused."""
        super().__init__()
        self.embedding = layers.embedding(37, wide, std=1.0)  # 37 rows divide by no number of ranks
        if apart:
            for name, rows in _APART.items():
                self.add_module(name, layers.column(wide, (rows,), bias=True, std=1.0))
        else:
            self.wqkv = layers.column(wide, tuple(_APART.values()), bias=True, std=1.0)
        self.wo = layers.row(8, wide, bias=True, std=1.0)
        self.small = layers.head(wide, 5, std=1.0)  # on 4 ranks: 2, 2, 1 and 0 rows
        self.norm = layers.rms_norm(wide, eps=1e-5)
        self.head = layers.head(wide, 37, std=1.0, tied_to=self.embedding)
        bind_names(self)


def make_run(
    rank: int,
    topology: Topology,
    dtype: torch.dtype,
    *,
    wide: int = 6,
    device: str = "cpu",
    config: OptimizerConfig = ADAMW,
    frozen: frozenset[str] = frozenset(),
    apart: bool = False,
) -> Run:
    """Return a run on this rank, all zeros; several ranks need a process group."""
    mesh = _channels(topology, rank)
    layers = ToolkitLayers(
        mode=topology.mode,
        tensor=mesh[Axis.TENSOR],
        weight=mesh[Axis.WEIGHT],
        device=torch.device(device),
        dtype=dtype,
    )
    parameters = list(named_parameters(_Model(layers, wide=wide, apart=apart)))
    trained = [item for item in parameters if item.name not in frozen]
    optimizer = Zero1Optimizer(MainGradients(trained, mesh), mesh, config)
    state = TrainState(
        parameters=parameters,
        optimizer=optimizer,
        topology=topology,
        earlier_names=_earlier_names() if apart else {},
    )
    run = Run(mesh[Axis.WORLD], state, optimizer)
    clear(run)
    return run


def _channels(topology: Topology, rank: int) -> dict[Axis, Channel]:
    """Return the channels of a topology, of which only WORLD and ZERO1 can communicate.

    These tests communicate over no other channel, and each gloo group takes time to connect.
    """
    channels = {axis: Channel.solo(axis.value) for axis in Axis}
    for axis, channel in channels.items():
        channel.size, channel.rank = topology.size(axis), topology.index(axis, rank)
    if topology.world_size > 1:
        channels[Axis.WORLD] = Channel(dist.group.WORLD, name="world")
        zero1 = topology.group_of(Axis.ZERO1, rank)
        if len(zero1) > 1:
            group = dist.new_group(zero1, use_local_synchronization=True)
            channels[Axis.ZERO1] = Channel(group, name="zero1")
    return channels


def chosen(checkpointer: Checkpointer, *step: int, **keys: float | None) -> CheckpointInfo:
    """Return the checkpoint to resume from; there has to be one."""
    info = checkpointer.choose(lambda: candidates_in(checkpointer.folder, *step, **keys))
    assert info is not None
    return info


@torch.no_grad()
def clear(run: Run) -> None:
    """Set every weight and moment to zero."""
    state = run.optimizer.state_dict()
    for part in state["parameters"].values():
        for tensor in part["tensors"].values():
            tensor.zero_()
    for item in run.state.parameters:
        item.parameter.zero_()
    run.optimizer.states_changed(0)


def whole_value(name: str, kind: str, shape: tuple[int, ...]) -> Tensor:
    """Return the whole float64 tensor of `kind` for a parameter; all its elements differ."""
    seed = int.from_bytes(hashlib.sha256(f"{name}/{kind}".encode()).digest()[:4], "little")
    return torch.rand(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def fill(run: Run) -> None:
    """Give every weight and moment its value, as if the optimizer had made 7 updates."""
    state = run.optimizer.state_dict()
    for item in run.state.parameters:
        name, parameter, layout = item.name, item.parameter, item.layout
        part = state["parameters"].get(name, _FROZEN)
        start, stop = part["rows"]
        for kind, tensor in part["tensors"].items():
            local = layout.shard(whole_value(name, kind, layout.global_shape))
            tensor.copy_(local[start:stop])
        parameter.copy_(layout.shard(whole_value(name, "master", layout.global_shape)))
    run.optimizer.states_changed(7)


def expect(run: Run, through: torch.dtype | None = None) -> int:
    """Check every weight and moment of this rank bit by bit; return the number of elements.

    `through`: dtype of the masters and moments of the run that saved, if narrower than this run's.
    """
    compared = 0
    state = run.optimizer.state_dict()
    assert state["step"] == 7
    for item in run.state.parameters:
        name, parameter, layout = item.name, item.parameter, item.layout
        part = state["parameters"].get(name, _FROZEN)
        start, stop = part["rows"]
        tensors = {kind: (x, slice(start, stop)) for kind, x in part["tensors"].items()}
        tensors["weights"] = parameter.detach(), slice(None)
        for kind, (tensor, rows) in tensors.items():
            of = run.state.earlier_names.get(name, RowsOf(name))
            shape = of.whole_shape(layout.global_shape)
            whole = whole_value(of.name, kind.replace("weights", "master"), shape)
            whole = whole[of.first :][: layout.global_shape[0]]
            expected = layout.shard(whole if through is None else whole.to(through))[rows]
            if tensor.dtype == torch.bfloat16:
                expected = expected.float()  # the master weights are rounded, not the value itself
            assert torch.equal(tensor.cpu(), expected.to(tensor.dtype)), (name, kind)
            compared += tensor.numel()
    return compared
