"""Build a traced model: its stage modules on this rank, or on meta to read shapes and layouts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import starmap

import torch
from torch import nn

from isp.core.attention.backends.cpu import CpuAttention
from isp.core.attention.sequence import SequenceRanks
from isp.core.comm import Channel, Mesh
from isp.core.comm.cuda import registered
from isp.core.comm.host_offload import HostMemory
from isp.core.layers.rank_layers import RankLayers
from isp.core.mesh import Axis, Mode, ParallelConfig, WeightConfig
from isp.core.mesh.layout import ParameterLayout
from isp.core.pipeline.order import PipelineOrder
from isp.core.weights.communicator import ISPCommModelConfig, ISPCommunicator
from isp.core.weights.sharded_parameter import ShardedParameter
from isp.core.weights.wp_communicator import LocalWeights
from isp.models.moe.load_balance import saved_buffers
from isp.models.runtime.stage_module import StageModule
from isp.models.traced_model import TracedModel

__all__ = ["BuiltModel", "build_model", "parameter_shapes", "shape_only", "trained_layouts"]


@dataclass(frozen=True, kw_only=True, eq=False)
class BuiltModel:
    """The stage modules of this rank, and the communicator of their weights."""

    model: TracedModel
    chunks: tuple[StageModule, ...]
    """The stage modules, one for each pipeline stage of this rank, in forward order."""
    stages: tuple[int, ...]
    """The number of the pipeline stage of each stage module."""
    order: PipelineOrder
    """The stages of all ranks, and the order in which they run."""
    weights: ISPCommunicator | LocalWeights
    """The communicator by which layers read their weights and deliver gradients."""
    sequence: SequenceRanks
    """The ranks that share a sequence."""
    host: HostMemory
    """The host memory for block inputs that are offloaded from the device."""

    @property
    def communicator(self) -> ISPCommunicator | None:
        """The communicator that gathers weights; None if no weight is gathered."""
        return self.weights if isinstance(self.weights, ISPCommunicator) else None

    @property
    def parameters(self) -> tuple[ShardedParameter, ...]:
        """All parameters of the stage modules, each once."""
        found = {item.parameter: item for chunk in self.chunks for item in chunk.shards()}
        return tuple(found.values())

    @property
    def trained(self) -> tuple[ShardedParameter, ...]:
        """The parameters that are not frozen."""
        return tuple(item for item in self.parameters if item.parameter.requires_grad)

    @property
    def saved(self) -> tuple[ShardedParameter, ...]:
        """The parameters in checkpoints, and the buffers that training may change."""
        named = self.parameters if self.model.checkpoints_frozen else self.trained
        return *named, *starmap(self._as_saved, _saved_buffers(self.model).items())

    def _as_saved(self, name: str, shape: tuple[int, ...]) -> ShardedParameter:
        """Return the buffer `name` as a parameter in the same memory, for code that saves
        parameters."""
        # Any stage module will do: those of a rank share one model, which has all buffers.
        memory = nn.Parameter(self.chunks[0].model.get_buffer(name), requires_grad=False)
        layout = ParameterLayout(global_shape=shape, reduce_over=Axis.STAGE)
        return ShardedParameter(name, memory, layout)

    @property
    def shared(self) -> tuple[nn.Parameter, ...]:
        """The trained parameters that several stage modules of this rank use."""
        uses = Counter(item.parameter for chunk in self.chunks for item in chunk.shards())
        return tuple(p for p, count in uses.items() if count > 1 and p.requires_grad)

    @property
    def tied_over_stages(self) -> ShardedParameter | None:
        """The trained tied weight, if this rank has only one of its two copies.

        The first and the last pipeline stage have a copy each. None if the model ties no weights,
        or if this rank has both stages or neither of them.
        """
        first, last = 0 in self.stages, self.order.num_stages - 1 in self.stages
        # This rank has both the first and the last stage, which share one copy, or neither of them.
        if first == last:
            return None
        return next((p for p in self.trained if p.name == self.model.tied_weight), None)

    @property
    def counted_elsewhere(self) -> tuple[str, ...]:
        """The names of parameters that the gradient norm leaves out on this rank, because the rank
        of the first stage counts its copy of the same weight."""
        tied = self.tied_over_stages
        return () if tied is None or 0 in self.stages else (tied.name,)


def build_model(
    model: TracedModel,
    parallel: ParallelConfig,
    mesh: Mesh,
    *,
    seed: int | None,
    device: torch.device,
    dtype: torch.dtype,
) -> BuiltModel:
    """Build this rank's stage modules, with the initial weights that follow from `seed`.

    seed None: weights are not initialized, because they will be loaded.
    """
    order = PipelineOrder(parallel.pipeline)
    weights: ISPCommunicator | LocalWeights = LocalWeights()
    # A single rank has whole weights: a plan would do nothing, but following it would take a fifth
    # of the time of a step of 64 tokens.
    if mesh.topology.mode.gathers_weights and mesh[Axis.WEIGHT].size > 1:
        weights = _communicator(parallel.weight, mesh, device)
    host = HostMemory(device, log=mesh.log)
    sequence = SequenceRanks.of(
        mesh,
        model.attention_windows,
        exchange=parallel.sequence_2D.exchange,
        scan=parallel.sequence_scan,
    )
    layers = RankLayers(
        mode=mesh.topology.mode,
        tensor=mesh[Axis.TENSOR],
        weight=mesh[Axis.WEIGHT],
        expert=mesh[Axis.EXPERT],
        expert_chunks=parallel.expert.num_chunks,
        experts_stay=mesh.topology.experts_stay,
        communicator=weights,
        embed_split_hidden=parallel.weight.embed_split_hidden,
        vocab_parallel_loss=parallel.weight.vocab_parallel_loss,
        sequence=sequence,
        host=host,
        everyone=mesh.host,
        device=device,
        dtype=dtype,
    )
    stages = order.stages_of(mesh[Axis.PIPELINE].rank)
    chunks = model.build(layers, stages, order.num_stages)
    for chunk in chunks:
        chunk.init_weights(seed)
    # Declare the weights of all stages of the rank in one call, because one prefetch plan covers
    # them.
    if isinstance(weights, ISPCommunicator):
        weights.declare([chunk.weight_blocks() for chunk in chunks])
    return BuiltModel(
        model=model,
        chunks=chunks,
        stages=stages,
        order=order,
        weights=weights,
        sequence=sequence,
        host=host,
    )


def _communicator(weight: WeightConfig, mesh: Mesh, device: torch.device) -> ISPCommunicator:
    """Make the communicator of the weight group.

    With `weight.reduces_apart`, reductions get other process groups than gathers, so that gathers
    do not wait for reductions.
    """
    # True: a reduce-scatter is an all-to-all and a sum on this rank; False: that of torch; None:
    # the channel chooses by backend.
    sum_locally = {"auto": None, "all_to_all": True, "reduce_scatter": False}[weight.reduce_by]
    reduces = {axis: mesh[axis] for axis in (Axis.WEIGHT, Axis.EXPERT_WEIGHT)}
    if weight.reduces_apart:
        axes = reduces if mesh.topology.expert > 1 else (Axis.WEIGHT,)
        reduces |= {a: mesh.open(a, f"{a}_reduce", sum_locally=sum_locally) for a in axes}
    allocate = None
    if weight.nccl_ub:
        group = mesh[Axis.WEIGHT].group
        assert group is not None, "this rank has others to gather from"
        allocate = registered(group, device, key="parallel.weight.nccl_ub")
    return ISPCommunicator(
        mesh[Axis.WEIGHT],
        ISPCommModelConfig.of(weight, device),
        prefetch=weight.prefetch,
        enable_memory_pool=weight.memory_pool,
        reduce_channel=reduces[Axis.WEIGHT],
        experts=(mesh[Axis.EXPERT_WEIGHT], reduces[Axis.EXPERT_WEIGHT]),
        poison=weight.poison_freed_buffers,
        allocate=allocate,
    )


def shape_only(
    model: TracedModel,
    mode: Mode,
    stages: Iterable[int] = (0,),
    num_stages: int = 1,
    *,
    embed_split_hidden: bool = False,
    experts_stay: bool = False,
) -> tuple[StageModule, ...]:
    """Build the stage modules of a single rank on the meta device, where no weight is cut.

    For code that needs shapes and the declared uses but no values, such as prefetch plans.
    `embed_split_hidden`, `experts_stay`: see `RankLayers`.
    """
    solo = Channel.solo()
    layers = RankLayers(
        mode=mode,
        tensor=solo,
        weight=solo,
        communicator=LocalWeights(),
        embed_split_hidden=embed_split_hidden,
        experts_stay=experts_stay,
        device=torch.device("meta"),
        dtype=torch.float32,
    )
    return model.build(layers, stages, num_stages, attention=CpuAttention())


def trained_layouts(model: TracedModel) -> dict[str, ParameterLayout]:
    """Return by name the `ParameterLayout` (shape, cut dim) of each trained parameter on one
    rank."""
    (whole,) = shape_only(model, Mode.ISP)
    return {p.name: p.layout for p in whole.shards() if p.parameter.requires_grad}


def parameter_shapes(model: TracedModel) -> dict[str, tuple[int, ...]]:
    """Return by name the shape of each parameter and buffer in checkpoints of the whole model."""
    (whole,) = shape_only(model, Mode.ISP)
    return _saved_buffers(model) | {
        item.name: item.layout.global_shape
        for item in whole.shards()
        if model.checkpoints_frozen or item.parameter.requires_grad
    }


def _saved_buffers(model: TracedModel) -> dict[str, tuple[int, ...]]:
    """Return by name the shapes of buffers in checkpoints; none with adapters.

    A checkpoint of adapters has nothing of the base model.
    """
    return saved_buffers(model.shape, model.trace) if model.checkpoints_frozen else {}
