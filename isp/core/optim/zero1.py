"""`Zero1Optimizer`, an update rule with states split over the replicas, and its `Publisher`."""

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
    """Parameters whose updated rows are all-gathered over a channel, one transfer at a time."""

    def __init__(self, members: list[ShardedParameter], channel: Channel) -> None:
        super().__init__(Purpose.PUBLISHED_WEIGHT, members, channel, channel.size)
        for member in members:
            if not member.parameter.is_contiguous():
                raise ValueError(f"{member.name} must be contiguous to be published by rows")
        self._flats = [member.parameter.detach().view(-1) for member in members]

    def launch(self) -> Pending:
        """Launch the all-gather of this rank's rows and the others'."""
        assert self.pending is None or self.pending.waited
        sent = self._flats[0].new_empty(sum(self.widths))  # [L]
        rank, slots = self.channel.rank, sent.split(self.widths)
        owned = (
            flat[rank * width : (rank + 1) * width]  # fewer at the end: padding is never read
            for flat, width in zip(self._flats, self.widths, strict=True)
        )
        copy_all((slot[: own.numel()], own) for slot, own in zip(slots, owned, strict=True))
        gathered = sent.new_empty(self.parts, sent.numel())  # [p, L]
        pending = self.channel.all_gather_into(gathered, sent, tag=self.tag)
        self.pending = pending.then(self._unpack)
        return self.pending

    def _unpack(self, gathered: Tensor) -> Tensor:
        copy_all(
            pair
            for flat, slots in zip(self._flats, gathered.split(self.widths, dim=1), strict=True)
            for pair in _rows_of_all(flat, slots)
        )
        return gathered


