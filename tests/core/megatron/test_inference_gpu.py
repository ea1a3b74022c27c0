"""Inference layers with symmetric memory and in a CUDA graph, against those with a channel.

torchrun starts the ranks as new processes: a process that has initialized CUDA cannot fork.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from isp.core.comm import Channel
from isp.core.comm.symmetric_memory import why_no_symmetric_rows
from isp.core.megatron.inference import (
    InferenceLayerNormColumnParallelLinear,
    InferenceRowParallelLinear,
    InferenceWorkspace,
)
from isp.core.mesh import Mode
from tests.ranks import run_ranks
from tests.toolkit import ToolkitLayers, init_weights

WIDTH, INNER, MOST = 64, 128, 32
ROUNDING = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 5e-2}


class Block:
    """A norm, a column and a row linear, and the next norm; x [T, D] -> [T, D]."""

    def __init__(
        self, group: Channel, device: torch.device, dtype: torch.dtype, symmetric: bool
    ) -> None:
        layers = ToolkitLayers(
            mode=Mode.MSP, tensor=group, weight=group, device=device, dtype=dtype
        )
        self.norm = layers.rms_norm(WIDTH, eps=1e-6)
        column, row = layers.column(WIDTH, (INNER,), std=0.3), layers.row(INNER, WIDTH, std=0.3)
        init_weights(torch.nn.ModuleList((self.norm, column, row)), seed=1)
        self.workspace = InferenceWorkspace(
            group, WIDTH, max_tokens=MOST, symmetric_memory=symmetric, device=device, dtype=dtype
        )
        self.column = InferenceLayerNormColumnParallelLinear(column, self.workspace, norm=self.norm)
        self.row = InferenceRowParallelLinear(row, self.workspace)

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Tensor:
        residual = self.workspace.begin(x)
        return self.row.add_norm(self.column(residual).tanh_(), residual, self.norm)


def compare(group: Channel, device: torch.device) -> None:
    """Compare the layers for tokens that are split over the ranks and tokens that are not."""
    on_cuda = device.type == "cuda"
    for dtype in (torch.bfloat16, torch.float32) if on_cuda else (torch.float64,):
        plain, other = (Block(group, device, dtype, symmetric) for symmetric in (False, on_cuda))
        for tokens in (MOST, 3, 1):
            generator = torch.Generator().manual_seed(tokens)
            x = torch.randn(tokens, WIDTH, generator=generator).to(device, dtype)
            expected = plain(x).clone()
            close = {"rtol": ROUNDING[dtype], "atol": ROUNDING[dtype]}
            torch.testing.assert_close(other(x), expected, **close)
            if on_cuda:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    out = other(x)
                out.zero_()
                for _ in range(3):
                    graph.replay()
                torch.testing.assert_close(out, expected, **close)


def _on_cpu(rank: int) -> None:
    compare(Channel(dist.group.WORLD, name="tensor"), torch.device("cpu"))


def test_the_comparison_runs_on_cpu() -> None:
    """Catches an error in the comparison that would only show in the GPU test below."""
    run_ranks(2, _on_cpu)


@pytest.mark.gpu
@pytest.mark.nccl
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices")
def test_symmetric_memory_and_graphs_equal_a_channel() -> None:
    """Catches a missing barrier, a buffer of another rank, and operations that cannot be
    captured.
    """
    root = Path(__file__).parents[3]
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, *ranks, "-m", "tests.core.megatron.test_inference_gpu"],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if "no symmetric memory: " in done.stdout:
        pytest.skip(done.stdout.strip().splitlines()[-1])
    assert done.returncode == 0, done.stderr[-4000:]


def main() -> None:
    """Run the comparison on a rank that torchrun has started."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    group = Channel(dist.group.WORLD, name="tensor")
    reason = why_no_symmetric_rows(group, WIDTH, device=device, dtype=torch.bfloat16)
    if reason:
        print(f"no symmetric memory: {reason}")
    else:
        compare(group, device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
