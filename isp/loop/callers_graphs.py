"""`CallersGraphs`: forwards from whose results, or loss, the caller computes a scalar.

There are two autograd graphs. The model's graph ends at the results of this rank's tokens; the
caller's graph begins at the results of whole rows. So the caller's code is the same on all ranks of
a sequence, and each rank's backward uses only the gradients of its own tokens: a scalar that all
these ranks compute counts once.

`ParallelRun` determines which calls are allowed in each state.

B batch, S sequence, N tokens of a row whose results this rank computes, K numbers of each token.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from isp.core.autograd import Function, once_differentiable, writable
from isp.core.comm import Channel, Mesh
from isp.core.comm.tag import Tag
from isp.core.mesh import Axis
from isp.core.micro_batch import MicroBatch
from isp.core.weights.uses import Action, ActionKind
from isp.loop.token_query import TokenQuery
from isp.step.step_work import StepParts, StepWork
from isp.step.train_step import MeanWork, StepOutcome, TrainStep

__all__ = ["CallersGraphs", "LossForward", "check_scalar"]

_CHUNK = 0
"""Index of the only model chunk of a rank without a pipeline."""
_BACKWARD = Action(ActionKind.BACKWARD, 0)
_TAG = Tag(tensor="results")


LossFunction = Callable[[int, Tensor], Tensor]
"""A function of a micro-batch's number and its results [B, S, K] that returns a scalar loss."""


# -- from the order of the ranks to the caller's, and back -----------------------------------------


class _Places(NamedTuple):
    """The map between tokens in the order of the ranks and the caller's order."""

    places: Tensor
    """For each token in the order of the ranks, the index at which the caller gets its result, in
    the flattened results [B S]; the index B S if the caller does not get it. Its shape is [B, S],
    or [1, B S] if context ranks join the B sequences to one."""
    rows: int
    """B, the number of sequences in the micro-batch."""
    tensor: Channel
    """The channel of the ranks that share these sequences."""

    def whole(self, own: Tensor) -> Tensor:
        """Return the results of all ranks of the sequence, in the caller's order: [B, S, K].

        `own` [B, N, K] are this rank's results. This has no backward: the method `own` gets the
        gradient of this rank's results from the gradient of all results.
        """
        own, total = own.detach(), self.places.numel()
        if own.shape[1] < self.places.shape[1]:
            own = self.tensor.all_gather(own, 1, tag=_TAG).wait()
        # One entry more than the caller gets: all results that are not for the caller go there.
        whole = own.new_zeros(total + 1, own.shape[2])
        whole.index_copy_(0, self.places.flatten(), own.flatten(0, 1))
        return whole[:-1].view(self.rows, -1, own.shape[2])

    def own(self, gradient: Tensor, num: int) -> Tensor:
        """Return the rows of `gradient` [B, S, K] for the N = `num` tokens of this rank, [B, N, K].

        `gradient` is in the caller's order; results that the caller does not get have gradient 0.
        """
        places, total = self.places, self.places.numel()
        if num < places.shape[1]:
            places = places.chunk(self.tensor.size, 1)[self.tensor.rank]
        found = gradient.flatten(0, 1)[places.clamp(max=total - 1)]
        return found.masked_fill_((places == total).unsqueeze(-1), 0)


class _QueryWork(StepWork):
    """Computes the results of queries, one query in each micro-batch, and keeps them in `found`.

    There is no loss and no backward.
    """

    def __init__(self, parts: StepParts, queries: Sequence[TokenQuery]) -> None:
        super().__init__(parts, [query.batch for query in queries])
        self._queries = queries
        self.found: list[tuple[Tensor, _Places]] = []
        """Results [B, N, K] of each micro-batch; only on the last stage."""

    def loss(self, micro_batch: int, output: Tensor) -> Tensor:
        """Keep the results of a micro-batch and return them, [B, N, K].

        There is no loss: the pipeline runs only forwards, so nothing calls backward of the result.
        """
        self.found.append(self._computed(micro_batch, output))
        return self.found[-1][0]

    def _computed(self, micro_batch: int, output: Tensor) -> tuple[Tensor, _Places]:
        """Return the results [B, N, K] of a micro-batch, and their places in the caller's rows."""
        query = self._queries[micro_batch]
        inputs = self.as_labels(micro_batch, query.inputs)
        self.hook.before_criterion()
        found = query.compute(self.chunks[-1], output, inputs)
        self.hook.after_criterion()
        order = self.arranged(micro_batch, query.places())
        return found, _Places(order, len(query.batch.tokens), self.mesh[Axis.TENSOR])


