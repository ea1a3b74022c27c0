"""The benchmarks at small size, and the removal of their network namespaces."""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import run_ranks

TOOLS = Path(__file__).parents[2] / "tools"
sys.path.insert(0, str(TOOLS))
import bench_fully_shard  # noqa: E402
import bench_link  # noqa: E402
import check_with_transformers  # noqa: E402
from bench_balance import PLANS  # noqa: E402


def _cells(line: str) -> list[str]:
    """Return the cells of a table's row; any other line is one cell."""
    return [cell.strip() for cell in line[1:-1].split("|")] if line[:1] == "|" else [line]


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., list[list[str]]]:
    """Return a function that runs a benchmark and returns the cells of the lines it prints."""

    def run(name: str, *words: str) -> list[list[str]]:
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *words])
        importlib.import_module(name).main()
        return [_cells(line) for line in capfd.readouterr().out.splitlines()]

    return run


def test_the_balance_benchmark_has_every_plan(run: Callable[..., list[list[str]]]) -> None:
    """Catches a plan that no longer runs, and a missing row."""
    lines = run("bench_balance", "--rows", "2", "--ranks", "2", "--tokens", "500")
    assert [line[1] for line in lines if line[0] == "2"] == list(PLANS)


def test_the_context_benchmark_has_every_exchange(run: Callable[..., list[list[str]]]) -> None:
    """Catches an exchange that no longer runs, computes something else, or sends more than
    needed.
    """
    rows = [line for line in run("bench_context", "--quick", "--ranks", "4") if len(line) > 1]
    names = ["Ulysses alone", "2 x 2", "1 x 4", "1 x 4, ring", "p2p ring"]
    found = [row[0] for row in rows if row[0] and row[0][0] != "-"]
    assert found == [*names, "torch's ring", *names]
    of_least = {row[0]: float(row[2]) for row in rows if row[0] in names}
    assert [of_least[name] for name in names[:3]] == [1.0, 1.0, 1.0]
    assert of_least["p2p ring"] > 2


def test_the_scan_benchmark_has_every_mixer(run: Callable[..., list[list[str]]]) -> None:
    """Catches a mixer that no longer runs, computes something else, or sends unplanned bytes."""
    rows = [line for line in run("bench_mixers", "--quick", "--ranks", "2") if len(line) > 1][2:]
    assert [row[0] for row in rows] == ["gated delta rule", "KDA", "Mamba2", "selective scan"]
    assert all(float(row[3]) > 0 for row in rows)


def test_the_overlap_benchmark_has_every_row(run: Callable[..., list[list[str]]]) -> None:
    """Catches a contestant that no longer runs or computes something else, and a missing row."""
    lines = run("bench_overlap", "--quick", "--ranks", "2", "--trace", "layer, wo")
    names = [line[0] for line in lines if len(line) > 1]
    expected = ["compute alone", "one rank a group, overlap on", "ours, no overlap"]
    expected += [f"ours, per layer, {point}" for point in ("wqkv", "attn", "wo", "w1")]
    expected += ["ours, per module", "fully_shard, default", "fully_shard, async prefetch"]
    assert not set(expected) - set(names)
    assert names[-1] == "the bound"
    assert any("reduce_scatter model.embed_tokens.weight.grad" in line[0] for line in lines)


def test_all_contestants_receive_the_same_bytes_on_a_modeled_link(tmp_path: Path, run: Any) -> None:
    """Catches a contestant that no longer runs, and bytes other than those of its gathers and
    sums.
    """
    numbers = tmp_path / "n.json"
    words = ["--device", "cpu", "--quick", "--layers", "2", "--rounds", "1"]
    run("bench_link", *words, "--gb-per-second", "100", "--json", str(numbers))
    rows = json.loads(numbers.read_text())
    received = {row["who"]: row["received_bytes"] for row in rows}
    assert len(rows) == 2 * len(received)  # each also with an infinitely fast link
    assert [row["gb_per_second"] for row in rows] == [None] * len(received) + [100] * len(received)
    assert {row["who"] for row in rows if "exposed" in row} == {*received} - {"compute alone"}
    hidden, vocab = 128, 8 * 128
    block = hidden * (hidden + 64 + 3 * 448 + hidden)  # q, k and v, w1 w2 w3, wo
    # Gathered for forward and backward and summed, but the last block is gathered once.
    elements = (3 * 2 - 1) * block + 2 * 2 * vocab * hidden
    assert received.pop("compute alone") == 0
    assert received["ours"] == 4 * elements * 7 // 8  # in float32, of 7 other ranks
    assert {"fully_shard", "fully_shard, explicit prefetch", "ours, per module"} < set(received)
    assert all(0.99 < count / received["ours"] < 1.25 for count in received.values())


