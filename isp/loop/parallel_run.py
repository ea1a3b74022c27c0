"""`ParallelRun`: a user's model in training, called from the user's own loop.

A step of the mean cross-entropy is two calls, and a step of the user's own loss at least three:

    run.step(run.loss(input_ids, labels))

    scores = run.log_probs(input_ids, labels)       # or run.logits, run.hidden; any number of them
    run.backward(my_loss(scores))                   # or several such losses, each once
    run.step()                                      # sums gradients over ranks, clips, updates

`run.forward_backward(batches, my_loss)` does the first two for micro-batches, and is the only way
through pipeline stages. `_NEXT_STATE` lists the calls that are allowed in each `State`.

B batch, S sequence, D hidden size, V vocabulary.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from enum import Enum
from functools import cached_property
from numbers import Real
from pathlib import Path
from typing import Any, Self, overload

import torch
from torch import Tensor

from isp.checkpoint import Checkpointer
from isp.checkpoint.plain import Plain
from isp.checkpoint.state import check_shapes
from isp.config import LoopConfig
from isp.config.sections import CheckpointConfig
from isp.core.comm import Mesh
from isp.core.comm.tag import Tag
from isp.core.layers.vocab_loss import IGNORED
from isp.core.mesh import Axis
from isp.core.optim.torch_optimizer import MakeOptimizer
from isp.loop.callers_graphs import CallersGraphs, LossForward, check_scalar
from isp.loop.gathered_weights import GatheredWeights
from isp.loop.off_device import OffDevice
from isp.loop.parameter_guard import ParameterGuard
from isp.loop.peft_adapters import turned_off
from isp.loop.rows import RowReader
from isp.loop.token_query import (
    HiddenQuery,
    LogitQuery,
    ScoreQuery,
    TokenQuery,
    TokenScores,
    TopTokens,
    check_predicts,
)
from isp.models.build import parameter_shapes
from isp.models.huggingface.interface import LogitsOf
from isp.models.traced_model import TracedModel
from isp.step.saved_step import SavedStep
from isp.step.train_step import StepOutcome, make_train_step

__all__ = ["Call", "ParallelRun", "State"]

logger = logging.getLogger(__name__)

_EXTRA = "extra"
"""Key, in a checkpoint, of the caller's values."""
_STEP_OR_DROP = "call run.step(), or run.zero_grad() to drop the gradients"
"""Advice in error messages, for the states in which gradients wait for the step."""


class State(Enum):
    """State of a run's gradients since the last step; it determines the allowed calls.

    The value has two texts for the error message of a call that is not allowed: what is pending,
    and what the user can do.
    """

    READY = "there are no gradients", "call run.backward(loss) first, or run.step(loss)"
    ADDED = "gradients of run.backward wait for the step", _STEP_OR_DROP
    LAST = "a backward with last=True has ended the gradients of the step", _STEP_OR_DROP
    SUMMED = "run.grad_norm() has summed the gradients over the ranks", _STEP_OR_DROP
    AWAY = "the weights are on the host", "call run.to(run.device) to bring them back"

    def refusal(self, call: Call) -> str:
        """Return the message for a `call` that is not allowed in this state."""
        pending, way_out = self.value
        return f"run.{call.value} cannot be called now: {pending}; {way_out}"


class Call(Enum):
    """A call of a run whose order matters; the value is what the user writes after `run.`."""

    LOG_PROBS = "log_probs"
    LOGITS = "logits"
    HIDDEN = "hidden"
    LOSS = "loss"
    LOSS_NO_GRAD = "loss under torch.no_grad()"
    BACKWARD = "backward"
    LAST_BACKWARD = "backward(.., last=True)"
    FORWARD_BACKWARD = "forward_backward"
    LAST_FORWARD_BACKWARD = "forward_backward(.., last=True)"
    FORWARD_BACKWARD_NO_GRAD = "forward_backward under torch.no_grad()"
    GRAD_NORM = "grad_norm"
    STEP = "step"
    STEP_OF_LOSS = "step(loss)"
    ZERO_GRAD = "zero_grad"
    SAVE_PRETRAINED = "save_pretrained"
    NAMED_WEIGHTS = "named_weights"
    SAVE = "save"
    LOAD = "load"
    TO_HOST = "to('cpu')"
    TO_DEVICE = "to(run.device)"


