"""The sections of the configuration that have no other home: plain numbers and switches.

They import next to nothing of the project, so that every layer may take them as arguments.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Literal

from isp.durations import parse_duration

__all__ = [
    "CheckpointConfig",
    "CommConfig",
    "GradScalerConfig",
    "JobSection",
    "LRSchedulerConfig",
    "MetricsConfig",
    "OptimizerConfig",
    "ParamGroupConfig",
    "ProfilerConfig",
    "TrainingConfig",
    "ValidationConfig",
]


def _unless(holds: bool, key: str, value: object, rule: str) -> str | None:
    return None if holds else f"{key}={value} {rule}"


def _at_least(key: str, value: int, least: int, meaning: str = "") -> str | None:
    return _unless(value >= least, key, value, f"must be at least {least}{meaning}")


def _duration_fault(key: str, value: int | str | None) -> str | None:
    try:
        if value is not None:
            parse_duration(value)
    except ValueError as error:
        return f"{key}={value} {error}, or null for no limit"
    return None


def _folder_fault(key: str, folder: str) -> str | None:
    """What is wrong with `folder` if it does not name one below that of the run."""
    path = PurePath(folder)
    inside = bool(path.parts) and not path.is_absolute() and ".." not in path.parts
    return _unless(inside, key, repr(folder), "must name a folder in that of the run, such as tb")


def _pattern_fault(key: str, pattern: str) -> str | None:
    try:
        re.compile(pattern)
    except re.error as error:
        return f"{key}={pattern!r} is not a regular expression: {error}"
    return _unless(pattern != "", key, "''", "must not be empty: use e.g. embedding")


def _refuse(*faults: str | None) -> None:
    """Raise one ValueError that names every fault, a line each."""
    found = [fault for fault in faults if fault is not None]
    if found:
        raise ValueError("\n".join(found))


@dataclass(frozen=True, kw_only=True)
class JobSection:
    """`job`: what the run is called and where it writes."""

    name: str = "isp"
    """Name of the run: it writes to `dump_folder/name/time`."""
    dump_folder: str = "outputs"
    """Folder of all runs."""

    def __post_init__(self) -> None:
        is_folder_name = self.name not in ("", ".", "..") and not set(self.name) & set("/\\\0")
        rule = "must be usable as the name of a folder: not empty, no slash"
        _refuse(
            _unless(is_folder_name, "job.name", repr(self.name), rule),
            _unless(self.dump_folder != "", "job.dump_folder", "''", "must name a folder"),
        )


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """`training`: length, numbers and device of a run."""

    steps: int = 100
    """Optimizer steps to take, counted from the first of the run, also when it is resumed."""
    max_time: int | str | None = None
    """Time that a start of the run may take, the last save included: seconds, or `HH:MM:SS` or
    `D-HH:MM:SS`; the same command goes on. null: no limit."""
    dtype: Literal["float64", "float32", "bfloat16", "float16"] = "float32"
    """Numbers of weights and activations; bfloat16 and float16 keep float32 gradients and master
    weights, and float16 scales the loss: see `optimizer.grad_scaler`."""
    seed: int = 0
    """Decides the initial weights, the order of the data and every random stream."""
    deterministic: bool = False
    """Use deterministic kernels only: the same run gives the same bits."""
    max_norm: float = 1.0
    """Clip the global gradient norm to this; 0: do not clip."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; auto: cuda where there is one, else cpu."""

    def __post_init__(self) -> None:
        clip = "must be finite and at least 0 (0: no clipping)"
        _refuse(
            _at_least("training.steps", self.steps, 1),
            _duration_fault("training.max_time", self.max_time),
            _at_least("training.seed", self.seed, 0),
            _unless(0 <= self.max_norm < math.inf, "training.max_norm", self.max_norm, clip),
        )

    @property
    def max_seconds(self) -> float:
        """`max_time` in seconds, infinity without a limit."""
        return math.inf if self.max_time is None else parse_duration(self.max_time)


