"""`PlanCursor`, which follows a plan as the layers report where they are.

[Note: Unannounced] Nobody says when weights change if nobody calls `begin`, and not every write can
be seen [Note: Versions]. So what is gathered ahead then lives no longer than the pass that it was
gathered for: a forward that is at any but the next place of the plan is another pass. The plan is
given up, what is there is dropped, and the layers gather for themselves until the next forward from
the start.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TYPE_CHECKING

from isp.parallel.phase import Phase
from isp.weights.plan import Act, ActKind, Plan, Step
from isp.weights.trace import Action, ActionKind, Site

if TYPE_CHECKING:
    from isp.weights.communicator import ISPCommunicator

__all__ = ["PlanCursor", "UnannouncedPasses"]


class PlanCursor:
    """A place in a plan. `key_of` names the visit at a site, as `arrive` will name it."""

    def __init__(self, plan: Plan, key_of: Callable[[Site], Hashable]) -> None:
        self.plan = plan
        self.position = 0
        """The next step that has not been arrived at."""
        self._key_of = key_of

    def arrive(self, key: Hashable, phase: Phase) -> tuple[Step, tuple[Step, ...]] | None:
        """The step of this visit and those skipped on the way to it; None if it is not planned.

        Looks through the rest of the current action, and through the first block of the next one:
        further away lies another visit of the same layer, which this one is not.
        """
        steps, start = self.plan.steps, self.position
        current = _action(steps[start - 1]) if start else None
        action_ahead: tuple[int, int, bool] | None = None
        for index in range(start, len(steps)):
            step = steps[index]
            if _action(step) != current:
                if action_ahead is None:
                    action_ahead, first_block = _action(step), step.site.block
                if _action(step) != action_ahead or step.site.block != first_block:
                    return None
            if step.site.phase is phase and self._key_of(step.site) == key:
                self.position = index + 1
                return step, steps[start:index]
        return None

    def live_steps(self, weight: str) -> Iterator[Step]:
        """The steps from the next wait for `weight` to the free that follows, both included."""
        inside = False
        for step in self.plan.steps[max(0, self.position - 1) :]:
            inside = inside or Act(ActKind.WAIT, weight) in step.before
            if inside:
                yield step
                if Act(ActKind.FREE, weight) in step.after:
                    return


def _action(step: Step) -> tuple[int, int, bool]:
    return step.micro_batch, step.site.chunk, step.site.phase is Phase.FORWARD


class UnannouncedPasses:
    """Begins a pass, one forward and one backward of all chunks, whenever its first visit comes."""

    def __init__(
        self, communicator: ISPCommunicator, keys: Sequence[Hashable], num_chunks: int
    ) -> None:
        self._communicator = communicator
        self._keys = keys
        """Of all visits, in forward order."""
        forward = (Action(ActionKind.FORWARD, 0, c) for c in range(num_chunks))
        backward = (Action(ActionKind.BACKWARD, 0, c) for c in reversed(range(num_chunks)))
        self._actions = (*forward, *backward)

    def __call__(self, key: Hashable) -> None:
        """A forward has come to `key`, which is not the next visit of the plan."""
        if key not in self._keys:  # a layer that nobody has declared is in no plan
            return
        self._communicator.drain()
        if key == self._keys[0]:
            self._communicator.follow(self._actions)
