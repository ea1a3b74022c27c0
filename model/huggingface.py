"""Models of Hugging Face that the decoder computes: their config.json, read and written.

A folder is read to begin from, and a run is written as one. Loads no torch.

Source: `configuration_*.py` of llama, mistral, mixtral, qwen2, qwen2_moe, qwen3 and qwen3_moe and
`modeling_rope_utils.py` in transformers; of InternLM2, the file that is published beside its
weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from isp.layers.rope_scaling import RopeScaling, RopeScalingType
from isp.settings.hub import download_hint
from isp.settings.json_file import read_json
from isp.settings.section import KeyRole, defaults_of
from model.config import ModelConfig
from model.huggingface_experts import (
    MIXTRAL,
    OF_EXPERTS,
    QWEN2_MOE,
    QWEN3_MOE,
    count_of,
    expert_values,
    experts_json,
    family_of_experts,
    shown,
    unsupported,
)

__all__ = [
    "CONFIG_FILE",
    "INTERNLM2",
    "config_json",
    "model_values",
    "trained_positions",
    "with_init_from",
]

CONFIG_FILE = "config.json"
_LLAMA, _MISTRAL, _QWEN2, _QWEN3, INTERNLM2 = "llama", "mistral", "qwen2", "qwen3", "internlm2"
_ARCHITECTURES = {
    _LLAMA: "LlamaForCausalLM",
    _MISTRAL: "MistralForCausalLM",
    _QWEN2: "Qwen2ForCausalLM",
    _QWEN3: "Qwen3ForCausalLM",
    INTERNLM2: "InternLM2ForCausalLM",
    MIXTRAL: "MixtralForCausalLM",
    QWEN2_MOE: "Qwen2MoeForCausalLM",
    QWEN3_MOE: "Qwen3MoeForCausalLM",
}
_WINDOWED = (_MISTRAL, _QWEN2, _QWEN3, *OF_EXPERTS)
"""Families that can say a sliding window."""

_ADAPTABLE = {"init_std", "rope_scaling", "rope_theta", "sliding_window"}
_NOT_OF_FOLDERS = {"adapter"}
_OF_THE_WEIGHTS = [
    key
    for key in defaults_of(ModelConfig, KeyRole.MODEL)
    if key not in _ADAPTABLE | _NOT_OF_FOLDERS
]
"""Keys that belong to the weights: a folder's hold, other values are refused."""

_SCALING_KEYS = {
    RopeScalingType.LINEAR: (),
    RopeScalingType.NTK: (),
    RopeScalingType.YARN: (
        "attention_factor",
        "mscale",
        "mscale_all_dim",
        "beta_fast",
        "beta_slow",
        "truncate",
    ),
    RopeScalingType.LLAMA3: ("low_freq_factor", "high_freq_factor"),
}
"""Fields beside `factor` and the original context, by names that are the same there and here."""

# -- config.json to keys -----------------------------------------------------------------------


def with_init_from(section: Mapping[str, Any]) -> dict[str, Any]:
    """A `model` section with the values of its `init_from` folder where it gives none itself.

    Raises ValueError, a line for each fault, if the folder is not of a model that the decoder
    computes, or the section has other values of `_OF_THE_WEIGHTS`.
    """
    if section.get("init_from") is None:
        return dict(section)
    folder = Path(section["init_from"])
    if section.get("preset") is not None:
        raise ValueError(
            f"model.preset={section['preset']} cannot be combined with model.init_from={folder},"
            f" which gives the sizes: leave the preset out"
        )
    if not folder.is_dir():
        raise ValueError(
            f"model.init_from={folder} is not a folder: name the folder of a model's weights"
            f"{download_hint(folder)}"
        )
    try:
        found = model_values(read_json(folder / CONFIG_FILE))
    except ValueError as error:
        raise ValueError(f"model.init_from={folder}: {error}") from None
    own = {
        key: value
        for key, value in section.items()
        if not (value is None and key in ("num_kv_heads", "head_dim"))
    }
    faults = [
        f"model.{key}={shown(own[key])}: the model in {folder} has {shown(found[key])}: leave it"
        f" out"
        for key in _OF_THE_WEIGHTS
        if key in own and own[key] != found[key]
    ]
    if faults:
        raise ValueError("\n".join(faults))
    scaling = own.get("rope_scaling")
    if isinstance(scaling, dict) and "type" not in scaling:  # a value of the folder's is changed
        own["rope_scaling"] = {**(found["rope_scaling"] or {}), **scaling}
    return {**found, **own}


