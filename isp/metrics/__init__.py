"""The numbers of a step: what they are, the line that is printed, the file that is kept."""

from isp.metrics.device import (
    MemoryMeter,
    describe_mfu,
    device_name,
    peak_memory_gib,
    peak_tflops,
    shared_cores,
)
from isp.metrics.file import MetricsFile, is_recorded, read_metrics
from isp.metrics.progress import ProgressBar, watched_stream
from isp.metrics.record import StepRecord
from isp.metrics.tracker import TrackedRun, Tracker, check_tracker
from isp.metrics.trackers import Trackers

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
