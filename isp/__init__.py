"""A runtime and trainer for long-context language models on PyTorch.

The public names, which are loaded when they are first asked for: `from isp import ISPCommunicator`.
"""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from isp.core.attention.api import attention
    from isp.core.attention.ulysses import DistributedAttention
    from isp.core.internevo import (
        EmbeddingWeightParallelCommunicator,
        HeadWeightParallelCommunicator,
        ISPCommunicatorWrapper,
        ISPOverlapState,
        SeqAllToAll,
    )
    from isp.core.mixers.api import causal_conv1d, gated_delta_rule, state_space_scan
    from isp.core.pipeline.hooks import ISPCommunicatorSchedulerHook
    from isp.core.weights.communicator import ISPCommModelConfig, ISPCommunicator
    from isp.core.weights.pool import MemoryPool
    from isp.core.weights.wp import WPCommunicator
    from isp.loop.parallelize import parallelize
    from isp.models.huggingface.patches.calls import register_mixer
    from isp.parity.api import check

_HOMES = {
    "DistributedAttention": "isp.core.attention.ulysses",
    "EmbeddingWeightParallelCommunicator": "isp.core.internevo",
    "HeadWeightParallelCommunicator": "isp.core.internevo",
    "ISPCommModelConfig": "isp.core.weights.communicator",
    "ISPCommunicator": "isp.core.weights.communicator",
    "ISPCommunicatorSchedulerHook": "isp.core.pipeline.hooks",
    "ISPCommunicatorWrapper": "isp.core.internevo",
    "ISPOverlapState": "isp.core.internevo",
    "MemoryPool": "isp.core.weights.pool",
    "SeqAllToAll": "isp.core.internevo",
    "WPCommunicator": "isp.core.weights.wp",
    "causal_conv1d": "isp.core.mixers.api",
    "gated_delta_rule": "isp.core.mixers.api",
    "register_mixer": "isp.models.huggingface.patches.calls",
    "attention": "isp.core.attention.api",
    "check": "isp.parity.api",
    "parallelize": "isp.loop.parallelize",
    "state_space_scan": "isp.core.mixers.api",
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
    "attention",
    "causal_conv1d",
    "check",
    "gated_delta_rule",
    "parallelize",
    "register_mixer",
    "state_space_scan",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
