"""Merge `model.hf_overrides`, new values for keys of a folder's config.json, into what is read.

The folder is not changed. All code that reads the config.json with overrides calls this module.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Mapping, Set
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

from isp.models.huggingface.make import folder_config, new_model, without_implementations
from isp.models.meta import parameters_on_meta
from isp.utils.files import read_json
from isp.utils.text import first_line, nearest

__all__ = ["OverrideError", "check_overrides", "overridden_config", "overridden_json"]

_ROPE, _EARLIER_ROPE = "rope_parameters", "rope_scaling"
"""The key of rotary positions in config.json, now and before transformers 5."""
_ORIGINAL = "original_max_position_embeddings"
_FIXED = {"architectures", "auto_map", "dtype", "model_type", "quantization_config"}
_FIXED |= {"torch_dtype", "transformers_version"}
"""Keys of config.json that describe the folder's files and so cannot be overridden."""
_OF_ALL_TYPES = {"rope_theta", "partial_rotary_factor", "mrope_section", _ORIGINAL}
"""Keys of rotary positions that remain valid when the type is changed."""
_WINDOWS = {"sliding_window", "use_sliding_window", "max_window_layers", "layer_types"}
"""Keys that decide which layers have a window."""


class OverrideError(ValueError):
    """The error for an override that does not fit the folder, with key, value and what to do."""


def overridden_config(folder: str | Path, overrides: Mapping[str, Any] | None) -> Any:
    """Return a folder's configuration as an object of transformers, with `overrides` if any.

    Raises OverrideError for overrides that do not fit the folder, and the errors of
    `folder_config`.
    """
    return _overridden(folder, overrides)[0] if overrides else folder_config(folder)


