"""The facts every layer with parameters of its own tells the runtime, and how they begin."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from isp.parallel.layout import ParameterLayout

__all__ = [
    "MasterStream",
    "NamedParameter",
    "ParallelModule",
    "bind_names",
    "init_weights",
    "named_parameters",
]


@dataclass(frozen=True)
class MasterStream:
    """Random numbers for one parameter: a function of the run's seed and its name alone."""

    seed: int
    name: str

    @property
    def generator_seed(self) -> int:
        digest = hashlib.sha256(f"{self.seed}/{self.name}".encode()).digest()
        return int.from_bytes(digest[:8], "little")

    def normal(self, shape: tuple[int, ...], std: float) -> Tensor:
        """A float32 tensor on CPU of normal values of mean 0."""
        generator = torch.Generator().manual_seed(self.generator_seed)
        return torch.empty(shape).normal_(0.0, std, generator=generator)


class ParallelModule(nn.Module):
    """A module whose parameters are shards, each with a layout that says of what.

    `name` is its qualified name in the whole model, by which its transfers are logged.
    """

    weight_name = "weight"

    def __init__(self) -> None:
        super().__init__()
        self.name = ""
        self.layouts: dict[str, ParameterLayout] = {}

    def add_shard(
        self, name: str, layout: ParameterLayout, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        """Register parameter `name`, uninitialised, of the shape of this rank's shard."""
        shard = torch.empty(layout.local_shape, device=device, dtype=dtype)
        self.register_parameter(name, nn.Parameter(shard))
        self.layouts[name] = layout

    def initial_value(self, name: str, stream: MasterStream) -> Tensor:
        """The whole of parameter `name` as it is before training."""
        raise NotImplementedError(f"{type(self).__name__} does not say how {name} begins")


class NamedParameter(NamedTuple):
    """A parameter of a model, once, even if several modules share it."""

    name: str
    parameter: nn.Parameter
    layout: ParameterLayout


def named_parameters(model: nn.Module) -> Iterator[NamedParameter]:
    """The parameters of a model of `ParallelModule`s with their layouts, in order of declaration.

    Raises TypeError for a parameter that belongs to a module which declares no layout.
    """
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for local, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            name = f"{prefix}.{local}" if prefix else local
            if not isinstance(module, ParallelModule):
                raise TypeError(
                    f"parameter {name} is held by {type(module).__name__}, which declares no"
                    f" layout: derive it from ParallelModule"
                )
            yield NamedParameter(name, parameter, module.layouts[local])


def bind_names(model: nn.Module) -> None:
    """Tell every `ParallelModule` its qualified name."""
    for name, module in model.named_modules():
        if isinstance(module, ParallelModule):
            module.name = name


@torch.no_grad()
def init_weights(model: nn.Module, seed: int) -> None:
    """Give every parameter its part of the initial weights that `seed` stands for.

    Every layout starts from the same weights: a value depends on the seed, the parameter's
    qualified name and its place in the whole parameter, not on the ranks.
    """
    for name, parameter, layout in named_parameters(model):
        prefix, _, local = name.rpartition(".")
        module = model.get_submodule(prefix)
        assert isinstance(module, ParallelModule)
        full = module.initial_value(local, MasterStream(seed, name))
        parameter.copy_(layout.shard(full))
