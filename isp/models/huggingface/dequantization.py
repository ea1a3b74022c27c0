"""Read quantized weights as dequantized tensors, a block of a tensor at a time.

fp8    `weight` of 8 bits, and `weight_scale_inv` [rows / a, columns / b], a factor for each block
       of a x b elements
mxfp4  `_blocks` [E, N, K / 32, 16], bytes of two 4-bit numbers, and `_scales` [E, N, K / 32],
       exponents; the weight is [E, K, N]

E experts, N and K features

Source: DeepSeek-V3, inference/fp8_cast_bf16.py; OCP Microscaling Formats 1.0; gpt-oss, weights.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from isp.models.huggingface.weight_files import WeightFiles

__all__ = ["DequantizedFiles", "check_readable"]

_SCALE, _BLOCKS, _SCALES = "_scale_inv", "_blocks", "_scales"
"""Endings of the names of fp8's factors, and of mxfp4's numbers and exponents."""

_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The magnitude of an fp4 number (e2m1) by its lower 3 bits; the fourth bit is the sign."""


def check_readable(quantization: Mapping[str, Any] | None) -> None:
    """Raise ValueError if a `quantization_config` has a method that isp does not read."""
    if quantization and quantization.get("quant_method") not in ("fp8", "mxfp4"):
        raise ValueError(
            f"the weights are quantized"
            f" (quantization_config.quant_method={quantization.get('quant_method')} in"
            f" config.json), and isp reads only unquantized, fp8 and mxfp4 weights: convert them"
            f" with transformers' dequantize and save_pretrained, or remove the entry if they are"
            f" not quantized"
        )


class DequantizedFiles(WeightFiles):
    """`WeightFiles` that dequantizes fp8 and mxfp4 weights to `dtype`.

    fp8 weights are multiplied by their factors in float32 at least.
    """

    def __init__(
        self, folder: Path, quantization: Mapping[str, Any] | None, dtype: torch.dtype
    ) -> None:
        super().__init__(folder)
        self._dtype = dtype
        self._block_size: list[int] | None = (quantization or {}).get("weight_block_size")
        there = super().names if quantization else frozenset[str]()
        self._fp8 = {name for name in there if f"{name}{_SCALE}" in there}
        ends = (name.removesuffix(_BLOCKS) for name in there if name.endswith(_BLOCKS))
        self._fp4 = {name for name in ends if f"{name}{_SCALES}" in there}
        parts = {f"{name}{end}" for name in self._fp4 for end in (_BLOCKS, _SCALES)}
        self._whole = (there or super().names) - parts - {f"{name}{_SCALE}" for name in self._fp8}

    @property
    def names(self) -> frozenset[str]:
        # A quantized weight has one name; the names of its blocks and scales are hidden.
        return self._whole | self._fp4

    def read_block(self, name: str, block: tuple[slice, ...]) -> Tensor:
        if name in self._fp4:
            # In the file the dims after that of the experts are in another order. So read the
            # block's experts whole, and then index their other dims.
            return self._of_fp4(name, block[:1])[(slice(None), *block[1:])]
        if name in self._fp8:
            return self._of_fp8(name, block)
        return super().read_block(name, block)

    def _shape(self, name: str) -> tuple[int, ...]:
        if name in self._fp4:
            experts, rows, groups, size = super()._shape(f"{name}{_BLOCKS}")
            return experts, groups * size * 2, rows
        return super()._shape(name)

    def _dtypes(self, name: str) -> set[str]:
        # Quantized weights are read as floats, which `WeightFiles.check` accepts.
        return {"F32"} if name in self._fp4 | self._fp8 else super()._dtypes(name)

    def _of_fp8(self, name: str, block: tuple[slice, ...]) -> Tensor:
        """Return a block of an fp8 weight, multiplied by the factors of its elements."""
        found = super().read_block(name, block).to(self._computed)
        scales = _factors(super().read_block(f"{name}{_SCALE}", ()), self._computed)
        for dim, size in enumerate(self._block_size or ()):
            # `block` may start inside of a quantization block: compute each element's factor from
            # its position in the whole weight.
            start = (block[dim].start or 0) if dim < len(block) else 0
            places = torch.arange(start, start + found.shape[dim]) // size
            scales = scales.index_select(dim, places)
        return found.mul_(scales).to(self._dtype)

    def _of_fp4(self, name: str, block: tuple[slice, ...]) -> Tensor:
        """Return the experts in `block` of an mxfp4 weight, [E, K, N]."""
        bits = super().read_block(f"{name}{_BLOCKS}", block)  # [E, N, K / 32, 16]
        scales = super().read_block(f"{name}{_SCALES}", block)  # [E, N, K / 32]
        values = torch.tensor([*_FP4, *(-x for x in _FP4)], dtype=self._dtype)
        # The low half of a byte is the first of its two numbers.
        found = torch.stack((values[(bits & 15).int()], values[(bits >> 4).int()]), -1)
        found = found.flatten(-2) * _factors(scales, self._dtype).unsqueeze(-1)
        return found.flatten(-2).transpose(1, 2)  # [E, K, N]

    @property
    def _computed(self) -> torch.dtype:
        """The dtype in which fp8 weights are multiplied by their factors."""
        return torch.promote_types(self._dtype, torch.float32)


def _factors(scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `scales` as factors in `dtype`; uint8 are exponents of two (e8m0) with bias 127."""
    if scales.dtype is torch.uint8:
        return torch.ldexp(torch.ones((), dtype=dtype), scales.int() - 127)
    return scales.to(dtype)
