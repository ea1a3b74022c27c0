"""From a model to its parts on this rank, or to its shape alone."""

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
from isp.core.layers.linear import LinearLayer, linears_of
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
    """This rank's parts of a model, and the communicator of its weights."""

    model: TracedModel
    chunks: tuple[StageModule, ...]
    """One for each stage that this rank has, in forward order."""
    stages: tuple[int, ...]
    """The stage that each chunk is."""
    order: PipelineOrder
    """The stages of all ranks, and their order of work."""
    communicator: ISPCommunicator | None
    """None where weights stay on their rank."""
    sequence: SequenceRanks
    """The ranks that share a sequence."""
    host: HostMemory
    """Where block inputs lie that are not kept on the device."""

    @property
    def parameters(self) -> tuple[ShardedParameter, ...]:
        """All parameters of the chunks, each once."""
        found = {item.parameter: item for chunk in self.chunks for item in chunk.shards()}
        return tuple(found.values())

    @property
    def trained(self) -> tuple[ShardedParameter, ...]:
        """Those that are not frozen."""
        return tuple(item for item in self.parameters if item.parameter.requires_grad)

    @property
    def saved(self) -> tuple[ShardedParameter, ...]:
        """Those that checkpoints have, and buffers that training may change."""
        named = self.parameters if self.model.checkpoints_frozen else self.trained
        return *named, *starmap(self._as_saved, _saved_buffers(self.model).items())

    def _as_saved(self, name: str, shape: tuple[int, ...]) -> ShardedParameter:
        """A buffer in its own memory."""
        memory = nn.Parameter(self.chunks[0].model.get_buffer(name), requires_grad=False)
        layout = ParameterLayout(global_shape=shape, reduce_over=Axis.STAGE)
        return ShardedParameter(name, memory, layout)

    @property
    def linears(self) -> tuple[LinearLayer, ...]:
        """The linears of the chunks, in forward order."""
        return tuple(linears_of(chunk.weight_blocks() for chunk in self.chunks))

    @property
    def shared(self) -> tuple[nn.Parameter, ...]:
        """The trained parameters that two chunks of this rank use."""
        uses = Counter(item.parameter for chunk in self.chunks for item in chunk.shards())
        return tuple(p for p, count in uses.items() if count > 1 and p.requires_grad)

    @property
    def tied_over_stages(self) -> ShardedParameter | None:
        """The trained weight of both ends, if the rank has one of two copies of it."""
        first, last = 0 in self.stages, self.order.num_stages - 1 in self.stages
        if first == last:  # both ends use the one weight, or this rank has neither
            return None
        return next((p for p in self.trained if p.name == self.model.tied_weight), None)

    @property
    def counted_elsewhere(self) -> tuple[str, ...]:
        """Names of parameters that another stage has, too, and counts in the gradient norm."""
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
    """This rank's shards of its stages of the model, with the initial weights of `seed`.

    Without a seed they are left for others to fill.
    """
    order, communicator = PipelineOrder(parallel.pipeline), None
    # One rank has whole weights: a plan would be idle, and costs a fifth of a step of 64 tokens.
    if mesh.topology.mode.gathers_weights and mesh[Axis.WEIGHT].size > 1:
        communicator = _communicator(parallel.weight, mesh, device)
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
        communicator=communicator or LocalWeights(),
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
    if communicator is not None:
        communicator.declare([chunk.weight_blocks() for chunk in chunks])
    return BuiltModel(
        model=model,
        chunks=chunks,
        stages=stages,
        order=order,
        communicator=communicator,
        sequence=sequence,
        host=host,
    )


def _communicator(weight: WeightConfig, mesh: Mesh, device: torch.device) -> ISPCommunicator:
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
    """Stages of the model as one rank would have them alone, without memory for weights."""
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
    """The layout of each trained parameter of the whole model, as one rank has it, by name."""
    (whole,) = shape_only(model, Mode.ISP)
    return {p.name: p.layout for p in whole.shards() if p.parameter.requires_grad}


def parameter_shapes(model: TracedModel) -> dict[str, tuple[int, ...]]:
    """The shape of each parameter and buffer that checkpoints of the whole model have, by name."""
    (whole,) = shape_only(model, Mode.ISP)
    return _saved_buffers(model) | {
        item.name: item.layout.global_shape
        for item in whole.shards()
        if model.checkpoints_frozen or item.parameter.requires_grad
    }


def _saved_buffers(model: TracedModel) -> dict[str, tuple[int, ...]]:
    """Return the shapes of buffers in checkpoints; adapters are saved without the model's."""
    return saved_buffers(model.shape, model.trace) if model.checkpoints_frozen else {}
