"""`AdapterConfig`, the section `model.adapter`, also read from a PEFT folder; loads no torch."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from isp.core.section import Count, KeyRole, section
from isp.utils.files import read_json

__all__ = ["ADAPTER_FILE", "AdapterConfig", "with_adapter"]

ADAPTER_FILE = "adapter_config.json"
"""The file of PEFT with an adapter's keys."""


@section("model.adapter", KeyRole.MODEL)
class AdapterConfig:
    """`model.adapter`: PEFT's LoRA on the model of `model.hf`, whose base weights are frozen.

    The keys are those of PEFT's LoraConfig.
    """

    folder: Annotated[str | None, KeyRole.PLACE] = None
    """Folder of an adapter saved by PEFT to start from, which also sets the other keys. `model.hf`
    may name such a folder instead, if its base model is a local folder."""
    r: Count = 8
    """Rank of the adapters."""
    lora_alpha: Count = 8
    """The adapter's output is scaled by lora_alpha / r."""
    lora_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout probability of the adapter's input in training."""
    target_modules: str | tuple[str, ...] | None = None
    """Modules that get an adapter: a list of name suffixes such as [q_proj], a regular expression
    for the whole name such as .*q_proj, or all-linear; null: PEFT's choice for the model."""
    exclude_modules: str | tuple[str, ...] | None = None
    """Modules that get no adapter, given in the same ways as target_modules."""
    target_parameters: tuple[str, ...] | None = None
    """Parameters that get an adapter, by name suffix: stacks of experts such as
    mlp.experts.gate_up_proj. Each call computes the sum of a stack and its adapter's product for
    all experts, which stays in memory until backward in blocks that are not recomputed."""
    bias: Literal["none", "all", "lora_only"] = "none"
    """Biases that are trained as well: none, all, or those of modules with adapters."""
    use_rslora: bool = False
    """Scale the adapter's output by lora_alpha / sqrt(r) instead of lora_alpha / r."""
    use_dora: bool = False
    """DoRA is not supported: must be false."""

    def __post_init__(self) -> None:
        if self.use_dora:
            raise ValueError(
                "model.adapter.use_dora=true: DoRA needs the norms of whole weights, of which"
                " each rank holds only a part: use false (LoRA)"
            )
        for key in ("target_modules", "exclude_modules"):
            if isinstance(pattern := getattr(self, key), str):
                try:
                    re.compile(pattern)
                except re.error as error:
                    raise ValueError(
                        f"model.adapter.{key}={json.dumps(pattern)} is no regular expression"
                        f" ({error}): escape its special characters, or use a list of name suffixes"
                    ) from None


_NAMES = tuple(name for name in AdapterConfig.__dataclass_fields__ if name != "folder")
"""The keys that PEFT's adapter_config.json and this section share."""
_OF_NO_EFFECT = {
    *("alora_invocation_tokens", "auto_mapping", "base_model_name_or_path", "inference_mode"),
    *("megatron_core", "peft_type", "peft_version", "qalora_group_size", "revision", "task_type"),
}
"""Keys of PEFT's adapter_config.json that do not change what LoRA computes."""


def with_adapter(section: Mapping[str, Any]) -> dict[str, Any]:
    """Return a `model` section with the base model and the keys of its adapter's folder, if any.

    If `hf` is an adapter's folder, it becomes `adapter.folder`, and `hf` the base model that the
    folder names. Raises ValueError for a folder without an adapter or a base model, for an adapter
    that is not supported, and for keys that contradict the folder.
    """
    hf, adapter = section["hf"], section.get("adapter") or {}
    # PEFT also saves adapters into the folder of a model: with a config.json it is the model.
    if (Path(hf) / ADAPTER_FILE).is_file() and not (Path(hf) / "config.json").is_file():
        base = read_json(Path(hf) / ADAPTER_FILE).get("base_model_name_or_path")
        if not isinstance(base, str) or not (Path(base) / "config.json").is_file():
            raise ValueError(
                f"model.hf={hf} is an adapter's folder, and base_model_name_or_path="
                f"{json.dumps(base)} in its {ADAPTER_FILE} is no folder of a model here: set"
                f" model.hf to the base model's folder, and model.adapter.folder={hf}"
            )
        section, adapter = {**section, "hf": base}, {"folder": hf, **adapter}
    if not isinstance(adapter, dict) or not isinstance(folder := adapter.get("folder"), str):
        return dict(section)
    found = _read(folder)
    for key, value in adapter.items():
        if key in found and value != found[key]:
            raise ValueError(
                f"model.adapter.{key}={json.dumps(value)} contradicts model.adapter.folder="
                f"{folder}, which has {json.dumps(found[key])}: leave it out"
            )
    return {**section, "adapter": {**found, **adapter}}


def _read(folder: str) -> dict[str, Any]:
    """Return the keys of `model.adapter` that an adapter's folder has.

    Raises ValueError if the folder has no adapter, or one with unsupported features of PEFT.
    """
    try:
        file = read_json(Path(folder) / ADAPTER_FILE)
    except ValueError as error:
        raise ValueError(f"model.adapter.folder={folder}: {error}") from None
    odd = {name: value for name, value in file.items() if name not in {*_NAMES, *_OF_NO_EFFECT}}
    # Other initializations, such as pissa, also change the base model's weights.
    drawn = odd.pop("init_lora_weights", True)
    if drawn not in (True, False, "gaussian"):
        odd["init_lora_weights"] = drawn
    # A key with null, false or {} is a feature that the adapter does not use: ignore it.
    odd = {name: value for name, value in odd.items() if value}
    if file.get("peft_type") != "LORA":
        odd["peft_type"] = file.get("peft_type")
    if odd:
        name, value = next(iter(odd.items()))
        raise ValueError(
            f"model.adapter.folder={folder}: {name}={json.dumps(value)} in {ADAPTER_FILE} is not"
            f" supported: only LoRA with the keys {', '.join(_NAMES)} is"
        )
    found = {name: file[name] for name in _NAMES if name in file}
    if isinstance(alpha := found.get("lora_alpha"), float) and alpha.is_integer():
        found["lora_alpha"] = int(alpha)
    # PEFT writes these sets in any order: sort them, so that equal configurations compare equal.
    for name in ("target_modules", "exclude_modules"):
        if isinstance(found.get(name), list):
            found[name] = sorted(found[name])
    return found
