"""The matrices that a model's weights consist of, as an update of whole ones takes them."""

from __future__ import annotations

import pytest
from torch import nn
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
)

from isp.models.build import trained_layouts
from isp.models.model import TracedModel
from isp.parallel.layout import Matrices

SIZES = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
TOKENS = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
LATENT = {
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 4,
}


def _phi() -> nn.Module:
    keys = {**SIZES, **TOKENS, "num_key_value_heads": 1, "intermediate_size": 24}
    return Phi3ForCausalLM(Phi3Config(**keys))


def _gpt2() -> nn.Module:
    none = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)
    keys = {"vocab_size": 64, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64}
    return GPT2LMHeadModel(GPT2Config(**keys, **none, **TOKENS))


def _neox() -> nn.Module:
    return GPTNeoXForCausalLM(GPTNeoXConfig(**SIZES, **TOKENS, intermediate_size=24))


def _oss() -> nn.Module:
    keys = {"num_key_value_heads": 2, "head_dim": 4, "intermediate_size": 24}
    return GptOssForCausalLM(GptOssConfig(**SIZES, **TOKENS, **keys, num_local_experts=4))


def _deepseek() -> nn.Module:
    keys = {"num_key_value_heads": 4, "intermediate_size": 24, "moe_intermediate_size": 8}
    config = DeepseekV3Config(**SIZES, **TOKENS, **keys, **EXPERTS, **LATENT)
    config.first_k_dense_replace = 1
    return DeepseekV3ForCausalLM(config)


OUTSIDE, LINEAR = Matrices(of_block=False), Matrices()
CASES = {
    _phi: {
        "model.embed_tokens.weight": OUTSIDE,
        "lm_head.weight": OUTSIDE,
        "model.norm.weight": None,
        "model.layers.1.self_attn.qkv_proj.weight": Matrices(sizes=(16, 4, 4), heads=6),
        "model.layers.1.self_attn.o_proj.weight": LINEAR,
        "model.layers.1.mlp.gate_up_proj.weight": Matrices(sizes=(24, 24)),
    },
    _gpt2: {
        "transformer.wte.weight": None,  # tied
        "transformer.h.0.attn.c_attn.weight": Matrices(dim=-1, sizes=(16, 16, 16), heads=6),
        "transformer.h.0.attn.c_attn.bias": None,
    },
    # q, k and v of each head lie together: no cut in three, but one per head
    _neox: {"gpt_neox.layers.1.attention.query_key_value.weight": Matrices(heads=12)},
    _oss: {
        "model.layers.1.self_attn.k_proj.weight": Matrices(heads=2),
        "model.layers.1.mlp.router.weight": None,
        "model.layers.1.mlp.experts.gate_up_proj": Matrices(dim=-1),  # every other feature
    },
    _deepseek: {
        "model.layers.1.self_attn.kv_a_proj_with_mqa.weight": Matrices(sizes=(8, 4)),
        "model.layers.1.self_attn.q_b_proj.weight": Matrices(heads=4),
        "model.layers.1.mlp.experts.gate_up_proj": Matrices(sizes=(8, 8)),
        "model.layers.1.mlp.experts.down_proj": LINEAR,
        "model.layers.1.mlp.gate.weight": None,
    },
}


@pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__)
def test_matrices_of_models(make) -> None:
    """Catches fused weights that are taken for one matrix, and tables, routers and tied weights
    that are taken for matrices of blocks."""
    found = trained_layouts(TracedModel(make()))
    assert {name: found[name].matrices for name in CASES[make]} == CASES[make]
