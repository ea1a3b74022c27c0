"""The sections of the configuration that have no other home: plain numbers and switches.

They import next to nothing of the project, so that every layer may take them as arguments.
"""

from __future__ import annotations

import math
import os
import re
from dataclasses import field
from pathlib import PurePath
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from isp.settings.durations import parse_duration
from isp.settings.optimizer import (
    GradScalerConfig,
    MuonConfig,
    OptimizerConfig,
    ParamGroupConfig,
)
from isp.settings.section import (
    Count,
    CountOrZero,
    Fraction,
    KeyRole,
    NotNegative,
    Positive,
    Seconds,
    Text,
    section,
)

__all__ = [
    "CheckpointConfig",
    "CommConfig",
    "GradScalerConfig",
    "JobSection",
    "LRSchedulerConfig",
    "MetricsConfig",
    "MuonConfig",
    "OptimizerConfig",
    "ParamGroupConfig",
    "ProfilerConfig",
    "TrainingConfig",
    "ValidationConfig",
]


_TRACKERS = ("tensorboard", "wandb", "trackio", "mlflow", "swanlab")


def _folder_name(name: str) -> str:
    if name in ("", ".", "..") or set(name) & set("/\\\0") or len(os.fsencode(name)) > 255:
        raise ValueError(
            "must be usable as the name of a folder: not empty, no slash, at most 255 bytes"
        )
    return name


def _inner_folder(folder: str) -> str:
    path = PurePath(folder)
    if not path.parts or path.is_absolute() or ".." in path.parts:
        raise ValueError("must name a folder in that of the run, such as tb")
    return folder


def _folder(path: str) -> str:
    if "://" in path:
        raise ValueError(
            "must be a folder, not a URL: checkpoints are published by renaming folders, which"
            " object stores cannot do. Name a folder on a file system, and in checkpoint.upload_to"
            " the URL for copies of its checkpoints"
        )
    return path


Folder = Annotated[Text, AfterValidator(_folder)]


def _url(url: str) -> str:
    if "://" not in url:
        raise ValueError("must be a URL, such as s3://bucket/run; checkpoint.folder names a folder")
    from fsspec import get_filesystem_class

    try:
        get_filesystem_class(url.partition("://")[0])
    except (ValueError, ImportError) as error:
        raise ValueError(f"cannot be opened: {error}") from None
    return url


def _duration(value: int | str | None) -> int | str | None:
    try:
        if value is not None:
            parse_duration(value)
    except ValueError as error:
        raise ValueError(f"{error}, or null for no limit") from error
    return value


def _trackers(names: tuple[str, ...]) -> tuple[str, ...]:
    for name in names:
        if name not in _TRACKERS and not re.fullmatch(r"[\w.]+:\w+", name):
            known = ", ".join(_TRACKERS)
            raise ValueError(f"must be some of {known}, or module:Class of your own")
    return names


@section("job", KeyRole.PLACE)
class JobSection:
    """`job`: what the run is called and where it writes."""

    name: Annotated[str, AfterValidator(_folder_name)] = "isp"
    """Name of the run: it writes to `dump_folder/name/time`."""
    dump_folder: Folder = "outputs"
    """Folder of all runs."""
    log_folder: Folder | None = None
    """Folder for the logs and memory snapshots of ranks, which need not be shared: each machine
    may have its own, on a local disk. They go to `log_folder/name/time`; null: in the run's."""


@section("training.dpo", KeyRole.METHOD)
class DPOConfig:
    """`training.dpo`: the loss of pairs of answers.  Names and definitions: TRL's."""

    loss_type: Literal["sigmoid", "sigmoid_norm", "ipo"] = "sigmoid"
    """sigmoid: of the margin of summed log-probabilities; sigmoid_norm, ipo: of those a token."""
    beta: Positive = 0.1
    """The weight of the reference: the larger, the less the model moves away from it."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """The probability that the labels of a pair are swapped; not of ipo."""


@section("training.distill", KeyRole.METHOD)
class DistillConfig:
    """`training.distill`: the loss by a teacher's distribution of each token."""

    teacher: Annotated[str | None, KeyRole.PLACE] = None
    """Folder of a Hugging Face model with the same tokens."""
    top_k: Count = 64
    """Tokens that the teacher holds most likely, among which its distribution is normalised."""
    temperature: Positive = 1.0
    """Logits of both are divided by it."""


