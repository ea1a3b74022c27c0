"""Read a Hugging Face `config.json`, and check that isp can run its model; needs no torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from isp.core.mesh.config import ParallelConfig
from isp.models.huggingface.adapter_config import with_adapter
from isp.utils.environment import require
from isp.utils.files import read_json

__all__ = [
    "beyond_positions",
    "check_layout",
    "check_model_config",
    "check_model_folder",
    "folder_sizes",
    "read_config",
    "read_text_config",
    "with_sizes",
]

_NAMES = {
    "vocab_size": ("vocab_size",),
    "hidden_size": ("hidden_size", "n_embd"),
    "num_layers": ("num_hidden_layers", "n_layer"),
    "num_heads": ("num_attention_heads", "n_head"),
    "num_kv_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
    "intermediate_size": ("intermediate_size", "n_inner"),
}
"""By key of the `model` section, its names in config.json files, the most common one first."""

_DROPOUT = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")
"""The names of attention dropout in config.json files."""


def with_sizes(section: Mapping[str, Any], decided: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `model` section, completed by the sizes in the folder `hf` and adapter keys.

    `decided`: the keys whose values the folder decides, each with the value that applies if neither
    config.json nor transformers' defaults for the model type have the key. Raises ValueError if the
    folder has no config.json, or if the section gives one of these keys another value than the
    folder.
    """
    section = with_adapter(section)
    folder, overrides = section["hf"], section.get("hf_overrides")
    found = folder_sizes(folder, overrides if isinstance(overrides, dict) else None)
    known = {**decided, **found, "hf": folder}
    faults = [
        f"model.{key}={json.dumps(value)} contradicts model.hf={folder}, whose config.json"
        f" decides: leave it out, or change config.json"
        for key, value in section.items()
        if key in decided.keys() - {"adapter", "hf_overrides"} and value != known[key]
    ]
    if faults:
        raise ValueError("\n".join(faults))
    return {**found, **section}


def folder_sizes(folder: str, overrides: Mapping[str, Any] | None = None) -> dict[str, int]:
    """Return the sizes in a folder's config.json, by their keys in a `model` section.

    Raises ValueError for a folder without one, and for `model.hf_overrides` that do not fit it.
    """
    config = read_text_config(folder, overrides)
    # Gemma 3 on the hub, for example, leaves the key out and relies on the default of its model
    # type.
    if "vocab_size" not in config:
        config = {**_defaults_of_type(folder), **config}
    return {
        key: config[name]
        for key, names in _NAMES.items()
        for name in names
        if type(config.get(name)) is int
    }


def check_model_folder(
    folder: str, parallel: ParallelConfig, overrides: Mapping[str, Any] | None = None
) -> None:
    """Check that isp can run a folder's model under `parallel`.

    `overrides`: the `model.hf_overrides` of the folder. Raises ValueError with key, value and what
    to use instead.
    """
    config = read_text_config(folder, overrides)
    for name in _DROPOUT:
        if config.get(name):
            raise ValueError(
                f"model.hf={folder}: {name}={config[name]} in config.json sets attention dropout,"
                f" which isp does not support: set it to 0"
            )
    try:
        check_model_config(config, parallel)
    except ValueError as error:
        raise ValueError(f"model.hf={folder}: {error}") from None


def check_model_config(config: Mapping[str, Any], parallel: ParallelConfig) -> None:
    """Raise ValueError for keys of a `config.json` with which results would be silently wrong."""
    kinds = config.get("layer_types") or ()
    chunk = config.get("attention_chunk_size")
    named = config.get("layer_types") is not None or config.get("model_type") == "llama4_text"
    # Llama 4 needs no layer_types in the file, because transformers derives it.
    if chunk and not named:
        raise ValueError(
            f"attention_chunk_size={chunk} in config.json needs layer_types, which says which"
            f" layers use chunked attention: add layer_types, or remove the key"
        )
    context = parallel.sequence_2D.context_size or 1
    if "chunked_attention" in kinds and context > 1:
        raise ValueError(
            f"chunked_attention in config.json cannot be combined with"
            f" parallel.sequence_2D.context_size={context}: use 1"
        )
    # These types of rotary positions compute angles from the largest position of a row. On a part
    # of the sequence a rank would see another maximum, and compute other angles.
    size = parallel.tensor.size
    for name, kind, by_layer in _rope_kinds(config):
        if (kind == "dynamic" or (kind == "longrope" and by_layer)) and size > 1:
            raise ValueError(
                f"{name} of type {kind} in config.json needs the positions of the whole sequence,"
                f" but each of parallel.tensor.size={size} ranks has only a part: use size 1, or"
                f" another type"
            )


