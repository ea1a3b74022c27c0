"""Count the tokens of each expert, and update the biases of routers to even the counts out.

L modules with experts, E experts of the largest, N tokens of a call, k experts of each token
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
"""The names that transformers gives to the bias that routers add to scores to choose experts.

The bias does not change the weights of the chosen experts."""


def router_dtype(model: Any, trace: ModelTrace, name: str, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the tensor `name` in a model that is computed in `dtype`.

    Biases of routers have float32 at least, because a narrower dtype would lose the small updates.
    So have routers that transformers keeps in float32. All other tensors have `dtype`.
    """
    kept = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    routes = trace.roles.get(name) is ParameterRole.ROUTER and any(key in name for key in kept)
    wide = routes or name.rpartition(".")[2] in _BIASES
    return torch.promote_types(dtype, torch.float32) if wide else dtype


def experts_of(shape: nn.Module, trace: ModelTrace) -> dict[str, int]:
    """Return the number of experts of each module that is called as experts of transformers are.

    `shape`: the traced model, on any device.
    """
    names = dict.fromkeys(call.module for call in trace.calls if call.route is not None)
    stacks = {name: expert_stacks(shape.get_submodule(name)) for name in names}
    return {name: len(next(iter(weights.values()))) for name, weights in stacks.items()}


def saved_buffers(shape: nn.Module, trace: ModelTrace) -> dict[str, tuple[int, ...]]:
    """Return by name the shapes of the buffers that checkpoints contain, as training changes them.

    These are the biases of routers that are buffers, not parameters.
    """
    biases = {*_biases_of(shape, experts_of(shape, trace)).values()}
    return {name: tuple(b.shape) for name, b in shape.named_buffers() if name in biases}


def _biases_of(model: nn.Module, experts: Mapping[str, int]) -> dict[str, str]:
    """Return by module with experts the name of its router's bias, for modules that have one.

    `experts`: modules by name, with the number of experts in each. The bias is recognized by its
    name, its number of elements, and its place in the same parent module.
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
    """Raise ValueError if the biases of the model's routers cannot be updated at this `rate`.

    `tiles`: tokens of a tile, 0 without tiles.
    """
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
    """Counts the tokens of each expert in the forwards of a step, on the device; updates biases.

    Source of the update of biases: Wang et al. 2024 (arXiv 2408.15664), as in DeepSeek-V3.
    """

    def __init__(
        self, model: nn.Module, experts: Mapping[str, int], device: torch.device, *, rate: float
    ) -> None:
        """`experts`: the modules to count, by name, with the number of experts in each.

        `rate`: the change of a router's biases per step; 0: no update.
        """
        self._model, self._rate, self._experts = model, rate, dict(experts)
        self._biases, most = _biases_of(model, experts), max(experts.values())
        self._sizes = torch.tensor([[size] for size in experts.values()]).to(device)
        # Modules may have different numbers of experts. `_exists` is True for the columns that a
        # module has.
        self._exists = torch.arange(most, device=device) < self._sizes
        self.counts = torch.zeros(len(experts), most + 1, dtype=torch.int64, device=device)
        """Tokens since `clear`, [L, E + 1]; the last column has the tokens that do not count."""
        self._masks: tuple[Tensor, ...] | None = None
        """The masks given to `counting`; None: tokens are not counted now."""
        for index, name in enumerate(experts):
            hook = partial(self._count, index)
            model.get_submodule(name).register_forward_pre_hook(hook, with_kwargs=True)

    @contextmanager
    def counting(self, *masks: Tensor) -> Iterator[None]:
        """Count tokens in this context, except those whose entry in a mask is False.

        `masks`: one for all tokens of the sequence [B, S] and one for this rank's tokens [B, S'],
        distinguished by size. Recomputation must run outside of the context, or it would count
        tokens twice.
        """
        self._masks = masks
        try:
            yield
        finally:
            self._masks = None

    def clear(self) -> None:
        """Set all counts to 0, at the beginning of a step."""
        self.counts.zero_()

    def tokens(self) -> Tensor:
        """Return this rank's counts [L, E], which are 0 for blocks of other pipeline stages.

        If several ranks count the same tokens, the sum over ranks counts each token several times,
        but as often for each expert of a block, so loads relative to the mean are right.
        """
        return self.counts[:, :-1].contiguous()

    def figures(self, counts: Tensor) -> Tensor:
        """Return [2] in float64: the largest load, and the number of unused experts, of all blocks.

        counts [L, E] are summed over ranks. The load of an expert is its number of tokens divided
        by the mean of its block.
        """
        # The mean is 0 in a block without tokens: clamp it, so that no division is by 0.
        mean = (counts.sum(1, keepdim=True) / self._sizes).clamp(min=1e-9)
        unused = ((counts == 0) & self._exists).sum()
        return torch.stack(((counts / mean).max().double(), unused.double()))

    @torch.no_grad()
    def update_biases(self, counts: Tensor) -> None:
        """Lower the biases of experts with more tokens than the mean, and raise those with fewer.

        Call it after a step on all ranks, with counts [L, E] summed over ranks, so that the biases
        stay equal on all of them.
        """
        if not self._rate:
            return
        # Compute the sign of mean - count from integers: both times the number of experts.
        moves = (counts.sum(1, keepdim=True) - counts * self._sizes).sign()
        for move, (name, size) in zip(moves, self._experts.items(), strict=True):
            if name in self._biases:
                bias = attrgetter(self._biases[name])(self._model)
                # Parameters of other pipeline stages are one expanded element: do not write them.
                if bias.is_contiguous():
                    bias += move[:size].to(bias.dtype).view_as(bias) * self._rate

    def _count(
        self, index: int, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Count the tokens of a call of experts; a forward pre-hook.

        `index`: the module's index in the first dim of the counts.
        """
        if self._masks is None:
            return
        numbers = _numbers((*args, *kwargs.values()))
        counts, seen = self.counts[index], [m for m in self._masks if m.numel() == len(numbers)]
        if seen:
            # A call with a tile of the tokens fits no mask: then `seen` is empty, and all tokens
            # count.
            numbers = numbers.masked_fill(~seen[0].reshape(-1, 1), len(counts))
        # The last column counts masked tokens and entries without an expert, whose index is this
        # module's number of experts or more.
        numbers = numbers.flatten().long()
        numbers = numbers.masked_fill(numbers >= self._sizes[index], len(counts) - 1)
        counts.scatter_add_(0, numbers, torch.ones_like(numbers))


def _numbers(given: Iterable[Any]) -> Tensor:
    """Return the expert indices [N, k] among the arguments of experts: the first integer tensor."""
    found = next(x for x in given if isinstance(x, Tensor) and not x.is_floating_point())
    return found.flatten(0, -2)
