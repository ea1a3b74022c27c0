"""One rank's stages of a pipeline at work, with the runtime told where each of them is.

B batch, S sequence, D hidden size; a micro-batch is [B, S'] tokens on the first stage and
[B, S', D] between stages.

[Note: Split backward] A linear of ours computes both gradients in one custom function. So where the
backward is split, the whole graph runs in the first half, with each linear's two factors kept, and
the second half is to multiply them. Gradients of norms, biases and the embedding are there
after the first half.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from isp.core.autograd import Function, once_differentiable, writable
from isp.core.comm import Channel, CommLog, Pending
from isp.core.layers.linear import DeferredWeightGradients
from isp.core.mesh.phase import Phase
from isp.core.optim.main_grads import MainGradients
from isp.core.pipeline.order import Hop, PipelineOrder, program
from isp.core.weights.uses import Action, ActionKind

__all__ = [
    "FollowsActions",
    "ISPCommunicatorSchedulerHook",
    "Pipeline",
    "StageWork",
]


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


class StageWork(Protocol):
    """A rank's work on micro-batch number `micro_batch` of a step."""

    @property
    def tokens(self) -> Sequence[Tensor]:
        """Of each micro-batch, [B, S']; only the first stage computes with them."""

    def between(self, micro_batch: int) -> Tensor:
        """A new tensor such as travels between stages, [B, S', D]."""

    def forward(self, chunk: int, micro_batch: int, x: Tensor) -> Tensor:
        """Through the part of the model that is this rank's chunk number `chunk`."""

    def loss(self, micro_batch: int, output: Tensor) -> Tensor:
        """On the last stage: what is differentiated, of no dimension and float64."""


class Pipeline:
    """One step of `work` on this rank's stages of a pipeline over `channel`.

    With `gradients` a step is forward and backward, without them it is forward alone. `deferred`
    has the weight gradients that a schedule with a split backward computes on their own. `last`: no
    backward pass of the same step comes behind these.
    """

    def __init__(
        self,
        channel: Channel,
        order: PipelineOrder,
        work: StageWork,
        *,
        hook: ISPCommunicatorSchedulerHook,
        gradients: MainGradients | None,
        deferred: DeferredWeightGradients | None,
        last: bool = True,
    ) -> None:
        self._last = last
        self._channel = channel
        self._order = order
        self._work = work
        self._hook = hook
        self._gradients = gradients
        self._deferred = deferred
        self._stages = order.stages_of(channel.rank)
        self._program = program(
            order, channel.rank, len(work.tokens), training=gradients is not None
        )
        self._kept: dict[tuple[int, int], tuple[_Entry, Tensor | GradientEdge]] = {}
        """By micro-batch and chunk: the two ends of its graph, until the backward; no activations,
        which are kept by who needs them."""
        self._second_halves: dict[tuple[int, int], Callable[[], None]] = {}
        """By micro-batch and chunk: the second half of its backward."""
        self._made: dict[Hop, Tensor] = {}
        """About to be sent."""
        self._sent: dict[tuple[ActionKind, int], Pending] = {}
        """The last one of each kind and stage."""
        self._coming: dict[Hop, Pending] = {}

    def run(self) -> None:
        actions = [item for item in self._program if not isinstance(item, Hop)]
        self._backwards_left = Counter(a.chunk for a in actions if a.kind is ActionKind.BACKWARD)
        halves = {a[1:] for a in actions if a.kind is ActionKind.WEIGHT_GRADIENT}
        for item in self._program:
            if isinstance(item, Hop):
                self._move(item)
            elif item.kind is ActionKind.FORWARD:
                self._forward(item)
            elif item.kind is ActionKind.BACKWARD:
                self._backward(item, is_split=item[1:] in halves)
            else:
                self._second_halves.pop(item[1:])()
        for sent in self._sent.values():
            sent.wait()

    def _move(self, hop: Hop) -> None:
        """Launch a send or a receive. One send at a time is under way of each kind and stage."""
        if hop.target in self._stages:
            buffer, source = self._work.between(hop.micro_batch), self._order.rank_of(hop.source)
            self._coming[hop] = self._channel.recv(buffer, source, tag=hop.tag)
            return
        key = hop.made_in, hop.source
        if key in self._sent:
            self._sent.pop(key).wait()
        target = self._order.rank_of(hop.target)
        self._sent[key] = self._channel.send(self._made.pop(hop), target, tag=hop.tag)

    def _hand_on(self, hop: Hop, x: Tensor) -> None:
        if hop.target in self._stages:
            self._coming[hop] = Pending.ready(x)
        else:
            self._made[hop] = x

    def _forward(self, action: Action) -> None:
        _, micro_batch, chunk = action
        stage, x = self._stages[chunk], self._work.tokens[micro_batch]
        entry = _Entry()
        if stage > 0:
            x = self._coming.pop(Hop(ActionKind.FORWARD, micro_batch, stage - 1)).wait()
            if self._gradients is not None:
                x = entry(x)
        self._hook.before_forward(chunk)
        y = self._work.forward(chunk, micro_batch, x)
        del x
        if self._gradients is not None and not y.requires_grad:
            y = entry(y)  # all weights from the input on are frozen
        self._hook.after_forward(chunk)
        end: Tensor | GradientEdge
        if stage < self._order.num_stages - 1:
            self._hand_on(Hop(ActionKind.FORWARD, micro_batch, stage), y.detach())
            end = get_gradient_edge(y) if self._gradients is not None else y
        else:
            end = self._work.loss(micro_batch, y)
        if self._gradients is not None:
            self._kept[action[1:]] = entry, end

    def _backward(self, action: Action, *, is_split: bool) -> None:
        assert self._gradients is not None
        _, micro_batch, chunk = action
        stage, dy = self._stages[chunk], None
        entry, end = self._kept.pop(action[1:])
        if stage < self._order.num_stages - 1:
            dy = self._coming.pop(Hop(ActionKind.BACKWARD, micro_batch, stage + 1)).wait()
        self._backwards_left[chunk] -= 1
        is_last = self._last and self._backwards_left[chunk] == 0
        if is_last:
            self._gradients.expect_last()
        self._hook.before_backward(chunk)
        with nullcontext() if is_last else self._gradients.no_sync():
            torch.autograd.backward(end, dy)
            if self._deferred is not None:
                multiply = self._deferred.take()
                if is_split:
                    self._second_halves[action[1:]] = multiply
                else:
                    multiply()
        self._hook.after_backward(chunk)
        if stage > 0:
            self._hand_on(Hop(ActionKind.BACKWARD, micro_batch, stage), entry.take_gradient())


class _Entry:
    """Where a stage's graph begins: has the gradient of its input, and no hold on the input."""

    def __init__(self) -> None:
        self.gradient: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """x, whose gradient comes here."""
        entered: Tensor = _Enter.apply(x.new_empty(0).requires_grad_(), x, self)
        return entered

    def take_gradient(self) -> Tensor:
        """The gradient, which goes to who asks."""
        dx, self.gradient = self.gradient, None
        assert dx is not None, "no backward has come to the stage's input"
        return dx


class _Enter(Function):
    """forward   x, in a graph because of `door`, which is empty
    backward  dx to the entry
    """

    @staticmethod
    def forward(ctx: Any, door: Tensor, x: Tensor, entry: _Entry) -> Tensor:
        ctx.entry = entry
        return writable(x.view_as(x))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor) -> tuple[None, None, None]:
        ctx.entry.gradient = dx
        return None, None, None
