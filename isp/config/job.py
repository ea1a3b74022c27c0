"""`JobConfig`, the configuration of a run, and its base `LoopConfig`; reading and writing them."""

from __future__ import annotations

import copy
import importlib.util
import json
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import TypeAdapter, ValidationError

from isp.config.data import DataConfig
from isp.config.faults import describe_faults, place
from isp.config.keys import KeyTable
from isp.config.sections import (
    CHECKPOINT_FOLDER,
    ENVIRONMENT_FILE,
    CheckpointConfig,
    CommConfig,
    JobSection,
    MetricsConfig,
    ProfilerConfig,
    StepConfig,
    TrainingConfig,
    ValidationConfig,
)
from isp.config.yaml_file import KeyPath, read_yaml
from isp.core.mesh.config import ParallelConfig, Sequence2DConfig, WeightConfig
from isp.core.mesh.partition import any_of
from isp.core.mesh.topology import Topology
from isp.core.optim.config import LRSchedulerConfig, OptimizerConfig
from isp.core.section import KeyRole, defaults_of, names_of, section
from isp.models.huggingface.config_json import (
    check_layout,
    check_model_folder,
    folder_sizes,
    with_sizes,
)
from isp.utils.text import check_complete, redacted_values
from model.config import ComputeConfig, ModelConfig
from model.presets import with_preset

__all__ = [
    "ConfigError",
    "JobConfig",
    "LoopConfig",
    "json_schema",
    "load_config",
    "load_loop_config",
    "sections_from",
    "to_plain",
    "to_yaml",
]

T = TypeVar("T")
C = TypeVar("C", bound="LoopConfig")


class ConfigError(ValueError):
    """All faults of a configuration, each with its key, its value and what to do."""


