"""Hooks that tell the runtime where a schedule of forward and backward passes is."""

from __future__ import annotations

from collections.abc import Sequence

from isp.comm import CommLog
from isp.parallel.phase import Phase
from isp.weights.communicator import ISPCommunicator
from isp.weights.trace import Action
from isp.weights.wp import ISPCommunicatorWrapper

__all__ = ["ISPCommunicatorSchedulerHook", "PhaseHook", "SchedulerHook"]


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


class PhaseHook(SchedulerHook):
    """Tells a log in which phase of the step its transfers set off; else does what `inner` does."""

    def __init__(self, log: CommLog, inner: SchedulerHook) -> None:
        self.log = log
        self.inner = inner

    def before_step(self, actions: Sequence[Action]) -> None:
        self.inner.before_step(actions)
        self.log.enter(Phase.OTHER)

    def before_forward(self, chunk: int) -> None:
        self.log.enter(Phase.FORWARD)
        self.inner.before_forward(chunk)

    def after_forward(self, chunk: int) -> None:
        self.inner.after_forward(chunk)
        self.log.enter(Phase.OTHER)

    def before_criterion(self) -> None:
        self.log.enter(Phase.LOSS)
        self.inner.before_criterion()

    def after_criterion(self) -> None:
        self.inner.after_criterion()
        self.log.enter(Phase.OTHER)

    def before_backward(self, chunk: int) -> None:
        self.log.enter(Phase.BACKWARD)
        self.inner.before_backward(chunk)

    def after_backward(self, chunk: int) -> None:
        self.inner.after_backward(chunk)
        self.log.enter(Phase.OTHER)

    def after_step(self) -> None:
        self.log.enter(Phase.OPTIMIZER)
        self.inner.after_step()
