"""The architectures of transformers that are tried, and the keys that their defaults leave out."""

from __future__ import annotations

from typing import Any

from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

__all__ = ["ARCHITECTURES", "MECHANISMS", "config_of"]

_EXPERTS = {"n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6}

_INDEXER = {
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 256,
    "indexer_budget": 16,
    "indexer_compress_ratio": 4,
}

_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * i for i in range(48)],
    "long_factor": [2.0 + i for i in range(48)],
    "original_max_position_embeddings": 4096,
}

_PART = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}

_DECODER = {"is_decoder": True}

_ENCODERS = """bert bert-generation big_bird camembert data2vec-text electra ernie megatron-bert
rembert roberta roberta-prelayernorm roformer xlm-roberta xlm-roberta-xl"""

_GIVEN: dict[str, dict[str, Any]] = {
    # what transformers' own defaults leave out
    "bamba": {"attn_layer_indices": [9, 18, 27]},
    "dbrx": {"attn_config": {"kv_n_heads": 8, "rope_theta": 500000, "clip_qkv": 8}},
    "deepseek_v2": {"first_k_dense_replace": 1, "num_experts_per_tok": 6},
    "dots1": {"first_k_dense_replace": 1, **_EXPERTS},
    "ernie4_5_moe": {"moe_layer_start_index": 1},
    "granitemoehybrid": {"layer_types": [*["linear_attention"] * 7, "full_attention"] * 4},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}
    },
    "hunyuan_v1_dense": {"head_dim": 128, "num_key_value_heads": 8},
    "hunyuan_v1_moe": {"head_dim": 128, "num_key_value_heads": 8},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
    "emu3": {"vocabulary_map": {"<image>": 3}},
    "phi4_multimodal": {"vision_config": _PART, "audio_config": {**_PART, "num_blocks": 1}},
    "moss_transcribe_diarize": {"audio_config": {"d_model": 32, "encoder_layers": 1}},
    "qwen4_exp": {"text_config": _INDEXER},
    "qwen4_exp_text": _INDEXER,
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "reformer": {**_DECODER, "axial_pos_embds": False},
    "xlstm": {"embedding_dim": 32, "hidden_size": 32, "num_heads": 4},
    # of encoders, the form that does not see later tokens
    **dict.fromkeys(_ENCODERS.split(), _DECODER),
    "xmod": {**_DECODER, "default_language": "en_XX"},
    "roc_bert": {
        **_DECODER,
        "shape_vocab_size": 40,
        "shape_embed_dim": 8,
        "pronunciation_vocab_size": 40,
        "pronunciation_embed_dim": 8,
    },
    # as published, where the defaults have less
    "phi3 (longrope)": {"rope_parameters": _LONGROPE, "max_position_embeddings": 131072},
    "falcon (alibi)": {"alibi": True, "multi_query": False},
    "falcon (40B)": {"new_decoder_architecture": True, "num_kv_heads": 8},
    "lfm2 (conv)": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8},
    "minimax_m3_vl_text (sparse)": {
        "layer_types": [*["full_attention"] * 3, *["minimax_m3_sparse"] * 57]
    },
    "qwen2 (window)": {"use_sliding_window": True, "max_window_layers": 16},
    "deepseek_v2 (groups)": {
        "first_k_dense_replace": 1,
        "num_experts_per_tok": 6,
        "topk_method": "group_limited_greedy",
        "n_group": 8,
        "topk_group": 3,
    },
}


def _angles(*sections: int, **more: Any) -> dict[str, Any]:
    """Rotary positions of a model that sees, as published."""
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [*sections], **more}
    return {"text_config": {"rope_parameters": rope}}


_SEEING = """apertus1p5 aria cohere2_vision cosmos3_edge cosmos3_omni deepseek_vl deepseek_vl_hybrid
exaone4_5 granite_docling hy_v4_vl hyperclovax_vision_v2 idefics2 idefics3 inkling2 internvl janus
kimi_k25 kosmos-2.5 lfm3_vl lighton_ocr llava llava_next llava_next_video llava_onevision
minicpm_ocr minicpmv4_6 minicpmv4_7 minimax_m3_vl mistral3 muse_glimmer muse_spark nemotron_h_omni
ovis2 pp_chart2table qianfan_ocr qwen3_omni_moe_thinker qwen3_vl qwen3_vl_moe smolvlm
unlimited_ocr video_llama_3 video_llava vipllava"""

_SHARED = ["full", *["full", "shared", "shared", "shared"] * 18][:72]
"""Layers of Mistral Large 4 with an indexer of their own; others use an earlier layer's choice."""

