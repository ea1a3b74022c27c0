"""The tensor-parallel toolkit: everything to split your own model over a group of ranks.

Nothing here keeps state of its own: a group is a `Channel` that is handed over, random streams are
a tracker that is handed over, and several toolkits over different groups live side by side.
"""

from isp.attention.exchange import all_to_all_hp2sp, all_to_all_sp2hp
from isp.comm.mappings import (
    all_gather_last_dim_from_tensor_parallel_region,
    all_to_all,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    gather_split_1d_tensor,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_last_dim_to_tensor_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
    scatter_to_tensor_model_parallel_region,
    split_tensor_into_1d_equal_chunks,
)
from isp.data.broadcast import broadcast_data
from isp.layers.inference import (
    InferenceLayerNormColumnParallelLinear,
    InferenceRowParallelLinear,
    InferenceVocabParallelEmbedding,
)
from isp.layers.loss import IGNORED, vocab_parallel_cross_entropy
from isp.layers.megatron import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from isp.layers.weight_gradients import DeferredWeightGradients, IntoMainGradients
from isp.layers.workspace import InferenceWorkspace, Residual
from isp.parallel.partition import VocabUtility, divide, split_tensor_along_last_dim
from isp.recompute import CheckpointWithoutOutput, checkpoint
from isp.rng import RngStatesTracker, RngStream, model_parallel_manual_seed

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
