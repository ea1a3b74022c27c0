"""Update rules of weights with their states, learning rates, and the values of parameter groups.

Code that keeps, saves or counts optimizer states asks the rule for them. To add a rule, add a class
here, and its name and keys in `isp.core.optim.config`.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import compress
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from isp.core.mesh.layout import Matrices, ParameterLayout
from isp.core.optim.config import LRSchedulerConfig, OptimizerConfig, ParamGroupConfig
from isp.core.torch_private import (
    foreach_add_,
    foreach_copy_,
    foreach_lerp_,
    foreach_mul_,
    foreach_sign_,
)

__all__ = [
    "GroupValues",
    "NoRule",
    "Rows",
    "UpdateRule",
    "check_groups",
    "group_of",
    "group_values",
    "learning_rate",
    "rules_in_words",
    "update_rule",
    "values_of",
]


class Rows(NamedTuple):
    """Rows of parameters to update; each list has one entry for each parameter."""

    masters: list[Tensor]
    """The master weights of these rows, a tensor for each parameter."""
    grads: list[Tensor]
    """Gradients, which an update may overwrite."""
    states: dict[str, list[Tensor]]
    """States by name, as `UpdateRule.states` declares them, in the dtype of the masters."""
    names: list[str]
    """Names of the parameters that the rows belong to, in the order of `masters`."""

    def of(self, names: Collection[str]) -> Rows:
        """Return the rows of the parameters with these names."""
        kept = [name in names for name in self.names]
        if all(kept):
            return self
        return Rows(
            [*compress(self.masters, kept)],
            [*compress(self.grads, kept)],
            {kind: [*compress(found, kept)] for kind, found in self.states.items()},
            [*compress(self.names, kept)],
        )


class UpdateRule(ABC):
    """An update of master weights by gradients, with no state but `config`.

    A rule gets some rows of a parameter's shard, so it must treat each element or row
    independently, or be `by_matrix`. See [Note: Whole matrices] in docs/design/notes/optimizer.md.
    """

    by_matrix = False
    """True if the rule updates whole matrices: `average` is called before `step`."""

    def __init__(self, config: OptimizerConfig) -> None:
        self.config = config

    @abstractmethod
    def states(self, dtype: torch.dtype) -> dict[str, torch.dtype]:
        """Return, for master weights of `dtype`, the states: name, and dtype between updates.

        States begin as zeros and have the shape of their weights. A state is saved under its name,
        so a rule loads the states of another rule with the same name. The dtype of `moment` may be
        narrower than `dtype`. Use it only for states that an update reads and replaces by an
        average: the update computes with the unrounded average, and only what is kept is rounded.
        """

    def moment(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which a moment of master weights of `dtype` is kept."""
        return torch.bfloat16 if self.config.moment_dtype == "bfloat16" else dtype

    @abstractmethod
    def step(self, rows: Rows, *, lr: float, weight_decay: float, numbers: Sequence[int]) -> None:
        """Update masters and states in place; may overwrite gradients.

        `numbers`: for each parameter, the number of this update, from 1. Rows may be passed all at
        once or some at a time: the result of a row does not depend on other rows.
        """

    def average(self, rows: Rows) -> None:
        """Update states, and overwrite gradients by rows of the matrices to make orthogonal.

        Only for rules `by_matrix`, which are called before `step`.
        """
        raise NotImplementedError(f"{type(self).__name__} updates each element independently")


class AdamW(UpdateRule):
    """Adam with decoupled weight decay, by torch's fused kernels.

    Source: Loshchilov and Hutter 2019; the same bits as `torch.optim.AdamW(fused=True)`.
    """

    def states(self, dtype: torch.dtype) -> dict[str, torch.dtype]:
        return {"exp_avg": self.moment(dtype), "exp_avg_sq": self.moment(dtype)}

    def step(self, rows: Rows, *, lr: float, weight_decay: float, numbers: Sequence[int]) -> None:
        # Steps before this update, as tensors on the device, where the fused kernel reads them.
        size, device, latest = len(rows.masters), rows.masters[0].device, max(numbers)
        before = torch.full((size,), latest - 1, dtype=torch.float32, device=device)
        for place, number in enumerate(numbers):
            # A weight that had no gradient in some steps has fewer updates than the others.
            if number < latest:
                before[place] = number - 1
        adamw(
            rows.masters,
            rows.grads,
            rows.states["exp_avg"],
            rows.states["exp_avg_sq"],
            max_exp_avg_sqs=[],
            state_steps=list(before.unbind()),  # torch's kernel adds 1 to each before it uses them
            fused=True,
            amsgrad=False,
            beta1=self.config.of_adamw("beta1"),
            beta2=self.config.of_adamw("beta2"),
            lr=lr,
            weight_decay=weight_decay,
            eps=self.config.of_adamw("eps"),
            maximize=False,
        )