def _next_states() -> dict[Call, dict[State, State]]:
    """Return, for each call, the states in which it is allowed, each with the state after it.

    A call that is refused, or fails before it does anything, changes nothing. A call that fails in
    the model's backward leads to READY, because an unknown part of the gradients has been added.
    Four calls change the state first and may fail after that: `step` leads to READY before it
    updates, and `load` when it has found a checkpoint that fits; `grad_norm` leads to SUMMED before
    it sums; `to('cpu')` drops results that wait for a backward, and stays READY if it fails.
    """
    ready, added, last, summed, away = State
    anywhere = {state: state for state in (ready, added, last, summed)}
    return {
        # These calls keep the gradients. Results are valid until the next step or zero_grad, but a
        # result of `loss` only until the run computes anything else (see `CallersGraphs`).
        Call.LOG_PROBS: anywhere,
        Call.LOGITS: anywhere,
        Call.HIDDEN: anywhere,
        Call.LOSS: anywhere,
        # An evaluation runs as a separate step, which would drop the gradients.
        Call.LOSS_NO_GRAD: {ready: ready},
        Call.FORWARD_BACKWARD_NO_GRAD: {ready: ready, added: added},
        # Gradients add up until the caller passes last=True, or reads the norm of their sum.
        Call.BACKWARD: {ready: added, added: added},
        Call.FORWARD_BACKWARD: {ready: added, added: added},
        Call.LAST_BACKWARD: {ready: last, added: last},
        Call.LAST_FORWARD_BACKWARD: {ready: last, added: last},
        Call.GRAD_NORM: {added: summed, last: summed, summed: summed},
        Call.STEP: {added: ready, last: ready, summed: ready},
        Call.STEP_OF_LOSS: {ready: ready},
        Call.ZERO_GRAD: {**dict.fromkeys(anywhere, ready), away: away},
        # These calls read, save or load weights; only `load` drops the gradients.
        Call.SAVE_PRETRAINED: anywhere,
        Call.NAMED_WEIGHTS: anywhere,
        Call.SAVE: anywhere,
        Call.LOAD: dict.fromkeys(anywhere, ready),
        # `run.to` reads this table only if it moves something. If the weights are on the wanted
        # device already, it is allowed in each state.
        Call.TO_HOST: {ready: away},
        Call.TO_DEVICE: {away: ready},
    }


_NEXT_STATE = _next_states()

_IN_CALLERS_GRAPH = (Call.LOG_PROBS, Call.LOGITS, Call.HIDDEN, Call.LOSS)
"""Calls after which the caller's autograd runs the backward."""
_NEEDS_TRAINED = {
    Call.LOSS: Call.LOSS_NO_GRAD,
    Call.FORWARD_BACKWARD: Call.FORWARD_BACKWARD_NO_GRAD,
    Call.LAST_FORWARD_BACKWARD: Call.FORWARD_BACKWARD_NO_GRAD,
}
"""Calls that need a weight that is not frozen, each with the call to make if all are frozen."""


