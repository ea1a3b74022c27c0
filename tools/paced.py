"""Compute that sleeps, so that ranks do not compete for cores."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torch import Tensor

from isp.weights.phase import Phase
from isp.weights.wp import WPCommunicator

__all__ = ["Paced"]


class Paced(WPCommunicator):
    """Sleeps where a layer multiplies by its weight or for its gradient, then hands on.

    `seconds` says how long a layer's product takes.
    """

    def __init__(self, communicator: WPCommunicator, seconds: Callable[[Any], float]) -> None:
        self.communicator = communicator
        self.gathers_weights = communicator.gathers_weights
        self.seconds = seconds

    @property
    def communication_mode(self) -> str:
        return self.communicator.communication_mode

    def prefetch_hook(self, *, module: Any, phase: Phase) -> None:
        self.communicator.prefetch_hook(module=module, phase=phase)

    def weight_hook(self, shard: Tensor, **place: Any) -> Tensor:
        return self.communicator.weight_hook(shard, **place)

    def release_hook(self, *, module: Any, phase: Phase) -> None:
        time.sleep(self.seconds(module))
        self.communicator.release_hook(module=module, phase=phase)

    def grad_hook(self, grad: Tensor, *, module: Any, **place: Any) -> Tensor | None:
        time.sleep(self.seconds(module))
        return self.communicator.grad_hook(grad, module=module, **place)
