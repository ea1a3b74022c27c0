"""A Llama's weights as InternLM2's published `modeling_internlm2.py` lays them out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from einops import rearrange
from safetensors.torch import save_file

__all__ = ["AS_LLAMA", "save_as_internlm2"]

AS_LLAMA = {
    "vocab_size": 96,
    "num_attention_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
}
_SAME = ("vocab_size", "hidden_size", "intermediate_size", "rms_norm_eps", "num_hidden_layers")
_SAME += ("num_attention_heads", "num_key_value_heads", "max_position_embeddings", "hidden_act")
_ENDS = {"embed_tokens": "tok_embeddings", "norm": "norm"}
_OF_BLOCK = {
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
}


def save_as_internlm2(llama: Any, folder: Path) -> None:
    """Write a model of transformers as it is published."""
    config, given = llama.config, llama.state_dict()
    names = {f"model.{theirs}": f"model.{own}" for theirs, own in _ENDS.items()}
    names["lm_head"] = "output"
    tensors = {}
    for block in (f"model.layers.{i}" for i in range(config.num_hidden_layers)):
        names |= {f"{block}.{theirs}": f"{block}.{own}" for theirs, own in _OF_BLOCK.items()}
        qkv = [
            rearrange(
                given[f"{block}.self_attn.{x}_proj.weight"],
                "(g h d) i -> g h d i",
                g=config.num_key_value_heads,
                d=config.head_dim,
            )
            for x in "qkv"
        ]
        tensors[f"{block}.attention.wqkv.weight"] = torch.cat(qkv, 1).flatten(0, 2)
    tensors |= {f"{own}.weight": given[f"{theirs}.weight"] for theirs, own in names.items()}
    values = {
        **{key: getattr(config, key) for key in _SAME},
        "architectures": ["InternLM2ForCausalLM"],
        "model_type": "internlm2",
        "bias": False,
        "rope_theta": 1000.0,
        "rope_scaling": {"type": "dynamic", "factor": 2.0},
        "tie_word_embeddings": False,
        "torch_dtype": "float64",
    }
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(values))
