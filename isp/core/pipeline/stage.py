"""`Pipeline`, which runs one rank's stages, and the calls that report its progress to the runtime.

B batch, S' positions of the sequence on this rank, D hidden size; a micro-batch is [B, S'] tokens
on the first stage and [B, S', D] hidden states between stages.
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
from isp.core.mesh.phase import Phase
from isp.core.optim.main_grads import MainGradients
from isp.core.pipeline.order import Hop, PipelineOrder, program
from isp.core.weights.uses import Action, ActionKind
from isp.core.weights.wp_communicator import DeferredWeightGradients

__all__ = [
    "FollowsActions",
    "ISPCommunicatorSchedulerHook",
    "Pipeline",
    "StageWork",
]


class FollowsActions(Protocol):
    """The methods of a communicator that a schedule calls to report its progress.

    An `ISPCommunicator` has them, and so does an object that wraps several `ISPCommunicator`s.
    """

    def begin(self, actions: Sequence[Action]) -> None: ...
    def finish(self) -> None: ...
    def switch_current_model_chunk(self, chunk: int) -> None: ...


class ISPCommunicatorSchedulerHook:
    """Methods that a schedule calls to report its progress to a communicator and a log.

    Not hooks of torch; the name is InternEvo's. The communicator is told which actions will run,
    which model chunk runs now, and when gradients are needed; the log, in which phase transfers
    are launched. `communicator` is None if weights are not gathered.
    """

    def __init__(self, communicator: FollowsActions | None, log: CommLog) -> None:
        self.communicator, self.log = communicator, log

    def before_step(self, actions: Sequence[Action]) -> None:
        """Begin a step that consists of `actions`; called before the first of them.

        The optimizer must have published the weights, because the first gathers are launched here.
        """
        if self.communicator is not None:
            self.communicator.begin(actions)
        self.log.enter(Phase.OTHER)

    def before_forward(self, chunk: int) -> None:
        """Report that the forward of a micro-batch through model chunk `chunk` begins now.

        The communicator then follows the plan of this chunk, and the log shows transfers as
        launched in forward.
        """
        self._enter(Phase.FORWARD, chunk)

    def after_forward(self, chunk: int) -> None:
        """Report that the forward through `chunk` has ended, for the log of later transfers."""
        self.log.enter(Phase.OTHER)

    def before_criterion(self) -> None:
        """Report that the loss of a micro-batch begins now: the log shows its transfers as LOSS."""
        self.log.enter(Phase.LOSS)

    def after_criterion(self) -> None:
        """Report that the loss of a micro-batch has ended, for the log of later transfers."""
        self.log.enter(Phase.OTHER)

    def before_backward(self, chunk: int) -> None:
        """Report that the backward of a micro-batch through model chunk `chunk` begins now.

        The communicator then follows the plan of this chunk, and the log shows transfers as
        launched in backward.
        """
        self._enter(Phase.BACKWARD, chunk)

    def after_backward(self, chunk: int) -> None:
        """Report that the backward through `chunk` has ended, for the log of later transfers."""
        self.log.enter(Phase.OTHER)

    def after_step(self) -> None:
        """Report that the last action of a step has ended; called before the optimizer's step.

        Waits until the communicator has reduced and delivered all gradients of weights.
        """
        self.log.enter(Phase.OPTIMIZER)
        if self.communicator is not None:
            self.communicator.finish()

    def _enter(self, phase: Phase, chunk: int) -> None:
        """Report the phase and the model chunk that run from now on."""
        self.log.enter(phase)
        if self.communicator is not None:
            self.communicator.switch_current_model_chunk(chunk)


class StageWork(Protocol):
    """The computations of a rank's stages on each micro-batch of a step."""

    @property
    def tokens(self) -> Sequence[Tensor]:
        """Tokens [B, S'] of each micro-batch; only the first stage computes with them."""

    def between(self, micro_batch: int) -> Tensor:
        """Return a new tensor [B, S', D], to receive hidden states of a micro-batch in."""

    def forward(self, chunk: int, micro_batch: int, x: Tensor) -> Tensor:
        """Return the output of this rank's model chunk number `chunk` for x."""

    def loss(self, micro_batch: int, output: Tensor) -> Tensor:
        """Return the loss to call backward of, a float64 scalar; only on the last stage."""


