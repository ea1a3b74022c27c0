"""`model.hf_overrides`: keys of a folder's config.json with other values.

The folder stays as it is: its config.json is read with the overrides merged in, here alone.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

from isp.models.make import folder_config, made, parameters_on_meta, without_implementations
from isp.settings.json_file import read_json
from isp.settings.suggestion import nearest

__all__ = ["OverrideError", "check_overrides", "overridden_config", "overridden_json"]

_ROPE, _EARLIER_ROPE = "rope_parameters", "rope_scaling"
_ORIGINAL = "original_max_position_embeddings"
_FIXED = {"architectures", "auto_map", "dtype", "model_type", "quantization_config"}
_FIXED |= {"torch_dtype", "transformers_version"}
"""Keys of config.json that describe the files."""


class OverrideError(ValueError):
    """`model.hf_overrides` does not fit the folder; says key, value and way out."""


def overridden_config(folder: str | Path, overrides: Mapping[str, Any]) -> Any:
    """Return the configuration of a folder for transformers, with `model.hf_overrides`.

    Raises OverrideError for overrides that do not fit it, and else as `folder_config` does.
    """
    return _overridden(folder, overrides)[0]


def overridden_json(folder: str | Path, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json of a folder with `model.hf_overrides` merged in.

    Raises OverrideError for overrides that do not fit it, and ValueError for a folder that
    transformers does not read.
    """
    try:
        return _overridden(folder, overrides)[1]
    except OverrideError:
        raise
    except (KeyError, OSError, TypeError, ValueError) as error:
        first = next(iter(str(error).strip().splitlines()), "")
        raise ValueError(
            f"model.hf={folder}: transformers {version('transformers')} cannot read its"
            f" config.json: {first}"
        ) from None


def check_overrides(folder: str | Path, overrides: Mapping[str, Any]) -> None:
    """Raise OverrideError for `model.hf_overrides` that change names or shapes of weights."""
    before = _shapes(folder_config(folder))
    if _shapes(overridden_config(folder, overrides)) == before:
        return
    for key, value in overrides.items():  # one of them may be the cause
        after = _shapes(overridden_config(folder, {key: value}))
        for name in {**before, **after}:
            there, here = before.get(name, "absent"), after.get(name, "absent")
            if there != here:
                raise OverrideError(
                    f"model.hf_overrides.{key}={json.dumps(value)}: {name} is {there} in {folder},"
                    f" and would be {here}: leave it out, since the weights decide"
                )
    raise OverrideError(
        f"model.hf_overrides={json.dumps(overrides)} changes shapes of the weights in {folder}:"
        f" leave it out"
    )


