"""`GatherExperts`: a module with experts of which each rank computes all, on gathered weights."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from isp.core.weights.wp_communicator import WPCommunicator
from isp.models.forwards import ModuleForward
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
        ahead: ComputedAhead | None = None,
    ) -> None:
        """`ahead`: the module that is computed while weights are in flight."""
        super().__init__(module, name, communicator)
        self._ahead = ahead

    def wrap(self, inner: ModuleForward) -> ModuleForward:
        self._own_code = inner
        return self.__call__ if self.communicator.gathers_weights else inner

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Compute the experts of all tokens, as the module's forward."""
        if self._ahead is not None:
            self._ahead.compute((*args, *kwargs.values())[0])
        return self.on_whole(self._run_own_code, args, kwargs)

    def _run_own_code(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        return self.run_own(self._own_code, args, kwargs)