class Lion(UpdateRule):
    """Updates by the sign of an average of momentum and gradient; decoupled decay, one state.

    c = beta1 m + (1 - beta1) g;  w -= lr (sign(c) + weight_decay w);  m = beta2 m + (1 - beta2) g
    Source: Chen et al. 2023, Symbolic Discovery of Optimization Algorithms; google/automl, lion.
    """

    def states(self, dtype: torch.dtype) -> dict[str, torch.dtype]:
        return {"exp_avg": self.moment(dtype)}

    def step(self, rows: Rows, *, lr: float, weight_decay: float, numbers: Sequence[int]) -> None:
        beta1, beta2 = self.config.beta1, self.config.beta2
        masters, grads, moments = rows.masters, rows.grads, rows.states["exp_avg"]
        foreach_lerp_(grads, moments, beta1)  # computes c (see the class) in the memory of g
        # From m and c, without g: m + (1 - beta2) (g - m), where g - m = (c - m) / (1 - beta1).
        foreach_lerp_(moments, grads, (1 - beta2) / (1 - beta1))
        foreach_sign_(grads)
        foreach_mul_(masters, 1 - lr * weight_decay)
        foreach_add_(masters, grads, alpha=-lr)


class Muon(UpdateRule):
    """Updates by momentum matrices made orthogonal; decoupled weight decay, one state.

    m = lerp(g, m, momentum);  u = lerp(g, m, momentum) if nesterov else m
    w -= lr (orthogonal(u) ratio(shape) + weight_decay w)
    orthogonal(u) has the singular vectors of u and singular values of about 1.
    Source: Jordan et al. 2024, Muon; the defaults are those of `torch.optim.Muon`.
    """

    by_matrix = True

    def states(self, dtype: torch.dtype) -> dict[str, torch.dtype]:
        return {"momentum_buffer": self.moment(dtype)}

    def average(self, rows: Rows) -> None:
        keys, moments = self.config.muon, rows.states["momentum_buffer"]
        foreach_lerp_(moments, rows.grads, 1 - keys.momentum)
        if keys.nesterov:
            foreach_lerp_(rows.grads, moments, keys.momentum)
        else:
            foreach_copy_(rows.grads, moments)

    def step(self, rows: Rows, *, lr: float, weight_decay: float, numbers: Sequence[int]) -> None:
        # Before this call, `rows.grads` were replaced by rows of the orthogonal matrices, times
        # the factor on lr of their matrix (`Matrix.ratio`).
        foreach_mul_(rows.masters, 1 - lr * weight_decay)
        foreach_add_(rows.masters, rows.grads, alpha=-lr)


class NoRule(UpdateRule):
    """The rule of a run in which a torch optimizer updates the weights: it has no states."""

    def states(self, dtype: torch.dtype) -> dict[str, torch.dtype]:
        return {}

    def step(self, rows: Rows, *, lr: float, weight_decay: float, numbers: Sequence[int]) -> None:
        raise NotImplementedError("a torch optimizer updates these weights")


_RULES: dict[str, type[UpdateRule]] = {"adamw": AdamW, "lion": Lion, "muon": Muon}


def update_rule(config: OptimizerConfig, name: str | None = None) -> UpdateRule:
    """Return the rule with this name; None: the rule `config.name`."""
    return _RULES.get(name or config.name, NoRule)(config)


