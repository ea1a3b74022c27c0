"""One training step: micro-batches in, updated weights and a few figures out."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from isp.config import JobConfig
from isp.core.attention.sequence import SequenceRanks
from isp.core.comm import Channel, Mesh, pinned_memory
from isp.core.comm.tag import Purpose, Tag
from isp.core.layers.linear import DeferredWeightGradients, IntoMainGradients, WeightGradientRoute
from isp.core.layers.vocab_loss import IGNORED
from isp.core.mesh import Axis
from isp.core.mesh.phase import Phase
from isp.core.micro_batch import MicroBatch
from isp.core.optim.main_grads import MainGradients
from isp.core.optim.torch_optimizer import MakeOptimizer
from isp.core.optim.update_rules import rules_in_words
from isp.core.optim.zero1 import Zero1Optimizer
from isp.core.pipeline.stage import ISPCommunicatorSchedulerHook, Pipeline
from isp.models.build import BuiltModel, build_model, trained_layouts
from isp.models.moe.router_losses import RouterLosses
from isp.models.traced_model import TracedModel
from isp.step.phases import PhaseClock
from isp.step.same_rows import SameRows

__all__ = [
    "Documents",
    "StepOutcome",
    "StepWork",
    "TokenLoss",
    "TrainStep",
    "arrange",
    "make_train_step",
    "slice_sequence",
]

logger = logging.getLogger(__name__)

_CHUNK = 0
"""The one model chunk of a rank that is no pipeline's."""


@dataclass(frozen=True, kw_only=True)
class StepOutcome:
    """A step's outcome; the same on every rank."""

    loss: float
    """Mean loss of the global batch's valid tokens, or pairs, before the update; 0 without."""
    grad_norm: float
    """Global gradient norm, without the loss scale and before clipping."""
    skipped: bool
    """Whether the update was left out: the gradients were not finite, or no token had a label."""
    valid_tokens: int
    """Tokens of the global batch that had a label; pairs, if the loss is of those."""
    expert_load: float | None = None
    """The most tokens of an expert, of any layer, as a multiple of the layer's mean."""
    unused_experts: int | None = None
    """Experts of all layers that no token went to; None without experts."""


class TokenLoss:
    """The mean cross-entropy of the tokens that have a label: what a step's loss is by default."""

    def begin(self, batches: Sequence[MicroBatch]) -> None:
        """Called before the passes of `batches`, of training or of an evaluation."""

    def count(self, batch: MicroBatch) -> Tensor:
        """What the loss of a micro-batch, all of its tokens, is the sum of; [], whole number."""
        return (batch.labels != IGNORED).sum()

    def loss(self, work: StepWork, micro_batch: int, output: Tensor, expected: Tensor) -> Tensor:
        """This rank's part of the sum, of what the last chunk gave; [].

        `expected` is the gradient that it is going to have.
        """
        return work.step.chunks[-1].loss(output, work.labels(micro_batch), expected)


