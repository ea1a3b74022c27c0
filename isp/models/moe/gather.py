"""`GatherExperts`: compute all experts of a module on each rank, with gathered weights."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from isp.models.forwards import ModuleForward
from isp.models.moe.whole_weights import ShardedExperts

__all__ = ["GatherExperts"]


class GatherExperts(ShardedExperts):
    """Computes all experts for this rank's tokens, with stacks gathered over the weight group."""

    def wrap(self, inner: ModuleForward) -> ModuleForward:
        self.own_code = inner
        # Without gathered weights the parameters are whole, so the module's own code can run.
        return self.__call__ if self.communicator.gathers_weights else inner

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        if self.ahead is not None:
            # Compute the other module now, while the weights of the experts are in flight.
            self.ahead.compute((*args, *kwargs.values())[0])
        return self.on_whole(self.run_own, self.own_code, args, kwargs)
