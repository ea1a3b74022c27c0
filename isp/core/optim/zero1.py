"""`Zero1Optimizer`, an optimizer with states split over replicas, and its `Publisher`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypedDict

import torch
from torch import Tensor, nn

from isp.core.comm import Channel, Channels, Pending, pinned_memory
from isp.core.comm.tag import Purpose, Tag
from isp.core.mesh import Axis
from isp.core.mesh.partition import chunk_range
from isp.core.optim.buckets import DEFAULT_BUCKET_BYTES, Bucket, copy_all, grouped
from isp.core.optim.config import OptimizerConfig
from isp.core.optim.grad_scaler import GradScaler
from isp.core.optim.main_grads import MainGradients
from isp.core.optim.matrices import MatrixUpdates
from isp.core.optim.states import (
    MASTER,
    STREAM_BYTES,
    Resting,
    StateMemory,
    StateStream,
    by_values,
    kept,
    take_up,
)
from isp.core.optim.torch_optimizer import MakeOptimizer, TorchUpdates, optimizer_of
from isp.core.optim.update_rules import GroupValues, NoRule, Rows, update_rule, values_of
from isp.core.torch_private import foreach_mul_, foreach_norm
from isp.core.weights.sharded_parameter import ShardedParameter

__all__ = [
    "Publisher",
    "StepResult",
    "Zero1Optimizer",
]


class WeightBucket(Bucket):
    """Parameters whose updated rows are all-gathered over a channel by one collective."""

    def __init__(self, members: list[ShardedParameter], channel: Channel) -> None:
        super().__init__(Purpose.PUBLISHED_WEIGHT, members, channel, channel.size)
        for member in members:
            if not member.parameter.is_contiguous():
                raise ValueError(
                    f"{member.name} is not contiguous, so its rows cannot be all-gathered: make the"
                    f" parameter contiguous"
                )
        self._flats = [member.parameter.detach().view(-1) for member in members]

    def launch(self) -> Pending:
        """Launch the all-gather: send this rank's rows, receive those of the other ranks."""
        assert self.pending is None or self.pending.waited
        sent = self._flats[0].new_empty(sum(self.widths))  # [L]
        rank, slots = self.channel.rank, sent.split(self.widths)
        owned = (
            # The last ranks may have fewer elements; receivers ignore the rest of their slots.
            flat[rank * width : (rank + 1) * width]
            for flat, width in zip(self._flats, self.widths, strict=True)
        )
        copy_all((slot[: own.numel()], own) for slot, own in zip(slots, owned, strict=True))
        gathered = sent.new_empty(self.parts, sent.numel())  # [p, L]
        pending = self.channel.all_gather_into(gathered, sent, tag=self.tag)
        self.pending = pending.then(self._unpack)
        return self.pending

    def _unpack(self, gathered: Tensor) -> Tensor:
        """Copy what the p ranks have sent, [p, L], into the parameters."""
        copy_all(
            pair
            for flat, slots in zip(self._flats, gathered.split(self.widths, dim=1), strict=True)
            for pair in _rows_of_all(flat, slots)
        )
        return gathered