@section("training", KeyRole.METHOD)
class TrainingConfig:
    """`training`: length, numbers and device of a run."""

    global_batch_size: Count | None = None
    """Sequences of a step over all data ranks, from which data.micro_num follows on any number of
    ranks; null: data.micro_num says it.  Name: torchtitan."""
    objective: Literal["sft", "dpo", "reward", "distill"] = "sft"
    """sft: the cross-entropy of tokens; dpo: direct preference optimization of `preferences`, with
    the weights of model.hf as the reference, which a second copy of the model has; reward: the
    reward of the preferred answer above that of the other, by a model.hf that classifies sequences
    by one logit; distill: the divergence from a teacher's distribution, of tokens that have a
    label."""
    dpo: DPOConfig = field(default_factory=DPOConfig)
    """The loss of dpo."""
    distill: DistillConfig = field(default_factory=DistillConfig)
    """The loss of distill."""
    steps: Count = 100
    """Optimizer steps to take, counted from the first of the run, also when it is resumed."""
    max_time: Annotated[int | str | None, AfterValidator(_duration)] = None
    """Time that a start of the run may take, the last save included: seconds, or `HH:MM:SS` or
    `D-HH:MM:SS`; the same command resumes it. null: no limit."""
    dtype: Literal["float64", "float32", "bfloat16", "float16"] = "float32"
    """Dtype of weights and activations; bfloat16 and float16 keep float32 gradients and master
    weights, and float16 scales the loss: see `optimizer.grad_scaler`."""
    seed: Annotated[int, Field(ge=0, le=2**63 - 1), KeyRole.DATA] = 0
    """Decides the initial weights, the order of the data and every random stream."""
    deterministic: bool = False
    """Use deterministic kernels only: the same run gives the same bits."""
    max_norm: NotNegative = 1.0
    """Clip the global gradient norm to this; 0: do not clip."""
    gc_freq: CountOrZero = 10
    """Steps between garbage collections, which also give freed host memory back to the system; on
    all ranks at once. 0: neither; Python collects by itself."""
    device: Annotated[Literal["auto", "cpu", "cuda"], KeyRole.PLACE] = "auto"
    """Computing device; auto: cuda where there is one, else cpu."""

    @property
    def max_seconds(self) -> float:
        """`max_time` in seconds, infinity without a limit."""
        return math.inf if self.max_time is None else parse_duration(self.max_time)


@section("lr_scheduler", KeyRole.METHOD)
class LRSchedulerConfig:
    """`lr_scheduler`: warm-up, an optional stable phase, decay.  Names: torchtitan."""

    warmup_steps: CountOrZero = 0
    """Steps in which the learning rate rises in a straight line to `optimizer.lr`."""
    decay_type: Literal["cosine", "linear", "sqrt"] = "cosine"
    """Shape of the decay."""
    decay_ratio: Fraction | None = None
    """Last fraction of the steps that decays, after a stable phase (WSD); null: decay from the end
    of the warm-up."""
    min_lr_factor: Fraction = 0.1
    """End of the decay, a fraction of `optimizer.lr`."""

    def num_decay_steps(self, total_steps: int) -> int:
        """Length of the decay: the steps after the warm-up, or the last `decay_ratio` of a run."""
        if self.decay_ratio is None:
            return total_steps - self.warmup_steps
        return round(total_steps * self.decay_ratio)


@section("validation", KeyRole.METHOD)
class ValidationConfig:
    """`validation`: the loss on held-out text."""

    freq: CountOrZero = 0
    """Evaluate every this many steps; 0: never."""
    steps: Count = 10
    """Global batches (`training.global_batch_size`, or `data.micro_bsz` x `data.micro_num` of each
    data rank) in an evaluation."""


@section("metrics", KeyRole.PLACE)
class MetricsConfig:
    """`metrics`: what is reported."""

    log_freq: Count = 1
    """Print and write the numbers of every this many steps."""
    peak_tflops: Positive | None = None
    """Peak TFLOP/s of a device, which mfu is a fraction of; null: that of a known GPU in dense
    bfloat16, and no mfu on others."""

    loss_spike_deviations: NotNegative = 6.0
    """Warn of a loss this many deviations above the median of the last 100 steps; 0: never."""
    slow_rank_factor: NotNegative = 1.5
    """Warn of a rank that is at work this many times as long as the others; 0: never."""
    slow_rank_steps: Count = 10
    """Steps in a row for which a rank has to be slow."""
    report_to: Annotated[tuple[str, ...], AfterValidator(_trackers)] = ()
    """Trackers that get the metrics too, each by its package: tensorboard, wandb, trackio, mlflow,
    swanlab; or module:Class, a subclass of isp.metrics.Tracker."""
    project: Text | None = None
    """Project (experiment) of the run in trackers; null: `job.name`."""
    enable_tensorboard: bool = False
    """The same as `report_to: [tensorboard]`.  Names: torchtitan."""
    save_tb_folder: Annotated[str, AfterValidator(_inner_folder)] = "tb"
    """Subfolder of the run for TensorBoard."""

    @property
    def trackers(self) -> list[str]:
        """The trackers of the run, each once."""
        return list(dict.fromkeys([*self.report_to, *["tensorboard"] * self.enable_tensorboard]))

    def __post_init__(self) -> None:
        if 0 < self.slow_rank_factor <= 1:
            raise ValueError(
                f"metrics.slow_rank_factor={self.slow_rank_factor} must be above 1, or 0 for no"
                f" warnings"
            )


