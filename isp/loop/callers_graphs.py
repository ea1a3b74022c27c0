"""`CallersGraphs`: forwards whose results, or losses, the caller computes a scalar from.

B batch, S sequence, N tokens of a row whose results this rank computes, K numbers of each token
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from isp.core.autograd import Function, once_differentiable, writable
from isp.core.comm import Channel, Mesh
from isp.core.comm.tag import Tag
from isp.core.layers.vocab_loss import IGNORED
from isp.core.mesh import Axis
from isp.core.micro_batch import MicroBatch
from isp.core.weights.uses import Action, ActionKind
from isp.models.runtime.stage_module import StageModule
from isp.step.step_work import StepParts, StepWork
from isp.step.train_step import MeanWork, StepOutcome, TrainStep

__all__ = ["Asked", "CallersGraphs"]

logger = logging.getLogger(__name__)

_CHUNK = 0
"""Number of the only model chunk of a rank without a pipeline."""
_BACKWARD = Action(ActionKind.BACKWARD, 0)
_TAG, _METRICS = Tag(tensor="results"), Tag(tensor="metrics")


class Asked(NamedTuple):
    """A per-token query over one micro-batch: the results to compute, and the caller's form."""

    batch: MicroBatch
    """Whole rows, in the caller's order, [B, S]."""
    width: int
    """K, the number of results of each token."""
    find: Callable[[StageModule, Tensor, Tensor], Tensor]
    """Function of the last chunk, its output, and `beside` for the output's tokens, that returns
    the results [B, N, K]."""
    beside: Tensor
    """Further input of `find` for each token of the whole rows, such as labels; [B, S, ..]."""
    num_labels: Tensor
    """Number of tokens that count as labels in a step's outcome; [], float64."""
    answer: Callable[[Tensor], Any]
    """Function that turns results [B, S, K] into what the caller gets."""
    ahead: int = 0
    """Positions from the token whose logits give a result to the token that the caller gets it for:
    1 for log-probabilities, which logits of the token before predict."""


LossFunction = Callable[[int, Tensor], Tensor]
"""A function of a micro-batch's number and its results [B, S, K] that returns a scalar loss."""


class _Places(NamedTuple):
    """The map between tokens in the order of the ranks and the caller's order."""

    places: Tensor
    """Index, in the caller's flattened rows, of each token's result, in the order of the ranks;
    B S for a result that the caller does not get. [B, S], or [1, B S] if rows are joined."""
    rows: int
    """B."""
    tensor: Channel

    def whole(self, own: Tensor) -> Tensor:
        """Gather results [B, N, K] of the ranks of a sequence into the caller's order, [B, S, K].

        Has no backward: `own` returns the gradient to this rank's results.
        """
        own, total = own.detach(), self.places.numel()
        if own.shape[1] < self.places.shape[1]:
            own = self.tensor.all_gather(own, 1, tag=_TAG).wait()
        whole = own.new_zeros(total + 1, own.shape[2])  # the last row takes unused results
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


class _Work(StepWork):
    """The work on micro-batches whose loss the caller computes."""

    def __init__(
        self, parts: StepParts, asked: Sequence[Asked], loss_function: LossFunction | None = None
    ) -> None:
        """Prepare the queries; with a `loss_function`, `loss` differentiates its result."""
        nothing = torch.zeros((), dtype=torch.float64, device=asked[0].batch.tokens.device)
        super().__init__(parts, [each.batch for each in asked])
        self._asked, self._loss_function = asked, loss_function
        self.losses = nothing.repeat(len(asked))
        """The caller's loss of each micro-batch, [micro-batches], with a function; 0 on all stages
        but the last."""
        self.found: list[tuple[Tensor, _Places]] = []
        """Results [B, N, K] of each micro-batch, without a function; on the last stage only."""

    def loss(self, micro_batch: int, output: Tensor) -> Tensor:
        """Compute the results of a micro-batch, and the caller's loss if there is a function.

        Returns a scalar to differentiate, or without a function the results [B, N, K].
        """
        asked = self._asked[micro_batch]
        beside = self.as_labels(micro_batch, asked.beside)
        self.hook.before_criterion()
        found = asked.find(self.chunks[-1], output, beside)  # [B, N, K]
        self.hook.after_criterion()
        order = self.arranged(micro_batch, _places(asked))
        places = _Places(order, len(asked.batch.tokens), self.mesh[Axis.TENSOR])
        if self._loss_function is None:
            self.found.append((found, places))
            return found
        whole = places.whole(found).requires_grad_(torch.is_grad_enabled())
        # `whole` is a leaf: backward through the caller's graph stops there, and runs right here.
        loss = _scalar(self._loss_function(micro_batch, whole), "the loss function gave")
        self.losses[micro_batch] = loss.detach()
        if not torch.is_grad_enabled():
            return loss
        if loss.requires_grad:
            loss.backward()
        gradient = torch.zeros_like(whole) if whole.grad is None else whole.grad
        own = places.own(gradient, found.shape[1])
        # Not the value of the loss, but its gradient at the results. The caller's graph is freed.
        return self.optimizer.scale_loss((found * own).sum(dtype=torch.float64))


