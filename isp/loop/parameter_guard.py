"""Checks and hooks that find misuse of a parallelized model's parameters by user code."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from isp.core.weights.sharded_parameter import ShardedParameter

__all__ = ["ParameterGuard", "refuse_data_parallel", "refuse_optimizers"]


class _Place(NamedTuple):
    """An attribute of a module that is a parameter; a tied parameter has several places."""

    name: str
    """Name of the parameter in the model, for errors."""
    owner: nn.Module
    """The module that has the attribute."""
    local: str
    """Name of the attribute of `owner`."""
    parameter: nn.Parameter
    """The parameter when the model was parallelized."""
    storage: Tensor
    """A tensor with the memory that the optimizer updates and gathers read. `parameter` had this
    memory when the model was parallelized."""
    trains: bool
    """True if the parameter was trained when the model was parallelized."""


class ParameterGuard:
    """Keeps the parameters of `model` on the memory that the optimizer updates.

    Writing into a parameter in place is allowed. `module.to(..)` and `parameter.data = ..` give a
    parameter other memory, which the optimizer does not update: `check` then copies the values
    into the original memory, as if they had been written there.
    """

    def __init__(self, model: nn.Module, parameters: Iterable[ShardedParameter]) -> None:
        names = {item.parameter: item.name for item in parameters}
        self._places = [
            _Place(names[p], owner, local, p, p.data, p.requires_grad)
            for owner in model.modules()
            for local, p in owner.named_parameters(recurse=False)
            if p in names
        ]

    @torch.no_grad()
    def check(self, *, trains: bool) -> None:
        """Give parameters with other memory their original memory back, with their new values.

        Raises RuntimeError if a parameter was replaced, or has another dtype, device or shape than
        before; with `trains`, also if it was frozen or unfrozen.
        """
        for place in self._places:
            parameter, storage = place.parameter, place.storage
            if getattr(place.owner, place.local) is not parameter:
                raise RuntimeError(
                    f"{place.name} is another parameter than when the model was parallelized: write"
                    f" into the original one, by copy_ or load_state_dict without assign=True"
                )
            if trains and parameter.requires_grad is not place.trains:
                was, now = ("trained", "frozen") if place.trains else ("frozen", "trained")
                raise RuntimeError(
                    f"{place.name} was {was} when the model was parallelized, and is {now} now:"
                    f" save the model by save_pretrained, load it, freeze its weights, and"
                    f" parallelize it again"
                )
            if _kind(parameter) != _kind(storage):
                raise RuntimeError(
                    f"{place.name} was {_kind(storage)} when the model was parallelized, and is"
                    f" {_kind(parameter)} now: set training.dtype and training.device instead, or"
                    f" convert a model that save_pretrained has written"
                )
            if _memory(parameter) != _memory(storage):
                # A clone, because the two may overlap, as for a transposed view of `storage`.
                storage.copy_(parameter.clone())
                parameter.data = storage


def refuse_optimizers(model: nn.Module, own: WeakIdKeyDictionary) -> None:
    """Make each step of a torch optimizer with parameters of `model` raise, while the model lives.

    These parameters never get a gradient, so such a step would silently change nothing. `own` has
    weak references to the parameters before the model was parallelized.
    """
    # The older parameters, too, because the user may have made the optimizer before `parallelize`.
    own.update(dict.fromkeys(model.parameters()))

    def check(optimizer: torch.optim.Optimizer, *_: object) -> None:
        if any(p in own for group in optimizer.param_groups for p in group["params"]):
            raise RuntimeError(
                f"this {type(optimizer).__name__} has parameters of a parallelized model, which get"
                f" no gradient: let isp.parallelize(.., optimizer=..) make it, and call run.step()"
            )

    weakref.finalize(model, register_optimizer_step_pre_hook(check).remove)


def refuse_data_parallel(model: nn.Module) -> None:
    """Make DistributedDataParallel around `model` raise; transformers' Trainer would add one.

    Otherwise it would compare shards as if they were replicas, and report that shapes differ.
    """
    of_model = weakref.ref(model)  # weak: the hook is global and must not keep the model alive

    def check(owner: nn.Module, _: str, inner: nn.Module | None) -> None:
        if isinstance(owner, DistributedDataParallel) and inner is of_model():
            raise RuntimeError(
                "DistributedDataParallel around a parallelized model, as transformers' Trainer adds"
                " it: leave it out, or use isp.integrations.transformers.Trainer"
            )

    weakref.finalize(model, register_module_module_registration_hook(check).remove)


def _kind(x: Tensor) -> str:
    """Return dtype, shape and device of x, as text for messages and comparison."""
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)} on {x.device}"


def _memory(x: Tensor) -> tuple[int, tuple[int, ...]]:
    """Return the address and strides of a tensor's memory."""
    return x.data_ptr(), x.stride()