def model_values(found: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of `model` that a config.json stands for.

    Raises ValueError for what the decoder does not compute, naming it.
    """
    family = found.get("model_type")
    if family not in _ARCHITECTURES:
        raise ValueError(
            f"{CONFIG_FILE} has model_type={family}, but isp's own decoder supports only"
            f" {', '.join(_ARCHITECTURES)}: use model.hf, which trains other models unchanged"
        )
    _refuse(found)
    heads, hidden = count_of(found, "num_attention_heads"), count_of(found, "hidden_size")
    head_dim = found.get("head_dim") or (128 if family == _QWEN3 else hidden // heads)
    theta, scaling = _rope_values(found)
    return {
        "vocab_size": count_of(found, "vocab_size"),
        "hidden_size": hidden,
        "num_layers": count_of(found, "num_hidden_layers"),
        "num_heads": heads,
        "num_kv_heads": found.get("num_key_value_heads") or heads,
        "head_dim": head_dim,
        "intermediate_size": count_of(found, "intermediate_size"),
        "norm_eps": found.get("rms_norm_eps", 1e-6),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "sliding_window": _window(found),
        "qkv_bias": family == _QWEN2 or (family == QWEN2_MOE and found.get("qkv_bias", True)),
        "qk_norm": family in (_QWEN3, QWEN3_MOE),
        "tie_embeddings": bool(found.get("tie_word_embeddings", False)),
        **expert_values(found),
    }


def _refuse(found: Mapping[str, Any]) -> None:
    """Raise ValueError for an option that the decoder does not have."""
    without = {
        "hidden_act": ("silu", None),
        "attention_bias": (False, None),
        "mlp_bias": (False, None),
        "bias": (False, None),
        "attention_dropout": (0, None),
        "partial_rotary_factor": (1, None),
        "router_jitter_noise": (0, None),
        "quantization_config": (None,),
    }
    for key, computed in without.items():
        if found.get(key) not in computed:
            value = shown(found[key])
            raise unsupported(f"{key}={value}, which isp's own decoder does not support")


def _window(found: Mapping[str, Any]) -> int | None:
    """The window of all layers; None if there is none."""
    family, window = found["model_type"], found.get("sliding_window")
    always = family in (_MISTRAL, MIXTRAL)
    if family not in _WINDOWED or not (always or found.get("use_sliding_window")):
        return None
    kinds = found.get("layer_types")
    if kinds is None and family == QWEN2_MOE:
        raise unsupported(
            "use_sliding_window and no layer_types, so every second layer has a window; isp's own"
            " decoder has one in all layers or in none"
        )
    if kinds is None and family in (_QWEN2, _QWEN3) and window is not None:
        first, layers = found.get("max_window_layers", 28), found["num_hidden_layers"]
        kinds = ["full_attention"] * min(first, layers) + ["sliding_attention"] * (layers - first)
    if kinds is None or window is None:
        return window
    if len(set(kinds)) > 1:
        raise unsupported(
            f"a window in {kinds.count('sliding_attention')} of {len(kinds)} layers; isp's own"
            f" decoder has one in all layers or in none"
        )
    return window if kinds[0] == "sliding_attention" else None


def _rope_values(found: Mapping[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """`rope_theta` and `rope_scaling`, from what transformers 4 and 5 write."""
    rope = found.get("rope_parameters") or found.get("rope_scaling") or {}
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        raise unsupported(
            f"different rotary positions for kinds of layers, {rope}; isp's own decoder has one"
            f" kind"
        )
    default = 1e6 if found["model_type"] == MIXTRAL else 1e4
    theta = float(rope.get("rope_theta", found.get("rope_theta") or default))
    kind = rope.get("rope_type", rope.get("type", "default"))
    known = {"linear": "linear", "dynamic": "ntk", "yarn": "yarn", "llama3": "llama3"}
    if kind == "default" and rope.get("partial_rotary_factor", 1) == 1:
        return theta, None
    if kind not in known or rope.get("partial_rotary_factor", 1) != 1:
        raise unsupported(
            f"rotary positions {shown(dict(rope))}; isp's own decoder supports default,"
            f" {', '.join(known)} on whole heads"
        )
    values: dict[str, Any] = {"type": known[kind]}
    context = found.get("max_position_embeddings")
    original = rope.get("original_max_position_embeddings") or context
    if kind == "dynamic":
        # The base grows with a row that is longer than the context; up to it nothing changes.
        values |= {"target_length": context}
        original = context
    if kind != "linear":
        values |= {"original_max_position_embeddings": original}
    factor = rope.get("factor")
    if factor is None and original and context:
        factor = context / original
    values["factor"] = factor if factor is None else float(factor)
    for key in _SCALING_KEYS[RopeScalingType(values["type"])]:
        if rope.get(key) is not None:
            values[key] = rope[key] if isinstance(rope[key], bool) else float(rope[key])
    return theta, values


# -- keys to config.json -----------------------------------------------------------------------


def config_json(
    model: ModelConfig, *, dtype: str, context: int, like: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The config.json of a model that was trained on rows of `context` tokens.

    `like` is that of the folder which the run began from; what holds still is kept. Raises
    ValueError if it has become another model's, and for a decoder that no family computes.
    """
    kept = dict(like or {})
    if like is None or (model.sliding_window and like["model_type"] not in _WINDOWED):
        tokens = {key: kept[key] for key in kept if key.endswith("_token_id")}
        found, was = {**_fresh(model), **tokens}, None
    else:
        found, was = kept, model_values(kept)
        _check_same(model, was)
    if was is None or was["sliding_window"] != model.sliding_window:
        found.pop("layer_types", None)
        found.update(_window_json(model, found["model_type"]))
    scaling = None if was is None or was["rope_scaling"] is None else was["rope_scaling"]
    before = None if scaling is None else RopeScaling(**scaling)
    reached = max(context, found.get("max_position_embeddings") or 0)
    if was is None or (was["rope_theta"], before) != (model.rope_theta, model.rope_scaling):
        found.pop("rope_parameters", None)
        found.update(_rope_json(model))
        found["max_position_embeddings"] = max(reached, _reach(model.rope_scaling))
    elif scaling is None:  # a scaling that stays may be made of it
        found["max_position_embeddings"] = reached
    found.pop("dtype", None)
    return {**found, "torch_dtype": dtype}


def trained_positions(found: Mapping[str, Any]) -> int | None:
    """The tokens of a row that a config.json says the model is for; None: it does not say."""
    context: int | None = found.get("max_position_embeddings", found.get("n_positions"))
    if context is None:
        return None
    ropes = [found.get(name) for name in ("rope_scaling", "rope_parameters")]
    ropes += [kind for rope in ropes if isinstance(rope, Mapping) for kind in rope.values()]
    reach = [
        int(rope["factor"] * (rope.get("original_max_position_embeddings") or context))
        for rope in ropes
        if isinstance(rope, Mapping) and isinstance(rope.get("factor"), int | float)
    ]
    return max(context, *reach, 0)


def _check_same(model: ModelConfig, was: Mapping[str, Any]) -> None:
    own = {**vars(model), "num_kv_heads": model.kv_heads, "head_dim": model.head_size}
    for key in _OF_THE_WEIGHTS:
        if own[key] != was[key]:
            raise ValueError(
                f"model.init_from={model.init_from} has changed: its {CONFIG_FILE} says"
                f" {key}={shown(was[key])}, the run had {shown(own[key])}"
            )


def _fresh(model: ModelConfig) -> dict[str, Any]:
    family = _family(model)
    return {
        "architectures": [_ARCHITECTURES[family]],
        "model_type": family,
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_size,
        "intermediate_size": model.intermediate_size,
        "hidden_act": "silu",
        "rms_norm_eps": model.norm_eps,
        "tie_word_embeddings": model.tie_embeddings,
        "bos_token_id": None,
        "eos_token_id": None,
        **experts_json(model, family),
    }


def _family(model: ModelConfig) -> str:
    """The family that computes what `model` does."""
    if model.qkv_bias and model.qk_norm:
        raise ValueError(
            "export supports no model of transformers with both model.qkv_bias and model.qk_norm:"
            " train with one of them"
        )
    if model.num_experts:
        return family_of_experts(model)
    if model.qk_norm:
        return _QWEN3
    if model.qkv_bias:
        return _QWEN2
    plain = model.sliding_window is None and model.hidden_size % model.num_heads == 0
    return _LLAMA if plain else _MISTRAL


def _window_json(model: ModelConfig, family: str) -> dict[str, Any]:
    window = model.sliding_window
    if family in (_MISTRAL, MIXTRAL):
        return {"sliding_window": window}
    if family in OF_EXPERTS and window is not None:  # by default every second layer of Qwen2-MoE
        kinds = ["sliding_attention"] * model.num_layers
        return {"use_sliding_window": True, "sliding_window": window, "layer_types": kinds}
    if family in _WINDOWED:
        used = window is not None
        layers = 0 if used else model.num_layers
        return {
            "use_sliding_window": used,
            "sliding_window": window,
            "max_window_layers": layers,
        }
    return {}


def _rope_json(model: ModelConfig) -> dict[str, Any]:
    """As transformers 4 wrote it, which 5 reads, too."""
    scaling, theta = model.rope_scaling, model.rope_theta
    if scaling is None or scaling.type is RopeScalingType.NONE:
        return {"rope_theta": theta, "rope_scaling": None}
    if scaling.type is RopeScalingType.NTK:
        # Their `dynamic` changes with the length of a row; at one length it is another base.
        return {"rope_theta": theta * scaling.base_factor(model.head_size), "rope_scaling": None}
    values: dict[str, Any] = {"rope_type": str(scaling.type), "factor": scaling.factor}
    if scaling.type is not RopeScalingType.LINEAR:
        original = scaling.original_max_position_embeddings
        values["original_max_position_embeddings"] = original
    given = {key: vars(scaling)[key] for key in _SCALING_KEYS[scaling.type]}
    values |= {key: value for key, value in given.items() if value is not None}
    return {"rope_theta": theta, "rope_scaling": values}


def _reach(scaling: RopeScaling | None) -> int:
    """The context that a scaling was made for."""
    if scaling is None:
        return 0
    return int(scaling.factor * scaling.original_max_position_embeddings)
