"""Functions that replace the code of transformers modules with attention of their own.

They call `isp.attention`. Each replaces a module's forward, or its method `_attn`, which takes
queries, keys and values.

B batch, S' tokens of this rank, D hidden size, H heads, K KV heads, d head size
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from isp.core.attention.api import Relative, attention
from isp.models.huggingface.patches.mixers import windows_of
from isp.models.positions import current_positions

__all__ = ["ALIBI_FEATURES", "OWN_FORWARDS", "OWN_METHODS", "check_dropout"]

_Attended = tuple[Tensor, None]
"""The output of attention, and None for the weights, as transformers returns them."""

ALIBI_FEATURES = 8
"""The number of features that ALiBi adds to a head: two are used, but fused kernels need multiples
of eight."""


def check_dropout(module: nn.Module, dropout: float) -> None:
    """Raise ValueError if the module is in training mode and its attention `dropout` is not 0."""
    if dropout and module.training:
        raise ValueError(
            f"{type(module).__name__} uses attention dropout {dropout}, which isp does not"
            f" support: build the model with attention_dropout=0 (GPT-2: attn_pdrop=0)"
        )


def _split_heads(
    module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **options: Any
) -> _Attended:
    """Compute attention in place of `_attn`: q, k and v [B, H, S', d] -> [B, H, S', d].

    `options`: further arguments of `isp.attention`.
    """
    _check_own_dropout(module)
    # GPT-J's rotary angles are in float32, which makes q and k float32: convert them back.
    q, k = query.to(value.dtype), key.to(value.dtype)
    out = attention(*(x.transpose(1, 2) for x in (q, k, value)), **options)
    return out.transpose(1, 2), None


def _check_own_dropout(module: Any) -> None:
    """Call `check_dropout` with the module's own dropout, an attribute with one of four names."""
    names = ("attn_dropout", "attention_dropout", "attn_dropout_p", "dropout")
    found = next(getattr(module, name) for name in names if hasattr(module, name))
    check_dropout(module, float(found.p if isinstance(found, nn.Dropout) else found))