@dataclass(frozen=True, kw_only=True)
class GradScalerConfig:
    """`optimizer.grad_scaler`: the factor of the loss in float16.  Names: InternEvo."""

    use: Literal["auto", "always"] = "auto"
    """auto: with `training.dtype: float16`, whose small gradients would vanish without it."""
    initial_scale: float = 2.0**16
    """The factor of the first step; an overflow skips the step and lowers it."""
    min_scale: float = 1.0
    """The factor is not lowered below this."""
    max_scale: float = 2.0**24
    """The factor is not raised above this."""
    growth_factor: float = 2.0
    """What the factor is multiplied by when it is raised; powers of two round no gradient."""
    backoff_factor: float = 0.5
    """What the factor is multiplied by when it is lowered."""
    growth_interval: int = 1000
    """Steps in a row without an overflow after which the factor is raised."""
    hysteresis: int = 2
    """Overflows, since the factor was last raised, from which on each one lowers it."""

    def __post_init__(self) -> None:
        initial, least, most = self.initial_scale, self.min_scale, self.max_scale
        growth, backoff = self.growth_factor, self.backoff_factor
        key = "optimizer.grad_scaler"
        between = f"must be from {key}.min_scale={least} to {key}.max_scale={most}"
        _refuse(
            _unless(0 < least < math.inf, f"{key}.min_scale", least, "must be above 0: use e.g. 1"),
            _unless(0 < most < math.inf, f"{key}.max_scale", most, "must be finite and above 0"),
            _unless(least <= initial <= most, f"{key}.initial_scale", initial, between),
            _unless(
                1 < growth < math.inf, f"{key}.growth_factor", growth, "must be above 1: use e.g. 2"
            ),
            _unless(
                0 < backoff < 1,
                f"{key}.backoff_factor",
                backoff,
                "must be above 0 and below 1: use e.g. 0.5",
            ),
            _at_least(f"{key}.growth_interval", self.growth_interval, 1),
            _at_least(f"{key}.hysteresis", self.hysteresis, 1, " (1: every overflow lowers it)"),
        )


