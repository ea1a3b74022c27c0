"""Hooks by which a schedule of forward and backward passes tells the runtime where it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from isp.core.comm import CommLog
from isp.core.mesh.phase import Phase
from isp.core.weights.uses import Action

__all__ = ["FollowsActions", "ISPCommunicatorSchedulerHook"]


class FollowsActions(Protocol):
    """A communicator that follows a schedule: an `ISPCommunicator`, or a wrapper of several."""

    def begin(self, actions: Sequence[Action]) -> None: ...
    def finish(self) -> None: ...
    def switch_current_model_chunk(self, chunk: int) -> None: ...


class ISPCommunicatorSchedulerHook:
    """Called by a schedule: tells a communicator what comes next, which chunk runs, and when
    gradients are needed; and `log` in which phase of the step its transfers set off.

    `communicator`: None where weights stay on their rank.
    """

    def __init__(self, communicator: FollowsActions | None, log: CommLog) -> None:
        self.communicator, self.log = communicator, log

    def before_step(self, actions: Sequence[Action]) -> None:
        """These actions come next; the weights they need are published."""
        if self.communicator is not None:
            self.communicator.begin(actions)
        self.log.enter(Phase.OTHER)

    def before_forward(self, chunk: int) -> None:
        """The forward of a micro-batch through model chunk `chunk` begins."""
        self._enter(Phase.FORWARD, chunk)

    def after_forward(self, chunk: int) -> None:
        self.log.enter(Phase.OTHER)

    def before_criterion(self) -> None:
        """The loss of a micro-batch is about to be computed."""
        self.log.enter(Phase.LOSS)

    def after_criterion(self) -> None:
        self.log.enter(Phase.OTHER)

    def before_backward(self, chunk: int) -> None:
        """The backward of a micro-batch through model chunk `chunk` begins."""
        self._enter(Phase.BACKWARD, chunk)

    def after_backward(self, chunk: int) -> None:
        self.log.enter(Phase.OTHER)

    def after_step(self) -> None:
        """All actions are done, and gradients are needed."""
        self.log.enter(Phase.OPTIMIZER)
        if self.communicator is not None:
            self.communicator.finish()

    def _enter(self, phase: Phase, chunk: int) -> None:
        self.log.enter(phase)
        if self.communicator is not None:
            self.communicator.switch_current_model_chunk(chunk)