class Pipeline:
    """Runs a step of `work` on this rank's stages of a pipeline over `channel`.

    With `gradients` a step is forward and backward; with None it is forward only. `deferred` keeps
    the weight gradients that a split backward computes later; see [Note: Split backward] in
    docs/design/notes/pipeline.md. `last`: True if these are the last backward passes of a training
    step.
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
        """Start and end of the graph of each (micro-batch, chunk), until its backward. They keep
        no activations alive: only the graph does, those that it needs."""
        self._second_halves: dict[tuple[int, int], Callable[[], None]] = {}
        """The second half of the backward of each (micro-batch, chunk), if it is split."""
        self._made: dict[Hop, Tensor] = {}
        """Activations and gradients that are computed and not sent yet, by their transfer."""
        self._sent: dict[tuple[ActionKind, int], Pending] = {}
        """The last send of activations or gradients of each stage, by (kind, stage)."""
        self._coming: dict[Hop, Pending] = {}
        """Receives in flight. Results for another stage of this rank are here, too, as if they had
        been received."""

    def run(self) -> None:
        """Run this rank's program, and wait for all sends."""
        actions = [item for item in self._program if not isinstance(item, Hop)]
        self._backwards_left = Counter(a.chunk for a in actions if a.kind is ActionKind.BACKWARD)
        # The (micro-batch, chunk) whose backward is split: they have a second action.
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
        """Launch a send or a receive; at most one send of each kind and stage is in flight."""
        if hop.target in self._stages:
            buffer, source = self._work.between(hop.micro_batch), self._order.rank_of(hop.source)
            self._coming[hop] = self._channel.recv(buffer, source, tag=hop.tag)
            return
        key = hop.made_in, hop.source
        # Wait for the earlier send first, to bound the memory of results in flight.
        if key in self._sent:
            self._sent.pop(key).wait()
        target = self._order.rank_of(hop.target)
        self._sent[key] = self._channel.send(self._made.pop(hop), target, tag=hop.tag)

    def _deliver(self, hop: Hop, x: Tensor) -> None:
        """Keep the result x for its send, or for the stage of this rank that needs it."""
        if hop.target in self._stages:
            self._coming[hop] = Pending.ready(x)
        else:
            self._made[hop] = x

    def _forward(self, action: Action) -> None:
        """Run a forward, and keep the graph for its backward."""
        _, micro_batch, chunk = action
        stage, x = self._stages[chunk], self._work.tokens[micro_batch]
        entry = _Entry()
        if stage > 0:
            x = self._coming.pop(Hop(ActionKind.FORWARD, micro_batch, stage - 1)).wait()
            if self._gradients is not None:
                x = entry(x)
        self._hook.before_forward(chunk)
        y = self._work.forward(chunk, micro_batch, x)
        del x  # frees the input, unless the graph of y has saved it for backward
        if self._gradients is not None and not y.requires_grad:
            # All weights up to here are frozen: add a node, so that backward can run all the same.
            y = entry(y)
        self._hook.after_forward(chunk)
        end: Tensor | GradientEdge
        if stage < self._order.num_stages - 1:
            self._deliver(Hop(ActionKind.FORWARD, micro_batch, stage), y.detach())
            # Keep the edge instead of y, whose memory is free after it is sent.
            end = get_gradient_edge(y) if self._gradients is not None else y
        else:
            end = self._work.loss(micro_batch, y)
        if self._gradients is not None:
            self._kept[action[1:]] = entry, end

    def _backward(self, action: Action, *, is_split: bool) -> None:
        """Run a backward, or the first half of a split one."""
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
        # The chunks of a rank end at different times: after the last backward of one chunk, which
        # called `expect_last`, other chunks may have further backwards that are not their last.
        with nullcontext() if is_last else self._gradients.no_sync():
            torch.autograd.backward(end, dy)
            # Backward has kept the factors of the weight gradients. They are multiplied in a later
            # action if this backward is split, else now [Note: Split backward].
            if self._deferred is not None:
                multiply = self._deferred.take()
                if is_split:
                    self._second_halves[action[1:]] = multiply
                else:
                    multiply()
        self._hook.after_backward(chunk)
        if stage > 0:
            self._deliver(Hop(ActionKind.BACKWARD, micro_batch, stage), entry.take_gradient())


class _Entry:
    """The start of a stage's graph, which gets the input's gradient without keeping the input."""

    def __init__(self) -> None:
        self.gradient: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """Return x as the result of a node whose backward stores the gradient of x here."""
        entered: Tensor = _Enter.apply(x.new_empty(0).requires_grad_(), x, self)
        return entered

    def take_gradient(self) -> Tensor:
        """Return the gradient of the input that backward has stored, and forget it."""
        dx, self.gradient = self.gradient, None
        assert dx is not None, "backward has not reached the stage's input"
        return dx


class _Enter(Function):
    """The identity of x, whose backward stores dx in the attribute `gradient` of `entry`.

    The empty tensor `door` requires a gradient, so that there is a node although x, which was
    received, requires none.
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
