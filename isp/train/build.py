"""From a configuration to a model on this rank."""

from __future__ import annotations

from typing import NamedTuple

import torch

from isp.attention import DistributedAttention, make_local_attention
from isp.comm import Mesh
from isp.layers.factory import LayerFactory
from isp.layers.module import init_weights
from isp.parallel import Axis, Mode
from isp.parallel.config import WeightConfig
from isp.weights.communicator import ISPCommModelConfig, ISPCommunicator
from isp.weights.wp import LocalWeights
from model.config import ModelConfig
from model.decoder import Decoder
from model.stages import stage_spans

__all__ = ["BuiltModel", "build_model"]


class BuiltModel(NamedTuple):
    """A model, and what drives its weights where they travel."""

    model: Decoder
    communicator: ISPCommunicator | None
    """None where weights stay on their rank."""


def build_model(
    config: ModelConfig,
    weight: WeightConfig,
    mesh: Mesh,
    *,
    seed: int,
    device: torch.device,
    dtype: torch.dtype,
) -> BuiltModel:
    """This rank's shards of its stage of the model, with the initial weights of `seed`."""
    mode, communicator = mesh.topology.mode, None
    if mode is Mode.ISP and mesh[Axis.WEIGHT].size > 1:
        sum_locally = {"auto": None, "all_to_all": True, "reduce_scatter": False}[weight.reduce_by]
        reduce_channel = mesh[Axis.WEIGHT]
        if weight.own_reduce_group or sum_locally is not None:
            reduce_channel = mesh.open(Axis.WEIGHT, "weight_reduce", sum_locally=sum_locally)
        communicator = ISPCommunicator(
            mesh[Axis.WEIGHT],
            ISPCommModelConfig(
                device=device,
                reduce_dtype=torch.float32 if weight.reduce_dtype == "float32" else None,
            ),
            reduce_channel=reduce_channel,
            poison=weight.poison_freed_buffers,
            overlap=weight.overlap,
            enable_memory_pool=weight.memory_pool,
            launch_allgather_before=weight.launch_allgather_before,
            forward_overlap_per=weight.forward_overlap_per,
        )
    layers = LayerFactory(
        mode=mode,
        tensor=mesh[Axis.TENSOR],
        weight=mesh[Axis.WEIGHT],
        communicator=communicator or LocalWeights(),
        embed_split_hidden=weight.embed_split_hidden,
        vocab_parallel_loss=mode is Mode.ISP and weight.vocab_parallel_loss,
        device=device,
        dtype=dtype,
    )
    attention = make_local_attention(device=device, dtype=dtype)
    stages = mesh[Axis.PIPELINE]
    model = Decoder(
        config,
        layers,
        DistributedAttention(attention, layers.attention_channel),
        stage_spans(config, stages.size)[stages.rank],
    )
    init_weights(model, seed)
    if communicator is not None:
        communicator.declare([model.weight_blocks()])
    return BuiltModel(model, communicator)