class _LossWork(_QueryWork):
    """Micro-batches of queries, each with a loss that the caller computes from its results."""

    def __init__(
        self, parts: StepParts, queries: Sequence[TokenQuery], loss_function: LossFunction
    ) -> None:
        super().__init__(parts, queries)
        self._loss_function = loss_function
        device = queries[0].batch.tokens.device
        self.losses = torch.zeros(len(queries), dtype=torch.float64, device=device)
        """The caller's loss of each micro-batch; 0 on all stages but the last."""

    def loss(self, micro_batch: int, output: Tensor) -> Tensor:
        """Call the caller's function, and return a scalar with the same gradient; [], float64."""
        found, places = self._computed(micro_batch, output)
        whole = places.whole(found).requires_grad_(torch.is_grad_enabled())
        # The backward below runs through the caller's graph only: it stops at `whole`, which is a
        # leaf, and leaves the gradient of the results there.
        loss = self._loss_function(micro_batch, whole)
        check_scalar(loss, "the loss function gave")
        self.losses[micro_batch] = loss.detach()
        if not torch.is_grad_enabled():
            return loss
        if loss.requires_grad:
            loss.backward()
        gradient = torch.zeros_like(whole) if whole.grad is None else whole.grad
        own = places.own(gradient, found.shape[1])
        # A scalar with the loss's gradient at the results, not its value: the caller's graph,
        # which has run backward, is freed.
        return self.optimizer.scale_loss((found * own).sum(dtype=torch.float64))


def check_scalar(loss: Tensor, what: str) -> None:
    """Raise ValueError, with a message that begins with `what`, if the loss is no scalar tensor."""
    if not isinstance(loss, Tensor) or loss.dim():
        found = f"a loss of shape {[*loss.shape]}" if isinstance(loss, Tensor) else f"{loss!r}"
        raise ValueError(f"{what} {found}: pass one scalar, a tensor without dimensions")


# -- forwards that wait for a gradient -------------------------------------------------------------


class WaitingForward(ABC):
    """A forward of the model whose backward runs when the caller's graph has given its gradient."""

    outside: str
    """Error message for a call of `loss.backward()` instead of the run's method."""
    too_late: str
    """Error message for a backward after the forward has become invalid."""

    def __init__(self, step: TrainStep, number: int, end: Tensor, num_labels: Tensor) -> None:
        """Keep the end of the model's graph on this rank: the node of `end`."""
        self._step = step
        self.number = number
        """Number of the forward, counted the same on all ranks of the sequence."""
        self._end: GradientEdge = get_gradient_edge(end)
        self.num_labels = num_labels
        """Number of this data rank's tokens that count as labels; [], float64."""

    @abstractmethod
    def run_backward(self, gradient: Tensor) -> None:
        """Run the model's backward.

        `gradient` is the gradient of what the caller got from this forward: results or a loss.
        """

    def counted_twice(self, gradient: Tensor) -> Tensor | float:
        """Return the part of the caller's scalar that other data ranks count as well.

        The run subtracts it from the scalar before it sums the scalars of all data ranks. It is 0
        unless a subclass overrides this. `gradient` is that of `run_backward`.
        """
        return 0.0


class _ResultForward(WaitingForward):
    """The forward of a query, which has computed the results `found` [B, N, K] of this rank.

    `places` maps them to the caller's order.
    """

    outside = "a loss of the run's results was given to loss.backward(): call run.backward(loss)"
    too_late = (
        "results of the run go backward once, in one call of run.backward, and before the step that"
        " follows them: compute them again"
    )

    def __init__(
        self, step: TrainStep, number: int, found: Tensor, places: _Places, query: TokenQuery
    ) -> None:
        super().__init__(step, number, found, query.num_labels)
        self._num, self._places = found.shape[1], places

    def run_backward(self, gradient: Tensor) -> None:
        """Run the model's backward of this rank's tokens; `gradient` [B, S, K] is of all tokens."""
        step, own = self._step, self._places.own(gradient, self._num)
        step.hook.before_step((_BACKWARD,))  # begins a prefetch plan for this backward alone
        step.hook.before_backward(_CHUNK)
        torch.autograd.backward(self._end, step.optimizer.scale_loss(own))
        step.hook.after_backward(_CHUNK)