@section("")
class LoopConfig:
    """The configuration of `isp.parallelize`, where the caller has its own model and loop."""

    model: ComputeConfig = field(default_factory=ComputeConfig)
    """How the caller's model is computed."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """The split of the run over its ranks."""
    training: StepConfig = field(default_factory=StepConfig)
    """Dtype, seed, clipping and device."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """The update rule."""
    comm: CommConfig = field(default_factory=CommConfig)
    """Time limits of waits between ranks."""

    def __post_init__(self) -> None:
        training = self.training
        self.model.attention_backend.check_fits(
            training.device, training.dtype, deterministic=training.deterministic
        )

    @property
    def num_micro_batches(self) -> int:
        """Return the least number of micro-batches of a step on a data rank: one for each stage."""
        return self.parallel.pipeline.size


@section("")
class JobConfig(LoopConfig):
    """Everything that decides a run of `isp train`, section by section."""

    job: JobSection = field(default_factory=JobSection)
    """Name and output folder."""
    model: ModelConfig
    """The model: a preset or sizes."""
    data: DataConfig
    """The text, and how it is cut into batches."""
    training: TrainingConfig = field(default_factory=TrainingConfig)
    """Length of the run, dtype, seed, clipping and device."""
    lr_scheduler: LRSchedulerConfig = field(default_factory=LRSchedulerConfig)
    """The learning rate over the steps."""
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    """The loss on held-out text."""
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    """Reported metrics."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Saved checkpoints."""
    profiler: ProfilerConfig = field(default_factory=ProfilerConfig)
    """Profiles of single steps."""

    def __post_init__(self) -> None:
        if self.model.hf is None:
            self.model.check_layout(self.parallel, self.row_tokens)
        else:
            check_layout(self.parallel, self.row_tokens)
            check_model_folder(self.model.hf, self.parallel, self.model.hf_overrides)
        if self.training.global_batch_size is None or self.data.micro_num is not None:
            self.parallel.pipeline.check_micro_batches(self.data.num_micro_batches)
        if self.validation.freq and not (self.data.valid_source or self.data.valid_fraction):
            raise ValueError(
                f"validation.freq={self.validation.freq} needs held-out text: give"
                f" data.valid_source, or data.valid_fraction=0.01"
            )
        _check_objective(self)
        steps, warmup = self.training.steps, self.lr_scheduler.warmup_steps
        ratio = self.lr_scheduler.decay_ratio
        decay = self.lr_scheduler.num_decay_steps(steps)
        if ratio is not None and warmup + decay > steps:
            raise ValueError(
                f"lr_scheduler.warmup_steps={warmup} and the {decay} steps of "
                f"lr_scheduler.decay_ratio={ratio} are more than training.steps={steps}: use "
                f"warmup_steps up to {steps - decay}, or a smaller decay_ratio"
            )
        super().__post_init__()

    @property
    def num_micro_batches(self) -> int:
        """Return the number of micro-batches of a step on a data rank."""
        return self.data.num_micro_batches

    @property
    def for_loop(self) -> LoopConfig:
        """Return the sections that `isp.parallelize` uses, without those of `isp train` only."""
        return LoopConfig(**{name: getattr(self, name) for name in names_of(LoopConfig)})

    @property
    def row_tokens(self) -> int:
        """Return the number of tokens in one row of a batch, which a tensor group shares."""
        samples_in_row = self.data.micro_bsz if self.data.pack else 1
        return self.data.seq_len * samples_in_row

    def topology(self, world_size: int) -> Topology:
        """Return the topology of `world_size` ranks.  Raises ConfigError if sizes do not fit."""
        try:
            heads = self.model.num_heads, self.model.kv_heads
            return Topology.create(world_size, self.parallel.for_heads(*heads))
        except ValueError as error:
            raise ConfigError(str(error)) from error

    def sequences(self, topology: Topology) -> int:
        """Return the number of samples in a step, over all ranks."""
        own = self.data.micro_bsz * self.data.num_micro_batches
        return self.training.global_batch_size or own * topology.data

    def for_ranks(self, world_size: int) -> JobConfig:
        """Return this configuration with `data.micro_num` for a global batch on `world_size` ranks.

        Raises ConfigError if the global batch is not divisible, or contradicts `data.micro_num`.
        """
        whole, data = self.training.global_batch_size, self.data
        if whole is None:
            return self
        ranks = self.topology(world_size).data
        part = data.micro_bsz * ranks
        given = f"data.micro_bsz={data.micro_bsz} on {ranks} data ranks"
        if whole % part:
            near = any_of(sorted({max(part, whole // part * part), -(-whole // part) * part}))
            raise ConfigError(
                f"training.global_batch_size={whole} must be a multiple of the {part} sequences of"
                f" {given}: use {near}"
            )
        if data.micro_num not in (None, whole // part):
            raise ConfigError(
                f"training.global_batch_size={whole} and data.micro_num={data.micro_num} disagree:"
                f" {given} takes data.micro_num={whole // part}; leave one of the two out"
            )
        try:
            return replace(self, data=replace(data, micro_num=whole // part))
        except ValueError as error:
            raise ConfigError(f"training.global_batch_size={whole}: {error}") from error

    def require_packages(self) -> None:
        """Raise ValueError if a key needs a package that is not installed."""
        from isp.metrics import check_tracker  # loads torch, which reading keys does not need

        for name in self.metrics.trackers:
            check_tracker(name)
        if self.checkpoint.upload_to is not None:
            check_complete("checkpoint.upload_to", self.checkpoint.upload_to)
        backend = self.model.attention_backend
        if backend.package is not None and importlib.util.find_spec(backend.package) is None:
            raise ConfigError(
                f"model.attention_backend={backend} needs the package {backend.package}, which is"
                f" not installed: {backend.remedy}, or use auto, the fastest that is there"
            )

    def unused(self) -> list[str]:
        """Return warnings about keys without effect, or without the effect they are meant for."""
        mode, rule = self.parallel.tensor.mode, self.optimizer.name
        found = [f"optimizer.{key} is not used by {rule}" for key in self.optimizer.unused]
        if not mode.gathers_weights and self.parallel.weight != WeightConfig():
            found.append(
                f"parallel.weight is not used in {mode} mode: its weights follow parallel.tensor"
            )
        else:
            found += [
                f"parallel.weight.{key} is not used with parallel.weight.size=1: no weight travels"
                for key in self.parallel.weight.unused
            ]
        two = self.parallel.sequence_2D
        if not mode.slices_batch and two.enable:
            found.append(f"parallel.sequence_2D is not used in {mode} mode, which splits features")
        if not two.enable and two != Sequence2DConfig():
            found.append("parallel.sequence_2D is not used: set parallel.sequence_2D.enable=true")
        steps, warmup = self.training.steps, self.lr_scheduler.warmup_steps
        if warmup > steps:
            found.append(
                f"lr_scheduler.warmup_steps={warmup} is longer than training.steps={steps}: the"
                f" learning rate ends at {steps / warmup:.0%} of optimizer.lr, and never decays"
            )
        tile, tokens = self.model.mlp_tile_tokens, self.data.seq_len * self.data.micro_bsz
        tokens //= self.parallel.tensor.size if mode.splits_sequence else 1
        if tile and tile >= tokens:
            found.append(
                f"model.mlp_tile_tokens={tile} saves no memory of tiles: a rank has {tokens} tokens"
                f" of a micro-batch, which are one tile"
            )
        return found


def _check_objective(config: JobConfig) -> None:
    """Raise ValueError for sections that do not fit `training.objective`."""
    objective, dpo = config.training.objective, config.training.dpo
    teacher = config.training.distill.teacher
    if (objective == "distill") != (teacher is not None):
        raise ValueError(
            f"training.objective={objective} and training.distill.teacher={teacher}: distill needs"
            f" the folder of a teacher, and no other objective takes one"
        )
    if teacher is not None:
        check_model_folder(teacher, config.parallel)
    if objective not in ("dpo", "reward"):
        return
    if config.model.hf is None:
        raise ValueError(
            f"training.objective={objective} needs model.hf, the folder of the initial model:"
            f" write one with `isp checkpoint export`"
        )
    if objective == "reward" and config.model.adapter is not None:
        raise ValueError(
            "training.objective=reward trains all weights of a reward model: leave out"
            " model.adapter"
        )
    if not config.data.pack:
        raise ValueError(f"training.objective={objective} needs data.pack=true")
    if dpo.label_smoothing and dpo.loss_type == "ipo":
        raise ValueError(
            f"training.dpo.label_smoothing={dpo.label_smoothing} is not defined for"
            f" training.dpo.loss_type=ipo: use 0, or sigmoid"
        )


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> JobConfig:
    """Load the configuration in the YAML file at `path`, changed by `overrides`.

    Overrides are words of a command line: `--section.key value`, `--section.key=value`, or
    `--section.key` alone for true. Raises ConfigError with all faults of file and overrides.
    """
    return _load(JobConfig, path, overrides)


def load_loop_config(path: str | Path) -> LoopConfig:
    """Load the configuration for `isp.parallelize` from the YAML file at `path`.

    Keys that only `isp train` has are ignored and not checked, so a file for `isp train` can be
    used too, even if the model that it names is not the caller's. Raises ConfigError with all
    faults of the file.
    """
    return _load(LoopConfig, path, ())


def _load(kind: type[C], path: str | Path, overrides: Sequence[str]) -> C:
    """Return the configuration of class `kind` in a file, changed by `overrides`."""
    keys = KeyTable.of(kind)
    try:
        file = read_yaml(path)
        origins: dict[KeyPath, str] = {key: f"line {line}" for key, line in file.lines.items()}
        # A config.yaml in a run's folder describes what that run did. A key that was added later
        # gets the value that matches the run's behavior, which may not be the present default.
        is_kept = (Path(path).parent / ENVIRONMENT_FILE).is_file()
        if is_kept:
            _check_resumable(path, file.values)
        given = keys.upgraded(file.values) if is_kept else file.values
        values = _override(_only(keys, given), origins, overrides, keys)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    _fill_empty_sections(values, (), keys)
    # Validate even if the model's values are faulty, to report all faults at once.
    faults = _fill_model(values, origins)
    config = _validate(values, origins, keys, kind)
    if not isinstance(config, list):
        if not faults:
            return config
        config = []
    faults += [fault for fault in config if fault not in faults]
    # A fault of an override begins with the override; any other one is of the file.
    of_file = [fault for fault in faults if not fault.startswith("--")]
    if len(faults) == 1:
        raise ConfigError(f"{path}: {faults[0]}" if of_file else faults[0])
    where = path if of_file else "the command line"
    raise ConfigError("\n  ".join([f"{where}: {len(faults)} faults", *faults]))


def _check_resumable(path: str | Path, kept: Mapping[str, Any]) -> None:
    """Raise ValueError for a run that began from `model.init_from` and has no checkpoint yet.

    Without that removed key it would start again, from random weights.
    """
    model, checkpoint = kept.get("model"), kept.get("checkpoint")
    begun = model.get("init_from") if isinstance(model, dict) else None
    places = checkpoint if isinstance(checkpoint, dict) else {}
    folder = Path(places.get("folder") or Path(path).parent / CHECKPOINT_FOLDER)
    # Copies in an object store may hold checkpoints: they are looked up when the run starts.
    has_checkpoint = places.get("upload_to") is not None or any(folder.glob("step_*[0-9]"))
    if begun is not None and not has_checkpoint:
        raise ValueError(
            f"{path}: this run began from model.init_from={begun}, which was removed, and has no"
            f" checkpoint to go on from: start a run of model.hf={begun}"
        )


def sections_from(
    kind: type[T], overrides: Sequence[str], defaults: Mapping[str, dict[str, Any]]
) -> T:
    """Return an instance of the sections in `kind`, from `defaults` and command-line overrides.

    Overrides are as in `load_config`. Raises ConfigError with all faults.
    """
    keys, origins = KeyTable.of(kind), dict[KeyPath, str]()
    try:
        values = _override(copy.deepcopy(dict(defaults)), origins, overrides, keys)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    found = _validate(values, origins, keys, kind)
    if isinstance(found, list):
        raise ConfigError("\n  ".join(found))
    return found


def to_plain(config: JobConfig, *, redact: bool = False) -> dict[str, Any]:
    """Return `config` as nested dicts of plain values, including all defaults.

    `redact`: remove credentials from URLs, to save the result or compare it with a saved one.
    """
    plain: dict[str, Any] = TypeAdapter(JobConfig).dump_python(config, mode="json")
    sections = KeyTable.of(JobConfig).sections
    plain = {name: {key: plain[name][key] for key in sections[(name,)]} for name in sections[()]}
    return redacted_values(plain) if redact else plain


def to_yaml(config: JobConfig, *, redact: bool = False, of_decoder: bool = True) -> str:
    """Return `config` as YAML, including all defaults; `redact` as in `to_plain`.

    `of_decoder`: include the keys that describe the decoder of `model/` even if `model.hf` is set.
    Loading the text gives an equal configuration, unless `redact` has removed credentials.
    """
    plain = to_plain(config, redact=redact)
    if config.model.hf is not None and not of_decoder:
        sizes = folder_sizes(config.model.hf, config.model.hf_overrides)
        kept = {"hf", "hf_overrides", "adapter", *sizes}
        for key in defaults_of(ModelConfig, KeyRole.MODEL, KeyRole.PLACE).keys() - kept:
            del plain["model"][key]
    return yaml.safe_dump(plain, sort_keys=False, allow_unicode=True)


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of a configuration file, with types, bounds, defaults and docs."""
    return TypeAdapter(JobConfig).json_schema()


def _only(keys: KeyTable, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return `values` without the keys and sections of `JobConfig` that are not in `keys`.

    Keys that are in neither stay, so that validation reports them.
    """
    more = KeyTable.of(JobConfig)
    dropped = {*more.hints, *more.sections} - {*keys.hints, *keys.sections}
    return {
        name: {key: value for key, value in below.items() if (name, key) not in dropped}
        if isinstance(below, dict)
        else below
        for name, below in values.items()
        if (name,) not in dropped
    }


def _fill_model(values: dict[str, Any], origins: dict[KeyPath, str]) -> list[str]:
    """Add to `values`, in place, the sizes that `model.hf` or `model.preset` stands for.

    Returns lines about what is wrong with the folder or preset; empty if nothing is.
    """
    model = values.get("model")
    if not isinstance(model, dict):
        return []
    named = [key for key in ("hf", "preset") if isinstance(model.get(key), str)]
    try:
        if "hf" in named:
            decided = defaults_of(ModelConfig, KeyRole.MODEL, KeyRole.PLACE)
            values["model"] = with_sizes(model, decided)
        elif named:
            values["model"] = with_preset(model)
    except ValueError as error:
        return [place(line, ("model", named[0]), origins) for line in str(error).splitlines()]
    return []


def _validate(
    values: dict[str, Any], origins: dict[KeyPath, str], keys: KeyTable, kind: type[T]
) -> T | list[str]:
    """Return the configuration made from `values`, or a list of their faults."""
    text = json.dumps(_with_whole(values, (), keys), default=str)  # YAML dates become text
    try:
        # Validate JSON text, not Python values: in strict mode pydantic then accepts "isp" for an
        # enum, and still refuses true for the number 1.
        return TypeAdapter(kind).validate_json(text, strict=True)
    except ValidationError as error:
        return describe_faults(error.errors(), origins, keys)


def _with_whole(value: Any, path: KeyPath, keys: KeyTable) -> Any:
    """Return `value` of the key `path` with whole floats as ints, see `KeyTable.as_whole`."""
    if isinstance(value, dict):
        return {name: _with_whole(below, (*path, str(name)), keys) for name, below in value.items()}
    return keys.as_whole(path, value)


def _override(
    values: dict[str, Any], origins: dict[KeyPath, str], overrides: Sequence[str], keys: KeyTable
) -> dict[str, Any]:
    """Put the overrides into `values` and `origins`, both in place, and return `values`.

    Raises ValueError for an override without a value, or below a key that is not a section.
    """
    for path, text in _split_overrides(overrides):
        if text is None and keys.needs_value(path):
            raise ValueError(f"--{'.'.join(path)} has no value: it takes {keys.type_of(path)}")
        value = True if text is None else keys.typed(path, text)
        section = values
        for end, name in enumerate(path[:-1], start=1):
            if section.get(name) is None:  # absent or null: the override makes the section
                section[name] = {}
                origins[path[:end]] = f"--{'.'.join(path)}"
            section = section[name]
            if not isinstance(section, dict):
                if path[:end] not in keys.sections:
                    key = ".".join(path[:end])
                    raise ValueError(f"--{'.'.join(path)}: {key} is a key, not a section")
                break  # validation reports that this must be a section
        else:
            section[path[-1]] = value
        origins[path] = f"--{'.'.join(path)}"
    return values


def _split_overrides(words: Sequence[str]) -> list[tuple[KeyPath, str | None]]:
    """Return each override as its path and its text, None for a bare flag."""
    found: list[tuple[KeyPath, str | None]] = []
    pending = list(reversed(words))
    while pending:
        word = pending.pop()
        if not word.startswith("--") or not word.strip("-=."):
            raise ValueError(f"{word!r} is not an override: write --section.key value")
        name, equals, text = word[2:].partition("=")
        if not equals and pending and not pending[-1].startswith("--"):
            text, equals = pending.pop(), " "
        found.append((tuple(name.split(".")), text if equals else None))
    return found


def _fill_empty_sections(values: dict[str, Any], path: KeyPath, keys: KeyTable) -> None:
    """Replace the null of an empty `section:` by a section without keys, in place."""
    for name in values:
        below = (*path, name)
        if below in keys.sections and below not in keys.hints:  # not a key that may be null
            values[name] = {} if values[name] is None else values[name]
            if isinstance(values[name], dict):
                _fill_empty_sections(values[name], below, keys)
