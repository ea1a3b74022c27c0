"""The names of all parameters of a model, known without building it."""

from __future__ import annotations

from isp.config import JobConfig
from isp.layers.module import named_parameters
from isp.optim import check_groups
from isp.train.schedule import shape_only
from model.decoder import LayerSpan

__all__ = ["check_param_groups"]


def check_param_groups(config: JobConfig) -> None:
    """Raise ValueError for one of `optimizer.param_groups` that no parameter would be in."""
    if config.optimizer.param_groups:
        whole = shape_only(config, LayerSpan(0, config.model.num_layers), None)
        check_groups([item.name for item in named_parameters(whole)], config.optimizer)
