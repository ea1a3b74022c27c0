"""`GatherExperts`: a module with experts of which each rank computes all, on gathered weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from isp.core.weights.wp_communicator import WPCommunicator
from isp.models.moe.ahead import ComputedAhead
from isp.models.moe.whole_weights import ShardedExperts

__all__ = ["GatherExperts"]


class GatherExperts(ShardedExperts):
    """Experts for the tokens of this rank, whose stacks are gathered over the weight group."""

    def __init__(
        self,
        module: nn.Module,
        name: str,
        communicator: WPCommunicator,
        called: Callable[[], object],
        ahead: ComputedAhead | None = None,
    ) -> None:
        """Replace the forward of `module` if its weights are gathered; see `ShardedExperts`."""
        super().__init__(module, name, communicator, called, ahead)
        if communicator.gathers_weights:
            module.forward = self.__call__

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Compute the experts of all tokens, as the module's forward."""
        if self.ahead is not None:
            self.ahead.compute((*args, *kwargs.values())[0])
        return self.on_whole(self.run_own, self.own_code, args, kwargs)