def overridden_json(folder: str | Path, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json of a folder as a dict, with `model.hf_overrides` merged in.

    Raises OverrideError for overrides that do not fit the folder, and ValueError for a folder that
    transformers cannot read.
    """
    try:
        return _overridden(folder, overrides)[1]
    except OverrideError:
        raise
    except (KeyError, OSError, TypeError, ValueError) as error:
        raise ValueError(
            f"model.hf={folder}: transformers {version('transformers')} cannot read its"
            f" config.json: {first_line(error)}"
        ) from None


def check_overrides(folder: str | Path, overrides: Mapping[str, Any]) -> None:
    """Raise OverrideError for `model.hf_overrides` that change names or shapes of weights."""
    before = _shapes(folder_config(folder))
    if _shapes(overridden_config(folder, overrides)) == before:
        return
    # Try each key alone, so that the error names the key at fault.
    for key, value in overrides.items():
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
    """Return by name the shape of each parameter; a tied weight counts under its first name."""
    with parameters_on_meta():
        model = new_model(config)
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def _overridden(folder: str | Path, overrides: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return a folder's configuration object and its config.json, both with `overrides`.

    Raises OverrideError if overrides do not fit or have no effect.
    """
    config, found = folder_config(folder), read_json(Path(folder) / "config.json")
    shown = f"model.hf_overrides={json.dumps(overrides)}"
    text, section = config.get_text_config(decoder=True), found
    if text is not config:
        named = [name for name in config.sub_configs if getattr(config, name, None) is text]
        if not named:
            raise OverrideError(
                f"{shown} is not supported for {type(config).__name__}: change {folder}/config.json"
            )
        # If the file has no section for its text model, the keys of that model are at the top of
        # the file: make the section.
        section = found[named[0]] = found.get(named[0]) or text.to_dict()
    names = {key: _known_name(text, key, value) for key, value in overrides.items()}
    # Only the outer configuration decides whether the head is tied: this key would do nothing.
    if text is not config and "tie_word_embeddings" in names:
        raise OverrideError(
            f"{shown}: tie_word_embeddings is a key of the whole model, not of its text model:"
            f" change {folder}/config.json"
        )
    for key, value in overrides.items():
        if (name := names[key]) != _ROPE:
            # Remove other names (aliases) of the key from the file's values: if both were there,
            # transformers would ignore one.
            for alias, of_class in text.attribute_map.items():
                if of_class == name:
                    section.pop(alias, None)
            section[name] = _merged(section.get(name), value)
    # Rewrite rope_parameters even if only max_position_embeddings is overridden: some rotary types
    # compute their scale from the context of the folder, so `_with_rope_of_one` writes it down.
    if _ROPE in names.values() or "max_position_embeddings" in names.values():
        section[_ROPE] = _with_rope(text, overrides)
        # If the older key stayed, transformers would read it in place of rope_parameters.
        section.pop(_EARLIER_ROPE, None)
        # rope_parameters contains the base already.
        section.pop("rope_theta", None)
    values = copy.deepcopy(found)
    # transformers may read the folder as a type with another name than the file's model_type.
    values |= {"model_type": config.model_type, "name_or_path": str(folder)}
    try:
        # This call also checks the types and values of the keys.
        changed: Any = type(config).from_dict(values)
    except Exception as error:  # the class's own checks may raise anything
        raise OverrideError(
            f"{shown}: {type(text).__name__} of transformers {version('transformers')} refuses it:"
            f" {' '.join(str(error).split())}"
        ) from None
    own = changed.get_text_config(decoder=True)
    for key, value in overrides.items():
        _check_effect(f"model.hf_overrides.{key}", value, getattr(own, names[key]), folder)
    _check_windows(own, {*names.values()}, shown, folder)
    return without_implementations(changed), found


def _check_effect(path: str, given: Any, found: Any, folder: str | Path) -> None:
    """Raise OverrideError if the value `found` in the new configuration is not the one `given`.

    `path`: the key of the override. Mappings are compared key by key.
    """
    if isinstance(given, dict) and isinstance(found, dict):
        for name, value in given.items():
            own = "rope_type" if name == "type" else name
            _check_effect(f"{path}.{name}", value, found.get(own), folder)
    elif given is not None and found != (tuple(given) if isinstance(found, tuple) else given):
        raise OverrideError(
            f"{path}={json.dumps(given)} has no effect: other keys of {folder}/config.json give"
            f" {found}"
        )


def _check_windows(text: Any, overridden: Set[str], shown: str, folder: str | Path) -> None:
    """Raise OverrideError if the `overridden` keys make window and `layer_types` contradict."""
    kinds = getattr(text, "layer_types", None)
    if not kinds or overridden.isdisjoint(_WINDOWS):
        return
    slides, window = "sliding_attention" in kinds, getattr(text, "sliding_window", None)
    if slides != (window is not None):
        raise OverrideError(
            f"{shown}: sliding_window would be {json.dumps(window)}, and layer_types of"
            f" {folder}/config.json has {'some' if slides else 'no'} layers with a window: override"
            f" layer_types, too"
        )


def _known_name(text: Any, key: str, value: Any) -> str:
    """Return the field of the configuration `text` that the override `key` sets.

    `key`: the field's name or an alias. Raises OverrideError if there is no such field, or it may
    not be overridden.
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


def _with_rope(text: Any, overrides: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return rope_parameters of the configuration `text` with the overrides merged in.

    transformers has already converted older keys: rope_parameters is one mapping that includes the
    base, or has one mapping for each kind of layer. Returns None for a model without rotary
    positions. Raises OverrideError for a key that would have no effect.
    """
    key, *others = [name for name in (_ROPE, _EARLIER_ROPE) if name in overrides] or [_ROPE]
    path, value = f"model.hf_overrides.{key}", overrides.get(key, {})
    if others:
        raise OverrideError(f"{path}={json.dumps(value)} is given as {_EARLIER_ROPE}, too: use one")
    if not isinstance(value, dict):
        raise OverrideError(f"{path}={json.dumps(value)} must be a mapping, as {{rope_theta: 1e6}}")
    found: dict[str, Any] = copy.deepcopy(getattr(text, _ROPE, None) or {})
    if not (found or value):
        # The model has no rotary positions.
        return None
    kinds = [name for name, of_one in found.items() if isinstance(of_one, dict)]
    if not kinds:
        return _with_rope_of_one(text, found, value, path, overrides)
    for kind, of_one in value.items():
        if kind not in kinds or not isinstance(of_one, dict):
            raise OverrideError(
                f"{path}.{kind}={json.dumps(of_one)}: the model has rotary positions for each kind"
                f" of layers: give a mapping for {' or '.join(kinds)}"
            )
    for kind in kinds:
        given = value.get(kind, {})
        found[kind] = _with_rope_of_one(text, found[kind], given, f"{path}.{kind}", overrides)
    return found


def _with_rope_of_one(
    text: Any,
    found: Mapping[str, Any],
    given: Mapping[str, Any],
    path: str,
    overrides: Mapping[str, Any],
) -> dict[str, Any]:
    """Merge the rotary parameters that are `given` into those `found`, and return the result.

    `path`: the key of the override, for errors.

    Raises OverrideError for unknown keys, for values that are null or not finite, and for a longer
    context that would change positions of type dynamic.
    """
    from transformers.modeling_rope_utils import RopeParameters

    known = sorted({*RopeParameters.__annotations__, *found, "type"})
    for name, value in given.items():
        if name not in known:
            near = nearest(name, known, 0.6)
            raise OverrideError(
                f"{path}.{name}={json.dumps(value)}: rotary positions of transformers have no such"
                f" key: {f'did you mean {near[0]}?' if near else 'leave it out'}"
            )
        if value is None or (isinstance(value, float) and not math.isfinite(value)):
            raise OverrideError(f"{path}.{name}={json.dumps(value)} has no value: leave it out")
    changed = {name: value for name, value in found.items() if name != "type"}
    new = {"rope_type" if name == "type" else name: value for name, value in given.items()}
    kind = new.get("rope_type", changed.get("rope_type"))
    # The override changes the type: drop the factors of the old type, which the new one does not
    # have.
    if kind != changed.get("rope_type"):
        changed = {name: value for name, value in changed.items() if name in _OF_ALL_TYPES}
    changed |= new
    longer = overrides.get("max_position_embeddings")
    if kind == "dynamic" and longer is not None:
        raise OverrideError(
            f"model.hf_overrides.max_position_embeddings={longer}: positions of type dynamic are"
            f" scaled from the {text.max_position_embeddings} on that the folder has: leave it out,"
            f" or change {path}.rope_type"
        )
    # Write down the folder's context as the original one. Otherwise transformers would take a
    # longer context from the overrides as the original.
    scales = kind in ("llama3", "longrope", "yarn")
    if scales and changed.get(_ORIGINAL) is None and not hasattr(text, _ORIGINAL):
        changed[_ORIGINAL] = text.max_position_embeddings
    return changed


def _merged(below: Any, value: Any) -> Any:
    """Return `value`, or `below` with the keys of `value` merged in if both are mappings."""
    if not (isinstance(below, dict) and isinstance(value, dict)):
        return copy.deepcopy(value)
    return below | {key: _merged(below.get(key), of_key) for key, of_key in value.items()}