class LossForward(WaitingForward):
    """The forward of `run.loss`; its prefetch plan includes the backward."""

    outside = (
        "the loss went backward outside of step: leave out loss.backward(), clipping and an"
        " optimizer of your own, all of which run.step(loss, lr=..) does; for n micro-batches a"
        " step, call run.backward(loss / n) for each, then run.step()"
    )
    too_late = (
        "a loss of run.loss goes backward once, and before the run computes anything else: for n"
        " micro-batches a step, call run.backward(loss / n) for each before the next one's"
        " run.loss, then run.step()"
    )

    def __init__(
        self, step: TrainStep, number: int, own: Tensor, work: MeanWork, num_labels: Tensor
    ) -> None:
        """Keep the end of the model's graph: `own`, this rank's loss times the loss scale."""
        super().__init__(step, number, own, num_labels)
        self._dtype, self._work = own.dtype, work
        self.mean = own.detach() + (step.over_ranks(work.total) - own.detach())
        """The mean loss over all ranks, []."""
        routers = step.chunks[-1].routers
        # Router losses have added their gradients in forward. `run_backward` scales these by the
        # gradient of the loss, which is known only then.
        self._scale_routers = None if routers is None else routers.scaling()

    def run_backward(self, gradient: Tensor) -> None:
        """Run the model's backward from the gradient [] of the mean loss."""
        self._step.hook.before_backward(_CHUNK)
        if self._scale_routers is not None:
            self._scale_routers(gradient)
        torch.autograd.backward(self._end, gradient.to(self._dtype))
        self._step.hook.after_backward(_CHUNK)

    def finish(self, lr: float) -> StepOutcome:
        """Update the weights after the backward of this loss alone."""
        return self._step.finish(self._work, lr)

    def counted_twice(self, gradient: Tensor) -> Tensor:
        """Return the part of the scalar that this loss adds, without 1 / (number of data ranks).

        The loss is a mean over data ranks and equal on all of them. So each rank keeps only
        1 / (number of data ranks) of it, or the sum over data ranks would count it several times.
        """
        return gradient * self.mean * (1 - 1 / self._step.mesh[Axis.DATA].size)


class _GraphStart(Function):
    """The node at which the caller's graph starts.

    forward   returns results [B, S, K] or a loss []; they require a gradient because `anchor` does
    backward  passes their gradient to `note_gradient`

    The node refers to the forward, and so to the model's graph: activations live as long as the
    caller's results.
    """

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        whole: Tensor,
        forward: WaitingForward,
        note_gradient: Callable[..., None],
    ) -> Tensor:
        ctx.of, ctx.note_gradient = forward, note_gradient
        return writable(whole.view_as(whole))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, ...]:
        ctx.note_gradient(ctx.of, gradient)
        return None, None, None, None


class _LastLoss(NamedTuple):
    """The last result of `run.loss`, until the run computes anything else."""

    loss: weakref.ref[Tensor]
    """The loss that the caller got. The reference is weak, because the graph of the loss refers to
    the run, and the run to this object."""
    forward: LossForward
    """The forward that computed the loss."""


