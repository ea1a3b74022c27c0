"""Scans and convolutions by kernels of other packages, on CUDA.

T tokens, H heads of values with V features, G heads of keys with K features, or groups; P features
of a head, N numbers of its state; C channels; n segments: ranges of tokens of one document

A kernel is used in bfloat16, float16 or float32 if its package is installed and supports the sizes;
which one, or why none, is logged once. Otherwise ISP's torch code computes, and also with
deterministic algorithms, because the backward of some kernels adds by atomics. Summaries use the
same kernels (`DeltaRule.summary` widens the values); Mamba2's summary is one product, not a scan.

Sources: github.com/fla-org/flash-linear-attention, fla/ops/gated_delta_rule/chunk.py and
fla/ops/kda/chunk.py; github.com/state-spaces/mamba, mamba_ssm/ops/triton/ssd_combined.py and
selective_scan_interface.py; github.com/Dao-AILab/causal-conv1d, causal_conv1d_interface.py and
csrc/causal_conv1d.cpp. tools/kernels.json has the versions and signatures last read.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from isp.core.comm import pinned_memory
from isp.core.mixers.recurrence import Inputs

__all__ = ["causal_convolution", "delta_rule", "mamba2", "selective_scan"]

logger = logging.getLogger(__name__)

_DEVICES = ("cuda",)
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_MOST = 256
"""Largest number of features of a key, or numbers of a state, that the kernels support."""
_CHUNK = 256
"""Tokens of a chunk of Mamba2, mamba_ssm's default."""
_ERASING_STEP, _WRITING_STEP = 1e20, 2.0**-50
"""Steps dt of tokens that erase a state, and write one: see [Note: Tokens that carry states] in
docs/design/notes/mixers.md."""


def delta_rule(
    inputs: Inputs, lengths: Sequence[int], initial: Tensor | None, *, normalise: bool
) -> tuple[Tensor, Tensor] | None:
    """Return what `Recurrence.scan` does for the gated delta rule, by a kernel; None: no kernel.

    One call computes all segments, as [1, T, ..]. Initial and final states [n, H, K, V] are float32
    and have gradients.
    """
    (v, g, beta), (q, k) = inputs.of_heads, inputs.of_groups
    found = ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule")
    if g.dim() == 3:
        found = ("fla.ops.kda", "chunk_kda")
    kernel = _kernel(*found, ("cu_seqlens", "cu_seqlens_cpu"), v, [k.shape[-1]])
    # Empty segments are computed by ISP's code.
    if kernel is None or min(lengths, default=0) == 0:
        return None
    wide = torch.promote_types(v.dtype, torch.float32)
    ends = torch.tensor([0, *accumulate(lengths)])
    out, states = kernel(
        *(x.to(v.dtype).unsqueeze(0) for x in (q, k, v)),
        g.to(wide).unsqueeze(0),
        beta.unsqueeze(0),
        initial_state=None if initial is None else initial.to(wide),
        output_final_state=True,
        use_qk_l2norm_in_kernel=normalise,
        cu_seqlens=pinned_memory.send(ends, v.device),
        cu_seqlens_cpu=ends,  # or the kernel would read the ends back from the device
    )
    return out[0], states


def mamba2(
    inputs: Inputs,
    lengths: Sequence[int],
    initial: Tensor | None,
    *,
    dt_softplus: bool,
    dt_limit: tuple[float, float],
) -> tuple[Tensor, Tensor | None] | None:
    """Return what `Recurrence.scan` does for Mamba2, by a kernel; None: no kernel.

    Several segments from zeros are one call with `seq_idx`. The final states of such a call have no
    gradient, so None is returned for them. With initial states there is one call for each segment,
    because a call has only one initial state.
    """
    (x, dt), (B, C) = inputs.of_heads, inputs.of_groups
    A, D, dt_bias = inputs.constants
    needed = ("seq_idx", "initial_states", "return_final_states")
    name = "mamba_chunk_scan_combined"
    kernel = _kernel("mamba_ssm.ops.triton.ssd_combined", name, needed, x, [B.shape[-1]])
    if kernel is None or min(lengths, default=0) == 0:
        return None
    options = {"D": D, "dt_bias": dt_bias, "dt_softplus": dt_softplus, "dt_limit": dt_limit}
    parts = (x, dt, B.to(x.dtype), C.to(x.dtype))
    if initial is None and len(lengths) > 1:
        counts = pinned_memory.send(torch.tensor(lengths), x.device)
        # With `output_size`, the host does not wait for the sum of the counts.
        index = torch.repeat_interleave(counts, output_size=len(x)).int().unsqueeze(0)
        x, dt, B, C = (t.unsqueeze(0) for t in parts)
        return kernel(x, dt, A, B, C, _CHUNK, seq_idx=index, **options)[0], None
    outs, states = [], []
    begins = [None] if initial is None else initial.unsqueeze(1)
    for x, dt, B, C, begin in zip(*(t.split(list(lengths)) for t in parts), begins, strict=True):
        x, dt, B, C = (t.unsqueeze(0) for t in (x, dt, B, C))
        given = {"initial_states": begin, "return_final_states": True, **options}
        out, state = kernel(x, dt, A, B, C, _CHUNK, **given)
        outs.append(out[0])
        states.append(state[0])
    return torch.cat(outs), torch.stack(states)