@dataclass(frozen=True, kw_only=True)
class ParamGroupConfig:
    """An entry of `optimizer.param_groups`: parameters with values of their own."""

    pattern: str
    """A regular expression, searched for in the names of parameters in the whole model."""
    lr_scale: float = 1.0
    """Their learning rate, as a part of that of the step."""
    weight_decay: float | None = None
    """Their weight decay; null: `optimizer.weight_decay`, and none where there is one dimension."""

    def __post_init__(self) -> None:
        key, decay = (
            "optimizer.param_groups",
            0.0 if self.weight_decay is None else self.weight_decay,
        )
        _refuse(
            _pattern_fault(f"{key}.pattern", self.pattern),
            _unless(
                0 <= self.lr_scale < math.inf,
                f"{key}.lr_scale",
                self.lr_scale,
                "must be finite and at least 0 (0: not trained)",
            ),
            _unless(
                0 <= decay < math.inf,
                f"{key}.weight_decay",
                decay,
                "must be finite and at least 0 (0: no decay), or null",
            ),
        )


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """`optimizer`: AdamW and its numbers."""

    name: Literal["adamw"] = "adamw"
    """The update rule."""
    lr: float = 3e-4
    """Peak learning rate, reached at the end of the warm-up."""
    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float = 0.95
    """Decay of the second moment."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.1
    """Decoupled decay of the weights, a fraction of lr."""
    param_groups: tuple[ParamGroupConfig, ...] = ()
    """Parameters with another learning rate or weight decay; the first that matches counts."""
    grad_scaler: GradScalerConfig = field(default_factory=GradScalerConfig)
    """The scale of the loss in float16."""
    max_skipped_steps: int = 10
    """End the run after this many steps in a row whose gradients were not finite; those after which
    the loss scale can still be lowered do not count. 0: never."""

    def __post_init__(self) -> None:
        lr, eps, decay = self.lr, self.eps, self.weight_decay
        beta = "must be at least 0 and below 1"
        _refuse(
            _unless(0 < lr < math.inf, "optimizer.lr", lr, "must be above 0: use e.g. 3e-4"),
            _unless(0 <= self.beta1 < 1, "optimizer.beta1", self.beta1, beta),
            _unless(0 <= self.beta2 < 1, "optimizer.beta2", self.beta2, beta),
            _unless(0 < eps < math.inf, "optimizer.eps", eps, "must be above 0: use e.g. 1e-8"),
            _unless(
                0 <= decay < math.inf,
                "optimizer.weight_decay",
                decay,
                "must be finite and at least 0 (0: no decay)",
            ),
            _at_least("optimizer.max_skipped_steps", self.max_skipped_steps, 0, " (0: no limit)"),
        )


@dataclass(frozen=True, kw_only=True)
class LRSchedulerConfig:
    """`lr_scheduler`: warm-up, an optional stable phase, decay.  Names: torchtitan."""

    warmup_steps: int = 0
    """Steps in which the learning rate rises in a straight line to `optimizer.lr`."""
    decay_type: Literal["cosine", "linear", "sqrt"] = "cosine"
    """Shape of the decay."""
    decay_ratio: float | None = None
    """Last fraction of the steps that decays, after a stable phase (WSD); null: decay from the end
    of the warm-up."""
    min_lr_factor: float = 0.1
    """Where the decay ends, a fraction of `optimizer.lr`."""

    def __post_init__(self) -> None:
        ratio, factor = self.decay_ratio, self.min_lr_factor
        ratio_rule = "must be from 0 to 1, or null to decay from the end of the warm-up"
        factor_rule = "must be from 0 to 1: a fraction of optimizer.lr"
        _refuse(
            _at_least("lr_scheduler.warmup_steps", self.warmup_steps, 0, " (0: no warm-up)"),
            _unless(
                ratio is None or 0 <= ratio <= 1, "lr_scheduler.decay_ratio", ratio, ratio_rule
            ),
            _unless(0 <= factor <= 1, "lr_scheduler.min_lr_factor", factor, factor_rule),
        )

    def num_decay_steps(self, total_steps: int) -> int:
        """Length of the decay: the steps after the warm-up, or the last `decay_ratio` of a run."""
        if self.decay_ratio is None:
            return total_steps - self.warmup_steps
        return round(total_steps * self.decay_ratio)


@dataclass(frozen=True, kw_only=True)
class ValidationConfig:
    """`validation`: the loss on held-out text."""

    freq: int = 0
    """Evaluate every this many steps; 0: never."""
    steps: int = 10
    """Global batches (of `data.micro_bsz` x `data.micro_num` samples from each data rank) in an
    evaluation."""

    def __post_init__(self) -> None:
        off = "; validation.freq=0 switches evaluation off"
        _refuse(
            _at_least("validation.freq", self.freq, 0, " (0: never evaluate)"),
            _at_least("validation.steps", self.steps, 1, off),
        )


@dataclass(frozen=True, kw_only=True)
class MetricsConfig:
    """`metrics`: what is reported."""

    log_freq: int = 1
    """Print and write the numbers of every this many steps."""
    peak_tflops: float | None = None
    """Peak TFLOP/s of a device, which mfu is a fraction of; null: that of a known GPU in dense
    bfloat16, and no mfu on others."""

    loss_spike_deviations: float = 6.0
    """Warn of a loss this many deviations above the median of the last 100 steps; 0: never."""
    slow_rank_factor: float = 1.5
    """Warn of a rank that is at work this many times as long as the others; 0: never."""
    slow_rank_steps: int = 10
    """Steps in a row for which a rank has to be slow."""
    enable_tensorboard: bool = False
    """Write the numbers for TensorBoard too; needs its package.  Names: torchtitan."""
    save_tb_folder: str = "tb"
    """Where to, in the folder of the run."""

    def __post_init__(self) -> None:
        peak, spike, slow = self.peak_tflops, self.loss_spike_deviations, self.slow_rank_factor
        peak_rule = "must be above 0, or null for that of a known GPU"
        spike_rule = "must be finite and at least 0 (0: no warnings)"
        slow_rule = "must be above 1, or 0 for no warnings"
        _refuse(
            _at_least("metrics.log_freq", self.log_freq, 1),
            _unless(0 <= spike < math.inf, "metrics.loss_spike_deviations", spike, spike_rule),
            _unless(slow == 0 or 1 < slow < math.inf, "metrics.slow_rank_factor", slow, slow_rule),
            _at_least("metrics.slow_rank_steps", self.slow_rank_steps, 1),
            _folder_fault("metrics.save_tb_folder", self.save_tb_folder),
            _unless(peak is None or 0 < peak < math.inf, "metrics.peak_tflops", peak, peak_rule),
        )


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """`checkpoint`: when to save, what to keep, where to go on from."""

    interval: int = 0
    """Save every this many steps; 0: only when the run ends or is stopped by a signal."""
    keep_latest_k: int = 0
    """Keep only this many of the newest checkpoints; 0: keep all."""
    async_mode: Literal["disabled", "async"] = "async"
    """async: copy the state to CPU memory and write it while training goes on, which takes as much
    memory as a rank saves; disabled: training waits until it is on disk. The last save waits."""
    load_step: int | None = None
    """Go on from the checkpoint of this step; null: from the newest, if `auto_resume`."""
    auto_resume: bool = True
    """Go on from the newest checkpoint where there is one."""
    allow_changes: bool = False
    """Go on from a checkpoint even if the model, the data or their order is not as it was then."""
    folder: str | None = None
    """Folder of the checkpoints, to save to and go on from; null: `checkpoint/` in the run's own
    folder."""
    initial_load_path: str | None = None
    """What a run without checkpoints of its own begins from: a checkpoint, a folder of them, or the
    folder of a run, of any layout; null: random weights.  Names: torchtitan."""
    initial_load_model_only: bool = True
    """Take only the weights from there and begin at step 0; false: go on with all there is."""
    last_save_retry_seconds: int = 600
    """How long the last save of a run is tried again where it fails, on a full disk; 0: not."""

    def __post_init__(self) -> None:
        load_step = 0 if self.load_step is None else self.load_step
        _refuse(
            _at_least("checkpoint.interval", self.interval, 0, " (0: save only at the end)"),
            _at_least("checkpoint.keep_latest_k", self.keep_latest_k, 0, " (0: keep all)"),
            _at_least("checkpoint.load_step", load_step, 0, ", or null for the newest"),
            _unless(self.folder != "", "checkpoint.folder", "''", "must name a folder, or be null"),
            _unless(
                self.initial_load_path != "",
                "checkpoint.initial_load_path",
                "''",
                "must name a checkpoint, or be null",
            ),
            _at_least("checkpoint.last_save_retry_seconds", self.last_save_retry_seconds, 0),
        )


@dataclass(frozen=True, kw_only=True)
class CommConfig:
    """`comm`: how long ranks wait for each other.  Names: torchtitan."""

    init_timeout_seconds: int = 600
    """Time for ranks to meet, and for a collective of the first step."""
    train_timeout_seconds: int = 300
    """Time for a collective of later steps: what separates the ranks at most, such as one that
    waits for its data. When it is over, the run ends with an error that names who did not come."""

    def __post_init__(self) -> None:
        _refuse(
            _at_least("comm.init_timeout_seconds", self.init_timeout_seconds, 1),
            _at_least("comm.train_timeout_seconds", self.train_timeout_seconds, 1),
        )


@dataclass(frozen=True, kw_only=True)
class ProfilerConfig:
    """`profiler`: profiles of single steps.  Names: torchtitan."""

    enable_profiling: bool = False
    """Write a profile and a trace of every `profile_freq`-th step."""
    profile_freq: int = 10
    """Steps from one profile to the next."""
    save_traces_folder: str = "profile_traces"
    """Where to, in the folder of the run."""
    with_torch: bool = True
    """Have torch.profiler's events in the trace, too; they make the profiled step slower."""
    enable_memory_snapshot: bool = False
    """Record the history of CUDA memory, and write it when memory runs out.  Names: torchtitan."""
    save_memory_snapshot_folder: str = "memory_snapshot"
    """Where to, in the folder of the run."""

    def __post_init__(self) -> None:
        before = ": the step before a profiled one is recorded too"
        _refuse(
            _at_least("profiler.profile_freq", self.profile_freq, 2, before),
            _folder_fault("profiler.save_traces_folder", self.save_traces_folder),
            _folder_fault("profiler.save_memory_snapshot_folder", self.save_memory_snapshot_folder),
        )