class ParallelRun:
    """A sharded model in training, with its loss, steps, weights and checkpoints.

        run = isp.parallelize(model, "config.yaml")
        for input_ids, labels in data:  # e.g. by DistributedSampler(.., run.dp_size, run.dp_rank)
            loss = run.loss(input_ids, labels)
            run.step(loss)
        run.save_pretrained(folder)

    Pass the same sequences on all ranks of a tensor group, and different ones on each data rank.
    Between steps no transfer is in flight: you may read parameters (this rank's shards) and write
    them, if all ranks that have a parameter write the same values.
    """

    def __init__(
        self,
        traced: TracedModel,
        config: LoopConfig,
        mesh: Mesh,
        device: torch.device,
        make_optimizer: MakeOptimizer | None = None,
    ) -> None:
        self.model = traced.model
        self._traced = traced
        self.config = config
        self.mesh = mesh
        self.device = device
        self.train_step = make_train_step(
            traced,
            config,
            mesh,
            device,
            weights_may_change=True,
            make_optimizer=make_optimizer,
        )
        mesh.set_timeout(config.comm.init_timeout_seconds)
        self._has_stepped = self._adapters_are_off = self._has_warned = False
        self._guard = ParameterGuard(self.model, self.train_step.built.parameters)
        self.weights = GatheredWeights(traced, self.train_step.built, mesh, config.training.dtype)
        self._saved = SavedStep(self.train_step)
        self.num_steps = self._num_tokens = 0
        """Numbers of steps and of tokens with labels so far, including skipped steps and those of a
        loaded checkpoint."""
        self._off_device = OffDevice(self.train_step, device)
        self._reader = RowReader(traced, config.parallel, device)
        self._graphs = CallersGraphs(self.train_step, mesh)
        self._state = State.READY
        self._loss = self._count = torch.zeros((), dtype=torch.float64)
        """This rank's sums of losses and of labels since the last step."""

    @property
    def dp_rank(self) -> int:
        """The data rank, from 0 to `dp_size` - 1; ranks with equal data ranks share sequences."""
        return self.mesh[Axis.DATA].rank

    @property
    def dp_size(self) -> int:
        """The number of data ranks, each with its own sequences."""
        return self.mesh[Axis.DATA].size

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The torch optimizer that updates the weights; None if an update rule of ISP does."""
        updates = self.train_step.optimizer.torch_updates
        return None if updates is None else updates.optimizer

    # -- results of tokens, and losses -------------------------------------------------------------

    def log_probs(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        position_ids: Tensor | None = None,
        *,
        attention_mask: Tensor | None = None,
        temperature: float = 1.0,
        entropy: bool = False,
    ) -> TokenScores:
        """Return the log-probability of each label, the log-sum-exp and `entropy`, each [B, S].

        Position t has the log-probability, in nats, of labels[t] given the tokens before it, for
        logits divided by `temperature`. It is 0, without a gradient, at the first token of a
        document and where a label is -100. The entropy, in nats, is None unless requested. Results
        are the same on all ranks of a sequence, in the order of your tokens, in float32 or wider;
        the logits never exist all at once.

        Arguments are as in `loss`; `labels` None: the tokens. Sequences may have any length. Tokens
        that `attention_mask` [B, S] masks, at either end, are neither attended to nor scored.
        Compute a scalar from the results and pass it to `backward`; several results may wait for
        their backward. Under `torch.no_grad()` no activations are kept. Raises TypeError for
        arguments that are not tensors, and for ids that are not integers; ValueError for shapes
        that do not fit and, with gradients, for pipeline stages: use `forward_backward`.
        """
        rows = input_ids, labels, position_ids, attention_mask
        query = ScoreQuery(self._reader, *rows, temperature=temperature, entropy=entropy)
        scores: TokenScores = self._answer(Call.LOG_PROBS, query)
        return scores

    @overload
    def logits(
        self,
        input_ids: Tensor,
        pick: Tensor | None = None,
        position_ids: Tensor | None = None,
        *,
        top_k: None = None,
        attention_mask: Tensor | None = None,
        temperature: float = 1.0,
    ) -> Tensor: ...

    @overload
    def logits(
        self,
        input_ids: Tensor,
        pick: None = None,
        position_ids: Tensor | None = None,
        *,
        top_k: int,
        attention_mask: Tensor | None = None,
        temperature: float = 1.0,
    ) -> TopTokens: ...

    def logits(
        self,
        input_ids: Tensor,
        pick: Tensor | None = None,
        position_ids: Tensor | None = None,
        *,
        top_k: int | None = None,
        attention_mask: Tensor | None = None,
        temperature: float = 1.0,
    ) -> Tensor | TopTokens:
        """Return logits divided by `temperature`, in float32 or wider.

        As in transformers, logits at position t predict the token at t + 1. The result has, with
        `pick` [B, S, k], the logits of these tokens, [B, S, k]; with `top_k`, the largest logits
        of the vocabulary and their tokens, [B, S, top_k] each; else all logits, [B, S, V], in
        several copies on every rank of a sequence. For a token classifier, V is the number of
        labels. For a sequence classifier the result is [B, labels], taken at the last token that is
        not the configuration's `pad_token_id`, as in transformers. Values (not `indices`) have
        gradients, as in `log_probs`. Raises as `log_probs` does.
        """
        rows = input_ids, pick, position_ids, attention_mask
        query = LogitQuery(self._reader, *rows, top_k=top_k, temperature=temperature)
        found: Tensor | TopTokens = self._answer(Call.LOGITS, query)
        return found

    def hidden(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        *,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """Return the input of the head, [B, S, D], in float32 or wider, for heads of your own.

        It has the whole sequence and is the same on all ranks of a sequence; compute a loss from it
        as from `log_probs`. Keep the parameters of your head equal on all ranks: their gradients
        are those of one data rank's sequences, so sum them over data ranks yourself. Raises as
        `log_probs` does, and ValueError for a model that does not end in a linear.
        """
        query = HiddenQuery(self._reader, input_ids, position_ids, attention_mask)
        found: Tensor = self._answer(Call.HIDDEN, query)
        return found

    def _answer(self, call: Call, query: TokenQuery) -> Any:
        """Check that `call` is allowed, compute a query and return what the caller gets."""
        self._check(call, trains=torch.is_grad_enabled())
        return query.answer(self._graphs.results(query))

    def loss(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        position_ids: Tensor | None = None,
        *,
        attention_mask: None = None,
    ) -> Tensor:
        """Return the mean loss over the labels of all ranks, to pass to `step` or `backward`.

        The loss is a float64 scalar [], the same on all ranks. `input_ids`, `labels` and
        `position_ids` [B, S] are whole sequences; S is a multiple of `parallel.tensor.size`. As in
        transformers, `labels` are the tokens themselves, -100 where no loss is computed, and are
        shifted here; None: all tokens but the first of each document. Without any label the loss is
        0, and a warning is logged once. Packed documents begin where `position_ids` restart. Pass
        the same arguments on all ranks of a tensor group. The gradient is this rank's part. Under
        `torch.no_grad()` this evaluates, without dropout if you called `eval`.

        Copies of inputs from the host may still run when this returns: do not refill page-locked
        inputs before the step is over.

        Raises TypeError or ValueError for arguments that do not fit, among them an
        `attention_mask`, which only `log_probs`, `logits` and `hidden` take; ValueError on all
        ranks if arguments differ in a tensor group (on CUDA, from the second call on, in `step`);
        ValueError with gradients for pipeline stages: use `forward_backward`; RuntimeError if
        weights were frozen, unfrozen, replaced or converted since `parallelize`, and with gradients
        if all are frozen. The backward of the loss raises RuntimeError outside of `step` and
        `backward`.
        """
        if attention_mask is not None:
            raise ValueError(
                f"run.loss(.., attention_mask=..): leave it out, pad sequences at their end and set"
                f" the labels of padding to {IGNORED}; padding at the start needs"
                f" run.log_probs(.., attention_mask=..)"
            )
        check_predicts(self._reader, "loss")
        batch = self._reader.read(input_ids, labels, position_ids)
        trains = torch.is_grad_enabled()
        self._check(Call.LOSS if trains else Call.LOSS_NO_GRAD, trains=trains)
        if trains:
            return self._graphs.loss(batch, more=self._state is not State.READY)
        self._graphs.forget_loss()
        mean = self.train_step.evaluate([[batch]])
        if mean is None:
            self._warn_unlabelled()
        return torch.tensor(mean or 0.0, dtype=torch.float64)

    def forward_backward(
        self,
        batches: Sequence[Mapping[str, Any]],
        loss_function: Callable[[Any, Mapping[str, Any]], Tensor],
        *,
        temperature: float = 1.0,
        entropy: bool = False,
        last: bool = False,
    ) -> Tensor:
        """Run forward and backward of micro-batches, in a pipeline if there is one.

        Returns the losses [len(batches)], float64, the same on all ranks of a sequence.

        Each of `batches` has `input_ids`, optionally `labels`, `position_ids` and `attention_mask`
        as in `log_probs`, and further entries that `loss_function(scores, batch)` reads. This
        function returns a scalar, computed from the results of `log_probs` for the micro-batch (of
        `logits`, for a classifier). Pass the same batches on all ranks of a sequence and on all
        stages. Only ranks of the last stage call the function, in order, while others compute, so
        it must not call collectives; put results of other models, such as a reference, into
        `batches`. Gradients add up until `step`, as in `backward`; under `torch.no_grad()` there
        are none. `last`: see `backward`. Raises as `log_probs` does, ValueError for a number of
        batches that the pipeline schedule cannot run, and RuntimeError with gradients if all
        weights are frozen.
        """
        if not batches:
            raise ValueError("forward_backward was given no batches: pass at least one")
        self.config.parallel.pipeline.check_micro_batches(len(batches), "len(batches)")
        queries = [self._query(batch, temperature, entropy) for batch in batches]
        trains = torch.is_grad_enabled()
        call = Call.LAST_FORWARD_BACKWARD if last else Call.FORWARD_BACKWARD
        after = self._check(call if trains else Call.FORWARD_BACKWARD_NO_GRAD, trains=trains)

        def loss_of(index: int, found: Tensor) -> Tensor:
            """Return the caller's loss of micro-batch `index` from its results [B, S, K]."""
            return loss_function(queries[index].answer(found), batches[index])

        self._graphs.forget_loss()
        self._graphs.compare(queries)
        with self._all_or_none() if trains else nullcontext():
            if trains:
                self._begin()
            if trains and last:
                self.train_step.expect_both()
            losses = self._graphs.micro_batches(queries, loss_of, training=trains, last=last)
        if trains:
            num_labels = torch.stack([query.num_labels for query in queries]).sum()
            self._loss, self._count = self._loss + losses.sum(), self._count + num_labels
            self._state = after
        return losses

    def _query(self, batch: Mapping[str, Any], temperature: float, entropy: bool) -> TokenQuery:
        """Return the query for one of the batches of `forward_backward`."""
        if "input_ids" not in batch:
            raise ValueError(f"a batch has no input_ids: it has {', '.join(map(str, batch))}")
        input_ids: Tensor = batch["input_ids"]
        labels, *where = map(batch.get, ("labels", "position_ids", "attention_mask"))
        if self._reader.logits_of is LogitsOf.VOCABULARY:
            return ScoreQuery(
                self._reader, input_ids, labels, *where, temperature=temperature, entropy=entropy
            )
        return LogitQuery(self._reader, input_ids, None, *where, temperature=temperature)

    # -- gradients and steps -----------------------------------------------------------------------

    def backward(self, loss: Tensor, *, last: bool = False) -> None:
        """Run the backward of a scalar computed from `log_probs`, `logits`, `hidden` or `loss`.

        You may call this several times before a `step`: gradients add up, over data ranks, too, and
        are not divided by anything (see `count`). A result of `loss` is a mean over data ranks
        already: for n micro-batches pass each as `loss / n`, before the next call of `loss`. All
        ranks of a sequence must compute the same scalar, which counts once. `last=True` declares
        that no other backward follows before the step, so gradients are reduced while it runs. A
        weight that no loss of a step reaches, such as the head if a step uses only `hidden`, keeps
        its value and its optimizer states, as with torch's optimizers.

        A failure in the model's backward drops the gradients since the last step; an error before
        it (no scalar, a fault in the caller's graph, results that are not valid any more) keeps
        them.

        Raises ValueError for a loss that is not a scalar, and RuntimeError if it does not depend on
        a result that waits for a backward, and after `grad_norm` or a backward with `last=True`.
        """
        after = self._check(Call.LAST_BACKWARD if last else Call.BACKWARD, trains=True)
        check_scalar(loss, "run.backward takes a scalar, got")
        arrived = self._graphs.run_callers_backward(loss)
        if not arrived:
            raise RuntimeError(
                "the loss does not depend on a result of the run that waits for a backward: compute"
                " it, with gradients enabled, from the result of run.log_probs, run.logits,"
                " run.hidden or run.loss"
            )
        value, step = loss.detach().double(), self.train_step
        with self._all_or_none():
            # A loss of `run.loss` is always the latest forward, because any other forward makes it
            # invalid. Its forward has begun the step, and router losses may have added gradients,
            # which must not be cleared.
            self._begin(clear=not isinstance(arrived[0][0], LossForward))
            while arrived:  # popped, so that a graph's activations are freed after its backward
                forward, gradient = arrived.pop(0)
                if last and not arrived:
                    step.gradients.expect_last()
                self._graphs.run_model_backward(forward, gradient)
                # `step` will sum this value over data ranks.
                value = value - forward.counted_twice(gradient)
                self._count = self._count + forward.num_labels
        self._loss, self._state = self._loss + value, after

    def grad_norm(self) -> float:
        """Return the global norm of the gradients of `backward`, as `step` will report it.

        This sums the gradients over ranks, so no `backward` may follow before `step` or
        `zero_grad`. Raises RuntimeError if there was no `backward`; for `step(loss)`, read the norm
        of its outcome.
        """
        self._state = self._check(Call.GRAD_NORM, trains=True)
        return self.train_step.grad_norm()

    def step(self, loss: Tensor | None = None, lr: float | None = None) -> StepOutcome:
        """Run the backward of `loss`, sum gradients over ranks, clip them, and update the weights.

        `lr` None: `optimizer.lr` of the configuration. Returns loss, global gradient norm and
        number of labels of the step, the same on all ranks. The outcome's loss is the mean over all
        labels of the step. Without a `loss`, `step` ends the step of `backward`, and the outcome's
        loss is the sum of the losses passed there, over data ranks. A
        step whose gradients are not finite, or without any label, is skipped: `outcome.skipped`.
        Raises RuntimeError for a loss that is not the result of the last call of `loss`, and if
        there was no `backward`; TypeError or ValueError for an `lr` that is no rate, and ValueError
        for `lr` with a torch optimizer.
        """
        if lr is not None:
            _check_rate(lr)
        if lr is not None and self.optimizer is not None:
            raise ValueError(
                f"run.step(lr={lr}): the groups and schedulers of run.optimizer set the learning"
                f" rate: leave out lr"
            )
        lr = self.config.optimizer.lr if lr is None else lr
        if loss is None:
            self._check(Call.STEP, trains=True)
            totals, data = torch.stack((self._loss, self._count)), self.mesh[Axis.DATA]
            # Only ends the state of the step: main gradients stay until the next `_begin`.
            self.zero_grad()
            outcome = self.train_step.update(
                lambda: data.all_reduce(totals, tag=Tag(tensor="metrics")).wait(), lr
            )
        else:
            self._check(Call.STEP_OF_LOSS, trains=True)
            forward = self._graphs.forward_of(loss)
            # The caller's graph is a single node, so the gradient is 1.
            ((_, gradient),) = self._graphs.run_callers_backward(loss)
            # Before the backward, so that buckets are summed while it runs.
            self.train_step.gradients.expect_last()
            forward.run_backward(gradient)
            outcome = forward.finish(lr)
            self.zero_grad()
        if not outcome.valid_tokens:
            self._warn_unlabelled()
        self.num_steps += 1
        self._num_tokens += outcome.valid_tokens
        # From the second step on, collectives get the shorter timeout of the configuration. The
        # first step had more time, because it loads kernels.
        if not self._has_stepped:
            self.mesh.set_timeout(self.config.comm.train_timeout_seconds)
            self._has_stepped = True
        return outcome

    def zero_grad(self) -> None:
        """Drop the gradients since the last step, and results that wait for a backward."""
        self._graphs.drop()
        self._state = _NEXT_STATE[Call.ZERO_GRAD][self._state]

    def count(self, mask: Tensor) -> Tensor:
        """Return the sum of `mask` (any shape) over data ranks, [], float64, on the device.

        Pass the same mask on all ranks of a sequence. Use this to divide a loss by the number of
        tokens or sequences of the global batch.
        """
        total = mask.to(self.device).sum(dtype=torch.float64)
        return self.mesh[Axis.DATA].all_reduce(total, tag=Tag(tensor="count")).wait()

    # -- modes and memory --------------------------------------------------------------------------

    def train(self, mode: bool = True) -> Self:
        """Set training mode (dropout on) or evaluation mode, as `nn.Module.train`; returns self."""
        self.model.train(mode)
        return self

    def eval(self) -> Self:
        """Set evaluation mode (dropout off): `train(False)`."""
        return self.train(False)

    @contextmanager
    def adapters_off(self) -> Iterator[None]:
        """Turn PEFT's LoRA adapters off in this context: the model is then its own reference.

        Compute here under `torch.no_grad()`: with gradients, methods of the run raise RuntimeError.
        Raises ValueError for a model without adapters, or with others than plain LoRA.
        """
        with turned_off(self.model):
            before, self._adapters_are_off = self._adapters_are_off, True
            try:
                yield
            finally:
                self._adapters_are_off = before

    def to(self, device: str | torch.device) -> Self:
        """Move weights and optimizer states to "cpu", or back to the run's device; returns self.

        Use this to free the device for another phase, such as generation. The memory of main
        gradients is freed, too. On CPU ranks nothing moves. Until the weights are back, computing,
        saving or reading them raises RuntimeError, and parameters have no memory. The host memory
        stays allocated. Raises ValueError for another device, MemoryError if the host has too
        little memory, and RuntimeError between `backward` and the step.
        """
        target = torch.device(device)
        home = target.type == self.device.type and target.index in (None, self.device.index)
        if not home and target.type != "cpu":
            raise ValueError(f"run.to({str(device)!r}): a run is on {self.device}, or on 'cpu'")
        if home and self._state is State.AWAY:
            self._off_device.come_back()
            self._state = _NEXT_STATE[Call.TO_DEVICE][self._state]
        elif not home and self._state is not State.AWAY:
            self._leave()
        return self

    def _leave(self) -> None:
        """Move the run's tensors to the host, for `to("cpu")`, if that is allowed now."""
        after = self._check(Call.TO_HOST, trains=False)
        self.zero_grad()
        self._off_device.leave()
        self._state = after

    # -- weights and checkpoints -------------------------------------------------------------------

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the weights as transformers does, so that `from_pretrained` loads them.

        All ranks call it; rank 0 writes, block by block, in the dtypes of training. Of a PEFT
        model, only the adapters are written, as PEFT does. Raises CheckpointError on all ranks if
        rank 0 cannot write.
        """
        self._check(Call.SAVE_PRETRAINED, trains=False)
        self.weights.save_pretrained(Path(folder))

    def named_weights(
        self,
        dtype: torch.dtype | None = None,
        *,
        to_rank: int | None = None,
        merge_adapters: bool = False,
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield names and full weights as `save_pretrained` writes them, e.g. for inference.

        All ranks must call this and iterate to the end. Tensors are on the device, belong to the
        caller, and have `dtype` if they are floating-point (None: their dtype in training, where
        routers may be float32). They are yielded on all ranks, or only on `to_rank`. One block at a
        time is gathered. With PEFT, names are those of the PeftModel's `state_dict`, adapters are
        separate, and experts are stacked; `merge_adapters` merges adapters into the base model's
        weights, as `merge_and_unload` does, with the names that the base model is saved with.
        Raises ValueError for a rank that does not exist, or for an adapter on a tied weight.
        """
        world = self.mesh.topology.world_size
        if to_rank is not None and not 0 <= to_rank < world:
            raise ValueError(f"to_rank={to_rank} must be a rank, from 0 to {world - 1}")
        self._check(Call.NAMED_WEIGHTS, trains=False)
        wanted = to_rank in (None, self.mesh.rank)
        return self.weights.named(dtype, wanted=wanted, merge_adapters=merge_adapters)

    def save(
        self, folder: str | Path, extra: Mapping[str, Plain] | None = None, *, keep: int = 0
    ) -> None:
        """Write a checkpoint `step_<num_steps>` into `folder`; all ranks call it.

        It contains weights, optimizer states, random states, and `extra`: plain values (rank 0's)
        and tensors, in lists and dicts with string keys, up to 98 levels deep. It is published by
        one rename, so a failure leaves earlier checkpoints intact. `keep` is the number of
        checkpoints to keep, 0: all. Gradients since the last step are not saved. Raises
        CheckpointError on all ranks if any rank cannot write.
        """
        self._check(Call.SAVE, trains=False)
        # Checkpoints have the float32 masters: update those of weights that the caller has written.
        self.train_step.optimizer.take_up_weights(only_written=True)
        self._saved.save(
            self._checkpointer.at(Path(folder), keep_latest_k=keep),
            self.num_steps,
            tokens=self._num_tokens,
            shared={_EXTRA: dict(extra or {})},
            wait=True,
        )

    def load(self, path: str | Path, *, weights_only: bool = False) -> dict[str, Plain]:
        """Load a checkpoint of `save` or `isp train`, saved in any layout; return its `extra`.

        All ranks call it. `path` is a checkpoint, or a folder of which the newest good one is
        loaded. Random states are loaded if the layout is the same. `weights_only` leaves out random
        states, optimizer states and the step count. Gradients since the last step are dropped,
        once a checkpoint with the model's shapes is found. Raises ValueError for another model or
        update rule, and CheckpointError if there is no good checkpoint.
        """
        self._check(Call.LOAD, trains=False)
        own, model = self._checkpointer.at(Path(path)), self._traced
        info = own.choose() or own.choose_initial(Path(path))
        check_shapes(info, parameter_shapes(model), model.earlier_names)
        self.zero_grad()
        found = self._saved.load(own, info, weights_only=weights_only)
        self.num_steps, self._num_tokens = (0, 0) if weights_only else (found.step, found.tokens)
        return dict(found.shared.get(_EXTRA, {}))

    @cached_property
    def _checkpointer(self) -> Checkpointer:
        """The checkpointer; making it is a collective, at the first save or load."""
        return Checkpointer("", CheckpointConfig(), world=self.mesh[Axis.WORLD])

    # -- checks and state --------------------------------------------------------------------------

    def _check(self, call: Call, *, trains: bool) -> State:
        """Return the state after `call`; raise RuntimeError or ValueError if it is not allowed now.

        `trains`: the call computes, or uses, gradients. If the caller has given parameters other
        memory, copies their values back into the memory that the optimizer updates.
        """
        after = _NEXT_STATE[call].get(self._state)
        if after is None:
            raise RuntimeError(self._state.refusal(call))
        stages = self.mesh[Axis.PIPELINE].size
        if trains and stages > 1 and call in _IN_CALLERS_GRAPH:
            # A pipeline schedules the backward passes of stages; the caller's autograd cannot.
            raise ValueError(
                f"run.{call.value} with gradients and parallel.pipeline.size={stages}: call"
                f" run.forward_backward(batches, loss_function), or this under torch.no_grad()"
            )
        if call in _NEEDS_TRAINED and not self.train_step.built.trained:
            without = _NEEDS_TRAINED[call].value
            raise RuntimeError(f"all weights are frozen: call run.{without}")
        if trains and self._adapters_are_off:
            raise RuntimeError(
                "adapters have no gradient in run.adapters_off(): compute there under"
                " torch.no_grad(), and train after it"
            )
        self._guard.check(trains=trains)
        return after

    def _begin(self, *, clear: bool = True) -> None:
        """Begin a step unless one has begun.

        `clear`: also set the gradients to zero. Pass False if `run.loss` has done that already.
        """
        if self._state is State.READY:
            if clear:
                self.train_step.begin()
            self._state = State.ADDED
            self._loss = self._count = torch.zeros_like(self._loss, device=self.train_step.device)

    @contextmanager
    def _all_or_none(self) -> Iterator[None]:
        """Drop all gradients if this context raises, because an unknown part was added."""
        try:
            yield
        except BaseException:
            self.zero_grad()
            raise

    def _warn_unlabelled(self) -> None:
        """Warn once, on rank 0, about a batch without a label."""
        if self.mesh.rank == 0 and not self._has_warned:
            logger.warning(
                "all labels of a batch are %s (ignore_index), on all ranks: its loss is 0, and a"
                " step on it leaves the weights as they are (logged once); labels are tokens of"
                " input_ids, aligned with them and not shifted",
                IGNORED,
            )
        self._has_warned = True


def _check_rate(lr: object) -> None:
    """Raise TypeError if the learning rate is no number, ValueError if infinite or negative."""
    if isinstance(lr, bool) or not isinstance(lr, Real):
        raise TypeError(
            f"run.step(lr={lr!r}): lr is a {type(lr).__name__}, pass a number such as 1e-5, or"
            f" leave it out for optimizer.lr"
        )
    if not 0 <= float(lr) < math.inf:
        raise ValueError(f"run.step(lr={lr}): lr must be a finite number of at least 0")
