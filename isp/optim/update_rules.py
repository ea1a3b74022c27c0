"""Update rules: which states a weight has, and how a step changes both.

Who keeps, saves, counts or plans optimizer states asks the rule for them. A further rule is a class
here, and its name and keys in `isp.settings`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from isp.settings import OptimizerConfig

__all__ = ["AdamW", "Lion", "Rows", "UpdateRule", "update_rule"]


class Rows(NamedTuple):
    """Rows of parameters to update, a tensor of each in every list."""

    masters: list[Tensor]
    """Master weights."""
    grads: list[Tensor]
    """Gradients, which an update may overwrite."""
    states: dict[str, list[Tensor]]
    """By name, as `UpdateRule.states` declares them."""


class UpdateRule(ABC):
    """The update of master weights by gradients; keeps nothing but the numbers of `config`.

    [Note: Whole matrices] A rule sees some rows of a parameter's shard, so it can only treat
    elements, or rows, each by itself. One that needs whole matrices, such as Muon, would say so:
    the optimizer would then gather their momentum over ZERO1, and over WEIGHT where that cuts
    them, as `Publisher` gathers weights, and keep the rank's rows of what the rule gives.
    """

    def __init__(self, config: OptimizerConfig) -> None:
        self.config = config

    @abstractmethod
    def states(self, dtype: torch.dtype) -> dict[str, torch.dtype]:
        """Name and dtype of each state of master weights of `dtype`; all begin as zeros.

        A state has the shape of its weights. It is saved under its name: rules whose states have
        the same names take up each other's.
        """

    @abstractmethod
    def step(self, rows: Rows, *, lr: float, weight_decay: float, number: int) -> None:
        """Change masters and states in place; the update is number `number` of the run, from 1 on.

        All rows may be given at once or some at a time: no result depends on the others.
        """


class AdamW(UpdateRule):
    """Adam with decoupled weight decay, by torch's fused kernels.

    Source: Loshchilov and Hutter 2019; the same bits as `torch.optim.AdamW(fused=True)`.
    """

    def states(self, dtype: torch.dtype) -> dict[str, torch.dtype]:
        return {"exp_avg": dtype, "exp_avg_sq": dtype}

    def step(self, rows: Rows, *, lr: float, weight_decay: float, number: int) -> None:
        size, device = len(rows.masters), rows.masters[0].device
        before = torch.full((size,), number - 1, dtype=torch.float32, device=device)
        adamw(
            rows.masters,
            rows.grads,
            rows.states["exp_avg"],
            rows.states["exp_avg_sq"],
            max_exp_avg_sqs=[],
            state_steps=list(before.unbind()),  # torch adds 1 to each
            fused=True,
            amsgrad=False,
            beta1=self.config.beta1,
            beta2=self.config.beta2,
            lr=lr,
            weight_decay=weight_decay,
            eps=self.config.eps,
            maximize=False,
        )


class Lion(UpdateRule):
    """The sign of an average of momentum and gradient, with decoupled weight decay; one state.

    c = beta1 m + (1 - beta1) g;  w -= lr (sign(c) + weight_decay w);  m = beta2 m + (1 - beta2) g
    Source: Chen et al. 2023, Symbolic Discovery of Optimization Algorithms; google/automl, lion.
    """

    def states(self, dtype: torch.dtype) -> dict[str, torch.dtype]:
        return {"exp_avg": dtype}

    def step(self, rows: Rows, *, lr: float, weight_decay: float, number: int) -> None:
        beta1, beta2 = self.config.beta1, self.config.beta2
        masters, grads, moments = rows.masters, rows.grads, rows.states["exp_avg"]
        torch._foreach_lerp_(grads, moments, beta1)  # c, in the place of g
        # The new m lies between m and c at this fraction: g, which is gone, is not needed.
        torch._foreach_lerp_(moments, grads, (1 - beta2) / (1 - beta1))
        torch._foreach_sign_(grads)
        torch._foreach_mul_(masters, 1 - lr * weight_decay)
        torch._foreach_add_(masters, grads, alpha=-lr)


def update_rule(config: OptimizerConfig) -> UpdateRule:
    """The rule that `config.name` names."""
    rules: dict[str, type[UpdateRule]] = {"adamw": AdamW, "lion": Lion}
    return rules[config.name](config)