def _rows_of_all(flat: Tensor, slots: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (target, source) pairs of a copy from the `slots` of all ranks to a flat parameter.

    `slots` [p, width] has the elements that each rank has sent. There are at most two pairs: the
    full slots as one copy, and the last slot without its padding.
    """
    if width := slots.shape[1]:
        num_full, rest = divmod(flat.numel(), width)
        yield flat[: num_full * width].view(num_full, width), slots[:num_full]
        if rest:
            yield flat[num_full * width :], slots[num_full, :rest]


class Publisher:
    """Sends the rows that each rank has updated to all ranks of `channel`, by all-gathers.

    Buckets have about `bucket_bytes` of parameters, in order of declaration: parameters that the
    next forward needs first are sent first.
    """

    def __init__(
        self,
        parameters: Iterable[ShardedParameter],
        channel: Channel,
        *,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    ) -> None:
        order = {item: i for i, item in enumerate(parameters if channel.size > 1 else ())}
        found = grouped(
            order,
            lambda item: (item.parameter.dtype, item.parameter.device),
            lambda item: item.parameter.nbytes,
            bucket_bytes,
        )
        found.sort(key=lambda members: order[members[0]])
        self.buckets = [WeightBucket(members, channel) for members in found]
        self._bucket_of = {item.parameter: b for b in self.buckets for item in b.members}

    def launch(self) -> list[Pending]:
        """Launch all transfers; call `wait_for` of a parameter before reading it."""
        return [bucket.launch() for bucket in self.buckets]

    def launch_updated(self, left: Collection[ShardedParameter]) -> None:
        """Launch the buckets that are not in flight and whose parameters are all updated.

        `left`: parameters that are not updated yet.
        """
        for bucket in self.buckets:
            if bucket.pending is None and not any(item in left for item in bucket.members):
                bucket.launch()

    def wait_for(self, parameter: nn.Parameter) -> None:
        """Wait until `parameter` has its new value; costs nothing if it has."""
        for wait in self.waits_for([parameter]):
            wait()

    def waits_for(self, parameters: Iterable[nn.Parameter]) -> list[Callable[[], None]]:
        """Return the `wait` method of each bucket that has one of these parameters."""
        # `_bucket_of` is empty if the channel has one rank: then nothing is sent.
        of = self._bucket_of
        return [bucket.wait for bucket in dict.fromkeys(of[p] for p in parameters if p in of)]

    def wait(self) -> None:
        """Wait until the updated weights of all buckets have arrived on this rank."""
        for bucket in self.buckets:
            bucket.wait()


_IN_CACHE = 1 << 16
"""Number of elements whose float64 copy stays in the cache of a CPU core."""


class StepResult(NamedTuple):
    """The gradient norm of an optimizer step, and whether the step was skipped."""

    grad_norm: float
    """Global norm of the gradients, without the loss scale and before clipping."""
    skipped: bool
    """True if the norm was not finite or the batch empty; no weight has changed then."""


class ShardState(TypedDict):
    """The optimizer state of a parameter's rows on this rank."""

    rows: list[int]
    """(start, stop) of the rows, on dim 0 of the local shard."""
    tensors: dict[str, Tensor]
    """The states of the update rule by name, and the `master` weights."""


class OptimizerState(TypedDict):
    """This rank's optimizer state; the tensors are the optimizer's own, not copies."""

    step: int
    """Number of updates made so far; skipped steps do not count."""
    parameters: dict[str, ShardState]
    """State of each parameter by name, also of parameters of which this rank has no rows."""


class Zero1Optimizer:
    """Updates master weights in float32 (float64 for float64), split over the zero1 group.

    A rank of the zero1 group owns some rows of dim 0 of each parameter's local shard, given by
    `chunk_range`. Only this rank keeps the rows' master weights and states and updates them;
    `publish` sends the new weights to the other ranks. Parameters must not be moved or replaced
    afterwards. With `weights_may_change`, other code may write weights, and their masters take the
    values [Note: Written weights].

    If a parameter is float16, or `config.grad_scaler.use` is `always`, the loss is scaled: call
    backward of the result of `scale_loss`; `step` divides the gradients by the scale.

    A weight without a gradient on any rank is not updated. See [Note: Reached] in
    docs/design/notes/optimizer.md.

    Collectives, in this order on all ranks: the norm over WORLD, the rows over ZERO1.
    Source: Rajbhandari et al. 2020, ZeRO stage 1.
    """

    def __init__(
        self,
        gradients: MainGradients,
        channels: Channels,
        config: OptimizerConfig,
        *,
        max_norm: float = 0.0,
        names: Sequence[str] | None = None,
        counted_elsewhere: Collection[str] = (),
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        stream_bytes: int = STREAM_BYTES,
        weights_may_change: bool = False,
        make: MakeOptimizer | None = None,
        matrix_dtype: torch.dtype | None = None,
    ) -> None:
        """Make an optimizer for the parameters of `gradients`; clip their norm to `max_norm`.

        `make` makes a torch optimizer, which replaces the rule of `config` and sets its own
        learning rates; None: the rule of `config`, with the learning rate given to `step`. `names`
        are the parameters of all pipeline stages, in the same order on all ranks; None: this rank
        has all. `counted_elsewhere`: names of parameters that the norm counts on another stage.
        `matrix_dtype`: see `MatrixUpdates`. Raises ValueError if `max_norm` is negative or not
        finite, or if the host has too little memory for states.
        """
        if not 0 <= max_norm < math.inf:
            raise ValueError(f"max_norm={max_norm} must be finite and at least 0 (0: no clipping)")
        peak = config.lr if make is None else None
        decayed = {item.name for item in gradients.parameters if item.layout.decays}
        make = make or optimizer_of(config, decayed)
        self._rules = {
            name: update_rule(config, name) if make is None else NoRule(config)
            for name in config.rules
        }
        """The update rules, by name."""
        self.config = config
        self.num_skipped = 0
        """Number of steps skipped so far."""
        self.skipped_in_a_row = 0
        """Number of consecutive skipped steps after which the loss scale could not be lowered."""
        dtypes = {item.parameter.dtype for item in gradients.parameters}
        scales = torch.float16 in dtypes or config.grad_scaler.use == "always"
        self.scaler = GradScaler(config.grad_scaler) if scales else None
        """The loss scale; None if the loss is not scaled."""
        self._gradients = gradients
        self._channels = channels
        assert names is not None or channels[Axis.PIPELINE].size == 1, "names of all stages needed"
        self._names = names or [item.name for item in gradients.parameters]
        self._reached: frozenset[str] = frozenset()
        """Names of the weights that the step updates [Note: Reached]; set by `grad_norm`."""
        self._missed = Counter[str]()
        """Number of updates in which each weight had no gradient on any rank, by name."""
        self._max_norm = max_norm
        self._counted_elsewhere = frozenset(counted_elsewhere)
        zero1 = channels[Axis.ZERO1]
        owned = {
            item: chunk_range(item.parameter.shape[0], zero1.size, zero1.rank)
            for item in gradients.parameters
        }
        # Without any parameter, because all weights are frozen, the device does not matter.
        device = next((p.parameter.device for p in gradients.parameters), torch.device("cpu"))
        self._device = device
        values = {item: values_of(item.name, item.layout, config) for item in owned}
        kinds = {item: kept(self._rules[values[item].rule], item.parameter.dtype) for item in owned}
        memory = StateMemory(
            (
                (kind, len(rows) * math.prod(item.parameter.shape[1:]))
                for item, rows in owned.items()
                for kind in kinds[item].values()
            ),
            device,
            on_host=config.offload_states,
        )
        self.host_bytes = memory.host_bytes
        """Bytes of master weights and states in host memory."""

        def resting(item: ShardedParameter, rows: range) -> Resting:
            weights, own = item.parameter.detach(), slice(rows.start, rows.stop)
            grad = gradients.summed(item.parameter)
            grad = grad if gradients.scatters else grad[own]
            return memory.resting(item.name, rows, weights[own], grad, kinds[item])

        self._shards = {item: resting(item, rows) for item, rows in owned.items()}
        """The rows of each parameter that this rank updates, with their states."""
        by_rows, whole = dict[ShardedParameter, Resting](), dict[ShardedParameter, Resting]()
        for item, shard in self._shards.items():
            (whole if self._rules[values[item].rule].by_matrix else by_rows)[item] = shard
        stream = StateStream(
            by_values(by_rows, values),
            device,
            on_host=config.offload_states,
            bucket_bytes=stream_bytes,
            weights_may_change=weights_may_change,
        )
        self.matrices = MatrixUpdates(
            whole,
            values,
            channels,
            config,
            stream,
            bucket_bytes=bucket_bytes,
            dtype=matrix_dtype,
        )
        """The updates of weights whose rule needs whole matrices (muon)."""
        self._stream: StateStream | TorchUpdates = stream
        # Without any shard, because all weights are frozen, make no torch optimizer: torch's
        # optimizers raise for an empty list of parameters.
        if make is not None and self._shards:
            self._stream = TorchUpdates(self._shards, make, peak=peak)
        self._publisher = Publisher(gradients.parameters, zero1, bucket_bytes=bucket_bytes)
        self._num_updates = 0

    def step(
        self,
        lr: float,
        *,
        wait: bool = True,
        is_empty: Callable[[], bool] = lambda: False,
        norm: float | None = None,
    ) -> StepResult:
        """Compute the norm, unscale, clip, update this rank's rows at rate `lr`, and publish.

        A parameter of one of `config.param_groups` gets that group's fraction of `lr`. Gradients
        must be reduced, and are overwritten. With `wait=False`, new weights are still in flight
        afterwards: call `published` for each parameter before using it. If the gradient norm is not
        finite (the same on all ranks), the step is skipped and counted, and the loss scale may be
        lowered. `is_empty` is called when the norm is known; it returns True if no token had a
        loss, and the step is then skipped and counted as well. `norm`: the result of an earlier
        call of `grad_norm`; None: it is computed.
        """
        assert self._gradients.reduced, "gradients have to be reduced before a step: call reduce()"
        self._publisher.wait()
        norm = self.grad_norm() if norm is None else norm
        if not math.isfinite(norm):
            self._count_skip()
            return StepResult(norm, skipped=True)
        # No overflow: an empty batch leaves the loss scale and `skipped_in_a_row` as they are.
        if is_empty():
            self.num_skipped += 1
            return StepResult(norm, skipped=True)
        self._unscale_and_clip(norm)
        self._update(lr)
        if wait:
            self._publisher.wait()
        return StepResult(norm, skipped=False)

    @property
    def torch_updates(self) -> TorchUpdates | None:
        """The updates by a torch optimizer; None if a rule of ISP updates."""
        return self._stream if isinstance(self._stream, TorchUpdates) else None

    @property
    def work_bytes(self) -> int:
        """Bytes of device memory that an update takes.

        They are for copies of states that are kept on the host or in a narrower dtype, and for the
        matrices of muon.
        """
        return self._stream.work_bytes + self.matrices.work_bytes

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return the loss to call backward of: `loss` times the loss scale, if there is one."""
        return loss if self.scaler is None else loss * self.scaler.scale

    def grad_norm(self) -> float:
        """Return the global norm of the reduced gradients, without the loss scale.

        A collective, which also finds the weights that the step updates [Note: Reached], and waits
        for the device. The norm is the same in every layout, because each gradient is counted once
        and squares are added in float64, in which their order hardly matters.
        """
        # Each element is counted by exactly one rank. Of several replicas, only the ranks of the
        # first zero1 group count, each its own rows of a parameter. If a whole weight group holds a
        # parameter, the first rank counts it. If two stages hold a tied weight, one of them counts
        # it; on the other stage, its name is in `counted_elsewhere`.
        channels = self._channels
        updates_first = channels[Axis.WEIGHT_DATA].rank < channels[Axis.ZERO1].size
        first = channels[Axis.WEIGHT].rank == 0
        counted = [
            shard.grad
            for item, shard in (self._shards.items() if updates_first else ())
            if (first or item.layout.sharded)
            and item.name not in self._counted_elsewhere
            and shard.grad.numel()
        ]
        squares = torch.zeros((), dtype=torch.float64, device=self._device)
        if counted:
            # On the CPU the norm in float64 copies a gradient, so it is computed by pieces whose
            # copies stay in the cache. On CUDA it makes no copy.
            if squares.device.type == "cpu":
                counted = [x for grad in counted for x in _pieces(grad)]
            norms = foreach_norm(counted, 2, dtype=torch.float64)
            squares = torch.stack(norms).square().sum()
        gradients = self._gradients
        # One all-reduce for the squares and for the number of ranks that reach each weight.
        here = {x.name for x in gradients.parameters if gradients.has_gradient(x.parameter)}
        flags = torch.tensor([float(name in here) for name in self._names], dtype=torch.float64)
        totals = torch.cat((squares.view(1), pinned_memory.send(flags, self._device)))
        totals = channels[Axis.WORLD].all_reduce_(totals, tag=Tag(tensor="grad norm")).wait()
        total, *counts = totals.tolist()
        reached = (name for name, count in zip(self._names, counts, strict=True) if count)
        self._reached = frozenset(reached)
        return math.sqrt(total) / (1.0 if self.scaler is None else self.scaler.scale)

    @torch.no_grad()
    def publish(self) -> list[Pending]:
        """Launch the all-gathers of updated rows over the zero1 group, one for each bucket.

        Buckets are in order of declaration, in which a forward needs them.
        """
        return self._publisher.launch()

    def published(self, parameter: nn.Parameter) -> None:
        """Wait for the new value of `parameter`; costs nothing if it has arrived."""
        self._publisher.wait_for(parameter)

    def publications(self, parameters: Iterable[nn.Parameter]) -> list[Callable[[], None]]:
        """Return functions that wait for the new values of `parameters`, one for each bucket."""
        return self._publisher.waits_for(parameters)

    def state_dict(self) -> OptimizerState:
        """Return the master weights and states of this rank's rows, and the number of updates."""
        self._stream.settle()
        return {
            "step": self._num_updates,
            "parameters": {
                item.name: {
                    "rows": [shard.rows.start, shard.rows.stop],
                    "tensors": {**shard.states, MASTER: shard.master},
                }
                for item, shard in self._shards.items()
            },
        }

    @torch.no_grad()
    def states_changed(self, num_updates: int | None = None) -> None:
        """Set weights from their masters, after the tensors of `state_dict` were written.

        A collective over ZERO1. `num_updates`: number of updates made so far; None: unchanged.
        """
        self._publisher.wait()
        for shard in self._shards.values():
            shard.weights.copy_(shard.master)
        if num_updates is not None:
            self._num_updates = num_updates
            # The missed updates of the old weights do not apply to the loaded ones; a later call of
            # `load_skip_state` sets them.
            self._missed.clear()
        self.publish()
        self._publisher.wait()

    @torch.no_grad()
    def take_up_weights(self, *, only_written: bool = False) -> None:
        """Set master weights from the weights, after other code has written weights.

        All ranks that have a weight must have written the same values. With `only_written`, a
        master whose weight nobody has written keeps its value, which is more precise than the
        weight; see [Note: Written weights] in docs/design/notes/optimizer.md.
        """
        self._publisher.wait()
        self._stream.settle()
        for shard in self._shards.values():
            if shard.master is not shard.weights:
                weights = shard.weights.to(shard.master.device)
                take_up(shard.master, weights) if only_written else shard.master.copy_(weights)

    def skip_state(self) -> dict[str, Any]:
        """Return the counts of skipped steps and missed updates, and the loss scale's state.

        Checkpoints keep them in addition to `state_dict`. They are plain numbers, the same on all
        ranks and in every layout.
        """
        return {
            "num_skipped": self.num_skipped,
            "skipped_in_a_row": self.skipped_in_a_row,
            "missed_updates": dict(self._missed),
            "grad_scaler": None if self.scaler is None else self.scaler.state_dict(),
        }

    def load_skip_state(self, state: Mapping[str, Any]) -> None:
        """Load a saved `skip_state`, the same on all ranks.

        If this run scales the loss and the saved run did not, the loss scale keeps its initial
        value.
        """
        self.num_skipped = state["num_skipped"]
        self.skipped_in_a_row = state["skipped_in_a_row"]
        # Absent in checkpoints of earlier versions, which updated all weights in each step.
        self._missed = Counter(state.get("missed_updates", {}))
        if self.scaler is not None and state["grad_scaler"] is not None:
            self.scaler.load_state_dict(state["grad_scaler"])

    def _count_skip(self) -> None:
        """Count a step with non-finite gradients, and lower the loss scale if it is due."""
        self.num_skipped += 1
        if self.scaler is None or not self.scaler.can_back_off:
            self.skipped_in_a_row += 1
        if self.scaler is not None:
            self.scaler.update(overflow=True)

    def _unscale_and_clip(self, norm: float) -> None:
        """Divide this rank's gradients by the loss scale, and clip their `norm` to `max_norm`.

        `norm` is without the loss scale. One multiplication does both. The clipping factor is that
        of `torch.nn.utils.clip_grad_norm_`, including its 1e-6.
        """
        factor = 1.0 if self.scaler is None else 1 / self.scaler.scale
        if self._max_norm:
            factor *= min(1.0, self._max_norm / (norm + 1e-6))
        if factor == 1:
            return
        foreach_mul_([shard.grad for shard in self._shards.values()], factor)

    @torch.no_grad()
    def _update(self, lr: float) -> None:
        """Update this rank's rows of weights that have a gradient, and publish each bucket after.

        A weight without a gradient on any rank is not updated. A bucket is published as soon as all
        its weights are updated.
        """
        self._num_updates += 1
        self._missed.update(name for name in self._names if name not in self._reached)

        # `step` and `average` are passed to `StateStream` and `MatrixUpdates`, which call them with
        # the rows of one bucket at a time.
        def step(values: GroupValues, rows: Rows) -> None:
            if (rows := rows.of(self._reached)).masters:
                self._rules[values.rule].step(
                    rows,
                    lr=lr * values.lr_scale,
                    weight_decay=values.weight_decay,
                    numbers=[self._num_updates - self._missed[name] for name in rows.names],
                )

        def average(values: GroupValues, rows: Rows) -> None:
            if (rows := rows.of(self._reached)).masters:
                self._rules[values.rule].average(rows)

        def others() -> None:
            if isinstance(self._stream, TorchUpdates):
                self._stream.set_rate(lr)
                self._stream.update(self._reached)
            else:
                self._stream.pass_through(step)
            self._publisher.launch_updated(left)

        # A bucket is published as soon as none of its weights has a matrix update left, so that
        # it is in flight while further matrices are multiplied.
        left = {*self.matrices.members}
        for items in self.matrices.run(average, step, others):
            left.difference_update(items)
            self._publisher.launch_updated(left)
        self.skipped_in_a_row = 0
        if self.scaler is not None:
            self.scaler.update(overflow=False)


def _pieces(x: Tensor) -> Sequence[Tensor]:
    """Return x, cut into pieces if it is large."""
    return (x,) if x.numel() <= _IN_CACHE else x.flatten().split(_IN_CACHE)