class CallersGraphs:
    """Runs forwards for a caller, and finds the forwards that the caller's loss depends on.

    Results of a query are valid for one backward, and until `drop`. A loss of `run.loss` is valid
    for one backward, and until the run computes anything else.
    """

    def __init__(self, step: TrainStep, mesh: Mesh) -> None:
        self._step, self._mesh = step, mesh
        self._num_forwards = 0
        self._valid: weakref.WeakSet[WaitingForward] = weakref.WeakSet()
        """Forwards of queries whose results were computed since the last `drop`."""
        self._last_loss: _LastLoss | None = None
        self._arrived: list[tuple[WaitingForward, Tensor]] | None = None
        """Forwards that the running backward of the caller's graph has reached, with the gradients
        of their results; None outside of `run_callers_backward`."""

    def results(self, query: TokenQuery) -> Tensor:
        """Run the forward of a query and return its results in the caller's order, [B, S, K].

        They are the same on all ranks of the sequence. They require a gradient if the output of the
        model does.
        """
        self.forget_loss()
        self.compare([query])
        step, work = self._step, _QueryWork(self._step.parts, [query])
        self._run(work, training=False)
        # Results are summed over the stages below. Only the last stage has some, so other stages
        # add zeros.
        if not step.is_last_stage:
            wide = torch.promote_types(step.built.parameters[0].parameter.dtype, torch.float32)
            shape = *query.batch.tokens.shape, query.width
            whole = torch.zeros(shape, dtype=wide, device=query.batch.tokens.device)
        else:
            ((found, places),) = work.found
            whole = places.whole(found)
        stages = self._mesh[Axis.PIPELINE]
        if stages.size > 1:
            return stages.all_reduce(whole, tag=_TAG).wait()
        self._num_forwards += 1
        if not found.requires_grad:
            return whole
        forward = _ResultForward(step, self._num_forwards, found, places, query)
        self._valid.add(forward)
        return self._started(whole, forward)

    def loss(self, batch: MicroBatch, *, more: bool) -> Tensor:
        """Run the forward of `ParallelRun.loss`, and return the loss [], which has a gradient.

        With `more`, the step that earlier backward passes have begun continues, and their gradients
        are kept. Otherwise a step begins, and gradients of an unfinished step are dropped.
        """
        self.forget_loss()
        step = self._step
        work = step.start([batch], more=more)
        own = step.forward(work, 0)  # this rank's part of the mean loss, times the loss scale
        self._num_forwards += 1
        num_labels = step.objective.count(batch).double()
        forward = LossForward(step, self._num_forwards, own, work, num_labels)
        loss = self._started(forward.mean, forward)
        self._last_loss = _LastLoss(weakref.ref(loss), forward)
        return loss

    def micro_batches(
        self,
        queries: Sequence[TokenQuery],
        loss_function: LossFunction,
        *,
        training: bool,
        last: bool,
    ) -> Tensor:
        """Run forward and, in `training`, backward of queries with the caller's losses.

        `last`: these are the last backward passes of the step. Returns the losses [len(queries)],
        float64, the same on all stages.
        """
        work = _LossWork(self._step.parts, queries, loss_function)
        self._run(work, training=training, last=last)
        return self._mesh[Axis.PIPELINE].all_reduce(work.losses, tag=_TAG).wait()

    def compare(self, queries: Sequence[TokenQuery]) -> None:
        """Raise ValueError if the ranks of this rank's sequence have different queries."""
        assert self._step.same_rows is not None
        self._step.same_rows.compare([q.batch for q in queries], [q.inputs for q in queries])

    def run_callers_backward(self, loss: Tensor) -> list[tuple[WaitingForward, Tensor]]:
        """Run backward through the caller's graph of `loss`, and return what it has reached.

        Returns the forwards that the loss was computed from, the latest first, each with the
        gradient of its results; the model's backward does not run. Raises RuntimeError for a
        forward that is not valid any more.
        """
        arrived: list[tuple[WaitingForward, Tensor]] = []
        self._arrived = arrived
        try:
            if loss.requires_grad:
                loss.backward()
        finally:
            self._arrived = None
            self.forget_loss()
        # All ranks must run the model's backward passes in the same order, so that their
        # collectives meet; autograd may reach the forwards in another order.
        return sorted(arrived, key=lambda item: item[0].number, reverse=True)

    def _note_gradient(self, forward: WaitingForward, gradient: Tensor) -> None:
        """Keep the gradient of a forward that autograd has reached in the caller's graph.

        Raises RuntimeError outside of `run_callers_backward`, and for a forward that is not valid
        any more.
        """
        if self._arrived is None:
            raise RuntimeError(forward.outside)
        is_last_loss = self._last_loss is not None and self._last_loss.forward is forward
        if not is_last_loss and forward not in self._valid:
            raise RuntimeError(forward.too_late)
        self._arrived.append((forward, gradient))

    def run_model_backward(self, forward: WaitingForward, gradient: Tensor) -> None:
        """Run the model's backward for `forward`, a query or a loss, which is invalid afterwards.

        `gradient` is the gradient of the results of `forward`, as `run_callers_backward` returned
        it.
        """
        forward.run_backward(gradient)
        self._step.hook.after_step()
        self._valid.discard(forward)

    def forward_of(self, loss: Tensor) -> LossForward:
        """Return the forward of `loss`, which must be the last result of `run.loss` itself.

        Raises RuntimeError for an earlier result, and for a scalar that was computed from one.
        """
        if self._last_loss is None or self._last_loss.loss() is not loss:
            raise RuntimeError(
                "step takes the unchanged loss that the last call of loss returned, once; for"
                " another loss, such as loss / n or one of other results, call run.backward(loss),"
                " then run.step() without a loss"
            )
        return self._last_loss.forward

    def forget_loss(self) -> None:
        """Make the last result of `run.loss` invalid, because the run computes something else."""
        self._last_loss = None

    def drop(self) -> None:
        """Make all results invalid: weights change, or gradients are dropped."""
        self.forget_loss()
        self._valid.clear()

    def _started(self, whole: Tensor, forward: WaitingForward) -> Tensor:
        """Return `whole` as the start of a graph whose backward calls `_note_gradient`."""
        anchor = whole.new_empty(0).requires_grad_()
        started: Tensor = _GraphStart.apply(anchor, whole, forward, self._note_gradient)
        return started

    def _run(self, work: StepWork, *, training: bool, last: bool = False) -> None:
        """Run forward and, in `training`, backward of `work`, with its own prefetch plan.

        Raises ValueError if gradients are enabled and the model has router losses, which only
        `run.loss` includes.
        """
        step = self._step
        if torch.is_grad_enabled() and any(chunk.routers for chunk in step.chunks):
            raise ValueError(
                "router losses are part of run.loss only: set model.router_aux_loss_coef and"
                " model.router_z_loss_coef to 0 for your own losses"
            )
        actions = step.built.order.actions(
            self._mesh[Axis.PIPELINE].rank, len(work.tokens), training=training
        )
        step.hook.before_step(actions)
        step.run(work, training=training, last=last)
        step.hook.after_step()
