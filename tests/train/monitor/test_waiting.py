"""The log line of a run on CPU about ranks that wait for each other."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from isp.core.comm import Mesh, TimedTransfer
from isp.core.comm.tag import Purpose, Tag
from isp.core.mesh import ParallelConfig, Topology, WeightConfig
from isp.train.monitor.watch import describe_waits
from tests.ranks import run_ranks
from tests.train.jobs import run_folders, run_forked, write_job


def _describe(rank: int, launched: tuple[float, ...]) -> str | None:
    """Describe a gather that every rank waits for at once, from its launch to 5."""
    mesh = Mesh(Topology.create(2, ParallelConfig(weight=WeightConfig(size=2))), rank)
    begin, tag = launched[rank], Tag(Purpose.WEIGHT, "a")
    transfer = TimedTransfer("all_gather", "weight", tag, 8, begin, 5.0, 5.0 - begin, True, begin)
    return describe_waits(mesh, [transfer])


def test_waiting_for_a_late_rank_is_reported_separately() -> None:
    """Catches the share of one rank only (80%), and time in which data were sent."""
    first, second = run_ranks(2, _describe, (0.0, 4.0))
    assert first == second is not None
    assert "67% of the exposed time of the last step was ranks waiting for each other" in first
    assert run_ranks(2, _describe, (5.0, 5.0)) == [None, None]


def test_ranks_that_share_cores_are_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a missing line, and one at every step."""
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    job = write_job(tmp_path)
    run_forked(job, "--training.steps", "3")
    (run,) = run_folders(job)
    log = (run / "logs" / "rank_0.log").read_text()
    (share,) = re.findall(r"2 ranks share 1 core: (\d+)% of the exposed time", log)
    assert 0 <= int(share) <= 100
