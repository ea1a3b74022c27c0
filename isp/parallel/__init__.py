"""Sizes, groups and the configuration of a parallel run."""

from isp.parallel.config import (
    LaunchPoint,
    Mode,
    OverlapUnit,
    ParallelConfig,
    PipelineConfig,
    PipelineSchedule,
    TensorConfig,
    WeightConfig,
    Zero1Config,
)
from isp.parallel.topology import Axis, Topology

__all__ = [
    "Axis",
    "LaunchPoint",
    "Mode",
    "OverlapUnit",
    "ParallelConfig",
    "PipelineConfig",
    "PipelineSchedule",
    "TensorConfig",
    "Topology",
    "WeightConfig",
    "Zero1Config",
]