def _shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a model's parameters; those of tied ones by the first name."""
    with parameters_on_meta():
        model = made(config)
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def _overridden(folder: str | Path, overrides: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return a folder's configuration and its config.json, both with `overrides`."""
    config, found = folder_config(folder), read_json(Path(folder) / "config.json")
    shown = f"model.hf_overrides={json.dumps(overrides)}"
    text, section = config.get_text_config(decoder=True), found
    if text is not config:
        named = [name for name in config.sub_configs if getattr(config, name, None) is text]
        if not named:
            raise OverrideError(
                f"{shown} is not supported for {type(config).__name__}: change {folder}/config.json"
            )
        section = found[named[0]] = found.get(named[0]) or {}
    for key, value in overrides.items():
        name = _known_name(text, key, value)
        if name == _ROPE:
            section[_ROPE] = _with_rope(text, overrides)
            section.pop(_EARLIER_ROPE, None)  # which transformers prefers
            section.pop("rope_theta", None)  # is in rope_parameters
            continue
        for alias, of_class in text.attribute_map.items():
            if of_class == name:
                section.pop(alias, None)
        section[name] = _merged(section.get(name), value)
    values = copy.deepcopy(found)
    # transformers reads some folders as a type of another name.
    values |= {"model_type": config.model_type, "name_or_path": str(folder)}
    try:
        changed: Any = type(config).from_dict(values)
    except Exception as error:  # from the validation of any class
        raise OverrideError(
            f"{shown}: {type(text).__name__} of transformers {version('transformers')} refuses it:"
            f" {' '.join(str(error).split())}"
        ) from None
    for key, value in overrides.items():
        own = getattr(changed.get_text_config(decoder=True), _known_name(text, key, value))
        if isinstance(value, bool | int | float | str) and own != value:
            raise OverrideError(
                f"model.hf_overrides.{key}={json.dumps(value)} has no effect: other keys of"
                f" {folder}/config.json give {own}"
            )
    return without_implementations(changed), found


def _known_name(text: Any, key: str, value: Any) -> str:
    """Return the name that the class of the configuration `text` has for `key`.

    Raises OverrideError if it has none.
    """
    from transformers.modeling_rope_utils import RopeParameters

    names = {field.name for field in fields(text)} - _FIXED
    known = {name: name for name in names}
    known |= {alias: name for alias, name in text.attribute_map.items() if name in names}
    if _ROPE in names:
        known[_EARLIER_ROPE] = _ROPE
    if key in known:
        return known[key]
    given, near = f"model.hf_overrides.{key}={json.dumps(value)}", nearest(key, sorted(known), 0.6)
    if key in _FIXED:
        raise OverrideError(f"{given} describes the files of the folder: leave it out")
    if _ROPE in names and key in RopeParameters.__annotations__:
        raise OverrideError(f"{given} belongs in {_ROPE}: use model.hf_overrides.{_ROPE}.{key}")
    raise OverrideError(
        f"{given}: {type(text).__name__} of transformers has no such key:"
        f" {f'did you mean {near[0]}?' if near else 'leave it out'}"
    )


def _with_rope(text: Any, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotary positions of the configuration `text` with those of `overrides`.

    What transformers has read from the file is in its newest form: one mapping with the base, or
    one for each kind of layers. Raises OverrideError for a key that would have no effect.
    """
    key, *others = (name for name in (_ROPE, _EARLIER_ROPE) if name in overrides)
    path, value = f"model.hf_overrides.{key}", overrides[key]
    if others:
        raise OverrideError(f"{path}={json.dumps(value)} is given as {_EARLIER_ROPE}, too: use one")
    if not isinstance(value, dict):
        raise OverrideError(f"{path}={json.dumps(value)} must be a mapping, as {{rope_theta: 1e6}}")
    found: dict[str, Any] = copy.deepcopy(text.rope_parameters) or {}
    kinds = [name for name, of_one in found.items() if isinstance(of_one, dict)]
    if not kinds:
        return _with_rope_of_one(text, found, value, path, overrides)
    for kind, of_one in value.items():
        if kind not in kinds or not isinstance(of_one, dict):
            raise OverrideError(
                f"{path}.{kind}={json.dumps(of_one)}: the model has rotary positions for each kind"
                f" of layers: give a mapping for {' or '.join(kinds)}"
            )
        found[kind] = _with_rope_of_one(text, found[kind], of_one, f"{path}.{kind}", overrides)
    return found


def _with_rope_of_one(
    text: Any,
    found: Mapping[str, Any],
    given: Mapping[str, Any],
    path: str,
    overrides: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the rotary positions `found` with those that are `given` by the key `path`."""
    from transformers.modeling_rope_utils import RopeParameters

    known = sorted({*RopeParameters.__annotations__, *found, "type"})
    for name, value in given.items():
        if name not in known:
            near = nearest(name, known, 0.6)
            raise OverrideError(
                f"{path}.{name}={json.dumps(value)}: rotary positions of transformers have no such"
                f" key: {f'did you mean {near[0]}?' if near else 'leave it out'}"
            )
    changed = {name: value for name, value in found.items() if name != "type"}
    changed |= {"rope_type" if name == "type" else name: x for name, x in given.items()}
    # transformers would take the longer context for that of the training.
    scales = changed.get("rope_type") in ("llama3", "longrope", "yarn")
    if scales and changed.get(_ORIGINAL) is None and not hasattr(text, _ORIGINAL):
        if (longer := overrides.get("max_position_embeddings")) is not None:
            raise OverrideError(
                f"{path}={json.dumps(given)} needs {_ORIGINAL} beside"
                f" model.hf_overrides.max_position_embeddings={longer}: the folder has"
                f" {text.max_position_embeddings}"
            )
        changed[_ORIGINAL] = text.max_position_embeddings
    return changed


def _merged(below: Any, value: Any) -> Any:
    """Return `value` merged into `below`, key by key where both are mappings."""
    if not (isinstance(below, dict) and isinstance(value, dict)):
        return copy.deepcopy(value)
    return below | {key: _merged(below.get(key), of_key) for key, of_key in value.items()}
