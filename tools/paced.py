"""Compute that sleeps, so that ranks do not compete for cores."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from isp.parallel.phase import Phase
from isp.weights.wp import FullWeights, WPCommunicator

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

    @contextmanager
    def unshard(
        self, module: Any, phase: Phase, weight: Tensor, bias: Tensor | None = None
    ) -> Iterator[FullWeights]:
        with self.communicator.unshard(module, phase, weight, bias) as full:
            yield full
            time.sleep(self.seconds(module))

    def grad_hook(self, grad: Tensor, *, module: Any, **place: Any) -> Tensor | None:
        time.sleep(self.seconds(module))
        return self.communicator.grad_hook(grad, module=module, **place)
