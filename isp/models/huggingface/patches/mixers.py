"""Forwards that replace those of transformers modules with convolutions and scans of their own.

They call `isp.core.mixers`, which distributes the mixing of tokens over ranks.

B batch, S' tokens of this rank, D hidden size, C channels, H heads, d head size, K taps
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from isp.core.mixers.api import causal_conv1d, state_space_scan
from isp.models.roles import is_linear

__all__ = ["OWN_MIXERS", "windows_of"]

_LEAST_TIME = 1e-12
"""The smallest dt of a scan whose input is divided by dt."""


def windows_of(x: Tensor, num_taps: int) -> Tensor:
    """Return each token with the K - 1 tokens before it: [B, S', C] -> [B, S', C, K].

    Index i of the last dim is the token i places before in the same document, or zeros. Computed as
    a convolution with one-hot taps, because `causal_conv1d` also gets the tokens of other ranks.
    """
    taps = torch.eye(num_taps, device=x.device, dtype=x.dtype).flip(1)[1:]  # [K - 1, K]
    before = causal_conv1d(x.repeat(1, 1, num_taps - 1), taps.repeat_interleave(x.shape[-1], 0))
    return torch.stack([x, *before.chunk(num_taps - 1, -1)], -1)


def _minimax(module: Any, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    """Compute MiniMax's linear attention, [B, S', D] -> [B, S', D], as a state-space scan.

    transformers computes it in a loop over blocks of tokens. The recurrence
    S_t = exp(-slope) S_(t-1) + k_t v_t^T, o_t = S_t^T q_t is Mamba2's scan with dt = 1.
    """
    heads = module.num_attention_heads
    qkv = module.act_fn(module.qkv_proj(hidden_states)).unflatten(-1, (heads, -1))
    q, k, v = qkv.split(module.head_dim, dim=-1)  # [B, S', H, d]
    slope = module.slope_rate.flatten().to(qkv.dtype)
    out = state_space_scan(v, torch.ones_like(v[..., 0]), -slope, k, q)
    gate = module.output_gate(hidden_states).sigmoid()
    return module.out_proj(gate * module.norm(out.flatten(2))), None


def _recurrent_gemma(
    module: Any, input_states: Tensor, position_ids: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, None]:
    """Compute RecurrentGemma's convolution and RG-LRU, [B, S', D] -> [B, S', D].

    transformers computes the RG-LRU in a loop over tokens. In each channel h_t = a_t h_(t-1) + x_t,
    which is a selective scan with a state of one number and a_t = exp(-dt_t).
    """
    from transformers.models.recurrent_gemma.modeling_recurrent_gemma import SqrtBoundDerivative

    y = module.act_fn(module.linear_y(input_states))
    convolution, unit = module.conv_1d, module.rg_lru
    taps = convolution.weight.squeeze(1)
    x = causal_conv1d(module.linear_x(input_states), taps, convolution.bias)
    heads = x.unflatten(-1, (unit.num_attention_heads, -1))
    input_gate, gate = (
        (torch.einsum("bshi,hio->bsho", heads, weight) + bias).flatten(2).sigmoid()
        for weight, bias in (
            (unit.input_gate_weight, unit.input_gate_bias),
            (unit.recurrent_gate_weight, unit.recurrent_gate_bias),
        )
    )
    dt = 8.0 * gate * F.softplus(unit.recurrent_param)
    kept = SqrtBoundDerivative.apply(1 - torch.exp(-2 * dt))
    # The RG-LRU does not scale the first token of a document.
    kept = kept.where(position_ids.unsqueeze(-1) != 0, 1)
    dt = dt.float().clamp(min=_LEAST_TIME)
    # The scan multiplies its input by dt, but the RG-LRU does not: divide the input by dt.
    written = (x * input_gate * kept.to(x.dtype)).float() / dt
    one = torch.ones_like(dt[..., :1])
    scanned = state_space_scan(written, dt, -torch.ones_like(dt[0, :1].T), one, one)
    return module.linear_out(scanned.to(x.dtype) * y), None


def _zaya(module: Any, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Compute Zaya's q, k and v, [B, S', H, d] each, from [B, S', D].

    q and k go through two convolutions; half of v is computed from the token before. G: groups of
    channels of the second convolution, with o outputs and i inputs each.
    """
    split = (-1, module.head_dim)
    q, k = module.q_proj(hidden_states), module.k_proj(hidden_states)
    first, second = module.conv_qk_depthwise, module.conv_qk_grouped
    x = causal_conv1d(torch.cat([q, k], -1), first.weight.squeeze(1))
    # Before a document's first token, the first convolution's output is its bias, since its input
    # is zeros there. The windows have zeros there, so add the bias after them.
    windows = windows_of(x, module.grouped_kernel_size) + first.bias.unsqueeze(-1)
    heads = (second.groups, -1)
    taps = second.weight.unflatten(0, heads).flip(-1)  # [G, o, i, K]
    mixed = torch.einsum("bsgik,goik->bsgo", windows.unflatten(2, heads), taps)
    mixed = mixed + second.bias.unflatten(0, heads)

    groups = module.num_key_value_groups
    own = (q.unflatten(-1, split) + k.unflatten(-1, split).repeat_interleave(groups, 2)) * 0.5
    query = mixed[:, :, : own.shape[2]] + own
    key = mixed[:, :, own.shape[2] :] + own.unflatten(2, (-1, groups)).mean(3)

    now = module.v_proj_current(hidden_states)
    delayed = module.v_proj_delayed(windows_of(hidden_states, 2)[..., 1])
    return query, key, torch.cat([now, delayed], -1).unflatten(-1, split)


class _Factor:
    """A stand-in for a linear: the product `.weight @ x` calls the linear, without its bias.

    So code that reads the weight works although a rank has only a shard of it.
    """

    def __init__(self, linear: nn.Linear) -> None:
        self._linear, self.weight, self.bias = linear, self, linear.bias

    def __matmul__(self, x: Tensor) -> Tensor:
        """Return the product W x: x [B, I, S'] -> [B, O, S']."""
        linear: Any = self._linear
        linear.bias = None
        try:
            out: Tensor = linear(x.transpose(1, 2)).transpose(1, 2)
        finally:
            linear.bias = self.bias
        return out


def _selective(module: Any, *args: Any, **kwargs: Any) -> Any:
    """Run Mamba's own forward, with its read of `dt_proj.weight` turned into a call of `dt_proj`.

    Outside of that call a rank has only a shard of the weight.
    """
    # `_Factor` takes a plain linear. If an adapter wraps `dt_proj`, run the forward unchanged.
    if not is_linear(module.dt_proj):
        return type(module).forward(module, *args, **kwargs)
    # An entry in the instance's dict hides the submodule of this name.
    vars(module)["dt_proj"] = _Factor(module.dt_proj)
    try:
        return type(module).forward(module, *args, **kwargs)
    finally:
        del vars(module)["dt_proj"]


OWN_MIXERS: dict[str, Callable[..., Any]] = {
    "falcon_mamba.modeling_falcon_mamba.FalconMambaMixer": _selective,
    "jamba.modeling_jamba.JambaMambaMixer": _selective,
    "mamba.modeling_mamba.MambaMixer": _selective,
    "minimax.modeling_minimax.MiniMaxLightningAttention": _minimax,
    "recurrent_gemma.modeling_recurrent_gemma.RecurrentGemmaRecurrentBlock": _recurrent_gemma,
    "zaya.modeling_zaya.ZayaCCAProjection": _zaya,
}
"""By name of a class in transformers.models, the function that replaces its forward."""