def _rows_of_all(flat: Tensor, slots: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield pairs of a parameter's elements and their source in slots [p, width]."""
    if width := slots.shape[1]:
        num_full, rest = divmod(flat.numel(), width)
        yield flat[: num_full * width].view(num_full, width), slots[:num_full]
        if rest:
            yield flat[num_full * width :], slots[num_full, :rest]


class Publisher:
    """Copies the rows that each rank owns into the parameters of all ranks of `channel`.

    Buckets have about `bucket_bytes` of parameters, in order of declaration: those that the next
    forward pass needs first are sent first.
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
        """Launch all transfers; wait for a parameter's own before using it."""
        return [bucket.launch() for bucket in self.buckets]

    def launch_updated(self, left: Collection[ShardedParameter]) -> None:
        """Launch the buckets that are not in flight and have no parameter `left` to update."""
        for bucket in self.buckets:
            if bucket.pending is None and not any(item in left for item in bucket.members):
                bucket.launch()

    def wait_for(self, parameter: nn.Parameter) -> None:
        """Wait until `parameter` is up to date; free if it is already."""
        for wait in self.waits_for([parameter]):
            wait()

    def waits_for(self, parameters: Iterable[nn.Parameter]) -> list[Callable[[], None]]:
        """Return a function to wait for each bucket that contains one of these parameters."""
        of = self._bucket_of  # none in a channel of one rank
        return [bucket.wait for bucket in dict.fromkeys(of[p] for p in parameters if p in of)]

    def wait(self) -> None:
        """Wait for all transfers."""
        for bucket in self.buckets:
            bucket.wait()


_IN_CACHE = 1 << 16
"""Elements whose float64 copy stays in a core's cache."""


class StepResult(NamedTuple):
    """The result of a step of the optimizer."""

    grad_norm: float
    """Global norm of the gradients, without the loss scale and before clipping."""
    skipped: bool
    """True if the norm was not finite or the batch empty; no weight has changed then."""


class ShardState(TypedDict):
    """The state of a parameter on this rank."""

    rows: list[int]
    """(start, stop) of dim 0 of the local shard."""
    tensors: dict[str, Tensor]
    """The states of the update rule by name, and the `master` weights."""


class OptimizerState(TypedDict):
    """Plain numbers, lists and tensors; the tensors are the optimizer's own, not copies."""

    step: int
    """Updates made so far; skipped steps do not count."""
    parameters: dict[str, ShardState]
    """State of each parameter by name, even if this rank has none of its rows."""


class Zero1Optimizer:
    """An update rule on float32 master weights (float64 for float64), split over the zero1 group.

    A rank of the zero1 group owns some rows of dim 0 of each parameter's local shard, given by
    `chunk_range`. It alone keeps their master weights and states and updates them; `publish` sends
    them to the others. Parameters must not be moved or replaced afterwards. If other code writes
    them (`weights_may_change`), masters follow [Note: Written weights].

    If a parameter is float16 (or `config.grad_scaler` says so), the loss is scaled: the result of
    `scale_loss` has to be differentiated, and `step` divides the gradients by the scale.

    Collectives, in this order on all ranks: the norm over WORLD, the rows over ZERO1.
    Source: Rajbhandari et al. 2020, ZeRO stage 1.

    [Note: Reached] torch's optimizers skip a parameter whose `grad` is None. Likewise, a weight
    that no loss of a step reaches keeps its value and states, and the step does not count as one of
    its updates. It is reached if any rank has a gradient of it, zeros included: a rank may have no
    part in the loss, or no token for its experts. The all-reduce of the norm counts these ranks.
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
        """`make` makes a torch optimizer that replaces the rule of `config`, at its own rates;
        None: `config` decides, and the rates are those given to `step`.
        `names` are the parameters of all pipeline stages, in the same order on all ranks; None:
        this rank has all. `matrix_dtype`: see `MatrixUpdates`.
        Raises ValueError for a bad `max_norm`, or too little host memory for states."""
        if not 0 <= max_norm < math.inf:
            raise ValueError(f"max_norm={max_norm} must be finite and at least 0 (0: no clipping)")
        peak = config.lr if make is None else None
        decayed = {item.name for item in gradients.parameters if item.layout.decays}
        make = make or optimizer_of(config, decayed)
        self._rules = {
            name: update_rule(config, name) if make is None else NoRule(config)
            for name in config.rules
        }
        """The update rules of the weights, by name."""
        self.config = config
        self.num_skipped = 0
        """Steps skipped so far."""
        self.skipped_in_a_row = 0
        """Consecutive skipped steps after which the loss scale could not be lowered."""
        dtypes = {item.parameter.dtype for item in gradients.parameters}
        scales = torch.float16 in dtypes or config.grad_scaler.use == "always"
        self.scaler = GradScaler(config.grad_scaler) if scales else None
        """The loss scale; None if the loss is not scaled."""
        self._gradients = gradients
        self._channels = channels
        assert names is not None or channels[Axis.PIPELINE].size == 1, "of all stages"
        self._names = names or [item.name for item in gradients.parameters]
        self._reached: frozenset[str] = frozenset()
        """Names of the weights that the step updates [Note: Reached]; set by `grad_norm`."""
        self._missed = Counter[str]()
        """Number of updates that did not reach each weight, by name."""
        self._max_norm = max_norm
        self._counted_elsewhere = frozenset(counted_elsewhere)
        zero1 = channels[Axis.ZERO1]
        owned = {
            item: chunk_range(item.parameter.shape[0], zero1.size, zero1.rank)
            for item in gradients.parameters
        }
        # A model that is frozen as a whole has no parameters here.
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
        """Updates of the weights that are updated by whole matrices."""
        self._stream: StateStream | TorchUpdates = stream
        if make is not None and self._shards:  # torch's optimizers refuse an empty list
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

        A parameter of one of `config.param_groups` gets that group's fraction of `lr`. Needs
        reduced gradients, which it overwrites. With `wait=False`, new weights are still in flight
        afterwards: call `published` for each parameter before using it. If the gradient norm is not
        finite (the same on all ranks), the step is skipped and counted, and the loss scale may be
        lowered. If the batch `is_empty` (called once the norm is known), no gradient comes from a
        loss, and the step is only skipped and counted. `norm` is the result of `grad_norm`, if
        that was called before.
        """
        assert self._gradients.reduced, "the gradients have to be reduced before the step"
        self._publisher.wait()
        norm = self.grad_norm() if norm is None else norm
        if not math.isfinite(norm):
            self._count_skip()
            return StepResult(norm, skipped=True)
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
        """Bytes of device memory an update takes for streamed or narrow states, and matrices."""
        return self._stream.work_bytes + self.matrices.work_bytes

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return the loss to differentiate: `loss` times the loss scale, if there is one."""
        return loss if self.scaler is None else loss * self.scaler.scale

    def grad_norm(self) -> float:
        """Return the global norm of the reduced gradients, unscaled; synchronizes with the device.

        Also finds which weights the step updates [Note: Reached]. The norm is the same in every
        layout. Ranks of the first zero1 group of the replicas count the rows that they update, so
        each row counts once. Of a parameter that is replicated over a weight group, the group's
        first rank counts it; of one that two pipeline stages hold (tied weights), the stage that
        does not list it in `counted_elsewhere`. Squares are added in float64, where their order
        hardly matters.
        """
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
            # CUDA makes no wide copy of a gradient. The CPU does, so it gets pieces whose copies
            # stay in the cache.
            if squares.device.type == "cpu":
                counted = [x for grad in counted for x in _pieces(grad)]
            norms = foreach_norm(counted, 2, dtype=torch.float64)
            squares = torch.stack(norms).square().sum()
        gradients = self._gradients
        # The flags of reached weights ride on the same all-reduce as the squares.
        came = {x.name for x in gradients.parameters if gradients.came(x.parameter)}
        flags = torch.tensor([float(name in came) for name in self._names], dtype=torch.float64)
        totals = torch.cat((squares.view(1), pinned_memory.send(flags, self._device)))
        totals = channels[Axis.WORLD].all_reduce_(totals, tag=Tag(tensor="grad norm")).wait()
        total, *counts = totals.tolist()
        reached = (name for name, count in zip(self._names, counts, strict=True) if count)
        self._reached = frozenset(reached)
        return math.sqrt(total) / (1.0 if self.scaler is None else self.scaler.scale)

    @torch.no_grad()
    def publish(self) -> list[Pending]:
        """Launch the all-gathers of updated rows over the zero1 group; return one for each bucket.

        Buckets are in order of declaration, in which a forward pass needs them.
        """
        return self._publisher.launch()

    def published(self, parameter: nn.Parameter) -> None:
        """Wait for the new value of `parameter`; free if it has arrived."""
        self._publisher.wait_for(parameter)

    def publications(self, parameters: Iterable[nn.Parameter]) -> list[Callable[[], None]]:
        """Return functions that wait for these parameters' new values, one for each bucket."""
        return self._publisher.waits_for(parameters)

    def state_dict(self) -> OptimizerState:
        """Return masters, states and step count of this rank's rows; see `OptimizerState`."""
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
        """Copy masters to weights after the tensors of `state_dict` were written; a collective.

        `num_updates`: number of updates made so far; None: as before. Publishes over ZERO1.
        """
        self._publisher.wait()
        for shard in self._shards.values():
            shard.weights.copy_(shard.master)
        if num_updates is not None:
            self._num_updates = num_updates
            self._missed.clear()  # `load_skip_state` knows of them
        self.publish()
        self._publisher.wait()

    @torch.no_grad()
    def take_up_weights(self, *, only_written: bool = False) -> None:
        """Copy weights to masters, after other code has written the same weights on all ranks.

        `only_written`: skip masters that round to their weight [Note: Written weights].
        """
        self._publisher.wait()
        self._stream.settle()
        for shard in self._shards.values():
            if shard.master is not shard.weights:
                weights = shard.weights.to(shard.master.device)
                take_up(shard.master, weights) if only_written else shard.master.copy_(weights)

    def skip_state(self) -> dict[str, Any]:
        """Return what checkpoints keep in addition to `state_dict`: skipped steps, missed updates.

        Plain numbers, the same on all ranks of every layout.
        """
        return {
            "num_skipped": self.num_skipped,
            "skipped_in_a_row": self.skipped_in_a_row,
            "missed_updates": dict(self._missed),
            "grad_scaler": None if self.scaler is None else self.scaler.state_dict(),
        }

    def load_skip_state(self, state: Mapping[str, Any]) -> None:
        """Take up a saved `skip_state`, the same on all ranks.

        A run that scales the loss begins at its own initial scale if the saved one did not scale.
        """
        self.num_skipped = state["num_skipped"]
        self.skipped_in_a_row = state["skipped_in_a_row"]
        # Earlier versions updated all weights in each step.
        self._missed = Counter(state.get("missed_updates", {}))
        if self.scaler is not None and state["grad_scaler"] is not None:
            self.scaler.load_state_dict(state["grad_scaler"])

    def _count_skip(self) -> None:
        self.num_skipped += 1
        if self.scaler is None or not self.scaler.can_back_off:
            self.skipped_in_a_row += 1
        if self.scaler is not None:
            self.scaler.update(overflow=True)

    def _unscale_and_clip(self, norm: float) -> None:
        """Divide this rank's gradients by the loss scale, and clip `norm` (unscaled) to max_norm.

        One multiplication does both. The clipping factor is that of
        `torch.nn.utils.clip_grad_norm_`, its 1e-6 included.
        """
        factor = 1.0 if self.scaler is None else 1 / self.scaler.scale
        if self._max_norm:
            factor *= min(1.0, self._max_norm / (norm + 1e-6))
        if factor == 1:
            return
        foreach_mul_([shard.grad for shard in self._shards.values()], factor)

    @torch.no_grad()
    def _update(self, lr: float) -> None:
        """Update this rank's rows of reached weights, and publish each bucket when it is done."""
        self._num_updates += 1
        self._missed.update(name for name in self._names if name not in self._reached)

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

        # Buckets are published as soon as no matrix update of their weights is left: their
        # transfers run while further matrices are multiplied.
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
