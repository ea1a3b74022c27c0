"""Groups of parameters: each with its part of the rate and its decay."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from isp.settings import OptimizerConfig

__all__ = ["GroupValues", "check_groups", "group_values"]


class GroupValues(NamedTuple):
    """A parameter's values."""

    lr_scale: float
    """Its learning rate, as a part of that of the step."""
    weight_decay: float


def group_values(name: str, num_dims: int, config: OptimizerConfig) -> GroupValues:
    """The values for the parameter called `name` in the whole model, of so many dimensions.

    Those of the first of `config.param_groups` whose pattern is found in the name. Where it says
    nothing of weight decay, or none is found, parameters of one dimension, which are norm weights
    and biases, are not decayed.
    """
    decay = config.weight_decay if num_dims > 1 else 0.0
    for group in config.param_groups:
        if re.search(group.pattern, name):
            own = group.weight_decay
            return GroupValues(group.lr_scale, decay if own is None else own)
    return GroupValues(1.0, decay)


def check_groups(names: Iterable[str], config: OptimizerConfig) -> None:
    """Raise ValueError for a group that no parameter of the whole model is in."""
    names = list(names)
    unmatched = set(names)
    for place, group in enumerate(config.param_groups):
        found = {name for name in names if re.search(group.pattern, name)}
        if not found & unmatched:
            raise ValueError(
                f"optimizer.param_groups.{place}.pattern={group.pattern!r} is"
                f" {'found only in names that groups before it took' if found else 'in no name'};"
                f" the parameters are {_shortened(names)}"
            )
        unmatched -= found


def _shortened(names: Iterable[str]) -> str:
    """The names, each once whatever the number of its layer."""
    return ", ".join(dict.fromkeys(re.sub(r"\.\d+\.", ".N.", name) for name in names))
