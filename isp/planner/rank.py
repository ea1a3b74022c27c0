"""One rank of a layout on the meta device, with channels that only log transfers.

`gather`, `GradientReducer`, `MainGradients` and `Publisher` are the runtime's own classes, so a
plan counts exactly the transfers of a run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from isp.core.comm.channel import DryChannel, Listener
from isp.core.comm.tag import Purpose, Tag, Transfer
from isp.core.mesh import Axis
from isp.core.optim.main_grads import MainGradients
from isp.core.optim.zero1 import Publisher, Zero1Optimizer
from isp.core.weights.communicator import ISPCommModelConfig
from isp.core.weights.gather_reduce import ErrorLatch, GradientReducer, gather
from isp.core.weights.pool import MemoryPool
from isp.core.weights.sharded_parameter import ShardedParameter
from isp.planner.case import Coordinates, PlanCase
from isp.planner.declared import local_parameters, trained_parameters, updated_parameters

__all__ = ["DryRank", "Heard"]

META = torch.device("meta")
_OF_WEIGHTS = (Axis.WEIGHT, Axis.EXPERT_WEIGHT)


class Heard(list[Transfer]):
    """A list of the transfers that a `DryRank` would send, in order; a `Listener`."""

    def launched(self, transfer: Transfer) -> Callable[[], object]:
        """Append a transfer; return the function to call at its wait, which does nothing."""
        self.append(transfer)
        return lambda: None


class DryRank:
    """The rank at `place`, without memory; it reports each transfer that it sends to `listener`."""

    def __init__(self, case: PlanCase, place: Coordinates, listener: Listener) -> None:
        self.case, self._place = case, place
        items = local_parameters(case, place)
        self.trained = trained_parameters(case, place)
        self.parameters = {item.name: item for item in items}
        self._listener = listener
        self._index = {
            Axis.TENSOR: place.tensor,
            Axis.WEIGHT: place.weight,
            Axis.EXPERT_WEIGHT: place.weight % case.topology.expert_weight,
            Axis.ZERO1: place.zero1,
            # Several ranks of a stage may have these coordinates; take the first of them.
            Axis.STAGE: place.zero1 * case.topology.weight + place.weight,
        }
        self.pool = MemoryPool()
        """Pool of the buffers that gradients are reduced into."""
        # Results of `travels` are cached by name: each micro-batch asks for the same parameters.
        self._gathered: dict[str, ShardedParameter] = {}
        self._full: dict[str, Tensor] = {}

    def __getitem__(self, axis: Axis) -> DryChannel:
        """Return the channel along `axis`."""
        return self._channel(axis, axis.value)

    @cached_property
    def gradients(self) -> MainGradients:
        """The main gradients of the rank, which get gradients from `deliver`.

        Nothing is computed, so autograd would never call their hooks: `close` removes them.
        """
        gradients = MainGradients(self.trained, self, rows_of=self[Axis.ZERO1])
        gradients.close()
        return gradients

    @cached_property
    def optimizer(self) -> Zero1Optimizer:
        """The optimizer of the rank; the parts of fused parameters are parameters of their own."""
        updated = updated_parameters(self.case, self._place)
        gradients = MainGradients(updated, self, rows_of=self[Axis.ZERO1])
        gradients.close()
        # On CUDA the runtime runs Newton-Schulz in bfloat16.
        dtype = None if self.case.on_cpu else torch.bfloat16
        config, names = self.case.optimizer, self.case.language_model.trained_names
        return Zero1Optimizer(gradients, self, config, names=names, matrix_dtype=dtype)

    @cached_property
    def publisher(self) -> Publisher:
        """The all-gathers of updated weights over the zero1 group."""
        return Publisher(self.trained, self[Axis.ZERO1])

    @cached_property
    def reducer(self) -> GradientReducer:
        """The reductions of gradients over the weight group."""
        weight = self.case.parallel.weight
        config = ISPCommModelConfig.of(weight, META)
        # With `reduces_apart`, reductions run over a second process group of the same ranks, whose
        # channel is called `weight_reduce` instead of `weight`.
        apart = "_reduce" * weight.reduces_apart
        reducer = GradientReducer(
            {a: self._channel(a, f"{a}{apart}") for a in _OF_WEIGHTS},
            self.pool,
            ErrorLatch(),
            dtype=config.reduce_dtype,
            # Without overlap each reduction is waited for at once.
            max_bytes_in_flight=config.max_reduce_bytes if weight.overlap else 0,
        )
        reducer.sink = self.gradients
        return reducer

    def travels(self, name: str) -> ShardedParameter:
        """Return parameter `name` with the layout in which it is gathered.

        The experts of this rank's expert group are gathered within that group only.
        """
        found = self._gathered.get(name)
        if found is None:
            item = self.parameters[name]
            found = self._gathered[name] = replace(item, layout=item.layout.of_group)
        return found

    def deliver(self, name: str, *, last: bool) -> None:
        """Take a gradient of parameter `name`, as backward does.

        `last` is True if the gradient is one of the last backward pass of the step: buckets are
        reduced only once they have all of these.
        """
        if self.case.gathers_weights:
            self._reduce(name)
            if not self.case.parallel.weight.overlap:
                self.reducer.finish()
        if last:
            self._uses[name] -= 1
            if self._uses[name] <= 0:
                self.gradients.collect(self.parameters[name].parameter)

    def _reduce(self, name: str) -> None:
        """Launch the reduction of a parameter's full gradient."""
        sharded = self.travels(name)
        full = self._full.get(name)
        if full is None:
            shape, dtype = sharded.layout.global_shape, sharded.parameter.dtype
            full = self._full[name] = torch.empty(shape, dtype=dtype, device=META)
        self.reducer.add(sharded, full)

    def expect_last(self, uses: Mapping[str, int]) -> None:
        """Begin the last backward pass, in which each parameter gets `uses` gradients.

        A bucket is reduced once each of its parameters has got all of its gradients. Parameters of
        which no block declares a use get gradients from autograd, and count as complete at once.
        """
        self._uses = Counter(uses)
        self.gradients.expect_last()
        for item in self.trained:
            if item.name not in uses:
                self.gradients.collect(item.parameter)

    def gather(self, name: str) -> None:
        """Launch the all-gather of parameter `name`."""
        gather([self.travels(name)], self, MemoryPool())

    def all_reduce_numbers(self, axis: Axis, shape: tuple[int, ...] = ()) -> None:
        """Sum metrics along `axis`, and wait for the result."""
        number = torch.empty(shape, dtype=torch.float64, device=META)
        self[axis].all_reduce_(number, tag=Tag(tensor="metrics")).wait()

    def share_batch(self) -> None:
        """Broadcast tokens, labels and positions of a step within the tensor group."""
        case = self.case
        shape = (case.micro_num, 3, case.rows, case.tokens)
        batch = torch.empty(shape, dtype=torch.int64, device=META)
        self[Axis.TENSOR].broadcast_(batch, tag=Tag(Purpose.DATA, tensor="batch")).wait()

    def add_tied(self, name: str) -> None:
        """Sum the gradient of an embedding table that the first and last stage share."""
        gradient = self.gradients.summed(self.parameters[name].parameter)
        self[Axis.EMBEDDING].all_reduce_(gradient, tag=Tag(Purpose.REPLICA_GRADIENT, name))

    def _channel(self, axis: Axis, name: str) -> DryChannel:
        """Return a channel along `axis` called `name`."""
        # Where the backend has no reduce-scatter, ranks exchange parts and sum them themselves.
        return DryChannel(
            name,
            self.case.size(axis),
            self._index.get(axis, 0),
            self._listener,
            sum_locally=self.case.sums_locally if axis in _OF_WEIGHTS else self.case.on_cpu,
        )
