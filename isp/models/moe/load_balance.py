"""How many tokens each expert gets, counted where experts are called; biases that even it out.

L modules of experts, E the most experts of one, N tokens that one is called with, k experts of each
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from isp.models.roles import ParameterRole, expert_stacks

if TYPE_CHECKING:
    from isp.models.tracing.trace import ModelTrace

__all__ = [
    "ExpertLoad",
    "check_bias_update",
    "experts_of",
    "router_dtype",
    "saved_buffers",
]

_BIASES = ("e_score_correction_bias", "expert_bias")
"""Names in transformers of what a router adds to scores where it chooses, and nowhere else."""


def router_dtype(model: Any, trace: ModelTrace, name: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype of a tensor of `model`, which is computed in `dtype`: float32 at least of routers.

    Of their biases, to which so little is added, and of what transformers keeps in float32.
    """
    kept = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    routes = trace.roles.get(name) is ParameterRole.ROUTER and any(key in name for key in kept)
    wide = routes or name.rpartition(".")[2] in _BIASES
    return torch.promote_types(dtype, torch.float32) if wide else dtype


def experts_of(shape: nn.Module, trace: ModelTrace) -> dict[str, int]:
    """Return the modules of experts that are called as in transformers, with their sizes E.

    `shape`: the traced model, on whatever device.
    """
    names = dict.fromkeys(call.module for call in trace.calls if call.route is not None)
    stacks = {name: expert_stacks(shape.get_submodule(name)) for name in names}
    return {name: len(next(iter(weights.values()))) for name, weights in stacks.items()}


def saved_buffers(shape: nn.Module, trace: ModelTrace) -> dict[str, tuple[int, ...]]:
    """Return the shapes of buffers that training may change and checkpoints have, by name."""
    biases = {*_biases_of(shape, experts_of(shape, trace)).values()}
    return {name: tuple(b.shape) for name, b in shape.named_buffers() if name in biases}


def _biases_of(model: nn.Module, experts: Mapping[str, int]) -> dict[str, str]:
    """The name of the bias by which the router of each of `experts` chooses, if it has one.

    `experts`: modules, and the number of experts in each.
    """
    tensors = dict([*model.named_buffers(), *model.named_parameters()])
    biases = [name for name in tensors if name.rpartition(".")[2] in _BIASES]
    return {
        name: bias
        for name, size in experts.items()
        for bias in biases
        if bias.startswith(f"{name.rpartition('.')[0]}.") and tensors[bias].numel() == size
    }


def check_bias_update(
    model: nn.Module, experts: Mapping[str, int], rate: float, *, tiles: int
) -> None:
    """Raise ValueError if a model, or the way in which it is computed, cannot have the update."""
    if not rate:
        return
    key = f"model.moe_router_bias_update_rate={rate}"
    if not _biases_of(model, experts):
        raise ValueError(
            f"{key}: no router of {type(model).__name__} has a bias for choosing experts"
            f" ({' or '.join(_BIASES)}): set it to 0, or use model.router_aux_loss_coef"
        )
    if hasattr(model, "peft_config"):
        raise ValueError(f"{key} changes the base model, but only adapters are saved: set it to 0")
    if tiles:
        raise ValueError(
            f"{key} cannot be combined with model.mlp_tile_tokens={tiles}: set one of them to 0"
        )


class ExpertLoad:
    """Counts the tokens of each expert in the forward passes of a step, on the device.

    Source of the update of biases: Wang et al. 2024 (arXiv 2408.15664), as in DeepSeek-V3.
    """

    def __init__(
        self, model: nn.Module, experts: Mapping[str, int], device: torch.device, *, rate: float
    ) -> None:
        """`experts`: the modules that are counted, and the number of experts in each.

        `rate`: how much a step moves the biases of routers; 0: not at all.
        """
        self._model, self._rate, self._experts = model, rate, dict(experts)
        self._biases, most = _biases_of(model, experts), max(experts.values())
        self._sizes = torch.tensor([[size] for size in experts.values()]).to(device)
        self._exists = torch.arange(most, device=device) < self._sizes
        self.counts = torch.zeros(len(experts), most + 1, dtype=torch.int64, device=device)
        """[L, E + 1], tokens since `clear`; the last column is of those that do not count."""
        self._masks: tuple[Tensor, ...] | None = None
        """Of a forward whose tokens are counted."""
        for index, name in enumerate(experts):
            hook = partial(self._count, index)
            model.get_submodule(name).register_forward_pre_hook(hook, with_kwargs=True)

    @contextmanager
    def counting(self, *masks: Tensor) -> Iterator[None]:
        """In this context tokens are counted, but for those that are False in `masks`.

        Of the tokens of a sequence, and of this rank's among them: [B, S] and [B, S']. What is
        recomputed later is not counted again.
        """
        self._masks = masks
        try:
            yield
        finally:
            self._masks = None

    def clear(self) -> None:
        """A step begins: nothing is counted yet."""
        self.counts.zero_()

    def tokens(self) -> Tensor:
        """[L, E], this rank's, of layers of other stages none.

        Where several ranks have the same tokens, their sum is a multiple, the same in a layer.
        """
        return self.counts[:, :-1].contiguous()

    def figures(self, counts: Tensor) -> Tensor:
        """The largest load of an expert as a multiple of the mean of its layer; unused experts.

        Over all layers; [2], float64.
        """
        mean = (counts.sum(1, keepdim=True) / self._sizes).clamp(min=1e-9)
        unused = ((counts == 0) & self._exists).sum()
        return torch.stack(((counts / mean).max().double(), unused.double()))

    @torch.no_grad()
    def update_biases(self, counts: Tensor) -> None:
        """After a step: experts with more tokens than the mean are chosen less, and vice versa."""
        if not self._rate:
            return
        moves = (counts.sum(1, keepdim=True) - counts * self._sizes).sign()
        for move, (name, size) in zip(moves, self._experts.items(), strict=True):
            if name in self._biases:
                bias = attrgetter(self._biases[name])(self._model)
                if bias.is_contiguous():  # a parameter of another stage has the memory of one
                    bias += move[:size].to(bias.dtype).view_as(bias) * self._rate

    def _count(
        self, index: int, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if self._masks is None:
            return
        numbers = _numbers((*args, *kwargs.values()))
        counts, seen = self.counts[index], [m for m in self._masks if m.numel() == len(numbers)]
        if seen:  # in tiles all count
            numbers = numbers.masked_fill(~seen[0].reshape(-1, 1), len(counts))
        numbers = numbers.flatten().long().clamp(max=len(counts) - 1)  # some route to nothing, too
        counts.scatter_add_(0, numbers, torch.ones_like(numbers))


def _numbers(given: Iterable[Any]) -> Tensor:
    """The numbers of the experts of each token, [N, k], among what experts are called with."""
    found = next(x for x in given if isinstance(x, Tensor) and not x.is_floating_point())
    return found.flatten(0, -2)
