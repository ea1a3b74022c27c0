"""Metrics of training steps: records, log lines, `metrics.jsonl`, and experiment trackers."""

from isp.metrics.device import (
    MemoryMeter,
    describe_mfu,
    device_name,
    peak_memory_gib,
    peak_tflops,
    shared_cores,
)
from isp.metrics.progress import ProgressBar, watched_stream
from isp.metrics.record import MetricsFile, StepRecord, is_recorded, read_metrics
from isp.metrics.trackers import TrackedRun, Tracker, Trackers, check_tracker

__all__ = [
    "MemoryMeter",
    "MetricsFile",
    "ProgressBar",
    "StepRecord",
    "TrackedRun",
    "Tracker",
    "Trackers",
    "check_tracker",
    "describe_mfu",
    "device_name",
    "is_recorded",
    "peak_memory_gib",
    "peak_tflops",
    "read_metrics",
    "shared_cores",
    "watched_stream",
]
