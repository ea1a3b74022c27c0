"""Experts on a GPU, in a mirror mesh, against the same on a CPU."""

from __future__ import annotations

import pytest
import torch

from isp.core.mesh import Topology
from isp.core.recompute.config import Recomputation
from isp.loop.parallel_run import ParallelRun
from isp.models.traced_model import TracedModel
from tests.mirror import MirrorMesh, one_rank
from tests.models.models import job, packed_rows, tiny

CPU = torch.device("cpu")


def _losses(device: torch.device, experts: int, recompute: float, dtype: str) -> list[float]:
    """Return the losses of three steps on the last of two ranks with equal data, then the norms."""
    config = job(2, 2, recompute=recompute, dtype=dtype)
    sizes = {"num_experts": experts, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    model = TracedModel(
        tiny("qwen3_moe", **sizes).to(getattr(torch, dtype)), recomputation=Recomputation(recompute)
    )
    numbers = []
    with one_rank(device):
        mesh = MirrorMesh(Topology.create(2, config.parallel), 1)
        run = ParallelRun(model, config, mesh, device)
        run.train_step.same_rows = None  # a mirror's sums have the checksum of one rank twice
        for seed in range(3):
            rows = packed_rows(1, 64, [[20, 44]], seed)
            outcome = run.step(run.loss(*rows))
            numbers += [outcome.loss, outcome.grad_norm]
    return numbers


@pytest.mark.parametrize(
    ("device", "experts", "recompute", "dtype"),
    [
        ("cpu", 4, 1.0, "float64"),  # checks the mirror world itself
        *(
            pytest.param("cuda", *case, dtype, marks=(pytest.mark.gpu, pytest.mark.nccl))
            for case in ((4, 0.0), (4, 1.0), (3, 0.5))
            for dtype in ("float64", "bfloat16")
        ),
    ],
)
def test_experts_on_a_gpu_train_as_on_a_cpu(
    device: str, experts: int, recompute: float, dtype: str
) -> None:
    """Catches whole weights read too early or too late, and grouped kernels that do not support
    their strides: between experts, or, with three dims, within each expert.
    """
    expected = _losses(CPU, experts, 0.0, dtype)
    found = _losses(torch.device(device), experts, recompute, dtype)
    assert len(set(expected)) == len(expected)
    assert found == pytest.approx(expected, rel=1e-9 if dtype == "float64" else 0.05)