def selective_scan(
    A: Tensor, xs: Sequence[Tensor], lengths: Sequence[int], initial: Tensor | None
) -> tuple[Tensor, Tensor] | None:
    """Return results [T, C], without the term of D, and final states [n, C, N]; None: no kernel.

    A is [C, N]; xs are x and dt >= 0 [T, C], B and C [T, 1, N], all float32. One call computes all
    segments. See [Note: Tokens that carry states] in docs/design/notes/mixers.md.
    """
    (x, dt, B, C), size = xs, A.shape[1]
    name = "mamba_ssm.ops.selective_scan_interface"
    kernel = _kernel(name, "selective_scan_fn", (), x, [size], extension="selective_scan_cuda")
    if kernel is None:
        return None
    # The kernel takes no initial states, and its final state has no gradient. So N tokens are added
    # to write each initial state, and N to read each final state. The B of an added token says
    # which of a state's N numbers it writes, C which it reads: token i has row i of `one` for
    # number i, or `none` for none.
    none, one = x.new_zeros(size, size), torch.eye(size, dtype=x.dtype, device=x.device)
    # As the x of added tokens, `still` writes zeros; as their dt, it keeps the state unchanged.
    still = x.new_zeros(size, x.shape[1])
    before, parts = 1 if initial is None else 1 + size, []
    begins = [None] * len(lengths) if initial is None else list(initial.unbind())
    segments = (t.split(list(lengths)) for t in (x, dt, B[:, 0], C[:, 0]))
    for x, dt, B, C, begin in zip(*segments, begins, strict=True):
        # Erase the state of the segment before.
        parts.append((still[:1], still[:1] + _ERASING_STEP, none[:1], none[:1]))
        if begin is not None:
            # Write the initial state: dt x = begin, with steps dt so small that nothing decays.
            parts.append((begin.to(x.dtype).T / _WRITING_STEP, still + _WRITING_STEP, one, none))
        # The segment itself, then the tokens that read its final state.
        parts += [(x, dt, B, C), (still, still, none, one)]
    x, dt, B, C = (torch.cat(xs).T.unsqueeze(0) for xs in zip(*parts, strict=True))  # [1, .., T']
    found = kernel(x, dt, A, B, C)[0].T
    sizes = [part for length in lengths for part in (before, length, size)]
    split = found.split(sizes)
    return torch.cat(split[1::3]), torch.stack([read.T for read in split[2::3]])


def causal_convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, dilation: int
) -> Tensor | None:
    """Convolve x [B, reach + S, C] with weight [C, K] -> [B, S, C]; None: no kernel.

    Each document comes after zeros or its halo, so the kernel needs no `seq_idx`. The kernel gets
    x with channels last in memory.
    """
    channels, taps = weight.shape
    fault = ""
    if channels % 8 or not 2 <= taps <= 4 or dilation > 1 or weight.dtype not in _DTYPES:
        fault = f"{channels} channels, {taps} taps, dilation {dilation}, {weight.dtype}"
    kernel = _kernel("causal_conv1d", "causal_conv1d_fn", (), x, [], fault=fault)
    if kernel is None or x.shape[1] < taps:
        return None
    bias = None if bias is None else bias.to(weight.dtype)
    out: Tensor = kernel(x.contiguous().transpose(1, 2), weight, bias)
    return out[..., taps - 1 :].transpose(1, 2)


def _kernel(
    module: str,
    name: str,
    needed: tuple[str, ...],
    x: Tensor,
    sizes: Sequence[int],
    *,
    extension: str = "",
    fault: str = "",
) -> Callable[..., Any] | None:
    """Return `module.name` if it supports x's device, dtype and `sizes`, else None; logs once.

    `needed`: parameters that the function must have. `fault`: a reason known before, or "".
    """
    if x.device.type not in _DEVICES:
        return None
    kernel = None
    if torch.are_deterministic_algorithms_enabled():
        fault = "deterministic algorithms"
    elif x.dtype not in _DTYPES:
        fault = str(x.dtype)
    elif max(sizes, default=0) > _MOST:
        fault = f"{max(sizes)} features are more than {_MOST}"
    elif not fault:
        kernel, fault = _imported(module, name, needed, extension)
    _report(name, fault)
    return kernel


@cache
def _imported(
    module: str, name: str, needed: tuple[str, ...], extension: str
) -> tuple[Callable[..., Any] | None, str]:
    """Return (function, ""), or (None, the reason) if it is missing or lacks parameters."""
    try:
        if extension:
            import_module(extension)
        function: Callable[..., Any] = getattr(import_module(module), name)
    except (ImportError, OSError, AttributeError) as error:
        return None, f"cannot be imported: {str(error).partition(chr(10))[0]}"
    if missing := set(needed) - set(inspect.signature(function).parameters):
        return None, f"too old, it takes no {', '.join(sorted(missing))}"
    return function, ""


@cache
def _report(name: str, fault: str) -> None:
    """Log whether the kernel `name` is used, or why not; once for each kernel and reason."""
    if fault:
        logger.info("mixers: using ISP's torch code; %s is unavailable: %s", name, fault)
    else:
        logger.info("mixers: %s", name)