_TEXT_PARTS: dict[str, dict[str, Any]] = {
    **{f"{name} (text part)": {} for name in _SEEING.split()},
    "aya_vision (text part)": {
        "vision_config": {"model_type": "siglip_vision_model", "num_attention_heads": 16}
    },
    "cohere_compass (text part)": {"text_config": _GIVEN["cohere_compass_text"]},
    "deepseek_ocr2 (text part)": {
        "text_config": {
            "mlp_layer_types": ["dense", *["sparse"] * 31],
            "num_experts_per_tok": 6,
            "num_key_value_heads": 32,
        }
    },
    "ernie4_5_vl_moe (text part)": _angles(22, 22, 20),
    "glm46v (text part)": _angles(8, 12, 12, partial_rotary_factor=0.5),
    "glm4v (text part)": _angles(8, 12, 12, partial_rotary_factor=0.5),
    "glm4v_moe (text part)": _angles(8, 12, 12, partial_rotary_factor=0.5),
    "glm_ocr (text part)": _angles(16, 24, 24),
    "glmga (text part)": _angles(8, 12, 12, partial_rotary_factor=0.5),
    "granite4_vision (text part)": {"deepstack_layer_map": [[-1, 0]], "downsample_rate": "4/8"},
    "hunyuan_vl (text part)": {
        "text_config": {"head_dim": 128, **_angles(16, 16, 16, 16)["text_config"]}
    },
    "lfm2_vl (text part)": {"text_config": _GIVEN["lfm2 (conv)"]},
    "mistral3 (text part of Mistral Small 4)": {"text_config": {"model_type": "mistral4"}},
    "mistral_large4 (text part)": {},
    "mistral_large4 (text part, shared)": {
        "text_config": {
            "indexer_types": _SHARED,
            # of 8 layers, those with positions have the keys of the first, the others of the fourth
            "kv_source_layers": [i - i % 8 + (3 if i % 4 == 3 else 0) for i in range(72)],
        }
    },
    "paddleocr_vl (text part)": _angles(16, 24, 24),
    "qwen2_5_omni_thinker (text part)": _angles(16, 24, 24),
    "qwen2_5_vl (text part)": _angles(16, 24, 24),
    "qwen2_vl (text part)": _angles(16, 24, 24),
    "step3p7 (text part)": {
        "text_config": {
            "layer_types": ["full_attention", *["sliding_attention"] * 3] * 11 + ["full_attention"],
            "sliding_window": 512,
            "attention_other_setting": {"num_attention_heads": 96},
        }
    },
}
"""Of types that see, and whose text has no causal class of its own."""

ARCHITECTURES: dict[str, dict[str, Any]] = {
    name: keys
    for name, keys in {
        **{name: {} for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES},
        **_GIVEN,
        **_TEXT_PARTS,
    }.items()
    if name.split()[0] in CONFIG_MAPPING_NAMES  # older releases lack some types
}
"""Causal types of the installed transformers, with the keys that their defaults leave out."""


MECHANISMS = {
    "roc_bert": "an encoder's code as a decoder",
    "gpt_neox": "queries, keys and values of one linear",
    "gemma4_text": "sizes of their own in each layer",
    "bloom": "ALiBi",
    "opt": "a table of positions with rows that stand for none",
    "phi3 (longrope)": "positions that know of long rows",
    "inkling2_text": "a bias by distance, sinks of queries, taps of tokens",
    "diffllama": "two values for each key",
    "llama4_text": "chunked attention",
    "lfm2 (conv)": "convolutions",
    "qwen3_next": "the gated delta rule",
    "ernie4_5_moe": "a bias of the router",
    "longcat_flash": "two attentions in a block, experts of nothing",
    "deepseek_v2 (groups)": "experts in groups",
    "kimi_linear": "the gated delta rule with a decay for each number, beside latent attention",
    "nemotron_h": "Mamba2, blocks without mixing",
    "zamba2": "Mamba2, a transformer that several blocks share",
    "falcon_h1": "Mamba2 and attention in one block",
    "jamba": "Mamba",
    "zamba": "Mamba with weights of each head, beside linears",
    "minimax": "a forward that is registered",
    "bart": "a table of positions that counts by itself",
    "gpt_neo": "a method that is registered, windows",
    "cohere2": "attention beside the MLP, layers without positions",
    "gemma2": "windows, a cap on scores",
    "hy_v4": "keys that an indexer chooses, also for the next layer, and sinks",
    "mistral_large4 (text part, shared)": "latents and chosen keys of a layer before, an indexer"
    " that reads positions",
    "minimax_m3_vl_text (sparse)": "blocks of keys that are chosen for each KV head",
    "gpt_oss": "windows, sinks and experts with biases",
    "deepseek_v3": "latent attention and experts",
    "llama": "grouped KV heads, a gated MLP",
    "gpt2": "transposed linears, a table of positions",
    "mixtral": "experts in each block",
}
"""A type for each mechanism, and what it is here for."""


def config_of(architecture: str) -> Any:
    """The configuration of an architecture of `ARCHITECTURES`."""
    from transformers import AutoConfig

    model_type = architecture.split()[0]
    try:
        return AutoConfig.for_model(model_type, **ARCHITECTURES[architecture])
    except Exception as error:  # somebody else's code: anything may come
        reason = " ".join(str(error).split())
        raise ValueError(f"no configuration of type {model_type}: {reason}") from error