class Documents(NamedTuple):
    """The documents of a micro-batch, in its order."""

    numbers: Tensor
    """That of each token, int64, of the shape of the tokens."""
    num_labels: Tensor
    """[d]; none of padding."""

    @classmethod
    def of(cls, batch: MicroBatch) -> Documents:
        rows, tokens = batch.labels.shape
        lengths = torch.tensor([tokens]).repeat(rows)
        if batch.cu_seqlens is not None:
            lengths = batch.cu_seqlens.diff().long()
        numbers = torch.arange(len(lengths)).repeat_interleave(lengths)
        numbers = pinned_memory.send(numbers, batch.labels.device)
        labelled = (batch.labels != IGNORED).long().flatten()
        num_labels = labelled.new_zeros(len(lengths)).index_add(0, numbers, labelled)
        return cls(numbers.view_as(batch.labels), num_labels)

    def num_pairs(self) -> Tensor:
        """The number of pairs, []; each is two documents that follow each other."""
        return (self.num_labels > 0).sum() // 2

    def margins(self, gains: Tensor) -> Tensor:
        """What each pair's first document gains more than its second one, [d]; 0 of others."""
        labelled = self.num_labels > 0
        place = (labelled.cumsum(0) - 1).clamp(min=0)
        signed = gains * (1 - 2 * (place % 2)) * labelled
        return torch.zeros_like(gains).index_add(0, place // 2, signed)


def make_train_step(
    config: JobConfig,
    mesh: Mesh,
    device: torch.device,
    *,
    model: TracedModel | None = None,
    clock: PhaseClock | None = None,
    weights_may_change: bool = False,
    initial_weights: bool = True,
    objective: TokenLoss | None = None,
    make_optimizer: MakeOptimizer | None = None,
) -> TrainStep:
    """Model, main gradients and optimizer as `config` says, with the initial weights.

    Without `initial_weights` they are left for others to fill (`TrainStep.init_weights`). `model`
    takes the place of the one that the configuration describes, `make_optimizer`'s of its update
    rule. `weights_may_change`: see `TrainStep`.
    """
    model = config.language_model if model is None else model
    built = build_model(
        model,
        config.parallel,
        mesh,
        seed=config.training.seed if initial_weights else None,
        device=device,
        dtype=getattr(torch, config.training.dtype),
    )
    rules = config.optimizer.rules if built.trained and make_optimizer is None else ()
    if len(rules) > 1 and mesh.rank == 0:
        logger.info("%s", rules_in_words(trained_layouts(model), config.optimizer))
    gradients = MainGradients(built.trained, mesh, rows_of=mesh[Axis.ZERO1])
    optimizer = Zero1Optimizer(
        gradients,
        mesh,
        config.optimizer,
        max_norm=config.training.max_norm,
        names=model.trained_names,
        counted_elsewhere=built.counted_elsewhere,
        weights_may_change=weights_may_change,
        make=make_optimizer,
    )
    return TrainStep(
        built,
        gradients,
        optimizer,
        mesh,
        micro_num=config.data.num_micro_batches,
        clock=clock,
        weights_may_change=weights_may_change,
        objective=objective,
    )


class TrainStep:
    """Forward, backward, reduction and update over the micro-batches of a step.

    [Note: One normalisation] A loss is the sum over valid tokens, divided once by the number of
    valid tokens in the global batch; every reduction is a SUM. So masks of any shape, a rank
    without a valid token, and groups of any size give the gradient of the global mean.

    With `weights_may_change` somebody else reads and writes weights between steps: nothing is under
    way there then. Else the updated weights, and the first gathers of the next step, still are.
    """

    def __init__(
        self,
        built: BuiltModel,
        gradients: MainGradients,
        optimizer: Zero1Optimizer,
        mesh: Mesh,
        *,
        micro_num: int,
        clock: PhaseClock | None = None,
        weights_may_change: bool = False,
        objective: TokenLoss | None = None,
    ) -> None:
        if mesh[Axis.PIPELINE].size > 1 and built.model.trained_names and not built.trained:
            raise ValueError(
                "this rank has no trainable weights: train some in each pipeline stage, or use"
                " parallel.pipeline.size=1"
            )
        self.objective = TokenLoss() if objective is None else objective
        self.built = built
        self.chunks = built.chunks
        self.gradients = gradients
        self.optimizer = optimizer
        self.mesh = mesh
        self.clock = PhaseClock(torch.device("cpu")) if clock is None else clock
        self._shared, self._tied = built.shared, built.tied_over_stages
        self._weights_may_change = weights_may_change
        self.same_rows = SameRows(mesh) if weights_may_change else None
        """The check of rows that come from a caller's loop."""
        self._stages = mesh[Axis.PIPELINE]
        self._deferred: DeferredWeightGradients | None = None
        """Work of the second half of a split backward; None if it is not split."""
        self._publications: dict[nn.Module, list[Callable[[], None]]] = {}
        """What waits for the weights of each part that was asked for: to find it takes long."""
        self._actions = built.order.actions(self._stages.rank, micro_num)
        route: WeightGradientRoute = IntoMainGradients(gradients)
        if self._stages.size > 1 and built.order.config.schedule.splits_backward:
            route = self._deferred = DeferredWeightGradients(gradients)
        for linear in built.linears:
            linear.weight_gradients = route
        self.communicator = communicator = built.communicator
        self.hook = ISPCommunicatorSchedulerHook(communicator, mesh.log)
        if communicator is not None:
            communicator.deliver_to(gradients)
            communicator.register_prerequisite_for_forward_prefetch_hooks(self._published)
        for part in self._parts():
            part.register_forward_pre_hook(lambda part, _: self._published(part))
        self._unfinished = False
        """Whether the last step ended with an exception."""
        self._norm: float | None = None
        """Of the gradients, if somebody has asked for it before the update."""
        self._gather_ahead()

    @property
    def device(self) -> torch.device:
        return self.built.parameters[0].parameter.device

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank has the stage that gives logits."""
        return self.built.order.num_stages - 1 in self.built.stages

    def init_weights(self, seed: int) -> None:
        """Give the model the initial weights of `seed`; then call `weights_changed`."""
        for chunk in self.chunks:
            chunk.init_weights(seed)
        self.optimizer.take_up_weights()

    def weights_changed(self) -> None:
        """Weights were loaded: what was gathered of the old ones is dropped."""
        self._gather_ahead()

    def drain(self) -> None:
        """Wait for what the last step has set off for a next one, and drop what was gathered.

        `weights_changed` sets it off anew.
        """
        self.hook.after_step()
        for item in self.gradients.parameters:
            self.optimizer.published(item.parameter)

    def __call__(self, batches: Sequence[MicroBatch], lr: float) -> StepOutcome:
        """Train on this rank's `batches` (whole rows, the same on a tensor group) at rate `lr`.

        The new weights may still be on their way afterwards: each part of the model waits for its
        own when it is needed. A step that ended with an exception before its update changed
        nothing, and leaves no gradient behind, if all ranks left it at the same place.
        """
        work = self.start(batches)
        self.run(work, training=True)
        return self.finish(work, lr)

    def start(self, batches: Sequence[MicroBatch], *, more: bool = False) -> StepWork:
        """Begin a step of these micro-batches; what another began and did not finish is dropped.

        `more`: add them to the step that has begun, whose gradients are kept.
        """
        if not more:
            self.begin()
            self.forget_routes()
            self.expect_both()
        if self._weights_may_change:
            self.hook.before_step(self._actions)
        self.objective.begin(batches)
        return StepWork(self, batches, self._count(batches))

    def expect_both(self) -> None:
        """The gradients of weights that two chunks of a rank use are final after both's last."""
        for parameter in self._shared:
            self.gradients.promise(parameter)

    def begin(self) -> None:
        """Begin a step whose passes the caller runs; what another began is dropped."""
        if self._unfinished or self.gradients.owed:  # the latter: somebody else went backward
            self._clear_up()
        self._unfinished = True
        self.clock.enter(Phase.FORWARD_BACKWARD)
        self.gradients.zero()
        self._norm = None

    def finish(self, work: StepWork, lr: float) -> StepOutcome:
        """Reduce the gradients of a step whose backward passes are through, and update."""
        return self.update(lambda: torch.stack((self.over_ranks(work.total), work.valid)), lr)

    def update(self, count: Callable[[], Tensor], lr: float) -> StepOutcome:
        """As `finish`; `count` gives the loss, and the tokens with a label, of all ranks, [2]."""
        self.reduce()
        # Set off before the norm: the host waits for no more than that.
        load, found = self.chunks[-1].expert_load, count()
        if load is not None:
            routes = self._sum(Axis.PIPELINE, self._sum(Axis.STAGE, load.tokens()))
            found = torch.cat((found, load.figures(routes)))
        totals = pinned_memory.HostCopy(found)
        self.clock.enter(Phase.OPTIMIZER)
        result = self.optimizer.step(
            lr,
            norm=self._norm,
            wait=self._weights_may_change,
            is_empty=lambda: self._is_empty(totals),
        )
        if load is not None and not result.skipped:
            load.update_biases(routes)
        self.forget_routes()
        self._gather_ahead()
        self._unfinished = False
        self._check_rows()
        loss, valid, *of_experts = totals.wait().tolist()
        self.clock.enter(Phase.OTHER)
        return StepOutcome(
            loss=loss,
            grad_norm=result.grad_norm,
            skipped=result.skipped,
            valid_tokens=int(valid),
            expert_load=of_experts[0] if of_experts else None,
            unused_experts=int(of_experts[1]) if of_experts else None,
        )

    def _is_empty(self, totals: pinned_memory.HostCopy) -> bool:
        """Whether only momentum would move the weights; checks the rows before anything does."""
        self._check_rows()
        return not totals.wait()[1]

    def _check_rows(self) -> None:
        if self.same_rows is not None:
            self.same_rows.check()

    def forget_routes(self) -> None:
        """What experts tokens went to so far belongs to no step."""
        if (load := self.chunks[-1].expert_load) is not None:
            load.clear()

    def reduce(self) -> None:
        """Sum the gradients over the ranks, unless that is done; none may come behind it."""
        if self.gradients.reduced:
            return
        for parameter in self._shared:
            self.gradients.withdraw(parameter)
        self.clock.enter(Phase.REDUCE)
        self.hook.after_step()
        self.gradients.reduce()
        self._add_tied()

    def grad_norm(self) -> float:
        """The norm of all gradients of the step, which are summed by it; none may come behind."""
        self.reduce()
        if self._norm is None:
            self._norm = self.optimizer.grad_norm()
        return self._norm

    def run(self, work: StepWork, *, training: bool, last: bool = True) -> None:
        """Forward and, in training, backward of the micro-batches: one by one, or in a pipeline.

        `last`: no backward pass of the step comes behind these.
        """
        if self._stages.size > 1:
            Pipeline(
                self._stages,
                self.built.order,
                work,
                hook=self.hook,
                gradients=self.gradients if training else None,
                deferred=self._deferred if training else None,
                last=last,
            ).run()
            return
        for index in range(len(work.tokens)):
            loss = self.forward(work, index)
            if training:
                self.backward(loss, last=last and index == len(work.tokens) - 1)

    @torch.no_grad()
    def see(self, batches: Sequence[MicroBatch]) -> None:
        """A forward of this rank's micro-batches, of which the objective keeps what it is for."""
        self._forward_only(batches)
        self._gather_ahead()

    def _forward_only(self, batches: Sequence[MicroBatch]) -> StepWork:
        actions = self.built.order.actions(self._stages.rank, len(batches), training=False)
        self.hook.before_step(actions)
        one = torch.ones((), dtype=torch.float64, device=self.device)
        work = StepWork(self, batches, one)
        self.run(work, training=False)
        return work

    @torch.no_grad()
    def evaluate(self, steps: Iterable[Sequence[MicroBatch]]) -> float | None:
        """The mean loss of all valid tokens of `steps` over all data ranks; changes nothing.

        None if there is no valid token.
        Each of `steps` is this rank's micro-batches of a global batch.
        """
        if self._unfinished or self.gradients.owed:
            self._clear_up()
        self._unfinished = True
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        with self._without_dropout():
            for batches in steps:
                self.objective.begin(batches)
                count = self._count(batches)  # before the forward, as it checks the rows
                work = self._forward_only(batches)
                sums += torch.stack((self.over_ranks(work.total), count))
        self._gather_ahead()
        self._unfinished = False
        total, valid = map(float, sums.tolist())
        self._check_rows()
        return total / valid if valid else None

    def _count(self, batches: Sequence[MicroBatch]) -> Tensor:
        """What the loss of all ranks is the mean of."""
        own = torch.stack([self.objective.count(batch) for batch in batches]).sum()
        if self.same_rows is not None:
            return self.same_rows.count(batches, own).double()
        return self._sum(Axis.DATA, own.double())

    @contextmanager
    def _without_dropout(self) -> Iterator[None]:
        """Modules in evaluation, then again as they were; a caller's loop sets modes itself."""
        chunks = [] if self._weights_may_change else self.chunks
        every = (module for chunk in chunks for module in chunk.model.modules())
        trains = [module for module in every if module.training]
        try:
            for module in trains:
                module.training = False
            yield
        finally:
            for module in trains:
                module.training = True

    def forward(self, work: StepWork, index: int) -> Tensor:
        """The loss of a micro-batch, to be given to `backward`; keeps no logits."""
        self.hook.before_forward(_CHUNK)
        y = work.forward(_CHUNK, index, work.tokens[index])
        self.hook.after_forward(_CHUNK)
        return work.loss(index, y)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """The backward pass of a micro-batch, whether it is the step's last one or not."""
        if last:
            self.gradients.expect_last()
        self.hook.before_backward(_CHUNK)
        loss.backward()
        self.hook.after_backward(_CHUNK)

    def _parts(self) -> Iterator[nn.Module]:
        for chunk in self.chunks:
            yield from chunk.parts().values()

    def _add_tied(self) -> None:
        """Sum the gradient of tied weights over the two stages that have a copy of them."""
        if self._tied is not None:
            gradient = self.gradients.summed(self._tied.parameter)
            tag = Tag(Purpose.REPLICA_GRADIENT, self._tied.name)
            self.mesh[Axis.EMBEDDING].all_reduce_(gradient, tag=tag).wait()

    def _clear_up(self) -> None:
        """After a step that ended with an exception, or a backward pass that was none of a step."""
        self.hook.after_step()  # what was still travelling, and was promised to `gradients`
        if self._deferred is not None:
            self._deferred.take()
        self.gradients.abandon()
        self._gather_ahead()

    def _gather_ahead(self) -> None:
        """Begin the gathers of the next step; where weights may change, its `start` does."""
        if self._weights_may_change:
            self.hook.after_step()
        else:
            self.hook.before_step(self._actions)

    def _published(self, part: nn.Module) -> None:
        if part not in self._publications:
            trained = (p for p in part.parameters() if p.requires_grad)
            self._publications[part] = self.optimizer.publications(trained)
        for wait in self._publications[part]:
            wait()

    def over_ranks(self, total: Tensor) -> Tensor:
        """The loss over all ranks, of which only the last stage has any; []."""
        # The ranks whose losses are of different tokens; a sequence's ranks may have the same.
        axis = Axis.DATA if self.chunks[-1].splits_logits else Axis.STAGE
        return self._sum(Axis.PIPELINE, self._sum(axis, total))

    def _sum(self, axis: Axis, x: Tensor) -> Tensor:
        return self.mesh[axis].all_reduce(x, tag=Tag(tensor="metrics")).wait()


class StepWork:
    """The micro-batches of a step on this rank, and the loss that has been found for them."""

    def __init__(self, step: TrainStep, batches: Sequence[MicroBatch], valid: Tensor) -> None:
        self.step = step
        self.batches = batches
        """As they were read: whole sequences, in their own order."""
        self._batches = [arrange(b, step.built.sequence) for b in batches]
        self._parts = list(self._batches)
        if step.mesh.topology.mode.slices_batch:
            self._parts = [slice_sequence(b, step.mesh[Axis.TENSOR]) for b in self._batches]
        self._documents: dict[int, Documents] = {}
        self.valid = valid
        """Tokens with a label in the global batch."""
        self.tokens = [part.tokens for part in self._parts]
        """Of each micro-batch, [B, S']."""
        self.total = torch.zeros((), dtype=torch.float64, device=valid.device)
        """This rank's part of the loss."""

    def between(self, micro_batch: int) -> Tensor:
        """A new tensor such as travels between stages, [B, S', D]."""
        step, (rows, tokens) = self.step, self.tokens[micro_batch].shape
        mode = step.mesh.topology.mode
        if mode.splits_sequence and not mode.slices_batch:
            tokens //= step.mesh[Axis.TENSOR].size  # split between the linears
        weight = step.built.parameters[0].parameter
        return weight.new_empty(rows, tokens, step.built.model.hidden_size)

    def forward(self, chunk: int, micro_batch: int, x: Tensor) -> Tensor:
        """Through the model, or the part of it that is this rank's chunk number `chunk`."""
        part, run = self._parts[micro_batch], self.step.chunks[chunk]
        if run.routers is not None:
            self._begin_routing(run.routers, micro_batch)
        counting: AbstractContextManager[None] = nullcontext()
        if run.expert_load is not None and torch.is_grad_enabled():
            counting = run.expert_load.counting(*self._documents_that_count(micro_batch))
        with counting:
            y: Tensor = run(x, part.positions, part.cu_seqlens)
        return y

    def loss(self, micro_batch: int, output: Tensor) -> Tensor:
        """Counts the loss of a micro-batch; what is to be differentiated."""
        step = self.step
        step.hook.before_criterion()
        valid = self.valid.clamp(min=1)
        expected = step.optimizer.scale_loss(torch.ones_like(valid)) / valid
        loss = step.objective.loss(self, micro_batch, output, expected) / valid
        routers = step.chunks[-1].routers
        if routers is not None and torch.is_grad_enabled():
            self.total += routers.end() / self.token_ranks
        step.hook.after_criterion()
        self.total += loss.detach()
        return step.optimizer.scale_loss(loss)

    @property
    def token_ranks(self) -> int:
        """The ranks that each compute losses of tokens of their own, of the same sequence."""
        step = self.step
        return 1 if step.chunks[-1].splits_logits else step.mesh[Axis.TENSOR].size

    def _begin_routing(self, routers: RouterLosses, micro_batch: int) -> None:
        if not torch.is_grad_enabled():
            routers.leave_out()
            return
        step = self.step
        mask, own = self._documents_that_count(micro_batch)
        weight = 1 / (len(self.batches) * step.mesh[Axis.DATA].size)
        scale = step.optimizer.scale_loss(torch.ones_like(self.valid))
        routers.begin(mask, own, weight=weight, scale=scale)

    def _documents_that_count(self, micro_batch: int) -> tuple[Tensor, Tensor]:
        """Which tokens are of a document with a label: of the sequence, [B, S], and of the rank."""
        step, documents = self.step, self.documents(micro_batch)
        mask = own = self._arranged(micro_batch, (documents.num_labels > 0)[documents.numbers])
        if step.mesh.topology.mode.splits_sequence:  # in msp and fsp between the linears
            own = _own(mask, step.mesh[Axis.TENSOR])
        return mask, own

    def documents(self, micro_batch: int) -> Documents:
        """Those of a micro-batch as it was read."""
        if micro_batch not in self._documents:
            self._documents[micro_batch] = Documents.of(self.batches[micro_batch])
        return self._documents[micro_batch]

    def labels(self, micro_batch: int) -> Tensor:
        """Those of the tokens whose losses this rank computes, [B, n]."""
        whole = self.step.chunks[-1].splits_logits
        return (self._batches if whole else self._parts)[micro_batch].labels

    def as_labels(self, micro_batch: int, x: Tensor) -> Tensor:
        """What belongs to the tokens of a micro-batch as it was read, where `labels` has them."""
        step, x = self.step, self._arranged(micro_batch, x)
        if not step.mesh.topology.mode.slices_batch or step.chunks[-1].splits_logits:
            return x
        return _own(x, step.mesh[Axis.TENSOR])

    def _arranged(self, micro_batch: int, x: Tensor) -> Tensor:
        """What belongs to the tokens of a micro-batch, [B, S, ..], as `arrange` brings them."""
        bounds = self.batches[micro_batch].cu_seqlens
        (x,) = self.step.built.sequence.arranged([x], bounds)
        return x


def arrange(batch: MicroBatch, ranks: SequenceRanks) -> MicroBatch:
    """Whole rows, of which each rank's tokens are together; `cu_seqlens` stays that of the rows."""
    rows = (batch.tokens, batch.labels, batch.positions)
    tokens, labels, positions = ranks.arranged(rows, batch.cu_seqlens)
    return MicroBatch(tokens, labels, positions, batch.cu_seqlens)


def slice_sequence(batch: MicroBatch, channel: Channel) -> MicroBatch:
    """This rank's S/p tokens of each row; `cu_seqlens` stays that of the full row."""

    rows = (batch.tokens, batch.labels, batch.positions)
    tokens, labels, positions = (_own(x, channel).contiguous() for x in rows)
    return MicroBatch(tokens, labels, positions, batch.cu_seqlens)


def _own(x: Tensor, channel: Channel) -> Tensor:
    """This rank's part of each row: [B, S, ..] -> [B, S/p, ..]."""
    return x.chunk(channel.size, dim=1)[channel.rank]
