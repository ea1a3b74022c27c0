"""Sections of the configuration that belong to no other package: plain numbers and switches.

This file imports almost nothing of the project, so that every layer may use the sections.
"""

from __future__ import annotations

import math
import os
import re
from dataclasses import field
from pathlib import PurePath
from typing import Annotated, Literal, get_args

from pydantic import AfterValidator, Field

from isp.core.section import (
    Count,
    CountOrZero,
    KeyRole,
    NotNegative,
    Positive,
    Seconds,
    Text,
    section,
)
from isp.utils.text import parse_duration

__all__ = [
    "CHECKPOINT_FOLDER",
    "DTYPES",
    "ENVIRONMENT_FILE",
    "CheckpointConfig",
    "CommConfig",
    "DType",
    "JobSection",
    "MetricsConfig",
    "ProfilerConfig",
    "StepConfig",
    "TrainingConfig",
    "ValidationConfig",
]


DType = Literal["float64", "float32", "bfloat16", "float16"]
ENVIRONMENT_FILE = "env.json"
"""File that marks the folder of a run: the configuration next to it was saved by the run."""
CHECKPOINT_FOLDER = "checkpoint"
"""Default folder of checkpoints in the folder of a run."""
DTYPES: tuple[str, ...] = get_args(DType)
"""Names of torch's dtypes for weights and activations."""
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
        raise ValueError("must be a relative path, such as tb, to a folder inside the run's folder")
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
    if "://" not in url[1:]:  # fsspec reads an empty scheme as a local file
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
        if name not in _TRACKERS and not re.fullmatch(r"[^\W\d][\w.]*:[^\W\d]\w*", name):
            known = ", ".join(_TRACKERS)
            raise ValueError(f"must be some of {known}, or module:Class of your own")
    return names


@section("job", KeyRole.PLACE)
class JobSection:
    """`job`: what the run is called and where it writes."""

    name: Annotated[str, AfterValidator(_folder_name)] = "isp"
    """Name of the run, which writes to `dump_folder/name/time`."""
    dump_folder: Folder = "outputs"
    """Folder of all runs."""
    log_folder: Folder | None = None
    """Folder for logs and memory snapshots of ranks, which may be on a local disk of each machine.
    They are written to `log_folder/name/time`; null: to the run's folder."""


@section("training.dpo", KeyRole.METHOD)
class DPOConfig:
    """`training.dpo`: the loss of pairs of answers.  Names and definitions: TRL's."""

    loss_type: Literal["sigmoid", "sigmoid_norm", "ipo"] = "sigmoid"
    """sigmoid: on the margin of summed log-probabilities; sigmoid_norm and ipo: on means per
    token."""
    beta: Positive = 0.1
    """Strength of the pull to the reference: the larger, the less the model moves away from
    it."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Assumed probability that the labels of a pair are swapped; not for ipo."""


@section("training.distill", KeyRole.METHOD)
class DistillConfig:
    """`training.distill`: the loss on a teacher's distribution for each token."""

    teacher: Annotated[str | None, KeyRole.PLACE] = None
    """Folder of a Hugging Face model with the same tokenizer."""
    top_k: Count = 64
    """Number of the teacher's most likely tokens, over which its distribution is normalised."""
    temperature: Positive = 1.0
    """Temperature that divides the logits of both models."""


@section("training", KeyRole.METHOD)
class StepConfig:
    """The keys of `training` that decide a step: dtype, clipping, seed and device."""

    global_batch_size: Count | None = None
    """Sequences per step over all data ranks; data.micro_num follows from it on any number of
    ranks; null: use data.micro_num.  Name: torchtitan."""
    dtype: DType = "float32"
    """Dtype of weights and activations; with bfloat16 and float16, gradients and master weights
    are float32, and float16 also scales the loss (`optimizer.grad_scaler`)."""
    seed: Annotated[int, Field(ge=0, le=2**63 - 1), KeyRole.DATA] = 0
    """Seed of the initial weights, the order of the data and all random numbers."""
    deterministic: bool = False
    """Use deterministic kernels only: a run repeats bit by bit."""
    max_norm: NotNegative = 1.0
    """Clip the global gradient norm to this value; 0: no clipping."""
    device: Annotated[Literal["auto", "cpu", "cuda"], KeyRole.PLACE] = "auto"
    """Device to compute on; auto: cuda if there is one, else cpu."""


@section("training", KeyRole.METHOD)
class TrainingConfig(StepConfig):
    """`training`: length, dtype and device of a run."""

    objective: Literal["sft", "dpo", "reward", "distill"] = "sft"
    """sft: cross-entropy of tokens; dpo: direct preference optimization on `preferences`, with a
    frozen copy of model.hf as the reference; reward: Bradley-Terry loss of the chosen and the
    rejected answer, for a model.hf that classifies sequences with one logit; distill: divergence
    from a teacher's distribution on tokens that have a label."""
    dpo: DPOConfig = field(default_factory=DPOConfig)
    """The loss of dpo."""
    distill: DistillConfig = field(default_factory=DistillConfig)
    """The loss of distill."""
    steps: Count = 100
    """Number of optimizer steps of the whole run, including those before it was resumed."""
    max_time: Annotated[int | str | None, AfterValidator(_duration)] = None
    """Time limit of one start of the run, including the last save: seconds, `HH:MM:SS` or
    `D-HH:MM:SS`. The same command resumes the run. null: no limit."""
    gc_freq: CountOrZero = 10
    """Steps between garbage collections, done on all ranks at once, which also return freed host
    memory to the system; 0: leave it to Python."""

    @property
    def max_seconds(self) -> float:
        """Return `max_time` in seconds; infinity without a limit."""
        return math.inf if self.max_time is None else parse_duration(self.max_time)


