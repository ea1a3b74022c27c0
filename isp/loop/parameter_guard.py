"""The parameters of a model that somebody else has in hand, and what may be done to them."""

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
    """A place of a model that has a parameter; a tied one has several."""

    name: str
    owner: nn.Module
    local: str
    parameter: nn.Parameter
    storage: Tensor
    """The memory that the optimizer updates and that travels, as a tensor of its own."""
    trains: bool


class ParameterGuard:
    """Keeps the parameters of `model` those that the runtime trains.

    In-place writes need no guard. `module.to(..)` and `parameter.data = ..` put other memory below
    a parameter, which no optimizer knows of: `check` takes the values over into the memory that it
    updates, as if they had been written there.
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
        """Take up replaced memory. Raises RuntimeError for what cannot be: another parameter,
        dtype, device or shape and, if it `trains`, a weight that was frozen or thawed.
        """
        for place in self._places:
            parameter, storage = place.parameter, place.storage
            if getattr(place.owner, place.local) is not parameter:
                raise RuntimeError(
                    f"{place.name} is another parameter than when the model was parallelised: write"
                    f" into that one, by copy_ or load_state_dict without assign=True"
                )
            if trains and parameter.requires_grad is not place.trains:
                was, now = ("trained", "frozen") if place.trains else ("frozen", "trained")
                raise RuntimeError(
                    f"{place.name} was {was} when the model was parallelised, and is {now} now:"
                    f" write the weights by save_pretrained, load and freeze them, and parallelize"
                    f" that model"
                )
            if _kind(parameter) != _kind(storage):
                raise RuntimeError(
                    f"{place.name} was {_kind(storage)} when the model was parallelised, and is"
                    f" {_kind(parameter)} now: choose by training.dtype and training.device"
                    f" instead, or convert a model that save_pretrained has written"
                )
            if _memory(parameter) != _memory(storage):
                storage.copy_(parameter.clone())  # it may lie in the same memory, transposed
                parameter.data = storage


def refuse_optimizers(model: nn.Module, own: WeakIdKeyDictionary) -> None:
    """Let a step of any of torch's optimizers over parameters of `model` raise while it lives.

    They never have a gradient, so that it would change nothing, without a word. `own`: those that
    it had before it was parallelised, kept alive by nobody here.
    """
    own.update(dict.fromkeys(model.parameters()))

    def check(optimizer: torch.optim.Optimizer, *_: object) -> None:
        if any(p in own for group in optimizer.param_groups for p in group["params"]):
            raise RuntimeError(
                f"this {type(optimizer).__name__} has parameters of a parallelised model, which get"
                f" no gradient: let isp.parallelize(.., optimizer=..) make it, and call run.step()"
            )

    weakref.finalize(model, register_optimizer_step_pre_hook(check).remove)


def refuse_data_parallel(model: nn.Module) -> None:
    """Let torch's DistributedDataParallel, as transformers' Trainer puts it around `model`, raise.

    It would compare shards as if they were copies, and say that their shapes differ.
    """
    of_model = weakref.ref(model)

    def check(owner: nn.Module, _: str, inner: nn.Module | None) -> None:
        if isinstance(owner, DistributedDataParallel) and inner is of_model():
            raise RuntimeError(
                "DistributedDataParallel around a parallelised model, as transformers' Trainer puts"
                " it: leave it out, or use isp.integrations.transformers.Trainer"
            )

    weakref.finalize(model, register_module_module_registration_hook(check).remove)


def _kind(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)} on {x.device}"


def _memory(x: Tensor) -> tuple[int, tuple[int, ...]]:
    return x.data_ptr(), x.stride()
