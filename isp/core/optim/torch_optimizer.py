"""`TorchUpdates`: updates of a rank's rows by a torch optimizer, which must be elementwise."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from isp.core.optim.config import OptimizerConfig
from isp.core.optim.states import MASTER, Resting, take_up
from isp.core.weights.sharded_parameter import ShardedParameter

__all__ = ["MakeOptimizer", "TorchUpdates", "check_elementwise", "count_states", "optimizer_of"]

MakeOptimizer: TypeAlias = "Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer]"
"""A function that makes an optimizer, given (name, parameter) pairs."""


def optimizer_of(config: OptimizerConfig, decayed: Collection[str]) -> MakeOptimizer | None:
    """Return a function that makes the torch optimizer `config.name`; None if that is ISP's rule.

    `decayed`: names of the weights with weight decay. Raises ValueError if the class cannot be
    imported.
    """
    if not config.is_torchs:
        return None
    try:
        made = pkgutil.resolve_name(config.name)
        takes = inspect.signature(made).parameters
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"optimizer.name={config.name} cannot be used: {error}") from error
    values = {
        "lr": config.lr,
        "betas": (config.beta1, config.beta2),
        "eps": config.eps,
        "weight_decay": config.weight_decay,
    }
    accepted = (key for key in values if key in takes and _accepts(takes[key].default, values[key]))
    known = {key: values[key] for key in accepted}

    def make(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        # Two groups, because torch sets weight decay by group.
        groups: list[dict[str, Any]] = [{"params": [pair for pair in named if pair[0] in decayed]}]
        plain = {"weight_decay": 0.0} if "weight_decay" in known else {}
        groups.append({"params": [pair for pair in named if pair[0] not in decayed], **plain})
        optimizer: torch.optim.Optimizer = made([g for g in groups if g["params"]], **known)
        return optimizer

    return make


def count_states(make: MakeOptimizer) -> int:
    """Return the number of states with a weight's shape that the optimizer keeps for it.

    Finds it by a step on a small weight.
    """
    weight = nn.Parameter(torch.ones(2, 2))
    optimizer = make([("weight", weight)])
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    return sum(_has_shape_of(x, weight) for x in optimizer.state[weight].values())


class TorchUpdates:
    """Updates rows by a torch optimizer over `nn.Parameter`s that are views of the master weights.

    These parameters have a gradient only during `update`; a step of the optimizer at another time
    raises RuntimeError.
    """

    work_bytes = 0

    def __init__(
        self,
        shards: Mapping[ShardedParameter, Resting],
        make: MakeOptimizer,
        *,
        peak: float | None = None,
    ) -> None:
        """Make the optimizer for the rows of `shards`.

        `peak`: the learning rate that the optimizer was made with, which `set_rate` scales; None:
        the caller sets the learning rates.
        """
        self._shards = {item.name: shard for item, shard in shards.items()}
        self._parameters = {
            name: nn.Parameter(shard.master) for name, shard in self._shards.items()
        }
        self.optimizer = make([*self._parameters.items()])
        self.optimizer.register_step_pre_hook(self._check_step)
        self._updates, self._peak = False, peak

    def set_rate(self, lr: float) -> None:
        """Scale the learning rates of all groups by `lr` / `peak`; without `peak`, do nothing."""
        for group in self.optimizer.param_groups if self._peak is not None else ():
            # The rate at the start is kept under the key that torch's schedulers use for it.
            group["lr"] = group.setdefault("initial_lr", group["lr"]) * lr / self._peak

    def _check_step(self, *_: object) -> None:
        """Raise RuntimeError unless `update` runs; torch calls this before each step."""
        if not self._updates:
            raise RuntimeError("the optimizer is stepped by run.step: leave out optimizer.step()")

    def update(self, reached: Collection[str]) -> None:
        """Update the rows of the weights whose names are `reached`, and copy masters to weights."""
        for name, shard in self._shards.items():
            if MASTER in shard.states:
                take_up(shard.master, shard.weights)
            # A weight that is not reached gets no gradient here, so torch's optimizers skip it.
            if name in reached:
                self._parameters[name].grad = shard.grad
        self._updates = True
        try:
            self.optimizer.step()
        finally:
            self._updates = False
            for parameter in self._parameters.values():
                parameter.grad = None
        for shard in self._shards.values():
            if MASTER in shard.states:
                shard.weights.copy_(shard.master)

    def settle(self) -> None:
        """Replace `Resting.states` of each shard by the optimizer's current state tensors.

        They are the same tensors, not copies.
        """
        for name, shard in self._shards.items():
            for kind in shard.states.keys() - {MASTER}:
                del shard.states[kind]
            shard.states.update(self._own_states(name)[0])

    def state_dict(self) -> dict[str, Any]:
        """Return the part of the optimizer's state that `settle` does not give to the shards.

        This is the class of the optimizer (`kind`), the options of its groups, and, by the name of
        a weight, the `values`: states that do not have the weight's shape, such as step counts.
        """
        # These options identify a rank's own rows, so they differ between ranks and layouts.
        left_out = ("params", "param_names")
        groups = [
            {key: value for key, value in group.items() if key not in left_out}
            for group in self.optimizer.param_groups
        ]
        values = {name: self._own_states(name)[1] for name in self._shards}
        return {"kind": self.kind, "groups": groups, "values": values}

    def load_state_dict(self, state: Mapping[str, Any], kinds: Mapping[str, list[str]]) -> None:
        """Load a `state_dict` that was saved in any layout, and allocate the other states.

        The other states have the shape of their weight and are zeros: the caller loads values into
        them. `kinds` are their names, by the name of the weight. Raises ValueError if `state` was
        saved by another optimizer, or with another number of groups.
        """
        if state.get("kind") != self.kind:
            raise ValueError(f"saved by {state.get('kind', 'isp')}, and this run has {self.kind}")
        # torch's state dict identifies a parameter by its index among this rank's parameters. The
        # saved values are by name, so map names to indices.
        own = self.optimizer.state_dict()["param_groups"]
        names = {id(parameter): name for name, parameter in self._parameters.items()}
        of_index: dict[int, Any] = {}
        for packed, group in zip(own, self.optimizer.param_groups, strict=True):
            for index, parameter in zip(packed["params"], group["params"], strict=True):
                name = names[id(parameter)]
                made = {kind: torch.zeros_like(parameter) for kind in kinds.get(name, ())}
                if found := made | state["values"].get(name, {}):
                    of_index[index] = found
        if len(own) != len(saved := state["groups"]):
            raise ValueError(f"saved with {len(saved)} groups, and this run has {len(own)}")
        groups = [{**old, **new} for old, new in zip(own, saved, strict=True)]
        self.optimizer.load_state_dict({"state": of_index, "param_groups": groups})
        self.settle()

    @property
    def kind(self) -> str:
        """Qualified name of the optimizer's class."""
        return f"{type(self.optimizer).__module__}.{type(self.optimizer).__qualname__}"

    def _own_states(self, name: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return a weight's states that have its shape, and its other values, such as counts."""
        parameter = self._parameters[name]
        of_one = self.optimizer.state.get(parameter, {})
        shaped = {k: x for k, x in of_one.items() if _has_shape_of(x, parameter)}
        return shaped, {k: x for k, x in of_one.items() if k not in shaped}


def check_elementwise(make: MakeOptimizer, dims: Mapping[str, int], device: torch.device) -> None:
    """Raise ValueError unless the optimizer is elementwise and updates all weights.

    A rank has only some rows or columns of a weight, so the optimizer must treat elements
    independently. Its states have the weight's shape, or are values for a whole weight, such as a
    count of steps. `dims`: number of dimensions of each weight, by name.
    """
    if not dims:
        raise ValueError("optimizer=..: all weights are frozen: leave out optimizer")
    # Run the optimizer on small tensors, and again on a part of each. If it is elementwise, the
    # part gets the same update both times.
    generator = torch.Generator().manual_seed(0)
    whole = {
        name: torch.randn(4, *[3] * dim, dtype=torch.float64, generator=generator).to(device)
        for name, dim in dims.items()
    }
    parts = {name: x[(slice(None), *[slice(2)] * dims[name])] for name, x in whole.items()}
    found, expected = _tried(make, parts), _tried(make, whole)
    for name, of_whole in expected.items():
        for kind, x in of_whole.items():
            own = x[(slice(2),) * x.dim()] if x.dim() else x
            y = found[name].get(kind)
            if y is None or y.shape != own.shape or not torch.allclose(y, own, 1e-9, 1e-30):
                raise ValueError(
                    f"optimizer=..: its update of an element of {name} ({kind}) depends on other"
                    f" elements of the weight, of which each rank holds only a part: use an"
                    f" elementwise one, such as SGD, Adam, AdamW, RMSprop"
                )


def _tried(make: MakeOptimizer, values: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Run three steps from weights x[0] with gradients x[1:], for each x of `values`.

    Returns, by name, the weight and the states that are tensors.
    """
    parameters = {name: nn.Parameter(x[0].clone()) for name, x in values.items()}
    try:
        optimizer = make([*parameters.items()])
        for group in optimizer.param_groups:
            # A learning rate of 0, as at the start of a warm-up, would hide all dependences.
            group["lr"] = 0.1 if not group.get("lr") else group["lr"]
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for step in range(1, 4):
            for name, parameter in parameters.items():
                parameter.grad = values[name][step].clone()
            optimizer.step()
    # Every exception is caught: the caller's function, or the optimizer, may raise any.
    except Exception as error:
        first = next(iter(str(error).strip().splitlines()), "")
        raise ValueError(
            f"optimizer=.. fails on small weights: {type(error).__name__}: {first}: pass a function"
            f" that takes (name, parameter) pairs, where a parameter has only some elements of a"
            f" weight, and returns an optimizer that steps without a closure"
        ) from error
    if left := [name for name, p in parameters.items() if id(p) not in held]:
        raise ValueError(
            f"optimizer=..: it does not update {left[0]}{f' +{len(left) - 1}' * (len(left) > 1)}:"
            f" pass all trainable weights to the optimizer, or freeze those that shall not be"
            f" trained with requires_grad_(False) before isp.parallelize"
        )
    if len(held) > len(parameters):
        raise ValueError(
            "optimizer=..: the optimizer has parameters that were not passed to the function:"
            " make it from the (name, parameter) pairs that the function gets, and no others"
        )
    return {
        name: {
            "weight": parameter.detach(),
            **{k: x for k, x in optimizer.state[parameter].items() if isinstance(x, Tensor)},
        }
        for name, parameter in parameters.items()
    }


def _accepts(default: object, value: object) -> bool:
    """Return True if an argument with this default takes `value`: both pairs, or both floats.

    Optimizers use some names differently: Adafactor's eps is a pair.
    """
    pair = isinstance(value, tuple)
    return isinstance(default, tuple) and len(default) == 2 if pair else isinstance(default, float)


def _has_shape_of(x: object, parameter: Tensor) -> bool:
    """Return True if x is a tensor with the shape of `parameter`."""
    return isinstance(x, Tensor) and x.shape == parameter.shape