def _places(asked: Asked) -> Tensor:
    """Return the index of each token's result in the caller's flattened rows, [B, S]."""
    tokens, total = asked.batch.tokens, asked.batch.tokens.numel()
    # The last `ahead` tokens of a row have no later position: `total` marks their results unused.
    places = torch.arange(total, device=tokens.device).view(tokens.shape) + asked.ahead
    places[:, tokens.shape[1] - asked.ahead :] = total
    return places


class _Graph(NamedTuple):
    """A forward that waits for the gradients of its results."""

    number: int
    """Number of the forward, the same on all ranks of the sequence."""
    weights: int
    """Value of `CallersGraphs._weights` at the forward: a later one makes it invalid."""
    end: GradientEdge
    """Edge of the results [B, N, K] that this rank computed, where its backward begins."""
    num: int
    """N, the number of tokens of a row that this rank computed."""
    places: _Places
    num_labels: Tensor
    """`Asked.num_labels`."""


class _LossGraph(NamedTuple):
    """A forward of `run.loss`; its prefetch plan includes the backward."""

    number: int
    """Number of the forward; see `_Graph`."""
    end: GradientEdge
    """Edge of this rank's part of the loss, times the loss scale."""
    dtype: torch.dtype
    """Dtype of that part."""
    work: MeanWork
    num_labels: Tensor
    """Number of this rank's labels; see `_Graph`."""
    mean: Tensor
    """The mean loss over all ranks, []."""
    scale_routers: Callable[[Tensor], None]
    """Function that multiplies the gradients of router losses, which the loss's gradient does not
    reach."""


class _Pending(NamedTuple):
    """The last loss of `run.loss`, until the run computes anything else."""

    loss: weakref.ref[Tensor]
    """The caller's loss. Weak: its graph refers to the run, which refers to this."""
    graph: _LossGraph


class _Handed(Function):
    """The node at which the caller's graph begins.

    forward   return results [B, S, K] or a loss []; they need a gradient because `door` does
    backward  pass their gradient to `arrived`

    The node refers to the forward's graph, so activations live as long as the caller's results.
    """

    @staticmethod
    def forward(
        ctx: Any,
        door: Tensor,
        whole: Tensor,
        graph: _Graph | _LossGraph,
        arrived: Callable[..., None],
    ) -> Tensor:
        ctx.graph, ctx.arrived = graph, arrived
        return writable(whole.view_as(whole))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, ...]:
        ctx.arrived(ctx.graph, gradient)
        return None, None, None, None