def beyond_positions(folder: str | None, overrides: Mapping[str, Any] | None, seq_len: int) -> str:
    """Return a warning if rows are longer than the model in `folder` was trained for; else ""."""
    if folder is None:
        return ""
    trained = _trained_positions(read_text_config(folder, overrides))
    if trained is None or seq_len <= trained:
        return ""
    return (
        f"sequences of {seq_len:,} tokens have positions beyond the {trained:,} that"
        f" {folder}/config.json says the model was trained on: model.hf_overrides.rope_parameters"
        f" may extend them"
    )


def _trained_positions(found: Mapping[str, Any]) -> int | None:
    """Return the number of tokens that a config.json allows in a row; None: unknown.

    With scaled rotary positions it is the original context times the factor.
    """
    context: int | None = found.get("max_position_embeddings", found.get("n_positions"))
    if context is None:
        return None
    ropes = [found.get(name) for name in ("rope_scaling", "rope_parameters")]
    ropes += [kind for rope in ropes if isinstance(rope, Mapping) for kind in rope.values()]
    reach = [
        int(rope["factor"] * (rope.get("original_max_position_embeddings") or context))
        for rope in ropes
        if isinstance(rope, Mapping)
        and isinstance(rope.get("factor"), int | float)
        and rope.get("rope_type", rope.get("type")) != "default"
    ]
    return max(context, *reach, 0)


def check_layout(parallel: ParallelConfig, seq_len: int) -> None:
    """Check that the rows of a traced model can be split over the tensor ranks.

    `seq_len` is the number of tokens in one row of a batch. Raises ValueError with key and value.
    """
    tensor = parallel.tensor
    if seq_len % tensor.size:
        raise ValueError(
            f"parallel.tensor.size={tensor.size} must divide the sequence of {seq_len} tokens"
            f" (data.seq_len, times data.micro_bsz if data.pack)"
        )


def read_config(folder: str, overrides: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the config.json in a folder, with `model.hf_overrides` merged in.

    Raises ValueError for a folder without one, and for overrides that do not fit it.
    """
    try:
        found = read_json(Path(folder) / "config.json")
    except ValueError as error:
        raise ValueError(f"model.hf={folder}: {error}") from None
    if not overrides:
        return found
    require("model.hf_overrides", "transformers")
    # Imported here, because this import loads torch.
    from isp.models.huggingface.overrides import overridden_json

    return overridden_json(folder, overrides)


def read_text_config(folder: str, overrides: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return `read_config`, with the keys of a vision-language model's `text_config` at the top."""
    config = read_config(folder, overrides)
    text = config.get("text_config")
    return {**config, **text} if isinstance(text, dict) else config


def _defaults_of_type(folder: str) -> dict[str, Any]:
    """Return a folder's configuration with transformers' defaults for the keys it leaves out.

    Empty if transformers cannot read the folder.
    """
    try:
        # Imported here, because this import loads torch.
        from isp.models.huggingface.make import folder_config

        config = folder_config(folder)
    except (ImportError, OSError, ValueError, KeyError):
        # Return nothing here: the model is made later, and that raises an error with the cause.
        return {}
    found: dict[str, Any] = config.get_text_config(decoder=True).to_dict()
    return found


def _rope_kinds(config: Mapping[str, Any]) -> Iterator[tuple[str, Any, bool]]:
    """Yield each type of rotary positions in a config.json, as a tuple of three.

    These are the key, the type, and True if the type is for one kind of layers only.
    """
    for name in ("rope_scaling", "rope_parameters"):
        found = config.get(name)
        if isinstance(found, dict):
            for entry in (found, *found.values()):
                if isinstance(entry, dict):
                    yield name, entry.get("rope_type", entry.get("type")), entry is not found