def learning_rate(step: int, *, peak: float, total_steps: int, config: LRSchedulerConfig) -> float:
    """Return the learning rate of step number `step`, from 0, in a run of `total_steps`.

    It rises linearly to `peak` within `warmup_steps`, stays there, and decays over the last
    `config.num_decay_steps` to `min_lr_factor * peak`, which it has in the last step and after it.
    The formulas are torchtitan's.
    """
    if step < config.warmup_steps:
        return peak * (step + 1) / config.warmup_steps
    num_decay = config.num_decay_steps(total_steps)
    done = step + 1 - (total_steps - num_decay)
    if done <= 0:
        return peak
    progress = min(1.0, done / num_decay) if num_decay else 1.0
    left = {
        "cosine": (1 + math.cos(math.pi * progress)) / 2,
        "linear": 1 - progress,
        "sqrt": 1 - math.sqrt(progress),
    }[config.decay_type]
    return peak * (config.min_lr_factor + (1 - config.min_lr_factor) * left)


class GroupValues(NamedTuple):
    """The values by which the parameters of a group are updated."""

    lr_scale: float
    """Factor on the learning rate of the step."""
    weight_decay: float
    """Decoupled weight decay; 0: none."""
    rule: str = "adamw"
    """Name of the update rule."""


def group_values(
    name: str, config: OptimizerConfig, *, decays: bool, matrices: Matrices | None = None
) -> GroupValues:
    """Return the values for the parameter with the name `name` in the whole model.

    They come from the first of `config.param_groups` whose pattern matches. If there is none, or if
    it sets no weight decay, the weight decay is that of the update rule if `decays`, else 0. Where
    muon would apply, a parameter without `matrices` gets another rule; so do tables, heads and
    routers, unless their group has `rule: muon`.
    """
    group = group_of(name, config)
    asked = None if group is None else group.rule
    rule = asked or config.name
    if rule == "muon" and (matrices is None or not (asked or matrices.of_block)):
        rule = "adamw" if config.name == "muon" else config.name
    own = config.of_rule(rule, "lr")
    decay = config.of_rule(rule, "weight_decay") if decays else 0.0
    if group is None:
        return GroupValues(own / config.lr, decay, rule)
    scale = (group.lr or own) / config.lr * group.lr_scale
    return GroupValues(scale, decay if group.weight_decay is None else group.weight_decay, rule)


def values_of(name: str, layout: ParameterLayout, config: OptimizerConfig) -> GroupValues:
    """Return the `group_values` for parameter `name`, which is cut over ranks as in `layout`."""
    return group_values(name, config, decays=layout.decays, matrices=layout.matrices)


def group_of(name: str, config: OptimizerConfig) -> ParamGroupConfig | None:
    """Return the first of `config.param_groups` whose pattern is found in `name`, or None."""
    return next((g for g in config.param_groups if re.search(g.pattern, name)), None)


def rules_in_words(layouts: Mapping[str, ParameterLayout], config: OptimizerConfig) -> str:
    """Return a line for each update rule, with the names of the parameters that it updates.

    `layouts`: the `ParameterLayout` of each parameter of the whole model, by name.
    """
    found: dict[str, list[str]] = {}
    for name, layout in layouts.items():
        found.setdefault(values_of(name, layout, config).rule, []).append(name)
    lines = (f"{rule} updates {_shortened(names)}" for rule, names in sorted(found.items()))
    return "\n".join(lines)


def check_groups(names: Iterable[str], config: OptimizerConfig) -> None:
    """Raise ValueError if an entry of `config.param_groups` applies to no parameter.

    `names`: all parameters of the whole model.
    """
    names = list(names)
    unmatched = set(names)
    for place, group in enumerate(config.param_groups):
        found = {name for name in names if re.search(group.pattern, name)}
        if not found & unmatched:
            raise ValueError(
                f"optimizer.param_groups.{place}.pattern={group.pattern!r} is"
                f" {'found only in names that earlier entries match' if found else 'in no name'}:"
                f" remove the entry or change its pattern; the parameters are {_shortened(names)}"
            )
        unmatched -= found


def _shortened(names: Iterable[str]) -> str:
    """Return the names, separated by commas, with block numbers as N: once for all blocks."""
    return ", ".join(dict.fromkeys(re.sub(r"\.\d+\.", ".N.", name) for name in names))
