"""`Zero1Optimizer`: an update rule with its states split over the replicas."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypedDict

import torch
from torch import Tensor, nn

from isp.core.comm import Channels, Pending, pinned_memory
from isp.core.comm.tag import Tag
from isp.core.mesh import Axis
from isp.core.mesh.partition import chunk_range
from isp.core.optim.buckets import DEFAULT_BUCKET_BYTES
from isp.core.optim.config import OptimizerConfig
from isp.core.optim.grad_scaler import GradScaler
from isp.core.optim.main_grads import MainGradients
from isp.core.optim.matrices import MatrixUpdates
from isp.core.optim.publisher import Publisher
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

__all__ = ["StepResult", "Zero1Optimizer"]

_IN_CACHE = 1 << 16
"""Numbers that stay in a core's cache in float64."""


class StepResult(NamedTuple):
    grad_norm: float
    """The global norm of the gradients, without the loss scale and before clipping."""
    skipped: bool
    """Whether the norm was not finite, or the batch empty: nothing has changed then."""


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
    """By the parameter's name, also where this rank has none of its rows."""


class Zero1Optimizer:
    """An update rule on float32 master weights (float64 for float64), split over the zero1 group.

    Of each parameter's local shard a rank of the zero1 group owns the rows of dim 0 that
    `chunk_range` gives it: it alone keeps their master weights and states and updates them, and
    `publish` brings them to the others. Parameters must not be moved or replaced afterwards. Where
    others write them (`weights_may_change`) masters follow [Note: Written weights].

    Where a parameter is float16 (or `config.grad_scaler` says so) the loss is scaled: what
    `scale_loss` gives has to be differentiated, and `step` takes the scale out again.

    Collectives, in this order on all ranks: the norm over WORLD, the rows over ZERO1.
    Source: Rajbhandari et al. 2020, ZeRO stage 1.

    [Note: Reached] As torch's optimizers leave a parameter alone whose `grad` is None, a weight
    that no loss of a step reaches keeps its value and its states, and the step is not one of its
    updates. It is reached if any rank has a gradient of it, zeros or not: a rank may have no part
    in the loss, or no token for its experts. The number of these ranks travels with the norm.
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
        """`make`: makes torch's optimizer in the place of the rule in `config`, at rates of its
        own; None: that which `config` names, if it does, at the rates of `step`.
        `names`: of the parameters of all pipeline stages, in the same order on all ranks; None:
        this rank has all.
        `matrix_dtype`: see `MatrixUpdates`."""
        if not 0 <= max_norm < math.inf:
            raise ValueError(f"max_norm={max_norm} must be finite and at least 0 (0: no clipping)")
        peak = config.lr if make is None else None
        decayed = {item.name for item in gradients.parameters if item.layout.decays}
        make = make or optimizer_of(config, decayed)
        self._rules = {
            name: update_rule(config, name) if make is None else NoRule(config)
            for name in config.rules
        }
        """Rules that update the weights, and say their states, by name."""
        self.config = config
        self.num_skipped = 0
        """Steps skipped so far."""
        self.skipped_in_a_row = 0
        """Those since the last update that no smaller loss scale could have saved."""
        dtypes = {item.parameter.dtype for item in gradients.parameters}
        scales = torch.float16 in dtypes or config.grad_scaler.use == "always"
        self.scaler = GradScaler(config.grad_scaler) if scales else None
        """None if the loss is not scaled."""
        self._gradients = gradients
        self._channels = channels
        assert names is not None or channels[Axis.PIPELINE].size == 1, "of all stages"
        self._names = names or [item.name for item in gradients.parameters]
        self._reached: frozenset[str] = frozenset()
        """Names of the weights that the step updates [Note: Reached]; `grad_norm` finds them."""
        self._missed = Counter[str]()
        """By weight, updates that did not reach it."""
        self._max_norm = max_norm
        self._counted_elsewhere = frozenset(counted_elsewhere)
        zero1 = channels[Axis.ZERO1]
        owned = {
            item: chunk_range(item.parameter.shape[0], zero1.size, zero1.rank)
            for item in gradients.parameters
        }
        # A model that is frozen as a whole has none.
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
        """Bytes of master weights and states in the memory of the host."""

        def resting(item: ShardedParameter, rows: range) -> Resting:
            weights, own = item.parameter.detach(), slice(rows.start, rows.stop)
            grad = gradients.summed(item.parameter)
            grad = grad if gradients.scatters else grad[own]
            return memory.resting(item.name, rows, weights[own], grad, kinds[item])

        self._shards = {item: resting(item, rows) for item, rows in owned.items()}
        """The rows of each parameter that this rank updates, and what it keeps of them."""
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
        """Those of whole matrices."""
        self._stream: StateStream | TorchUpdates = stream
        if make is not None and self._shards:  # torch makes no optimizer of nothing
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
        """Norm, unscale, clip, update the rows of this rank at learning rate `lr`, publish.

        A parameter of one of `config.param_groups` learns at that group's part of `lr`.
        Needs reduced gradients and uses them up. With `wait=False` the new weights are still on
        their way: `published` has to be called for each parameter before it is used. A gradient
        norm that is not finite, the same on all ranks, skips the step, counts it and may lower
        the loss scale. So is a step skipped and counted, and nothing else, whose batch `is_empty`,
        which is asked once the norm is there: no gradient is from any loss. `norm`: that of
        `grad_norm`, if it is known.
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
        """Those of torch's optimizer, if the caller has made one."""
        return self._stream if isinstance(self._stream, TorchUpdates) else None

    @property
    def work_bytes(self) -> int:
        """Bytes of the device that an update takes for states that rest elsewhere, or narrower."""
        return self._stream.work_bytes + self.matrices.work_bytes

    def scale_loss(self, loss: Tensor) -> Tensor:
        """The loss to differentiate: multiplied by the loss scale, `loss` itself without one."""
        return loss if self.scaler is None else loss * self.scaler.scale

    def grad_norm(self) -> float:
        """Return the global norm of the reduced gradients, unscaled; synchronises with the device.

        It also finds which weights the step updates [Note: Reached].
        The same number in every layout. A rank counts the rows that it updates, and the first
        zero1 group of the replicas those of the model once, except for what is replicated: a
        parameter that every rank of a weight group holds is counted by the group's first rank, and
        one that two pipeline stages hold (tied weights) on the one that does not have it among
        `counted_elsewhere`. Squares are added in float64, where their order hardly shows.
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
            # On CUDA without a wide copy of a gradient; on CPU that is a piece's, in the cache.
            if squares.device.type == "cpu":
                counted = [x for grad in counted for x in _pieces(grad)]
            norms = foreach_norm(counted, 2, dtype=torch.float64)
            squares = torch.stack(norms).square().sum()
        gradients = self._gradients
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
        """Launch the updated rows towards the other ranks of the zero1 group, a `Pending` a bucket.

        The buckets are in order of declaration, that in which a forward pass needs them.
        """
        return self._publisher.launch()

    def published(self, parameter: nn.Parameter) -> None:
        """Wait until the new value of `parameter` is there; free if it is."""
        self._publisher.wait_for(parameter)

    def publications(self, parameters: Iterable[nn.Parameter]) -> list[Callable[[], None]]:
        """What waits until the new values of all these are there; each is free if they are."""
        return self._publisher.waits_for(parameters)

    def state_dict(self) -> OptimizerState:
        """Master weights, states and step count of this rank's rows; see `OptimizerState`."""
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
        """The tensors of `state_dict` were written: weights follow them; a collective over ZERO1.

        `num_updates`: those made so far; None: as many as before.
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
        """Let master weights be the weights, which others have written, alike on all ranks.

        `only_written`: others keep what rounding cuts off [Note: Written weights].
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
        """Divide the gradients of this rank's rows by the loss scale, and bring the global norm,
        which is `norm` without the scale, to max_norm if it is larger.

        One product does both. The factor of clipping is that of `torch.nn.utils.clip_grad_norm_`,
        its 1e-6 included.
        """
        factor = 1.0 if self.scaler is None else 1 / self.scaler.scale
        if self._max_norm:
            factor *= min(1.0, self._max_norm / (norm + 1e-6))
        if factor == 1:
            return
        foreach_mul_([shard.grad for shard in self._shards.values()], factor)

    @torch.no_grad()
    def _update(self, lr: float) -> None:
        """Update this rank's rows of what is reached; publish each bucket of weights after it."""
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

        left = {*self.matrices.members}
        for items in self.matrices.run(average, step, others):
            left.difference_update(items)
            self._publisher.launch_updated(left)
        self.skipped_in_a_row = 0
        if self.scaler is not None:
            self.scaler.update(overflow=False)


def _pieces(x: Tensor) -> Sequence[Tensor]:
    """x, in pieces if it is large."""
    return (x,) if x.numel() <= _IN_CACHE else x.flatten().split(_IN_CACHE)