def _gpt_neo(module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> _Attended:
    """Compute GPT-Neo's attention, which is unscaled, with a window in local layers."""
    window = module.config.window_size if module.attention_type == "local" else None
    return _split_heads(module, query, key, value, window=window, scale=1.0)


def _openai_gpt(module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> list[Tensor]:
    """Compute OpenAI GPT's attention, whose keys are [B, H, d, S']."""
    scale = None if module.scale else 1.0
    return [_split_heads(module, query, key.mT, value, scale=scale)[0]]


def _bart(
    module: Any, hidden_states: Tensor, *_: Any, attn_prompt: Any = None, **__: Any
) -> _Attended:
    """Compute self-attention of BART and similar models, [B, S', D] -> [B, S', D]."""
    _check_own_dropout(module)
    if attn_prompt is not None:
        raise ValueError(
            f"{type(module).__name__} attends to a prompt of its own, which is not supported"
        )
    linears = module.q_proj, module.k_proj, module.v_proj
    q, k, v = (linear(hidden_states).unflatten(-1, (-1, module.head_dim)) for linear in linears)
    return module.out_proj(attention(q, k, v, causal=module.is_decoder).flatten(2)), None


def _bert(
    module: Any,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    sinusoidal_pos: Any = None,
    *_: Any,
    **__: Any,
) -> _Attended:
    """Compute self-attention of BERT and similar models, [B, S', D] -> [B, S', D].

    `sinusoidal_pos`: RoFormer's angles [1, 1, B, S', d]. In other models the third argument is a
    state, which is None here.
    """
    _check_own_dropout(module)
    split = (-1, module.attention_head_size)
    linears = module.query, module.key, module.value
    heads = [x(hidden_states).unflatten(-1, split).transpose(1, 2) for x in linears]
    if sinusoidal_pos is not None:
        # RoFormer rotates q and k, and with `rotary_value` v as well.
        count = 3 if module.rotary_value else 2
        angles = sinusoidal_pos[0, 0].unsqueeze(1)
        heads[:count] = module.apply_rotary_position_embeddings(angles, *heads[:count])
    q, k, v = (x.transpose(1, 2) for x in heads)
    return attention(q, k, v, causal=module.is_decoder).flatten(2), None


def _with_alibi(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> Tensor:
    """Compute attention with `bias` [B, S', H] by key and head added to its logits: [B, S', H, d].

    ALiBi's bias by distance equals a bias by the key's position plus a constant per query, which
    softmax ignores. So fused kernels can add it, as the product of further features: ones in q, the
    bias in k. The bias is split into two features in the dtype of k, so that it keeps 16 bits in
    bfloat16.
    """
    # Query heads that share a KV head have different slopes, so each gets its own k and v.
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, 2) for x in (k, v))
    # Attention multiplies the whole product by the scale: divide the bias by it.
    wide = bias.to(torch.promote_types(k.dtype, torch.float32)) / scale
    high = wide.to(k.dtype)
    # `low` is the rounding error of `high`.
    low = (wide - high).to(k.dtype)
    zeros = k.new_zeros(*bias.shape, ALIBI_FEATURES - 2)
    ones = q.new_ones(*bias.shape, ALIBI_FEATURES)
    k = torch.cat([k, high.unsqueeze(-1), low.unsqueeze(-1), zeros], -1)
    return attention(torch.cat([q, ones], -1), k, v, scale=scale)


def _slopes(build: Callable[..., Tensor], heads: int, like: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ALiBi's slope of each head, [H]: transformers' bias for a key at position 1.

    `build`: transformers' function that makes the bias; `like`: a tensor on the device to use.
    """
    two = torch.ones(1, 2, dtype=torch.int64, device=like.device)
    return build(two, heads, dtype)[:, 0, 1]


def _bloom(module: Any, hidden_states: Tensor, residual: Tensor, *_: Any, **__: Any) -> _Attended:
    """Compute BLOOM's attention with ALiBi, and add the residual: [B, S', D] -> [B, S', D]."""
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor, dropout_add

    _check_own_dropout(module)
    fused = module.query_key_value(hidden_states)
    q, k, v = fused.unflatten(-1, (module.num_heads, 3, module.head_dim)).unbind(3)
    slopes = _slopes(build_alibi_tensor, module.num_heads, q, torch.float32)
    bias = current_positions().unsqueeze(-1) * slopes
    out = module.dense(_with_alibi(q, k, v, bias, module.inv_norm_factor).flatten(2))
    return dropout_add(out, residual, module.hidden_dropout, module.training), None


def _mpt(
    module: Any, hidden_states: Tensor, position_bias: Tensor, *_: Any, **__: Any
) -> _Attended:
    """Compute MPT's attention; `position_bias` [H, 1, N] is slope x (1 - N), .., 0."""
    _check_own_dropout(module)
    qkv = module.Wqkv(hidden_states)
    if module.clip_qkv:
        qkv = qkv.clamp(min=-module.clip_qkv, max=module.clip_qkv)
    q, k, v = qkv.unflatten(-1, (3, module.n_heads, module.head_dim)).unbind(2)
    # `position_bias[:, 0, -2]` is the bias at distance 1: the slope times -1.
    bias = current_positions().unsqueeze(-1) * -position_bias[:, 0, -2]
    return module.out_proj(_with_alibi(q, k, v, bias, module.softmax_scale).flatten(2)), None


def _mpt_model(module: Any, *args: Any, **kwargs: Any) -> Any:
    """Run MPT's own forward with a dummy mask; without one, it would make a mask of S' x S'."""
    unread = torch.zeros(1, 1, 1, 1, device=current_positions().device)
    return type(module).forward(module, *args, **{**kwargs, "attention_mask": unread})


def _falcon(
    module: Any,
    hidden_states: Tensor,
    alibi: Tensor | None,
    *_: Any,
    position_embeddings: tuple[Tensor, Tensor],
    **__: Any,
) -> _Attended:
    """Compute Falcon's attention, [B, S', D] -> [B, S', D], with ALiBi or rotary positions."""
    from transformers.models.falcon.modeling_falcon import apply_rotary_pos_emb, build_alibi_tensor

    _check_own_dropout(module)
    fused = module.query_key_value(hidden_states)
    # `heads` [B, S', K, G + 2, d] has for each KV head its G query heads, then its key, then its
    # value.
    heads = fused.unflatten(-1, (module.num_kv_heads, -1, module.head_dim))
    q, k, v = heads[..., :-2, :].flatten(2, 3), heads[..., -2, :], heads[..., -1, :]
    if alibi is None:
        q, k = apply_rotary_pos_emb(q, k, *position_embeddings, unsqueeze_dim=2)
        out = attention(q, k, v)
    else:
        # transformers rounds Falcon's slopes and biases to bfloat16.
        slopes = _slopes(build_alibi_tensor, module.num_heads, q, torch.bfloat16)
        bias = (current_positions().unsqueeze(-1) * slopes).float() * module.inv_norm_factor
        out = _with_alibi(q, k, v, bias, module.inv_norm_factor)
    return module.dense(out.flatten(2)), None


def _inkling(module: Any, hidden_states: Tensor, *_: Any, **__: Any) -> _Attended:
    """Compute Inkling's attention, whose logits have a learned bias by distance."""
    linears = module.q_proj, module.k_proj, module.v_proj, module.r_proj
    q, k, v, states = (linear(hidden_states) for linear in linears)
    split = (-1, module.head_dim)
    q = module.q_norm(q.unflatten(-1, split))
    k = module.k_norm(module.k_sconv(k).unflatten(-1, split))
    v, states = module.v_sconv(v).unflatten(-1, split), states.unflatten(-1, (module.num_heads, -1))
    if not module.is_sliding:
        q, states = _scaled_by_position(module.config, q, states)
    relative = Relative(states, module.rel_logits_proj.proj)
    return module.o_proj(_attend_relative(module, q, k, v, relative).flatten(2)), None


def _inkling2(
    module: Any,
    hidden_states: Tensor,
    key_hidden_states: Tensor | None = None,
    value_hidden_states: Tensor | None = None,
    **_: Any,
) -> _Attended:
    """Compute Inkling 2's attention: that of Inkling (`_inkling`) with a sink for each query.

    In a full layer, keys and values are computed from other hidden states than the queries.
    """
    of_keys = hidden_states if key_hidden_states is None else key_hidden_states
    of_values = hidden_states if value_hidden_states is None else value_hidden_states
    if not hasattr(module, "relative_position_bias"):
        return _inkling2_before_5_24(module, hidden_states, of_keys, of_values)
    bias, positions = module.relative_position_bias, current_positions()
    q = module.q_proj(hidden_states, positions).transpose(1, 2)
    k, v = (f(x).transpose(1, 2) for f, x in ((module.k_proj, of_keys), (module.v_proj, of_values)))
    states = bias.linear(hidden_states).unflatten(-1, (module.num_heads, -1))
    relative = Relative(bias.norm(states, positions), bias.proj, module.sink_proj(hidden_states))
    out = _attend_relative(module, q, k, v, relative).flatten(2)
    return module.o_proj(out, hidden_states), None


def _inkling2_before_5_24(
    module: Any, hidden_states: Tensor, of_keys: Tensor, of_values: Tensor
) -> _Attended:
    """Compute Inkling 2's attention in transformers before 5.24, with plain linear projections."""
    linears = module.q_proj, module.r_proj, module.gate_proj, module.sink_proj
    q, states, gate, sinks = (linear(hidden_states) for linear in linears)
    k, v = module.k_proj(of_keys), module.v_proj(of_values)
    # In sliding layers a convolution has the same taps for all tokens; in full layers it computes
    # them from the hidden states.
    if module.is_sliding:
        k, v = module.k_sconv(k), module.v_sconv(v)
    else:
        k, v = module.k_sconv(k, of_keys), module.v_sconv(v, of_values)
    split = (-1, module.head_dim)
    q, k = module.q_l2_clip(q.unflatten(-1, split)), module.k_l2_clip(k.unflatten(-1, split))
    v = module.v_norm(v.unflatten(-1, split).float()).to(v.dtype)
    states = module.rel_l2_clip(states.unflatten(-1, (module.num_heads, -1)))
    if not module.is_sliding:
        q, states = _scaled_by_position(module.config, q, states)
    relative = Relative(states, module.rel_logits_proj.proj, sinks)
    out = _attend_relative(module, q, k, v, relative).flatten(2)
    return module.o_proj((out.float() * gate.float().sigmoid()).to(out.dtype)), None


def _inkling2_residual(
    module: Any, block_states: Tensor, partial_block_states: Tensor
) -> tuple[Tensor, ...]:
    """Attend from each token to its own states in earlier blocks, without mixing tokens.

    Since transformers 5.24 the module calls the attention interface for this. isp would take that
    call for attention between tokens, so the forward is replaced.
    """
    states = torch.cat([block_states, partial_block_states.unsqueeze(-2)], -2).float()
    states = module.norm(states)  # [B, S', N, D], of N states
    size = states.shape[-1]
    query = module.query.float().view(-1, size).expand(*states.shape[:-2], -1, -1)
    out = F.scaled_dot_product_attention(query, states, states, scale=size**-0.5)
    return out.unbind(-2)


def _attend_relative(module: Any, q: Tensor, k: Tensor, v: Tensor, relative: Relative) -> Tensor:
    """Compute attention with the bias `relative` by distance, the module's window and scale."""
    check_dropout(module, module.attention_dropout)
    return attention(q, k, v, window=module.sliding_window, scale=module.scaling, relative=relative)


def _scaled_by_position(config: Any, q: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
    """Return q and states [B, S', H, ..], multiplied by 1 + alpha log(position / floor) or by 1."""
    if config.log_scaling_n_floor is None:
        return q, states
    lengths = (current_positions() + 1).float() / config.log_scaling_n_floor
    tau = 1.0 + config.log_scaling_alpha * lengths.clamp(min=1.0).log()[..., None, None]
    return (q.float() * tau).to(q.dtype), (states.float() * tau).to(states.dtype)


def _dynamic_convolution(
    module: Any, hidden_states: Tensor, dynamic_input: Tensor, *_: Any, **__: Any
) -> Tensor:
    """Compute Inkling 2's convolution, [B, S', D] -> [B, S', D]; each token has its own taps.

    Tap i is multiplied with the token i places before.
    """
    # Compute in float32, as transformers does.
    num_taps, x = module.conv_kernel_size, hidden_states.float()
    heads = (module.num_heads, -1)
    taps = module.weight_proj(dynamic_input).float().unflatten(-1, (module.num_heads, num_taps))
    static = module.static_weight.float().T.unflatten(0, heads)  # [H, d, K]
    windows = windows_of(x, num_taps).unflatten(2, heads)
    mixed = (windows * (static + taps.unsqueeze(3))).sum(-1).flatten(2)
    out: Tensor = (mixed + x) / math.sqrt(2 * num_taps + 1)
    return out.to(hidden_states.dtype)


class _InFloat32:
    """A stand-in for a module whose parameters are read in float32, as transformers keeps them."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._module, name)
        return found.float() if isinstance(found, nn.Parameter) else found


def _in_float32(module: Any, *args: Any) -> Any:
    """Run the module's own forward with its parameters in float32."""
    return type(module).forward(_InFloat32(module), *args)


def _gemma4(module: Any, input_ids: Tensor, position_ids: Tensor, **_: Any) -> Any:
    """Run Gemma 4 on text only, in place of the model's own forward.

    That forward reads from the weight of the embedding, which is sharded.
    """
    from transformers.models.gemma4.modeling_gemma4 import Gemma4ModelOutputWithPast

    text, config = module.language_model, module.config.get_text_config()
    image, video, sound = module.get_placeholder_mask(input_ids)
    ids = torch.where(image | video | sound, config.pad_token_id, input_ids)
    embedded, of_layers = text.embed_tokens(ids), None
    if config.hidden_size_per_layer_input:
        of_layers = text.get_per_layer_inputs(ids, embedded)
    keys = {"position_ids": position_ids, "use_cache": False}
    output = text(inputs_embeds=embedded, per_layer_inputs=of_layers, **keys)
    return Gemma4ModelOutputWithPast(last_hidden_state=output.last_hidden_state)


def _linear(module: Any, x: Tensor) -> Tensor:
    """Compute Falcon's linear, x [.., I] -> [.., O], with `F.linear`, a call that isp can shard."""
    return F.linear(x, module.weight, module.bias)


OWN_FORWARDS: dict[str, Callable[..., Any]] = {
    "bloom.modeling_bloom.BloomAttention": _bloom,
    "falcon.modeling_falcon.FalconAttention": _falcon,
    "falcon.modeling_falcon.FalconLinear": _linear,
    "gemma4.modeling_gemma4.Gemma4Model": _gemma4,
    "inkling.modeling_inkling.InklingAttention": _inkling,
    "inkling2.modeling_inkling2.Inkling2BlockAttentionResidual": _inkling2_residual,
    "inkling2.modeling_inkling2.Inkling2DynamicShortConvolution": _dynamic_convolution,
    "inkling2.modeling_inkling2.Inkling2FullAttention": _inkling2,
    "inkling2.modeling_inkling2.Inkling2SlidingAttention": _inkling2,
    "inkling2.modeling_inkling2.Inkling2TopKRouter": _in_float32,
    "megatron_bert.modeling_megatron_bert.MegatronBertSelfAttention": _bert,
    "mpt.modeling_mpt.MptAttention": _mpt,
    "mpt.modeling_mpt.MptModel": _mpt_model,
    "mvp.modeling_mvp.MvpAttention": _bart,
    "rembert.modeling_rembert.RemBertSelfAttention": _bert,
    "roformer.modeling_roformer.RoFormerSelfAttention": _bert,
    "trocr.modeling_trocr.TrOCRAttention": _bart,
    "xglm.modeling_xglm.XGLMAttention": _bart,
}
"""By name of a class in transformers.models, the function that replaces its forward."""

OWN_METHODS: dict[str, Callable[..., Any]] = {
    "codegen.modeling_codegen.CodeGenAttention": _split_heads,
    "gpt_neo.modeling_gpt_neo.GPTNeoSelfAttention": _gpt_neo,
    "gpt_neox_japanese.modeling_gpt_neox_japanese.GPTNeoXJapaneseAttention": _split_heads,
    "gptj.modeling_gptj.GPTJAttention": _split_heads,
    "openai.modeling_openai.Attention": _openai_gpt,
}
"""By name of a class in transformers.models, the function that replaces its method `_attn`."""
