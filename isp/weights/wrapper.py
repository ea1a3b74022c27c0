"""`ISPCommunicatorWrapper`: several communicators, e.g. of dense and expert weights, behind one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from torch import nn

from isp.weights.communicator import ISPCommunicator
from isp.weights.reductions import GradientSink
from isp.weights.trace import Action

__all__ = ["ISPCommunicatorWrapper"]


class ISPCommunicatorWrapper:
    """Passes what happens in a step on to each of its communicators, in their order.

    Layers talk to their own communicator directly. All of them follow the same actions, each along
    a plan of the blocks that were declared to it.
    """

    def __init__(self, communicators: Sequence[ISPCommunicator]) -> None:
        self.communicators = tuple(communicators)

    def deliver_to(self, sink: GradientSink) -> None:
        """Give all reduced gradients to `sink`."""
        for communicator in self.communicators:
            communicator.deliver_to(sink)

    def register_prerequisite_for_forward_prefetch_hooks(
        self, fn: Callable[[nn.Module], None]
    ) -> None:
        """As of `ISPCommunicator`, for each.  Raises TypeError if `fn` is not callable."""
        for communicator in self.communicators:
            communicator.register_prerequisite_for_forward_prefetch_hooks(fn)

    def begin(self, actions: Sequence[Action]) -> None:
        """Follow the plans of `actions`, and launch their first gathers."""
        for communicator in self.communicators:
            communicator.begin(actions)

    def finish(self) -> None:
        """Deliver all gradients and give all buffers back."""
        for communicator in self.communicators:
            communicator.finish()

    def drain(self) -> None:
        """Drop what was gathered."""
        for communicator in self.communicators:
            communicator.drain()

    def switch_current_model_chunk(self, chunk: int) -> None:
        """Say which chunk runs from here on."""
        for communicator in self.communicators:
            communicator.switch_current_model_chunk(chunk)

    @contextmanager
    def recomputing(self) -> Iterator[None]:
        """Forward passes in this context are recomputes."""
        with ExitStack() as stack:
            for communicator in self.communicators:
                stack.enter_context(communicator.recomputing())
            yield
