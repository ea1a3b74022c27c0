"""Exact attention over sequences that are split over ranks."""

import sys
from types import ModuleType

from isp.attention.call import Relative, attention
from isp.attention.context import ContextAttention
from isp.attention.cpu import CpuAttention
from isp.attention.distributed import DistributedAttention
from isp.attention.exchange import SeqAllToAll, all_to_all_hp2sp, all_to_all_sp2hp
from isp.attention.heads import HeadPlan
from isp.attention.local import LocalAttention, make_local_attention
from isp.attention.mask import AttentionMask

__all__ = [
    "AttentionMask",
    "ContextAttention",
    "CpuAttention",
    "DistributedAttention",
    "HeadPlan",
    "LocalAttention",
    "Relative",
    "SeqAllToAll",
    "all_to_all_hp2sp",
    "all_to_all_sp2hp",
    "make_local_attention",
]


class _Callable(ModuleType):
    """Lets people write `isp.attention(q, k, v)`."""

    __call__ = staticmethod(attention)


sys.modules[__name__].__class__ = _Callable