def test_exposed_time_is_relative_to_the_same_step_without_a_link(monkeypatch) -> None:
    """Catches the compute of one contestant subtracted for another, and a link that sleeps too
    long.
    """
    link = bench_link.ModelledLink(torch.device("cpu"), float("inf"))
    x = torch.zeros(250_000_000, dtype=torch.int8)
    slower = {"ours": 1.0, "theirs": 2.0}  # seconds of compute

    def seconds(name: str, device: torch.device) -> float:
        link.transfer(x.nbytes, lambda: None, x)
        link.transfer(x.nbytes, lambda: None, x)
        return slower[name] + 0.125e9 / link.bytes_per_second

    monkeypatch.setattr(bench_link, "seconds", seconds)
    rows = {name: name for name in slower}
    at_once = {one["who"]: one for one in bench_link.measure(rows, link, 2, {}, {})}
    link.bytes_per_second = 1e9
    for one in bench_link.measure(rows, link, 2, {}, at_once):
        assert one["link_ms"] == pytest.approx(500 + 2e3 * bench_link.LATENCY)
        assert one["exposed"] == pytest.approx(0.25)


def _beside_fully_shard(rank: int) -> list[str]:
    options = argparse.Namespace(quick=True, layers=1, lengths=[8, 16], rounds=1, dtype="bfloat16")
    mesh = bench_fully_shard.mesh_of(2, rank)
    found = bench_fully_shard.measure(options, mesh, torch.device("cpu"))
    return [str(one["who"]) for one in found]


def test_all_contestants_compute_as_fully_shard_alone() -> None:
    """Catches a contestant that no longer runs in 16 bit, or computes something else."""
    names, others = run_ranks(2, _beside_fully_shard)
    assert names == others
    assert {"ours, own_reduce_group", "fully_shard, explicit prefetch"} < set(names)
    assert len(names) == 2 * len(set(names))


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("tc") is None,
    reason="network namespaces need root, ip and tc",
)
def test_namespaces_are_removed_when_their_benchmark_is_killed() -> None:
    """Catches namespaces that remain after a benchmark that could not clean up."""
    code = "from netns import Wires\nwith Wires(2):\n    print('ready', flush=True)\n    input()"
    maker = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=TOOLS,
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


def test_isp_is_within_the_tolerance_of_transformers_mixins() -> None:
    """Catches a comparison that no longer runs, and a gradient that is not the plain model's."""
    row = check_with_transformers.row_of("tp", "llama", {"transformers tp", "isp mtp"})
    assert [*row] == ["transformers tp", "isp mtp"]
    for contestant, found in row.items():
        single, double = found
        assert not isinstance(single, str), single
        assert not isinstance(double, str), double
        assert single.within == check_with_transformers.TOLERANCES[0], contestant
        assert 0 < double.relative < 1e-12, contestant  # another order of sums


@pytest.mark.parametrize(("added", "within"), [(0.0, 1e-5), (1e-3, 5e-3), (1.0, math.inf)])
def test_differences_from_transformers_are_found(added: float, within: float) -> None:
    """Catches a comparison that passes for any results."""
    outputs, weights = {"loss": torch.ones(())}, {"a": torch.ones(4), "b": torch.ones(4)}
    plain = check_with_transformers.Found(outputs, weights)
    shards = {"a": torch.ones(2) + added, "b": torch.ones(2)}
    halves = dict.fromkeys(weights, lambda whole: whole[:2])
    compare = check_with_transformers.differences
    assert compare(plain._replace(tensors=shards, shard=halves), plain).within == within
    assert (
        compare(plain._replace(outputs={"loss": torch.tensor(1 + added)}), plain).within == within
    )
    if added:
        assert compare(plain._replace(tensors={"a": torch.ones(4)}), plain).within == math.inf
