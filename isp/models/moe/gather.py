"""`GatherExperts`: a module with experts of which each rank computes all, on gathered weights."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from isp.models.forwards import ModuleForward
from isp.models.moe.whole_weights import ShardedExperts

__all__ = ["GatherExperts"]


class GatherExperts(ShardedExperts):
    """Experts for the tokens of this rank, whose stacks are gathered over the weight group."""

    def wrap(self, inner: ModuleForward) -> ModuleForward:
        self.own_code = inner
        return self.__call__ if self.communicator.gathers_weights else inner

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        if self.ahead is not None:
            self.ahead.compute((*args, *kwargs.values())[0])
        return self.on_whole(self.run_own, self.own_code, args, kwargs)
