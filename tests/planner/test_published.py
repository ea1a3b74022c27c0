"""Planned throughput compared with published throughput, in tokens per rank and second."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from isp.config import load_config
from isp.core.mesh import Mode
from isp.planner import load_fabric
from isp.planner.case import PlanCase
from isp.planner.predict import predict


class Run(NamedTuple):
    """A published run of a 7B model."""

    fabric: str
    world: int
    seq_len: int
    micro_bsz: int
    micro_num: int
    checkpoint: float
    tgs: float
    mode: Mode = Mode.ISP
    """With all ranks in one weight group, isp sends what fully sharded data parallelism sends."""


A100, H100 = "a100x8_hdr", "h100x8_ib400"
RUNS = {
    "llm-foundry, A100, 2K": Run(A100, 8, 2048, 6, 2, 0, 4641),
    "llm-foundry, A100, 4K": Run(A100, 8, 4096, 16, 2, 1, 3684),
    "llm-foundry, 128 A100": Run(A100, 128, 2048, 18, 1, 1, 3623),
    "InternEvo, A100, 2K": Run(A100, 8, 2048, 2, 4, 0, 4078, Mode.MTP),
    "llm-foundry, H100, 2K": Run(H100, 8, 2048, 6, 1, 0, 10643),
    "llm-foundry, H100, 8K": Run(H100, 8, 8192, 8, 2, 1, 6935),
}
"""MosaicML llm-foundry, scripts/train/benchmarking; InternEvo, doc/en/train_performance."""


def _planned(run: Run, path: str) -> float:
    values = {
        "model.preset": "llama2-7b",
        "model.checkpoint": run.checkpoint,
        "parallel.tensor.mode": run.mode,
        "parallel.weight.size": run.world if run.mode is Mode.ISP else 1,
        "data.seq_len": run.seq_len,
        "data.micro_bsz": run.micro_bsz,
        "data.micro_num": run.micro_num,
        "data.pack": "false",
    }
    words = [str(word) for key, value in values.items() for word in (f"--{key}", value)]
    case = PlanCase.of(load_config(path, words), run.world)
    return predict(case, load_fabric(run.fabric)).tgs(run.world)


@pytest.fixture
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("job") / "job.yaml"
    file.write_text("data: {source: python-stdlib}\ntraining: {dtype: bfloat16}\n")
    return str(file)


@pytest.mark.timeout(320)
@pytest.mark.parametrize("name", RUNS)
def test_planned_throughput_is_near_the_published_one(name: str, path: str) -> None:
    """Catches a machine planned as if it reached the peaks of its data sheet."""
    assert _planned(RUNS[name], path) == pytest.approx(RUNS[name].tgs, rel=0.15)


def test_more_nodes_cost_the_published_efficiency(path: str) -> None:
    """Catches plans in which many ranks lose no efficiency, or far too much."""
    few, many = Run(A100, 8, 2048, 18, 1, 1, 3679), RUNS["llm-foundry, 128 A100"]
    found = _planned(many, path) / _planned(few, path)
    assert found < 0.99
    assert found == pytest.approx(many.tgs / few.tgs, abs=0.03)


def test_small_micro_batches_lose_in_large_weight_groups(path: str) -> None:
    """Catches gathers over 512 ranks whose latency is that of 8."""
    small = Run(A100, 512, 4096, 1, 4, 0, 0)
    large = small._replace(micro_bsz=8, micro_num=1, checkpoint=1)
    lost = [
        1 - _planned(run, path) / _planned(run._replace(world=8), path) for run in (small, large)
    ]
    assert lost[0] > 2 * lost[1] > 0.05
