"""`export`: writes a checkpoint of any layout as a folder that transformers can load."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor, nn

from isp.checkpoint import CheckpointInfo
from isp.checkpoint.folder import describe_contents
from isp.checkpoint.state import CheckpointWeights, check_shapes, saved_rows
from isp.config import JobConfig
from isp.config.keys import KeyTable
from isp.config.removed import REMOVED_KEYS
from isp.config.sections import DTYPES
from isp.models.build import parameter_shapes
from isp.models.huggingface.config_json import read_config
from isp.models.traced_model import TracedModel
from isp.utils.environment import require
from isp.utils.files import copy_regular
from model.build import language_model
from model.config import ModelConfig
from model.huggingface import CONFIG_FILE, config_json
from model.weight_names import exported_rows

__all__ = ["Exported", "as_saved", "export", "plain_decoder", "saved_model"]


class Exported(NamedTuple):
    """Result of `export`: the number of tensors, their dtype and model, and notes."""

    source: Path
    """Path of the checkpoint."""
    num_tensors: int
    dtype: str
    """Dtype of the floating-point tensors."""
    model_type: str
    """`model_type` in config.json, or `adapter`."""
    notes: tuple[str, ...]
    """Sentences about what the folder lacks, or how to load it."""


def export(path: Path, folder: Path, *, dtype: str | None = None) -> Exported:
    """Write the weights of the checkpoint at `path` to `folder`, in `dtype` (None: as trained).

    For a run with `model.adapter` only the adapter is written, for PEFT; `model_type` is then
    `adapter`. Tensors are read one by one (with `model.hf`, block by block), and are kept in memory
    until they fill a file of the size that transformers writes. Raises ValueError, before it writes
    anything, if `folder` is not empty, or if `path` is no checkpoint or does not record its model;
    CheckpointError if it is damaged.
    """
    require("isp checkpoint export", "safetensors")
    from isp.models.huggingface.weight_files import WeightWriter

    if describe_contents(folder) not in ("is empty", "does not exist"):
        raise ValueError(f"--hf {folder}: it {describe_contents(folder)}: name an empty folder")
    weights = CheckpointWeights(path)
    kept = _kept(weights.info)
    if kept["model"].get("adapter") is not None:
        return _export_adapter(weights, kept, folder, dtype)
    source, trained = _source(kept), kept["training"]["dtype"]
    out = trained if dtype is None else dtype
    plan = _plan(weights, kept, source, out)
    num_tensors = 0
    with WeightWriter(folder) as writer:
        for name, tensor in plan.tensors:
            writer.add(name, tensor)
            num_tensors += 1
    (folder / CONFIG_FILE).write_text(json.dumps(plan.config, indent=2) + "\n")
    named = _copy_companions(kept, source, folder)
    notes = () if named else ("the run names no tokenizer to copy",)
    return Exported(weights.info.path, num_tensors, out, plan.config["model_type"], notes)


def _export_adapter(
    weights: CheckpointWeights, kept: Mapping[str, Any], folder: Path, dtype: str | None
) -> Exported:
    """Write an adapter as PEFT does; its adapter_config.json names the folder of its base model."""
    section, trained = _model(weights.info, kept["model"]), kept["training"]["dtype"]
    assert section.adapter is not None
    # Do not load the adapter that the run began from: its weights come from the checkpoint.
    section = replace(section, adapter=replace(section.adapter, folder=None))
    traced, out = language_model(section, trained, trains=False), dtype or trained
    check_shapes(weights.info, parameter_shapes(traced), {})
    state = {name: _in_dtype(weights.read(name), out) for name in weights.shapes}
    model: Any = traced.model
    model.save_pretrained(folder, state_dict=state, save_embedding_layers=False)
    named = _copy_companions(kept, _source(kept), folder)
    notes = [] if named else ["the run names no tokenizer to copy"]
    if section.hf_overrides:
        notes.append(
            f"the adapter was trained with model.hf_overrides={json.dumps(section.hf_overrides)}:"
            f" load its base model with these keys changed in config.json"
        )
    return Exported(weights.info.path, len(state), out, "adapter", tuple(notes))


def saved_model(info: CheckpointInfo) -> ModelConfig:
    """Return the `model` section of the run that saved a checkpoint.

    Raises ValueError if the checkpoint does not record it, or if this version cannot read it.
    """
    return _model(info, _kept(info)["model"])


def _kept(info: CheckpointInfo) -> dict[str, Any]:
    """Return the configuration of the run that saved a checkpoint, with the keys of this version.

    Raises ValueError if it is not recorded, or if a value that this file uses has another type.
    """
    kept = info.manifest.shared.get("config")
    if not isinstance(kept, dict) or not isinstance(kept.get("model"), dict):
        raise ValueError(
            f"{info.path} does not record its model: only checkpoints of `isp train` do"
        )
    known = {
        "model.hf": lambda found: found is None or isinstance(found, str),
        "model.hf_overrides": lambda found: found is None or isinstance(found, dict),
        "training.dtype": lambda found: found in DTYPES,
        "data.seq_len": lambda found: type(found) is int and found > 0,
        "data.tokenizer": lambda found: isinstance(found, str),
    }
    for key, is_known in known.items():
        section, _, name = key.partition(".")
        values = kept.get(section)
        found = values.get(name) if isinstance(values, dict) else None
        if not is_known(found):
            raise ValueError(f"{info.path} is damaged: its configuration has {key}={found!r}")
    return KeyTable.of(JobConfig).upgraded(kept)


class _Plan(NamedTuple):
    """The content of an exported folder, before it is written."""

    config: dict[str, Any]
    """Content of config.json."""
    tensors: Iterator[tuple[str, Tensor]]
    """Weights with their names; each is read when the iterator reaches it."""


def _source(kept: Mapping[str, Any]) -> Path | None:
    """Return the folder `model.hf` of a run; None if the run has none or it no longer exists."""
    named = kept["model"].get("hf")
    folder = None if named is None else Path(named)
    return folder if folder is not None and (folder / CONFIG_FILE).exists() else None


def _plan(
    weights: CheckpointWeights, kept: Mapping[str, Any], source: Path | None, dtype: str
) -> _Plan:
    """Return what an export will write; `source` is the folder of `model.hf`, if there is one.

    Raises ValueError if that folder is needed but gone. Reads no weights.
    """
    if kept["model"].get("hf") is not None:
        if source is None:
            raise ValueError(
                f"model.hf={kept['model']['hf']} no longer exists, but its {CONFIG_FILE} is needed:"
                " put the folder back there"
            )
        return _plan_as_named(weights, source, dtype, kept["model"].get("hf_overrides"))
    section = _model(weights.info, kept["model"])
    model = language_model(section, kept["training"]["dtype"])
    context = kept["data"]["seq_len"]
    described = config_json(section, dtype=dtype, context=context)
    shapes = parameter_shapes(model)
    check_shapes(weights.info, shapes, model.earlier_names)
    exported = exported_rows(section, described["model_type"], shapes)
    read = _rows_of(weights, model)
    tensors = ((name, _in_dtype(read(*part), dtype)) for name, part in exported.items())
    return _Plan(described, tensors)


def _rows_of(weights: CheckpointWeights, model: TracedModel) -> Callable[[str, int, int], Tensor]:
    """Return a function that reads rows of a parameter, by its present name: (name, start, stop).

    The checkpoint may be of an earlier version, which saved it under another name.
    """
    saved = saved_rows(parameter_shapes(model), weights.shapes, model.earlier_names)
    # An export reads a stack of experts one expert after the other: keep the last tensor.
    whole = lru_cache(maxsize=1)(weights.read)

    def read(name: str, start: int, stop: int) -> Tensor:
        """Return rows `start` to `stop` of a parameter, with all dims but the last flattened."""
        first, found = saved[name].first, whole(saved[name].name)
        rows = found.flatten(0, -2) if found.dim() > 2 else found
        # Copy them: a view would keep the whole tensor alive until its file is written.
        return rows[first + start : first + stop].clone()

    return read


def plain_decoder(weights: CheckpointWeights, section: ModelConfig, dtype: str) -> nn.Module:
    """Return the plain decoder of `model/` with the weights of a checkpoint, in `dtype` on CPU."""
    traced = language_model(replace(section, compile=False), dtype, trains=False)
    check_shapes(weights.info, parameter_shapes(traced), traced.earlier_names)
    decoder, read = copy.deepcopy(traced.model), _rows_of(weights, traced)
    found: dict[int, nn.Parameter] = {}
    # A list: the loop replaces parameters.
    for name, parameter in [*decoder.named_parameters(remove_duplicate=False)]:
        if id(parameter) not in found:  # a tied parameter is read once
            # Number of rows with all dims but the last flattened, as `read` has them.
            rows = parameter.shape[: max(1, parameter.dim() - 1)].numel()
            own = _in_dtype(read(name, 0, rows), dtype).view(parameter.shape)
            found[id(parameter)] = nn.Parameter(own, requires_grad=False)
        owner, _, local = name.rpartition(".")
        decoder.get_submodule(owner).register_parameter(local, found[id(parameter)])
    return decoder.eval()


def as_saved(
    weights: CheckpointWeights, folder: str, dtype: str, overrides: Mapping[str, Any] | None
) -> Iterator[tuple[str, Tensor]]:
    """Yield a run's weights under the names, and in the shapes, of the files in `folder`.

    `folder` and `overrides` are `model.hf` and `model.hf_overrides` of the run.
    """
    from isp.models.loading import exported_tensors

    return exported_tensors(
        folder, weights.shapes, lambda name: _in_dtype(weights.read(name), dtype), overrides
    )


def _plan_as_named(
    weights: CheckpointWeights, source: Path, dtype: str, overrides: Mapping[str, Any] | None
) -> _Plan:
    """Return the plan for a run of `model.hf`: weights named as in the files of that folder."""
    require("an export of model.hf", "transformers", "safetensors")
    described = {**read_config(str(source), overrides), "torch_dtype": dtype}
    # These keys describe the weights in the source's files, not the exported ones.
    for key in ("dtype", "quantization_config"):
        described.pop(key, None)
    return _Plan(described, as_saved(weights, str(source), dtype, overrides))


def _model(info: CheckpointInfo, values: Mapping[str, Any]) -> ModelConfig:
    """Return the `model` section with the saved `values`.

    Raises ValueError if this version does not accept them.
    """
    try:
        return TypeAdapter(ModelConfig).validate_json(json.dumps(values), strict=True)
    except ValidationError as error:
        fault = error.errors()[0]
        key = ".".join(map(str, ("model", *fault["loc"])))
        removed = REMOVED_KEYS.get(key)
        why = fault["msg"] if removed is None else f"it was removed: {removed.instead}"
        raise ValueError(
            f"{info.path} is of a model that this version does not read: {key}: {why}"
        ) from None


def _in_dtype(tensor: Tensor, dtype: str) -> Tensor:
    """Return a floating-point tensor in `dtype`; other tensors stay as they are."""
    return tensor.to(getattr(torch, dtype)) if tensor.is_floating_point() else tensor


def _copy_companions(kept: Mapping[str, Any], source: Path | None, folder: Path) -> bool:
    """Copy tokenizer and model code to `folder`; return True if it then has a tokenizer."""
    from isp.models.huggingface.weight_files import copy_tokenizer

    if source is not None:
        for code in source.glob("*.py"):  # needed for models that transformers lacks
            copy_regular(code, folder / code.name)
        copy_tokenizer(source, folder)
        if any(folder.glob("tokenizer*")):
            return True
    named = Path(kept["data"]["tokenizer"])
    if named.is_dir():
        copy_tokenizer(named, folder)
    elif named.is_file():
        copy_tokenizer(named.parent, folder)
        copy_regular(named, folder / "tokenizer.json")
    return any(folder.glob("tokenizer*"))
