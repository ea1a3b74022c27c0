"""Megatron-LM's tensor-parallel toolkit: layers and collectives to split a model of your own.

Nothing here keeps global state. A group of ranks is a `Channel` that you pass, and random streams
are an `RngStatesTracker` that you pass, so one program can use several groups.
"""

from isp.core.attention.all_to_all import all_to_all_hp2sp, all_to_all_sp2hp
from isp.core.layers.vocab_loss import IGNORED, vocab_parallel_cross_entropy
from isp.core.megatron.broadcast import broadcast_data
from isp.core.megatron.inference import (
    InferenceLayerNormColumnParallelLinear,
    InferenceRowParallelLinear,
    InferenceVocabParallelEmbedding,
    InferenceWorkspace,
    Residual,
)
from isp.core.megatron.layers import (
    ColumnParallelLinear,
    IntoMainGradients,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from isp.core.megatron.mappings import (
    all_gather_last_dim_from_tensor_parallel_region,
    all_to_all,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_last_dim_to_tensor_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
    scatter_to_tensor_model_parallel_region,
)
from isp.core.mesh.partition import VocabUtility, divide, split_tensor_along_last_dim
from isp.core.recompute.recompute import (
    CheckpointWithoutOutput,
    checkpoint,
    gather_split_1d_tensor,
    split_tensor_into_1d_equal_chunks,
)
from isp.core.rng import RngStatesTracker, RngStream, model_parallel_manual_seed
from isp.core.weights.wp_communicator import DeferredWeightGradients

__all__ = [
    "IGNORED",
    "CheckpointWithoutOutput",
    "ColumnParallelLinear",
    "DeferredWeightGradients",
    "InferenceLayerNormColumnParallelLinear",
    "InferenceRowParallelLinear",
    "InferenceVocabParallelEmbedding",
    "InferenceWorkspace",
    "IntoMainGradients",
    "Residual",
    "RngStatesTracker",
    "RngStream",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "VocabUtility",
    "all_gather_last_dim_from_tensor_parallel_region",
    "all_to_all",
    "all_to_all_hp2sp",
    "all_to_all_sp2hp",
    "broadcast_data",
    "checkpoint",
    "copy_to_tensor_model_parallel_region",
    "divide",
    "gather_from_sequence_parallel_region",
    "gather_from_tensor_model_parallel_region",
    "gather_split_1d_tensor",
    "model_parallel_manual_seed",
    "reduce_from_tensor_model_parallel_region",
    "reduce_scatter_last_dim_to_tensor_parallel_region",
    "reduce_scatter_to_sequence_parallel_region",
    "scatter_to_sequence_parallel_region",
    "scatter_to_tensor_model_parallel_region",
    "split_tensor_along_last_dim",
    "split_tensor_into_1d_equal_chunks",
    "vocab_parallel_cross_entropy",
]
