"""The names and shapes of all parameters of a model, known without building it."""

from __future__ import annotations

from isp.config import JobConfig
from isp.layers.module import named_parameters
from isp.optim import check_groups
from isp.train.schedule import shape_only
from model.decoder import LayerSpan

__all__ = ["check_param_groups", "parameter_shapes"]


def check_param_groups(config: JobConfig) -> None:
    """Raise ValueError for one of `optimizer.param_groups` that no parameter would be in."""
    if config.optimizer.param_groups:
        check_groups(list(parameter_shapes(config)), config.optimizer)


def parameter_shapes(config: JobConfig) -> dict[str, tuple[int, ...]]:
    """The shape of each parameter of the whole model, by name."""
    whole = shape_only(config, LayerSpan(0, config.model.num_layers), None)
    return {item.name: item.layout.global_shape for item in named_parameters(whole)}
