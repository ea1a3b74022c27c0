"""Sizes, groups and the configuration of a parallel run."""

from isp.core.mesh.config import (
    ContextExchange,
    DevicePlacementConfig,
    ExpertConfig,
    ExpertWeightConfig,
    LaunchPoint,
    Mode,
    OverlapUnit,
    ParallelConfig,
    PipelineConfig,
    PipelineSchedule,
    Sequence2DConfig,
    SequenceScan,
    TensorConfig,
    WeightConfig,
    Zero1Config,
)
from isp.core.mesh.topology import Axis, Topology

__all__ = [
    "Axis",
    "ContextExchange",
    "DevicePlacementConfig",
    "ExpertConfig",
    "ExpertWeightConfig",
    "LaunchPoint",
    "Mode",
    "OverlapUnit",
    "ParallelConfig",
    "PipelineConfig",
    "PipelineSchedule",
    "Sequence2DConfig",
    "SequenceScan",
    "TensorConfig",
    "Topology",
    "WeightConfig",
    "Zero1Config",
]
