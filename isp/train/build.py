"""From a configuration to a model on this rank."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from isp.attention import DistributedAttention, make_local_attention
from isp.comm import Mesh
from isp.layers.factory import LayerFactory
from isp.layers.module import NamedParameter, init_weights, named_parameters
from isp.parallel import Axis, ParallelConfig, WeightConfig
from isp.pipeline import PipelineOrder
from isp.weights.communicator import ISPCommModelConfig, ISPCommunicator
from isp.weights.wp import LocalWeights
from model.config import ModelConfig
from model.decoder import Decoder
from model.stages import stage_spans

__all__ = ["BuiltModel", "build_model"]


@dataclass(frozen=True, kw_only=True, eq=False)
class BuiltModel:
    """This rank's parts of a model, and what drives its weights where they travel."""

    chunks: tuple[Decoder, ...]
    """One for each stage that this rank has, in forward order."""
    order: PipelineOrder
    """The stages of all ranks, and their order of work."""
    communicator: ISPCommunicator | None
    """None where weights stay on their rank."""
    parameters: tuple[NamedParameter, ...]
    """All parameters of the chunks, each once."""

    @property
    def tied_over_stages(self) -> NamedParameter | None:
        """The table of token embeddings, if the rank has one of two copies of it."""
        if not self.chunks[0].config.tie_embeddings:
            return None
        first, last = self.chunks[0].is_first, self.chunks[-1].is_last
        if first == last:  # both ends use the one table, or this rank has neither
            return None
        return next(item for item in self.parameters if item.name == "embedding.weight")

    @property
    def counted_elsewhere(self) -> tuple[str, ...]:
        """Names of parameters that another stage has, too, and counts in the gradient norm."""
        tied = self.tied_over_stages
        return () if tied is None or self.chunks[0].is_first else (tied.name,)


def build_model(
    config: ModelConfig,
    parallel: ParallelConfig,
    mesh: Mesh,
    *,
    seed: int,
    device: torch.device,
    dtype: torch.dtype,
) -> BuiltModel:
    """This rank's shards of its stages of the model, with the initial weights of `seed`."""
    order, communicator = PipelineOrder(parallel.pipeline), None
    # Of a whole weight there is nothing to plan, and it would cost a fifth of a step of 64 tokens.
    if mesh.topology.mode.facts.gathers_weights and mesh[Axis.WEIGHT].size > 1:
        communicator = _communicator(parallel.weight, mesh, device)
    layers = _layers(parallel, mesh, communicator, device, dtype)
    core = DistributedAttention(
        make_local_attention(
            config.attention_backend, device=device, dtype=dtype, head_dim=config.head_size
        ),
        layers.attention_channel,
    )
    spans = stage_spans(config, order.num_stages)
    chunks: list[Decoder] = []
    for stage in order.stages_of(mesh[Axis.PIPELINE].rank):
        table = chunks[0].embedding if chunks else None
        chunks.append(Decoder(config, layers, core, spans[stage], table=table))
        init_weights(chunks[-1], seed)
    if communicator is not None:
        communicator.declare([chunk.weight_blocks() for chunk in chunks])
    found = {item.parameter: item for chunk in chunks for item in named_parameters(chunk)}
    return BuiltModel(
        chunks=tuple(chunks),
        order=order,
        communicator=communicator,
        parameters=tuple(found.values()),
    )


def _communicator(weight: WeightConfig, mesh: Mesh, device: torch.device) -> ISPCommunicator:
    sum_locally = {"auto": None, "all_to_all": True, "reduce_scatter": False}[weight.reduce_by]
    reduce_channel = mesh[Axis.WEIGHT]
    if weight.reduces_apart:
        reduce_channel = mesh.open(Axis.WEIGHT, "weight_reduce", sum_locally=sum_locally)
    return ISPCommunicator(
        mesh[Axis.WEIGHT],
        ISPCommModelConfig.of(weight, device),
        prefetch=weight.prefetch,
        enable_memory_pool=weight.memory_pool,
        reduce_channel=reduce_channel,
        poison=weight.poison_freed_buffers,
    )


def _layers(
    parallel: ParallelConfig,
    mesh: Mesh,
    communicator: ISPCommunicator | None,
    device: torch.device,
    dtype: torch.dtype,
) -> LayerFactory:
    mode, weight = mesh.topology.mode, parallel.weight
    return LayerFactory(
        mode=mode,
        tensor=mesh[Axis.TENSOR],
        weight=mesh[Axis.WEIGHT],
        communicator=communicator or LocalWeights(),
        embed_split_hidden=weight.embed_split_hidden,
        vocab_parallel_loss=weight.vocab_parallel_loss,
        device=device,
        dtype=dtype,
    )
