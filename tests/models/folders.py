"""Small folders of Hugging Face models, and jobs that train them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers

__all__ = ["small_config", "write_folder", "write_job"]

_SIZES = {
    "vocab_size": 272,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
}
_OWN = {
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "gpt2": {
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 128,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    },
    "qwen3_next": {
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    },
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention", "mlp"],
        "num_hidden_layers": 3,
        "mamba_num_heads": 4,
        "mamba_head_dim": 8,
        "n_groups": 2,
        "ssm_state_size": 8,
        "conv_kernel": 4,
    },
    "deepseek_v3": {
        "q_lora_rank": 12,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
        "head_dim": 4,
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
    },
}
_OWN["deepseek_v32"] = {
    **_OWN["deepseek_v3"],
    "num_hidden_layers": 3,
    "index_topk": 7,
    "index_n_heads": 3,
    "index_head_dim": 8,
}

_JOB = """
job: {{name: {name}, dump_folder: {folder}/out}}
model: {{hf: {model}, checkpoint: 0.5}}
data: {{source: {folder}/text.txt, seq_len: 32, micro_bsz: 2}}
optimizer: {{lr: 1.0e-2}}
lr_scheduler: {{min_lr_factor: 1.0}}
training: {{steps: 5, device: cpu, dtype: float64, seed: 3}}
"""


def small_config(kind: str, **changes: Any) -> Any:
    """The configuration of a small model of this type."""
    return transformers.AutoConfig.for_model(kind, **{**_SIZES, **_OWN.get(kind, {}), **changes})


def write_folder(
    folder: Path, kind: str, *, weights: bool = True, own_names: bool = False, **changes: Any
) -> Path:
    """A folder with a small model; its files have the names of the hub unless `own_names`."""
    config = small_config(kind, **changes)
    if weights:
        model = transformers.AutoModelForCausalLM.from_config(config)
        model.save_pretrained(folder, save_original_format=not own_names)
    else:
        config.save_pretrained(folder)
    return folder


def write_job(folder: Path, model: Path, name: str = "job") -> Path:
    """A job of `model` in `folder`, of 5 steps in float64."""
    words = "".join(f"word {i} of many\n" for i in range(400))
    (folder / "text.txt").write_text(words)
    path = folder / f"{name}.yaml"
    path.write_text(_JOB.format(folder=folder, model=model, name=name))
    return path
