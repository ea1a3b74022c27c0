"""What a schedule of forward and backward passes tells the runtime: where it is."""

from __future__ import annotations

from collections.abc import Sequence

from isp.weights.communicator import ISPCommunicator
from isp.weights.trace import Action
from isp.weights.wrapper import ISPCommunicatorWrapper

__all__ = ["ISPCommunicatorSchedulerHook", "SchedulerHook"]


class SchedulerHook:
    """Called by a schedule; each method does nothing until it is overridden."""

    def before_step(self, actions: Sequence[Action]) -> None:
        """These actions come next; the weights they need are published."""

    def before_forward(self, chunk: int) -> None:
        """The forward of a micro-batch through model chunk `chunk` begins."""

    def after_forward(self, chunk: int) -> None:
        """It has ended."""

    def before_criterion(self) -> None:
        """The loss of a micro-batch is about to be computed."""

    def after_criterion(self) -> None:
        """It has been."""

    def before_backward(self, chunk: int) -> None:
        """The backward of a micro-batch through model chunk `chunk` begins."""

    def after_backward(self, chunk: int) -> None:
        """It has ended."""

    def after_step(self) -> None:
        """All actions are done, and gradients are needed."""


class ISPCommunicatorSchedulerHook(SchedulerHook):
    """Tells a communicator what comes next, which chunk runs, and when gradients are needed."""

    def __init__(self, communicator: ISPCommunicator | ISPCommunicatorWrapper) -> None:
        self.communicator = communicator

    def before_step(self, actions: Sequence[Action]) -> None:
        self.communicator.begin(actions)

    def before_forward(self, chunk: int) -> None:
        self.communicator.switch_current_model_chunk(chunk)

    def before_backward(self, chunk: int) -> None:
        self.communicator.switch_current_model_chunk(chunk)

    def after_step(self) -> None:
        self.communicator.finish()
