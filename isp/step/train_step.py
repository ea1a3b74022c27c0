"""`TrainStep`: forward, backward, reduction and update over the micro-batches of a step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from isp.config import LoopConfig
from isp.core.comm import Mesh, pinned_memory
from isp.core.comm.tag import Purpose, Tag
from isp.core.layers.vocab_loss import IGNORED
from isp.core.mesh import Axis
from isp.core.mesh.phase import Phase
from isp.core.micro_batch import MicroBatch
from isp.core.optim.main_grads import MainGradients
from isp.core.optim.torch_optimizer import MakeOptimizer
from isp.core.optim.update_rules import rules_in_words
from isp.core.optim.zero1 import Zero1Optimizer
from isp.core.pipeline.stage import ISPCommunicatorSchedulerHook, Pipeline
from isp.core.weights.wp_communicator import DeferredWeightGradients
from isp.models.build import BuiltModel, build_model, trained_layouts
from isp.models.traced_model import TracedModel
from isp.step.phases import PhaseClock
from isp.step.same_rows import SameRows
from isp.step.step_work import StepParts, StepWork

__all__ = ["MeanWork", "StepOutcome", "TokenLoss", "TrainStep", "make_train_step"]

logger = logging.getLogger(__name__)

_CHUNK = 0
"""Index of the only model chunk of a rank without a pipeline."""


@dataclass(frozen=True, kw_only=True)
class StepOutcome:
    """Results of a training step, the same on every rank."""

    loss: float
    """Mean loss before the update, over the valid tokens (or pairs) of the global batch; 0 if
    there are none."""
    grad_norm: float
    """Global gradient norm, without the loss scale and before clipping."""
    skipped: bool
    """True if there was no update: the gradients were not finite, or no token had a label."""
    valid_tokens: int
    """Number of tokens with a label in the global batch; number of pairs for a loss over pairs."""
    expert_load: float | None = None
    """Tokens of the expert with the most tokens in a layer, divided by the mean over the layer's
    experts; the largest value of all layers. None: the model has no experts."""
    unused_experts: int | None = None
    """Number of experts, in all layers, that got no token; None: the model has no experts."""


class TokenLoss:
    """The mean cross-entropy over tokens with a label, the default objective of a step."""

    def begin(self, batches: Sequence[MicroBatch]) -> None:
        """Prepare for the forwards of `batches`, in training or evaluation; by default, nothing."""

    def count(self, batch: MicroBatch) -> Tensor:
        """Return the number of terms of a whole micro-batch's loss, here its labels; [], integer.

        The step divides the loss by the sum of these numbers over the global batch.
        """
        return (batch.labels != IGNORED).sum()

    def loss(self, work: StepWork, micro_batch: int, output: Tensor, expected: Tensor) -> Tensor:
        """Return this rank's part of the loss, summed over terms: [].

        `output` is that of the last chunk; `expected` [] is the gradient that backward will have
        for the returned sum.
        """
        return work.chunks[-1].loss(output, work.labels(micro_batch), expected)


class MeanWork(StepWork):
    """Micro-batches whose loss is the mean of an objective over the global batch."""

    def __init__(
        self,
        parts: StepParts,
        batches: Sequence[MicroBatch],
        objective: TokenLoss,
        valid: Tensor,
    ) -> None:
        super().__init__(parts, batches)
        self._objective = objective
        self.valid = valid
        """Number of terms of the mean, such as tokens with a label, in the global batch; []."""
        self.total = torch.zeros((), dtype=torch.float64, device=valid.device)
        """This rank's part of the mean loss of the global batch, without the loss scale; []."""

    def loss(self, micro_batch: int, output: Tensor) -> Tensor:
        """Add the loss of a micro-batch to `total`, and return the scalar to call backward of.

        The scalar is this rank's part of the global mean, times the loss scale; [], float64.
        """
        self.hook.before_criterion()
        valid = self.valid.clamp(min=1)  # a batch without labels has loss 0, not nan
        # The head computes gradients together with the loss. So it needs now the gradient that the
        # later backward will have for the loss: loss scale / number of labels.
        expected = self.optimizer.scale_loss(torch.ones_like(valid)) / valid
        loss = self._objective.loss(self, micro_batch, output, expected) / valid
        routers = self.chunks[-1].routers
        if routers is not None and torch.is_grad_enabled():
            # Only for the reported loss: `RouterLosses` adds its gradients at the routers' logits.
            # Each rank of a sequence has the same value, and `over_ranks` sums over these ranks.
            self.total += routers.end() / self.num_loss_parts
        self.hook.after_criterion()
        self.total += loss.detach()
        return self.optimizer.scale_loss(loss)