@section("checkpoint", KeyRole.PLACE)
class CheckpointConfig:
    """`checkpoint`: when to save, what to keep, where to resume from."""

    interval: CountOrZero = 0
    """Save every this many steps; 0: only when the run ends or is stopped by a signal."""
    keep_latest_k: CountOrZero = 0
    """Keep only this many of the newest checkpoints; 0: keep all."""
    async_mode: Literal["disabled", "async"] = "async"
    """async: copy the state to CPU memory and write it while training continues. This takes as
    much memory as a rank saves. disabled: training waits for the disk. The last save waits."""
    load_step: CountOrZero | None = None
    """Resume from the checkpoint of this step; null: from the newest, if `auto_resume`."""
    auto_resume: bool = True
    """Resume from the newest checkpoint where there is one."""
    allow_changes: bool = False
    """Resume from a checkpoint even if the model, the data or their order is not as it was then."""
    folder: Folder | None = None
    """Folder of the checkpoints, to save to and resume from; null: `checkpoint/` in the run's own
    folder."""
    upload_to: Annotated[Text, AfterValidator(_url)] | None = None
    """URL to which each checkpoint in `folder`, which must be named, is copied once it is complete:
    s3://bucket/run, or what else fsspec opens. Training does not wait for it: of checkpoints that
    are complete before the last copy is, the newest is next. A run whose `folder` is empty, as on a
    new machine, resumes from the copies, which it has `comm.init_timeout_seconds` to fetch. Of
    `keep_latest_k`, as many are kept."""
    initial_load_path: Folder | None = None
    """Start of a run without checkpoints of its own: a checkpoint, a folder of them, or the
    folder of a run, of any layout; null: random weights.  Names: torchtitan."""
    initial_load_model_only: bool = True
    """Take only the weights from there and begin at step 0; false: resume with all there is."""
    last_save_retry_seconds: CountOrZero = 600
    """Time to keep trying the last save of a run where it fails, on a full disk; 0: not."""

    def __post_init__(self) -> None:
        if self.upload_to is not None and self.folder is None:
            raise ValueError(
                "checkpoint.upload_to needs checkpoint.folder: name the folder whose checkpoints"
                " are copied"
            )

    @property
    def copies_state(self) -> bool:
        """Whether a run copies its state to the memory of the host; the last save does not."""
        return self.async_mode == "async" and self.interval > 0


@section("comm", KeyRole.PLACE)
class CommConfig:
    """`comm`: how long ranks wait for each other.  Names: torchtitan."""

    init_timeout_seconds: Seconds = 600
    """Time for ranks to meet, and for a collective of the first step."""
    train_timeout_seconds: Seconds = 300
    """Time for a collective of later steps: what separates the ranks at most, such as one that
    waits for its data. When it is over, the run ends with an error that names who did not come."""


@section("profiler", KeyRole.PLACE)
class ProfilerConfig:
    """`profiler`: profiles of single steps.  Names: torchtitan."""

    enable_profiling: bool = False
    """Write a profile and a trace of every `profile_freq`-th step."""
    profile_freq: Annotated[int, Field(ge=2, le=2**31 - 1)] = 10
    """Steps from one profile to the next; at least 2, as the step before is recorded too."""
    save_traces_folder: Annotated[str, AfterValidator(_inner_folder)] = "profile_traces"
    """Subfolder of the run for traces."""
    with_torch: bool = True
    """Have torch.profiler's events in the trace, too; they make the profiled step slower."""
    enable_memory_snapshot: bool = False
    """Record the history of CUDA memory, and write it when memory runs out.  Names: torchtitan."""
    save_memory_snapshot_folder: Annotated[str, AfterValidator(_inner_folder)] = "memory_snapshot"
    """Subfolder of the run for snapshots."""