@section("validation", KeyRole.METHOD)
class ValidationConfig:
    """`validation`: the loss on held-out text."""

    freq: CountOrZero = 0
    """Steps between evaluations; 0: never."""
    steps: Count = 10
    """Global batches in an evaluation (`training.global_batch_size` sequences, or `data.micro_bsz`
    x `data.micro_num` for each data rank)."""


@section("metrics", KeyRole.PLACE)
class MetricsConfig:
    """`metrics`: what is reported."""

    log_freq: Count = 1
    """Steps between log lines and writes to metrics.jsonl."""
    peak_tflops: Positive | None = None
    """Peak TFLOP/s of a device, from which mfu is computed; null: dense bfloat16 of a known GPU,
    and no mfu on others."""

    loss_spike_deviations: NotNegative = 6.0
    """Warn if a loss is this many deviations (median absolute deviation, scaled to a standard
    deviation) above the median of the last 100 steps; 0: never."""
    slow_rank_factor: NotNegative = 1.5
    """Warn if a rank computes this many times as long as the others; 0: never."""
    slow_rank_steps: Count = 10
    """Consecutive steps in which a rank must be slow before the warning."""
    report_to: Annotated[tuple[str, ...], AfterValidator(_trackers)] = ()
    """Trackers that also get the metrics: tensorboard, wandb, trackio, mlflow, swanlab, each
    through its own package; or module:Class, a subclass of isp.metrics.Tracker."""
    project: Text | None = None
    """Project (experiment) name in trackers; null: `job.name`."""
    enable_tensorboard: bool = False
    """The same as `report_to: [tensorboard]`.  Names: torchtitan."""
    save_tb_folder: Annotated[str, AfterValidator(_inner_folder)] = "tb"
    """Subfolder of the run for TensorBoard files."""

    @property
    def trackers(self) -> list[str]:
        """Return the trackers of the run, without duplicates."""
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
    """Steps between checkpoints; 0: save only when the run ends or is stopped by a signal."""
    keep_latest_k: CountOrZero = 0
    """Number of newest checkpoints to keep; 0: all."""
    async_mode: Literal["disabled", "async"] = "async"
    """async: copy the state to CPU memory and write it while training continues, which takes as
    much memory as a rank saves; disabled: training waits for the disk. Training always waits for
    the last save."""
    load_step: CountOrZero | None = None
    """Resume from the checkpoint of this step; null: from the newest, with `auto_resume`."""
    auto_resume: bool = True
    """Resume from the newest checkpoint, if there is one."""
    allow_changes: bool = False
    """Resume even if the model, the data or their order differ from those of the checkpoint."""
    folder: Folder | None = None
    """Folder to save checkpoints to and resume from; null: `checkpoint/` in the run's folder."""
    upload_to: Annotated[Text, AfterValidator(_url)] | None = None
    """URL to which every complete checkpoint is copied, s3://bucket/run or another that fsspec
    opens; needs `folder`. Training does not wait: if several checkpoints complete during a copy,
    only the newest of them is copied next. A finished run whose last copy fails exits with an
    error; the same command, if it resumes (`auto_resume`, no `load_step`), copies it again. A run
    with an empty `folder`, as on a new machine, resumes from the copies, and has
    `comm.init_timeout_seconds` to fetch them. `keep_latest_k` applies to the copies, too."""
    initial_load_path: Folder | None = None
    """Checkpoint, folder of checkpoints or run folder, of any layout, that a run without
    checkpoints starts from; null: random weights.  Names: torchtitan."""
    initial_load_model_only: bool = True
    """Load only the weights from `initial_load_path` and start at step 0; false: load the whole
    state, and go on after its step."""
    last_save_retry_seconds: CountOrZero = 600
    """Time to retry the last save of a run if it fails, for example on a full disk; 0: no
    retries."""

    def __post_init__(self) -> None:
        if self.upload_to is not None and self.folder is None:
            raise ValueError(
                "checkpoint.upload_to needs checkpoint.folder: name the folder whose checkpoints"
                " are copied"
            )

    @property
    def copies_state(self) -> bool:
        """Return whether saves during a run copy the state to host memory; the last never does."""
        return self.async_mode == "async" and self.interval > 0


@section("comm", KeyRole.PLACE)
class CommConfig:
    """`comm`: how long ranks wait for each other.  Names: torchtitan."""

    init_timeout_seconds: Seconds = 600
    """Time for ranks to connect, and for each collective of the first step."""
    train_timeout_seconds: Seconds = 300
    """Time for each collective of later steps, which limits how far apart ranks may be, for
    example if one waits for data. After it, the run ends with an error that names the ranks that
    did not join."""


@section("profiler", KeyRole.PLACE)
class ProfilerConfig:
    """`profiler`: profiles of single steps.  Names: torchtitan."""

    enable_profiling: bool = False
    """Write a profile and a trace of every `profile_freq`-th step."""
    profile_freq: Annotated[int, Field(ge=2, le=2**31 - 1)] = 10
    """Steps between profiles, at least 2, as the step before is recorded too."""
    save_traces_folder: Annotated[str, AfterValidator(_inner_folder)] = "profile_traces"
    """Subfolder of the run for traces."""
    with_torch: bool = True
    """Include torch.profiler's events in the trace; they slow the profiled step down."""
    enable_memory_snapshot: bool = False
    """Record the history of CUDA memory, and write it if memory runs out.  Names: torchtitan."""
    save_memory_snapshot_folder: Annotated[str, AfterValidator(_inner_folder)] = "memory_snapshot"
    """Subfolder of the run for snapshots."""