def make_train_step(
    model: TracedModel,
    config: LoopConfig,
    mesh: Mesh,
    device: torch.device,
    *,
    clock: PhaseClock | None = None,
    weights_may_change: bool = False,
    initial_weights: bool = True,
    objective: TokenLoss | None = None,
    make_optimizer: MakeOptimizer | None = None,
) -> TrainStep:
    """Shard `model`, make its main gradients and optimizer, and return their `TrainStep`.

    Without `initial_weights` the caller has to fill the weights (`TrainStep.init_weights`).
    `make_optimizer` replaces the update rule of `config`. `weights_may_change`: see `TrainStep`.
    """
    built = build_model(
        model,
        config.parallel,
        mesh,
        seed=config.training.seed if initial_weights else None,
        device=device,
        dtype=getattr(torch, config.training.dtype),
    )
    rules = config.optimizer.rules if built.trained and make_optimizer is None else ()
    # Not logged for a single rule, which updates all weights.
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
        micro_num=config.num_micro_batches,
        clock=clock,
        weights_may_change=weights_may_change,
        objective=objective,
    )


class TrainStep:
    """Runs forward, backward, reduction and update over the micro-batches of a step.

    The gradient is that of the mean loss over all valid tokens of the global batch. See
    [Note: One normalization] in docs/design/notes/step.md.

    With `weights_may_change` the caller reads and writes weights between steps, so no transfer is
    in flight between steps. Without it, updated weights and the first gathers of the next step may
    be in flight.
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
        # Allowed if all weights of the model are frozen: then no rank runs a backward.
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
        """Check of the rows that a user's loop passes; None: ISP's own loader reads the rows."""
        self._stages = mesh[Axis.PIPELINE]
        self._deferred: DeferredWeightGradients | None = None
        """Weight gradients for the second half of a split backward; None: it is not split."""
        self._publications: dict[nn.Module, list[Callable[[], None]]] = {}
        """For each module that `_published` got, the functions that wait for its updated weights.
        A cache, because finding them visits all parameters of the module."""
        self._actions = built.order.actions(self._stages.rank, micro_num)
        built.weights.deliver_to(gradients)
        if self._stages.size > 1 and built.order.config.schedule.splits_backward:
            built.weights.route = self._deferred = DeferredWeightGradients(gradients)
        self.communicator = communicator = built.communicator
        self.hook = ISPCommunicatorSchedulerHook(communicator, mesh.log)
        self.parts = StepParts(built, mesh, optimizer, self.hook)
        """The parts that micro-batches pass through, for a `StepWork`."""
        if communicator is not None:
            # A gather reads shards, so it waits until the optimizer has published them.
            communicator.register_prerequisite_for_forward_prefetch_hooks(self._published)
        # A part's own forward reads its weights that are not gathered, so it waits, too.
        for part in self._parts():
            part.register_forward_pre_hook(lambda part, _: self._published(part))
        self._unfinished = False
        """True during a step; if the step fails, until the next step begins."""
        self._norm: float | None = None
        """Norm of this step's gradients; None: `grad_norm` was not called before the update."""
        self._gather_ahead()

    @property
    def device(self) -> torch.device:
        """The device of this rank's weights."""
        return self.built.parameters[0].parameter.device

    @property
    def is_last_stage(self) -> bool:
        """True if this rank has the last pipeline stage, which computes logits."""
        return self.built.order.num_stages - 1 in self.built.stages

    def init_weights(self, seed: int) -> None:
        """Set all weights to the initial values of `seed`; call `weights_changed` after it."""
        for chunk in self.chunks:
            chunk.init_weights(seed)
        self.optimizer.take_up_weights()

    def weights_changed(self) -> None:
        """Gather weights again, after other code has written or loaded new values."""
        self._gather_ahead()

    def drain(self) -> None:
        """Wait for the transfers that the last step has launched ahead, and drop gathered weights.

        `weights_changed` launches the gathers again.
        """
        self.hook.after_step()
        for item in self.gradients.parameters:
            self.optimizer.published(item.parameter)

    def __call__(self, batches: Sequence[MicroBatch], lr: float) -> StepOutcome:
        """Train on this rank's `batches` with the learning rate `lr`, and return the outcome.

        `batches` are whole rows, the same on all ranks of a tensor group. New weights may still be
        in flight afterwards: each part of the model waits for its weights before its forward. A
        step that fails before its update changes no weight, and the next step drops its gradients,
        if all ranks fail at the same place.
        """
        work = self.start(batches)
        self.run(work, training=True)
        return self.finish(work, lr)

    def start(self, batches: Sequence[MicroBatch], *, more: bool = False) -> MeanWork:
        """Begin a step of these micro-batches, and return them as work for `run` and `finish`.

        Drops the gradients of an unfinished step; with `more`, keeps them and adds the
        micro-batches to that step.
        """
        if not more:
            self.begin()
            self.forget_routes()
            self.expect_both()
        if self._weights_may_change:
            self.hook.before_step(self._actions)
        self.objective.begin(batches)
        return MeanWork(self.parts, batches, self.objective, self._count(batches))

    def expect_both(self) -> None:
        """Promise a gradient of each weight that two chunks of this rank share, until `reduce`.

        Without the promise, the last backward of one chunk would launch the weight's bucket before
        the other chunk has added its gradient.
        """
        for parameter in self._shared:
            self.gradients.promise(parameter)

    def begin(self) -> None:
        """Begin a step whose forwards and backwards the caller runs; drop an unfinished step."""
        # Open promises without a step: the caller ran a backward outside of any step.
        if self._unfinished or self.gradients.has_open_promises:
            self._clear_up()
        self._unfinished = True
        self.clock.enter(Phase.FORWARD_BACKWARD)
        self.gradients.zero()
        self._norm = None

    def finish(self, work: MeanWork, lr: float) -> StepOutcome:
        """Reduce the gradients of a step after its last backward, and update the weights."""
        return self.update(lambda: torch.stack((self.over_ranks(work.total), work.valid)), lr)

    def update(self, count: Callable[[], Tensor], lr: float) -> StepOutcome:
        """Reduce the gradients and update the weights; return the outcome.

        `count` returns a tensor [2]: the loss and the number of labels, summed over all ranks.
        """
        self.reduce()
        # Launch these sums and their copy to the host before the norm, for which the host waits
        # anyway, so that reading them costs no second wait.
        load, found = self.chunks[-1].expert_load, count()
        if load is not None:
            # Sum the tokens of each expert over all ranks. Stages have different layers. Ranks of a
            # stage that see the same tokens count them several times, but equally for all experts
            # of a layer, so the ratios of these numbers are right.
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
        """Return True if no token has a label, so that only momentum would change the weights.

        Also checks the rows, because the optimizer calls this before it changes a weight.
        """
        self._check_rows()
        return not totals.wait()[1]

    def _check_rows(self) -> None:
        """Raise ValueError if the ranks of a sequence were given different rows."""
        if self.same_rows is not None:
            self.same_rows.check()

    def forget_routes(self) -> None:
        """Clear the counts of tokens of each expert, so that the next step starts at zero."""
        if (load := self.chunks[-1].expert_load) is not None:
            load.clear()

    def reduce(self) -> None:
        """Sum the gradients over the ranks, once in a step; no backward may follow in the step."""
        # If the caller has read `grad_norm` before the update, the gradients are reduced already.
        if self.gradients.reduced:
            return
        for parameter in self._shared:
            self.gradients.withdraw(parameter)
        self.clock.enter(Phase.REDUCE)
        self.hook.after_step()
        self.gradients.reduce()
        self._add_tied()

    def grad_norm(self) -> float:
        """Call `reduce`, and return the global norm of the step's gradients."""
        self.reduce()
        if self._norm is None:
            self._norm = self.optimizer.grad_norm()
        return self._norm

    def run(self, work: StepWork, *, training: bool, last: bool = True) -> None:
        """Run forward and, in training, backward of the micro-batches; in a pipeline, if any.

        `last`: these are the last backward passes of the step.
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
        """Run only the forward of this rank's micro-batches; the objective may keep results."""
        self._forward_only(batches)
        self._gather_ahead()

    def _forward_only(self, batches: Sequence[MicroBatch]) -> MeanWork:
        """Run the forward of `batches`, and return the object that has added up their losses.

        Its `total` is the sum of the loss over this rank's tokens, not divided by their number.
        """
        actions = self.built.order.actions(self._stages.rank, len(batches), training=False)
        self.hook.before_step(actions)
        # The number that the loss is divided by: 1, to get the sum.
        one = torch.ones((), dtype=torch.float64, device=self.device)
        work = MeanWork(self.parts, batches, self.objective, one)
        self.run(work, training=False)
        return work

    @torch.no_grad()
    def evaluate(self, steps: Iterable[Sequence[MicroBatch]]) -> float | None:
        """Return the mean loss over all valid tokens of `steps` and all data ranks.

        Each of `steps` has this rank's micro-batches of a global batch. Returns None if there is no
        valid token. Does not change weights, or the training mode of modules.
        """
        if self._unfinished or self.gradients.has_open_promises:
            self._clear_up()
        self._unfinished = True
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        with self._without_dropout():
            for batches in steps:
                self.objective.begin(batches)
                # Count before the forward, because this also compares the rows over ranks.
                count = self._count(batches)
                work = self._forward_only(batches)
                sums += torch.stack((self.over_ranks(work.total), count))
        self._gather_ahead()
        self._unfinished = False
        total, valid = map(float, sums.tolist())
        self._check_rows()
        return total / valid if valid else None

    def _count(self, batches: Sequence[MicroBatch]) -> Tensor:
        """Return the number of terms in the mean loss, such as labels, of all ranks: [], float64.

        If a user's loop passes the rows, also compares them over the ranks of each sequence.
        """
        own = torch.stack([self.objective.count(batch) for batch in batches]).sum()
        if self.same_rows is not None:
            return self.same_rows.count(batches, own).double()
        return self._sum(Axis.DATA, own.double())

    @contextmanager
    def _without_dropout(self) -> Iterator[None]:
        """Set modules to evaluation mode in this context; does nothing in a user's loop."""
        chunks = [] if self._weights_may_change else self.chunks
        every = (module for chunk in chunks for module in chunk.model.modules())
        trains = [module for module in every if module.training]
        try:
            for module in trains:
                module.training = False
            yield
        finally:
            # `trains` leaves out modules that were in evaluation mode before, so they stay in it.
            for module in trains:
                module.training = True

    def forward(self, work: StepWork, index: int) -> Tensor:
        """Run the forward of micro-batch `index`, and return its loss, to pass to `backward`."""
        self.hook.before_forward(_CHUNK)
        y = work.forward(_CHUNK, index, work.tokens[index])
        self.hook.after_forward(_CHUNK)
        return work.loss(index, y)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Run the backward of a micro-batch; `last`: it is the last backward of the step."""
        if last:  # each bucket of gradients is reduced during this backward, when it is complete
            self.gradients.expect_last()
        self.hook.before_backward(_CHUNK)
        loss.backward()
        self.hook.after_backward(_CHUNK)

    def _parts(self) -> Iterator[nn.Module]:
        """Yield the parts of this rank's chunks: modules, such as blocks, whose forwards run."""
        for chunk in self.chunks:
            yield from chunk.parts().values()

    def _add_tied(self) -> None:
        """Sum the gradient of tied weights over the two stages that have a copy of them."""
        if self._tied is not None:
            gradient = self.gradients.summed(self._tied.parameter)
            tag = Tag(Purpose.REPLICA_GRADIENT, self._tied.name)
            self.mesh[Axis.EMBEDDING].all_reduce_(gradient, tag=tag).wait()

    def _clear_up(self) -> None:
        """Drop the gradients of a failed step, or of a backward pass outside of any step."""
        # First, wait for reductions in flight: later they would be added to the next step.
        self.hook.after_step()
        if self._deferred is not None:
            self._deferred.take()
        self.gradients.abandon()
        self._gather_ahead()

    def _gather_ahead(self) -> None:
        """Launch the first gathers of the next step, unless weights may change before it."""
        # If the caller may write weights before the next step, launch nothing: `start` does it.
        if self._weights_may_change:
            self.hook.after_step()
        else:
            self.hook.before_step(self._actions)

    def _published(self, part: nn.Module) -> None:
        """Wait until the updated weights of `part` have arrived.

        Called before these weights are gathered, and before the forward of `part`.
        """
        if part not in self._publications:
            trained = (p for p in part.parameters() if p.requires_grad)
            self._publications[part] = self.optimizer.publications(trained)
        for wait in self._publications[part]:
            wait()

    def over_ranks(self, total: Tensor) -> Tensor:
        """Return the sum over all ranks of a sum of losses, `total` [].

        Only ranks of the last pipeline stage compute losses: `total` is 0 on the other stages.
        """
        # If logits are split by vocabulary, all ranks of a sequence have the same losses. If not,
        # each rank has the losses of its own tokens.
        axis = Axis.DATA if self.chunks[-1].splits_logits else Axis.STAGE
        return self._sum(Axis.PIPELINE, self._sum(axis, total))

    def _sum(self, axis: Axis, x: Tensor) -> Tensor:
        """Return the sum of x over the ranks of `axis`."""
        return self.mesh[axis].all_reduce(x, tag=Tag(tensor="metrics")).wait()