class CallersGraphs:
    """The forwards of a caller's loop, and the step that their backward passes belong to.

    The caller's graph begins at the results of whole rows; the model's ends at those that this rank
    computed. So the caller's code is the same on all ranks of a sequence, and each rank's backward
    uses only the gradients of its own tokens: a scalar that all ranks compute counts once.
    """

    def __init__(self, step: TrainStep, mesh: Mesh) -> None:
        self._step, self._mesh = step, mesh
        self._forwards = self._weights = 0
        """Number of forwards so far, and number of times that `drop` made graphs invalid."""
        self._arrived: list[tuple[_Graph | _LossGraph, Tensor]] | None = None
        """Graphs that a backward of the caller's graph has reached, with their gradients; None
        outside of `step` and `backward`."""
        self._pending: _Pending | None = None
        self._went: set[int] = set()
        """Numbers of graphs that went backward since the last step."""
        self._begun = self._ended = False
        """True after a backward since the last step, and after one with `last=True`."""
        self._has_told = False
        """True after the warning of a batch without labels."""
        self._loss = self._count = torch.zeros((), dtype=torch.float64)
        """This rank's sums of losses and of labels since the last step."""

    def results(self, asked: Asked) -> Tensor:
        """Run the forward of a query and return its results in the caller's order, [B, S, K].

        They are the same on all ranks of the sequence, and have a gradient if the model's do.
        """
        self._pending = None
        self._compare([asked])
        step, work = self._step, _Work(self._step.parts, [asked])
        self._run(work, training=False)
        if not step.is_last_stage:  # zeros, for the sum over stages
            wide = torch.promote_types(step.built.parameters[0].parameter.dtype, torch.float32)
            shape = *asked.batch.tokens.shape, asked.width
            whole = torch.zeros(shape, dtype=wide, device=asked.batch.tokens.device)
        else:
            ((found, places),) = work.found
            whole = places.whole(found)
        stages = self._mesh[Axis.PIPELINE]
        if stages.size > 1:
            return stages.all_reduce(whole, tag=_TAG).wait()
        self._forwards += 1
        if not found.requires_grad:
            return whole
        given = self._forwards, self._weights, get_gradient_edge(found), found.shape[1]
        graph = _Graph(*given, places, asked.num_labels)
        return self._handed(whole, graph)

    def loss(self, batch: MicroBatch) -> Tensor:
        """Return the loss of `ParallelRun.loss`, []."""
        step, self._pending = self._step, None
        if not torch.is_grad_enabled():
            self.refuse("loss under torch.no_grad()")  # an evaluation would drop gradients
            found = step.evaluate([[batch]])
            if found is None:
                self._tell_unlabelled()
            return torch.tensor(found or 0.0, dtype=torch.float64)
        work = step.start([batch], more=self._begun)
        own = step.forward(work, 0)  # this rank's part, times the loss scale
        mean = own.detach() + (step.over_ranks(work.total) - own.detach())
        routers = step.chunks[-1].routers
        self._forwards += 1
        graph = _LossGraph(
            number=self._forwards,
            end=get_gradient_edge(own),
            dtype=own.dtype,
            work=work,
            num_labels=step.objective.count(batch).double(),
            mean=mean,
            scale_routers=(lambda _: None) if routers is None else routers.scaling(),
        )
        loss = self._handed(mean, graph)
        self._pending = _Pending(weakref.ref(loss), graph)
        return loss

    def _compare(self, asked: Sequence[Asked]) -> None:
        """Check that all ranks of this rank's sequence have the same query."""
        assert self._step.same_rows is not None
        batches, more = [each.batch for each in asked], [each.beside for each in asked]
        self._step.same_rows.compare(batches, more)

    def _handed(self, whole: Tensor, graph: _Graph | _LossGraph) -> Tensor:
        """Return `whole` as the begin of a new graph, whose backward calls `_arrive`."""
        door = whole.new_empty(0).requires_grad_()
        handed: Tensor = _Handed.apply(door, whole, graph, self._arrive)
        return handed

    def step(self, loss: Tensor, lr: float) -> StepOutcome:
        """Run the backward of the pending loss and update; see `ParallelRun.step` with a loss."""
        pending = self._pending
        if pending is None or pending.loss() is not loss:
            raise RuntimeError(
                "step takes the unchanged loss that the last call of loss returned, once; for"
                " another, such as loss / n or one of other results, call run.backward(loss), then"
                " run.step() without a loss"
            )
        self.refuse("step(loss)")
        # The caller's graph is the node of `_Handed` alone, so the gradient is 1.
        ((_, gradient),) = self._arrivals(loss)
        self._step.gradients.expect_last()
        self._loss_backward(pending.graph, gradient)
        outcome = self._step.finish(pending.graph.work, lr)
        self.drop()
        if not outcome.valid_tokens:
            self._tell_unlabelled()
        return outcome

    def _tell_unlabelled(self) -> None:
        """Warn once, on rank 0, about a batch without a label."""
        if self._mesh.rank == 0 and not self._has_told:
            logger.warning(
                "all labels of a batch are %s (ignore_index), on all ranks: its loss is 0, and a"
                " step on it leaves the weights as they are (told once); labels are tokens of"
                " input_ids, aligned with them and not shifted",
                IGNORED,
            )
        self._has_told = True

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Run the backward of a scalar; see `ParallelRun.backward`."""
        _scalar(loss, "run.backward takes a scalar, got")
        self._check_open()
        arrived = self._arrivals(loss)
        if not arrived:
            raise RuntimeError(
                "the loss does not depend on a result of the run that needs backward, such as"
                " run.log_probs returns with gradients"
            )
        # All ranks have to run the model's backward passes in the same order, whatever order
        # autograd reached them in: the latest forward first. A loss of `run.loss` is always the
        # latest, as any other forward ends its `_Pending`.
        graphs = sorted(arrived, key=lambda item: item[0].number)
        value = loss.detach().double()
        with self._all_or_none():
            self._begin(clear=not isinstance(graphs[-1][0], _LossGraph))
            while graphs:  # popped, so that a graph's activations are freed after its backward
                if last and len(graphs) == 1:
                    self._step.gradients.expect_last()
                graph, gradient = graphs.pop()
                if isinstance(graph, _LossGraph):
                    self._loss_backward(graph, gradient)
                    # This mean over data ranks is the same on all of them, and `update` sums values
                    # over them: count 1 / (number of data ranks) of it.
                    value = value - gradient * graph.mean * (1 - 1 / self._mesh[Axis.DATA].size)
                else:
                    self._go_backward(graph, gradient)
                self._step.hook.after_step()
                self._went.add(graph.number)
                self._count = self._count + graph.num_labels
        self._loss, self._ended = self._loss + value, last

    def _arrivals(self, loss: Tensor) -> list[tuple[_Graph | _LossGraph, Tensor]]:
        """Run backward through the caller's graph; return the forwards it reaches and gradients."""
        arrived: list[tuple[_Graph | _LossGraph, Tensor]] = []
        self._arrived = arrived
        try:
            if loss.requires_grad:
                loss.backward()
        finally:
            self._arrived = self._pending = None
        return arrived

    def forward_backward(
        self, asked: Sequence[Asked], loss_function: LossFunction, *, last: bool
    ) -> Tensor:
        """Run `ParallelRun.forward_backward`; return the losses [micro-batches], float64."""
        self._check_open()
        self._pending = None
        self._compare(asked)
        work, training = _Work(self._step.parts, asked, loss_function), torch.is_grad_enabled()
        with self._all_or_none() if training else nullcontext():
            if training:
                self._begin()
            if training and last:
                self._step.expect_both()
            self._run(work, training=training, last=last)
        losses = self._mesh[Axis.PIPELINE].all_reduce(work.losses, tag=_TAG).wait()
        if training:
            self._loss, self._ended = self._loss + losses.sum(), last
            self._count = self._count + torch.stack([each.num_labels for each in asked]).sum()
        return losses

    @contextmanager
    def _all_or_none(self) -> Iterator[None]:
        """Drop all gradients if this context fails: an unknown part of them has been added."""
        try:
            yield
        except BaseException:
            self.drop()
            raise

    def _run(self, work: _Work, *, training: bool, last: bool = False) -> None:
        """Run forward and, in `training`, backward of `work`, in a prefetch plan of its own.

        Raises ValueError with gradients and router losses, which only `run.loss` includes.
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

    def _begin(self, *, clear: bool = True) -> None:
        """Begin a step unless one has begun; without `clear`, `loss` has cleared the gradients."""
        if not self._begun:
            if clear:
                self._step.begin()
            self._begun, self._went = True, set()
            self._loss = self._count = torch.zeros_like(self._loss, device=self._step.device)

    def _go_backward(self, graph: _Graph, gradient: Tensor) -> None:
        """Run the model's backward of `graph` from the gradient of its results [B, S, K]."""
        step = self._step
        own = graph.places.own(gradient, graph.num)
        step.hook.before_step((_BACKWARD,))
        step.hook.before_backward(_CHUNK)
        torch.autograd.backward(graph.end, step.optimizer.scale_loss(own))
        step.hook.after_backward(_CHUNK)

    def _loss_backward(self, graph: _LossGraph, gradient: Tensor) -> None:
        """Run the model's backward of a loss, in the prefetch plan of its forward."""
        self._step.hook.before_backward(_CHUNK)
        graph.scale_routers(gradient)
        torch.autograd.backward(graph.end, gradient.to(graph.dtype))
        self._step.hook.after_backward(_CHUNK)

    def grad_norm(self) -> float:
        """Return the global norm of the step's gradients; see `ParallelRun.grad_norm`."""
        if not self._begun:
            raise RuntimeError("call run.grad_norm() between run.backward(loss) and run.step()")
        return self._step.grad_norm()

    def update(self, lr: float) -> StepOutcome:
        """Update with the gradients of `backward`; see `ParallelRun.step` without a loss."""
        if not self._begun:
            raise RuntimeError("call run.backward(loss) before step() without a loss")
        totals = torch.stack((self._loss, self._count))
        data = self._mesh[Axis.DATA]
        self.drop()
        outcome = self._step.update(lambda: data.all_reduce(totals, tag=_METRICS).wait(), lr)
        if not outcome.valid_tokens:
            self._tell_unlabelled()
        return outcome

    def drop(self) -> None:
        """Forget all graphs and gradients; the next step begins with none."""
        self._pending = None
        self._begun = self._ended = False
        self._weights += 1

    def refuse(self, name: str) -> None:
        """Raise RuntimeError if there are gradients of `backward`, which `name` would drop."""
        if self._begun:
            raise RuntimeError(
                f"run.{name} comes between run.backward and the step: call run.step(), or"
                f" run.zero_grad() to drop the gradients"
            )

    def _check_open(self) -> None:
        """Raise RuntimeError if no further backward may come before the step."""
        if self._begun and self._step.gradients.reduced:
            raise RuntimeError(
                "run.backward after run.grad_norm(), which has summed the gradients over the"
                " ranks: call run.step() first, or run.zero_grad() to drop them"
            )
        if self._ended:
            raise RuntimeError("there was a backward with last=True: run.step() comes next")

    def _arrive(self, graph: _Graph | _LossGraph, gradient: Tensor) -> None:
        """Keep the gradient of a graph that autograd has reached.

        Raises RuntimeError outside of `step` and `backward`, and for a graph that is not valid any
        more. The model's backward runs later, outside of the caller's.
        """
        if isinstance(graph, _LossGraph):
            self._check_pending(graph)
        elif self._arrived is None:
            raise RuntimeError(
                "a loss of the run's results was given to loss.backward(): call run.backward(loss)"
            )
        elif graph.weights != self._weights or graph.number in self._went:
            raise RuntimeError(
                "results of the run go backward once, in one call of run.backward, and before the"
                " step that follows them: compute them again"
            )
        assert self._arrived is not None
        self._arrived.append((graph, gradient))

    def _check_pending(self, graph: _LossGraph) -> None:
        """Raise RuntimeError outside of `step` and `backward`, or if the loss is not pending."""
        if self._arrived is None:
            raise RuntimeError(
                "the loss went backward outside of step: leave out loss.backward(), clipping and"
                " an optimizer of your own, all of which run.step(loss, lr=..) does; for n"
                " micro-batches a step, call run.backward(loss / n) for each, then run.step()"
            )
        if self._pending is None or self._pending.graph is not graph:
            raise RuntimeError(
                "a loss of run.loss goes backward once, and before the run computes anything else:"
                " for n micro-batches a step, call run.backward(loss / n) for each before the next"
                " one's run.loss, then run.step()"
            )


def _scalar(loss: Tensor, what: str) -> Tensor:
    """Return the loss; raise ValueError, beginning with `what`, if it is not a scalar."""
    if not isinstance(loss, Tensor) or loss.dim():
        found = f"a loss of shape {[*loss.shape]}" if isinstance(loss, Tensor) else f"{loss!r}"
        raise ValueError(f"{what} {found}: pass one scalar, a tensor without dimensions")
    return loss
