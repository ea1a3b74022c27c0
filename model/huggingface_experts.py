"""Experts in the config.json of models of Hugging Face, read and written.

Mixtral's have no expert that all tokens share, Qwen2-MoE's one with a gate of its own, Qwen3-MoE's
none, and norms of q and k.

Source: `configuration_*.py` of mixtral, qwen2_moe and qwen3_moe in transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from isp.settings.section import KeyRole, defaults_of
from model.config import ModelConfig

__all__ = [
    "MIXTRAL",
    "OF_EXPERTS",
    "QWEN2_MOE",
    "QWEN3_MOE",
    "count_of",
    "expert_values",
    "experts_json",
    "family_of_experts",
    "shown",
    "unsupported",
]

MIXTRAL, QWEN2_MOE, QWEN3_MOE = "mixtral", "qwen2_moe", "qwen3_moe"
OF_EXPERTS = (MIXTRAL, QWEN2_MOE, QWEN3_MOE)
"""Families with experts."""

_EXPERT_KEYS = (
    "num_experts",
    "experts_per_token",
    "moe_intermediate_size",
    "norm_topk_prob",
    "shared_expert_intermediate_size",
    "num_dense_layers",
)


def expert_values(found: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of `model` on experts, of a config.json; ValueError if the decoder has none such."""
    family, defaults = found["model_type"], defaults_of(ModelConfig, KeyRole.MODEL)
    values = {key: defaults[key] for key in _EXPERT_KEYS}
    if family not in OF_EXPERTS:
        return values
    mixtral, dense = family == MIXTRAL, found.get("mlp_only_layers") or []
    if found.get("decoder_sparse_step", 1) != 1 or sorted(dense) != [*range(len(dense))]:
        raise unsupported(
            f"mlp_only_layers={dense} and"
            f" decoder_sparse_step={found.get('decoder_sparse_step', 1)}; isp's own decoder"
            f" supports layers without experts only before all others"
        )
    counted = "num_local_experts" if "num_experts" not in found else "num_experts"
    values |= {
        "num_experts": count_of(found, counted),
        "experts_per_token": count_of(found, "num_experts_per_tok"),
        "moe_intermediate_size": count_of(
            found, "intermediate_size" if mixtral else "moe_intermediate_size"
        ),
        "norm_topk_prob": mixtral or bool(found.get("norm_topk_prob", False)),
        "num_dense_layers": len(dense),
    }
    if family == QWEN2_MOE:
        values["shared_expert_intermediate_size"] = count_of(
            found, "shared_expert_intermediate_size"
        )
    if found.get("output_router_logits"):
        values["router_aux_loss_coef"] = float(found.get("router_aux_loss_coef", 0.001))
    return values


def experts_json(model: ModelConfig, family: str) -> dict[str, Any]:
    """What config.json says of experts; nothing in a family without them."""
    if family not in OF_EXPERTS:
        return {}
    found: dict[str, Any] = {"num_experts_per_tok": model.experts_per_token}
    if family == MIXTRAL:
        return found | {
            "num_local_experts": model.num_experts,
            "intermediate_size": model.expert_size,
        }
    if family == QWEN2_MOE:
        found["shared_expert_intermediate_size"] = model.shared_expert_intermediate_size
        found["qkv_bias"] = model.qkv_bias
    return found | {
        "num_experts": model.num_experts,
        "moe_intermediate_size": model.expert_size,
        "norm_topk_prob": model.norm_topk_prob,
        "mlp_only_layers": [*range(model.num_dense_layers)],
        "decoder_sparse_step": 1,
    }


def family_of_experts(model: ModelConfig) -> str:
    """The family whose experts are the model's; ValueError if there is none."""
    shared = model.shared_expert_intermediate_size > 0
    if shared is not model.qk_norm:
        return QWEN2_MOE if shared else QWEN3_MOE
    if shared or model.qkv_bias or model.num_dense_layers or not model.norm_topk_prob:
        raise ValueError(
            "export supports no model of transformers with this combination: Qwen2-MoE has"
            " model.shared_expert_intermediate_size but no model.qk_norm, Qwen3-MoE the reverse,"
            " and Mixtral neither, nor model.qkv_bias or model.num_dense_layers, and"
            " model.norm_topk_prob=true"
        )
    return MIXTRAL


def unsupported(what: str) -> ValueError:
    """The error for what config.json has and the decoder does not compute."""
    return ValueError(f"config.json has {what}: use model.hf, which trains the model unchanged")


def count_of(found: Mapping[str, Any], key: str) -> int:
    """A number of a config.json, at least 1; ValueError for anything else."""
    value = found.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"config.json has {key}={shown(value)}, which must be a whole number")
    return value


def shown(value: object) -> str:
    """As YAML and JSON have it."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
