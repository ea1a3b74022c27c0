"""A runtime and trainer for long-context language models on PyTorch.

Public names are those in `isp.__all__` and in that of `isp.tensor_parallel`, `isp.data_parallel`,
`isp.metrics`, `isp.profile` and the modules of `isp.integrations`. Every other module is internal.
"""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

# Type checkers and editors do not run `__getattr__` below, so they read these imports. `_NAMES` is
# the same list; a test compares the two.
if TYPE_CHECKING:
    # isort: off
    from isp.core.attention.api import attention as attention
    from isp.core.attention.local import make_local_attention as make_local_attention
    from isp.core.attention.mask import AttentionMask as AttentionMask
    from isp.core.attention.ulysses import DistributedAttention as DistributedAttention
    from isp.core.comm.channel import Channel as Channel
    from isp.core.internevo import (
        EmbeddingWeightParallelCommunicator as EmbeddingWeightParallelCommunicator,
        HeadWeightParallelCommunicator as HeadWeightParallelCommunicator,
        ISPCommunicatorWrapper as ISPCommunicatorWrapper,
        ISPOverlapState as ISPOverlapState,
        SeqAllToAll as SeqAllToAll,
    )
    from isp.core.layers.weight_parallel import (
        ISPEmbedding as ISPEmbedding,
        ISPLinear as ISPLinear,
        sum_gradients as sum_gradients,
        weight_blocks as weight_blocks,
    )
    from isp.core.mesh.config import (
        LaunchPoint as LaunchPoint,
        OverlapUnit as OverlapUnit,
        Prefetch as Prefetch,
    )
    from isp.core.mixers.api import (
        causal_conv1d as causal_conv1d,
        gated_delta_rule as gated_delta_rule,
        state_space_scan as state_space_scan,
    )
    from isp.core.pipeline.stage import ISPCommunicatorSchedulerHook as ISPCommunicatorSchedulerHook
    from isp.core.weights.communicator import (
        ISPCommModelConfig as ISPCommModelConfig,
        ISPCommunicator as ISPCommunicator,
    )
    from isp.core.weights.pool import MemoryPool as MemoryPool
    from isp.core.weights.uses import (
        Action as Action,
        ActionKind as ActionKind,
        sequential_actions as sequential_actions,
    )
    from isp.core.weights.wp_communicator import WPCommunicator as WPCommunicator
    from isp.loop.parallel_run import ParallelRun as ParallelRun
    from isp.loop.parallelize import parallelize as parallelize
    from isp.models.meta import parameters_on_meta as parameters_on_meta
    from isp.models.huggingface.patches.calls import register_mixer as register_mixer
    from isp.parity.api import CheckResult as CheckResult, check as check
    # isort: on

_NAMES = {
    "isp.core.attention.api": ["attention"],
    "isp.core.attention.local": ["make_local_attention"],
    "isp.core.attention.mask": ["AttentionMask"],
    "isp.core.attention.ulysses": ["DistributedAttention"],
    "isp.core.comm.channel": ["Channel"],
    "isp.core.internevo": [
        "EmbeddingWeightParallelCommunicator",
        "HeadWeightParallelCommunicator",
        "ISPCommunicatorWrapper",
        "ISPOverlapState",
        "SeqAllToAll",
    ],
    "isp.core.layers.weight_parallel": [
        "ISPEmbedding",
        "ISPLinear",
        "sum_gradients",
        "weight_blocks",
    ],
    "isp.core.mesh.config": ["LaunchPoint", "OverlapUnit", "Prefetch"],
    "isp.core.mixers.api": ["causal_conv1d", "gated_delta_rule", "state_space_scan"],
    "isp.core.pipeline.stage": ["ISPCommunicatorSchedulerHook"],
    "isp.core.weights.communicator": ["ISPCommModelConfig", "ISPCommunicator"],
    "isp.core.weights.pool": ["MemoryPool"],
    "isp.core.weights.uses": ["Action", "ActionKind", "sequential_actions"],
    "isp.core.weights.wp_communicator": ["WPCommunicator"],
    "isp.loop.parallel_run": ["ParallelRun"],
    "isp.loop.parallelize": ["parallelize"],
    "isp.models.meta": ["parameters_on_meta"],
    "isp.models.huggingface.patches.calls": ["register_mixer"],
    "isp.parity.api": ["CheckResult", "check"],
}
"""Public names by module. A module is imported only when one of its names is first used, so that
`import isp` is fast and does not load torch."""

_HOMES = {name: module for module, names in _NAMES.items() for name in names}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(import_module(_HOMES[name]), name)
    globals()[name] = found  # so that the next use is a plain attribute
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
