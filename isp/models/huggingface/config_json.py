"""A model's `config.json`, as Hugging Face has it, and what of it isp can run; needs no torch."""

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
"""Keys of the `model` section, and the names that transformers has for them."""

_DROPOUT = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")


def with_sizes(section: Mapping[str, Any], decided: Mapping[str, Any]) -> dict[str, Any]:
    """A `model` section with the sizes of the folder that its key `hf` names, and its adapter.

    `decided`: the keys that the folder decides, each with its default, which holds where neither
    config.json nor its type has the size. Raises ValueError for a folder without config.json, and
    for such keys that say other than the folder.
    """
    section = with_adapter(section)
    folder, overrides = section["hf"], section.get("hf_overrides")
    found = folder_sizes(folder, overrides if isinstance(overrides, dict) else None)
    known = {**decided, **found, "hf": folder}
    faults = [
        f"model.{key}={json.dumps(value)} is given beside model.hf={folder}, whose config.json"
        f" decides: leave it out, or change it there"
        for key, value in section.items()
        if key in decided.keys() - {"adapter", "hf_overrides"} and value != known[key]
    ]
    if faults:
        raise ValueError("\n".join(faults))
    return {**found, **section}


def folder_sizes(folder: str, overrides: Mapping[str, Any] | None = None) -> dict[str, int]:
    """Return the keys of a `model` section that the config.json in a folder has.

    Raises ValueError for a folder without one, and for `model.hf_overrides` that do not fit it.
    """
    config = read_text_config(folder, overrides)
    if "vocab_size" not in config:  # as of Gemma 3 on the hub: the default of its type
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
    """Raise ValueError, naming key, value and way out, for what isp cannot run so.

    `overrides`: the `model.hf_overrides` of the folder.
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
    """Raise ValueError for what a model of this `config.json` would compute wrongly in silence."""
    kinds = config.get("layer_types") or ()
    chunk = config.get("attention_chunk_size")
    named = config.get("layer_types") is not None or config.get("model_type") == "llama4_text"
    if chunk and not named:  # of Llama 4, transformers names them
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
    size = parallel.tensor.size
    for name, kind, by_layer in _rope_kinds(config):
        if (kind == "dynamic" or (kind == "longrope" and by_layer)) and size > 1:
            raise ValueError(
                f"{name} of type {kind} in config.json needs the positions of the whole sequence,"
                f" but each of parallel.tensor.size={size} ranks has only a part: use size 1, or"
                f" another type"
            )


def beyond_positions(folder: str | None, overrides: Mapping[str, Any] | None, seq_len: int) -> str:
    """Return a warning of rows longer than a folder's model is for; "" without."""
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
    """The tokens of a row that a config.json says the model is for; None: it does not say."""
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
    """Raise ValueError, naming key, value and way out, if a traced model cannot be split as asked.

    `seq_len` is the number of tokens in one row of a batch.
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
    from isp.models.huggingface.overrides import overridden_json  # loads torch

    return overridden_json(folder, overrides)


def read_text_config(folder: str, overrides: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return `read_config`, with the keys of a vision-language model's text model at the top."""
    config = read_config(folder, overrides)
    text = config.get("text_config")
    return {**config, **text} if isinstance(text, dict) else config


def _defaults_of_type(folder: str) -> dict[str, Any]:
    """What transformers' class takes for keys that config.json leaves out; empty if unknown."""
    try:
        from isp.models.huggingface.make import folder_config  # loads torch

        config = folder_config(folder)
    except (ImportError, OSError, ValueError, KeyError):  # refused where the model is made
        return {}
    found: dict[str, Any] = config.get_text_config(decoder=True).to_dict()
    return found


def _rope_kinds(config: Mapping[str, Any]) -> Iterator[tuple[str, Any, bool]]:
    """The kinds of rotary positions, by the key that names them, and whether it is by layer."""
    for name in ("rope_scaling", "rope_parameters"):
        found = config.get(name)
        if isinstance(found, dict):
            for entry in (found, *found.values()):
                if isinstance(entry, dict):
                    yield name, entry.get("rope_type", entry.get("type")), entry is not found
