"""Folders quantized as on the hub, read as transformers reads them, and by slices."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from isp.core.mesh import Axis
from isp.core.mesh.layout import ParameterLayout
from isp.models.huggingface.dequantization import DequantizedFiles
from isp.models.loading import exported_tensors
from tests.models.folders import write_folder
from tests.models.test_loading import parts_of, state, whole
from tests.ranks import run_ranks

FP8 = {"quant_method": "fp8", "weight_block_size": [4, 4], "activation_scheme": "dynamic"}
MXFP4 = {"quant_method": "mxfp4"}


def _in_fp8(weight: Tensor, size: list[int]) -> dict[str, Tensor]:
    """Return each block divided by its largest value, in the format of DeepSeek's files."""
    a, b = size
    rows, columns = (-(-n // of) for n, of in zip(weight.shape, size, strict=True))
    scales = torch.empty(rows, columns)
    found = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    for i in range(rows):
        for j in range(columns):
            block = weight[i * a : (i + 1) * a, j * b : (j + 1) * b]
            scales[i, j] = block.abs().max() / 448
            found[i * a : (i + 1) * a, j * b : (j + 1) * b] = (block / scales[i, j]).to(found.dtype)
    return {"": found, "_scale_inv": scales}


def _in_mxfp4(weight: Tensor) -> dict[str, Tensor]:
    """Return random bits for [E, K, N]: [E, N, K / 32, 16] bytes and [E, N, K / 32] exponents."""
    experts, columns, rows = weight.shape
    generator = torch.Generator().manual_seed(columns)
    shape = experts, rows, columns // 32
    blocks = torch.randint(256, (*shape, 16), generator=generator, dtype=torch.uint8)
    return {
        "_blocks": blocks,
        "_scales": torch.randint(118, 124, shape, generator=generator, dtype=torch.uint8),
    }


def _quantize(folder: Path, quantisation: dict[str, Any]) -> None:
    file, config = folder / "model.safetensors", folder / "config.json"
    found: dict[str, Tensor] = {}
    for name, weight in load_file(file).items():
        parts = {"": weight}
        if quantisation is FP8 and name.endswith("_proj.weight"):
            parts = _in_fp8(weight, FP8["weight_block_size"])
        elif quantisation is MXFP4 and weight.dim() == 3:
            parts = _in_mxfp4(weight)
        found |= {f"{name}{end}": part.contiguous() for end, part in parts.items()}
    save_file(found, file, metadata={"format": "pt"})
    text = json.loads(config.read_text()) | {"quantization_config": quantisation}
    config.write_text(json.dumps(text))


KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "deepseek_v3": (FP8, {}),
    "gpt_oss": (MXFP4, {"hidden_size": 64, "intermediate_size": 32, "num_local_experts": 4}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_read_the_values_that_transformers_dequantizes(tmp_path: Path, kind: str) -> None:
    """Catches scales of other blocks, values in another order, and slices that always begin
    at 0.
    """
    quantisation, sizes = KINDS[kind]
    folder = write_folder(tmp_path, kind, **sizes)
    before = load_file(folder / "model.safetensors").keys()
    _quantize(folder, quantisation)
    expected = state(folder)
    found = whole(run_ranks(4, parts_of, folder, 4))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        # Before transformers 5.23 MXFP4 becomes bfloat16, which holds each number exactly.
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0, check_dtype=False)
    shapes = {name: tuple(tensor.shape) for name, tensor in found.items()}
    assert dict(exported_tensors(str(folder), shapes, found.__getitem__)).keys() == before


@pytest.mark.parametrize("dim", [0, 1])
def test_incomplete_blocks_are_read_by_slices(tmp_path: Path, dim: int) -> None:
    """Catches blocks counted from the start of a slice, and an incomplete last block."""
    weight = torch.randn(40, 28)
    parts = {f"w{end}": part for end, part in _in_fp8(weight, [16, 8]).items()}
    save_file(parts, tmp_path / "model.safetensors")
    files = DequantizedFiles(tmp_path, {"weight_block_size": [16, 8]}, torch.float32)
    assert files.names == {"w"}
    every = torch.empty(40, 28)
    for i, row in enumerate(parts["w_scale_inv"]):
        for j, scale in enumerate(row):
            place = slice(16 * i, 16 * i + 16), slice(8 * j, 8 * j + 8)
            every[place] = parts["w"][place].float() * scale
    for index in range(3):
        layout = ParameterLayout(
            global_shape=(40, 28), reduce_over=Axis.DATA, dim=dim, parts=3, index=index
        )
        torch.testing.assert_close(files.read("w", layout), layout.shard(every), rtol=0, atol=0)
