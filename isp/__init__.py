"""A runtime and trainer for long-context language models on PyTorch.

The public names, which are loaded when they are first asked for: `from isp import ISPCommunicator`.
"""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from isp.attention.distributed import DistributedAttention
    from isp.attention.exchange import SeqAllToAll
    from isp.mixers.call import causal_conv1d, gated_delta_rule, state_space_scan
    from isp.models.adapters import register_mixer
    from isp.pipeline.hooks import ISPCommunicatorSchedulerHook
    from isp.train.check_model import check
    from isp.train.parallelize import parallelize
    from isp.weights.communicator import ISPCommModelConfig, ISPCommunicator, ISPOverlapState
    from isp.weights.pool import MemoryPool
    from isp.weights.wp import (
        EmbeddingWeightParallelCommunicator,
        HeadWeightParallelCommunicator,
        ISPCommunicatorWrapper,
        WPCommunicator,
    )

_HOMES = {
    "DistributedAttention": "isp.attention.distributed",
    "EmbeddingWeightParallelCommunicator": "isp.weights.wp",
    "HeadWeightParallelCommunicator": "isp.weights.wp",
    "ISPCommModelConfig": "isp.weights.communicator",
    "ISPCommunicator": "isp.weights.communicator",
    "ISPCommunicatorSchedulerHook": "isp.pipeline.hooks",
    "ISPCommunicatorWrapper": "isp.weights.wp",
    "ISPOverlapState": "isp.weights.communicator",
    "MemoryPool": "isp.weights.pool",
    "SeqAllToAll": "isp.attention.exchange",
    "WPCommunicator": "isp.weights.wp",
    "causal_conv1d": "isp.mixers.call",
    "gated_delta_rule": "isp.mixers.call",
    "register_mixer": "isp.models.adapters",
    "check": "isp.train.check_model",
    "parallelize": "isp.train.parallelize",
    "state_space_scan": "isp.mixers.call",
}

__all__ = [
    "DistributedAttention",
    "EmbeddingWeightParallelCommunicator",
    "HeadWeightParallelCommunicator",
    "ISPCommModelConfig",
    "ISPCommunicator",
    "ISPCommunicatorSchedulerHook",
    "ISPCommunicatorWrapper",
    "ISPOverlapState",
    "MemoryPool",
    "SeqAllToAll",
    "WPCommunicator",
    "causal_conv1d",
    "check",
    "gated_delta_rule",
    "parallelize",
    "register_mixer",
    "state_space_scan",
]


def __getattr__(name: str) -> object:
    if name == "attention":
        return import_module("isp.attention")  # a room, and a function that can be called
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
