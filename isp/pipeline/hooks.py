"""Hooks by which a schedule of forward and backward passes tells the runtime where it is."""

from __future__ import annotations

from collections.abc import Sequence

from isp.comm import CommLog
from isp.parallel.phase import Phase
from isp.weights.communicator import ISPCommunicator
from isp.weights.trace import Action
from isp.weights.wp import ISPCommunicatorWrapper

__all__ = ["ISPCommunicatorSchedulerHook", "SchedulerHook"]


class SchedulerHook:
    """Called by a schedule: tells `log` in which phase of the step its transfers set off."""

    def __init__(self, log: CommLog) -> None:
        self.log = log

    def before_step(self, actions: Sequence[Action]) -> None:
        """These actions come next; the weights they need are published."""
        self.log.enter(Phase.OTHER)

    def before_forward(self, chunk: int) -> None:
        """The forward of a micro-batch through model chunk `chunk` begins."""
        self.log.enter(Phase.FORWARD)

    def after_forward(self, chunk: int) -> None:
        self.log.enter(Phase.OTHER)

    def before_criterion(self) -> None:
        """The loss of a micro-batch is about to be computed."""
        self.log.enter(Phase.LOSS)

    def after_criterion(self) -> None:
        self.log.enter(Phase.OTHER)

    def before_backward(self, chunk: int) -> None:
        """The backward of a micro-batch through model chunk `chunk` begins."""
        self.log.enter(Phase.BACKWARD)

    def after_backward(self, chunk: int) -> None:
        self.log.enter(Phase.OTHER)

    def after_step(self) -> None:
        """All actions are done, and gradients are needed."""
        self.log.enter(Phase.OPTIMIZER)


class ISPCommunicatorSchedulerHook(SchedulerHook):
    """Tells a communicator what comes next, which chunk runs, and when gradients are needed."""

    def __init__(
        self, communicator: ISPCommunicator | ISPCommunicatorWrapper, log: CommLog
    ) -> None:
        super().__init__(log)
        self.communicator = communicator

    def before_step(self, actions: Sequence[Action]) -> None:
        self.communicator.begin(actions)
        super().before_step(actions)

    def before_forward(self, chunk: int) -> None:
        super().before_forward(chunk)
        self.communicator.switch_current_model_chunk(chunk)

    def before_backward(self, chunk: int) -> None:
        super().before_backward(chunk)
        self.communicator.switch_current_model_chunk(chunk)

    def after_step(self) -> None:
        super().after_step()
        self.communicator.finish()
