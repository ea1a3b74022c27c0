"""The overlap benchmark runs, and its namespaces do not outlive it."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.ranks import run_ranks

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import bench_fully_shard  # noqa: E402
import bench_overlap  # noqa: E402

CPU = torch.device("cpu")


def test_quick_run_has_every_row(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Catches a contestant that no longer runs or computes something else, or a row lost."""
    words = ["--quick", "--ranks", "2", "--trace", "layer, wo"]
    monkeypatch.setattr(sys, "argv", ["bench_overlap.py", *words])
    bench_overlap.main()
    said = capfd.readouterr().out
    names = [line.split("|")[1].strip() for line in said.splitlines() if line[:1] == "|"]
    expected = ["compute alone", "one rank a group, overlap on", "ours, no overlap"]
    expected += [f"ours, per layer, {point}" for point in ("wqkv", "attn", "wo", "w1")]
    expected += ["ours, per module", "fully_shard, default", "fully_shard, async prefetch"]
    assert not set(expected) - set(names)
    assert names[-1] == "the bound"
    assert "reduce_scatter model.embed_tokens.weight.grad" in said


def _beside_fully_shard(rank: int) -> list[str]:
    options = argparse.Namespace(quick=True, layers=1, lengths=[8, 16], rounds=1, dtype="bfloat16")
    found = bench_fully_shard.measure(options, bench_fully_shard.mesh_of(2, rank), CPU)
    return [str(one["who"]) for one in found]


def test_all_compute_what_fully_shard_does_by_itself() -> None:
    """Catches a contestant that no longer runs in 16 bit, or computes something else."""
    names, others = run_ranks(2, _beside_fully_shard)
    assert names == others
    assert {"ours, own_reduce_group", "fully_shard, explicit prefetch"} < set(names)
    assert len(names) == 2 * len(set(names))


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("tc") is None,
    reason="network namespaces need root, ip and tc",
)
def test_namespaces_go_when_their_maker_is_killed() -> None:
    """Catches namespaces left behind by a benchmark that could not clean up itself."""
    code = "from netns import Wires\nwith Wires(2):\n    print('ready', flush=True)\n    input()"
    maker = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT / "tools",
    )
    assert maker.stdout is not None
    if maker.stdout.readline() != "ready\n":
        pytest.skip("this machine does not let us make network namespaces")
    mine = f"isp-{maker.pid}-"
    assert mine in _namespaces()
    maker.kill()
    maker.communicate()
    deadline = time.monotonic() + 20
    while mine in _namespaces():
        assert time.monotonic() < deadline, _namespaces()
        time.sleep(0.05)


def _namespaces() -> str:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
