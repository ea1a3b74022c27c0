"""The search over layouts, and the report of `isp layouts`."""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace
from pathlib import Path

import pytest

from isp.cli.program import main
from isp.config import JobConfig, load_config
from isp.planner import Candidate, as_text, evaluate, load_fabric, search
from isp.planner.case import PlanCase
from isp.planner.fabric import HostSpec

TEXT = """
model:
  {vocab_size: 32000, hidden_size: 2048, num_layers: 4, num_heads: 16, num_kv_heads: 4,
   intermediate_size: 5504}
data: {source: python-stdlib, seq_len: 16384, micro_num: 2}
parallel: {tensor: {size: 2}, weight: {size: 2}}
training: {dtype: bfloat16}
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "model.yaml"
    path.write_text(TEXT)
    return str(path)


def _config(file: str, *overrides: str) -> JobConfig:
    return load_config(file, overrides)


def test_the_best_layout_fits_and_is_not_slower_than_the_given_one(file: str) -> None:
    """Catches a reversed ranking, another batch, and a ranking that ignores memory."""
    config, fabric = _config(file), load_fabric("h100x8_ib400")
    found = search(config, 4, fabric)
    own, rows = found.own, found.rows
    assert rows == 2 * 2
    assert isinstance(own, Candidate)
    steps = [c.prediction.step for c in found.fitting if c.prediction is not None]
    assert steps == sorted(steps)
    assert own.prediction is not None
    assert steps[0] <= own.prediction.step
    assert {c.case.mode.value for c in found.fitting} == {"mtp", "msp", "fsp", "isp"}
    for candidate in found.fitting:
        assert candidate.memory.total <= fabric.device.usable_bytes
        assert candidate.case.tokens_per_step == rows * 16384
        words = [word for pair in candidate.overrides for word in pair.split(" ")]
        again = PlanCase.of(_config(file, *words), 4)
        assert again.topology == candidate.case.topology
        assert (again.model, again.micro_num) == (candidate.case.model, candidate.case.micro_num)


def test_weights_stay_where_that_is_faster(file: str) -> None:
    """Catches weights that needlessly stay on fast links, or are gathered again on slow ones."""
    config, fast = _config(file, "--data.seq_len", "1024"), load_fabric("h100x8_ib400")
    slow = replace(fast, inside=replace(fast.inside, gb_per_second=20))
    for fabric, stay in ((fast, False), (slow, True)):
        found = search(config, 2, fabric, rows=16)
        fastest = next(c for c in found.fitting if c.case.gathers_weights)
        assert fastest.config.parallel.weight.reshard_after_forward is not stay
        assert ("2, kept" in as_text(replace(found, own=fastest), 9)) is stay


def test_layouts_that_do_not_fit_are_reported(
    file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a layout left out without a reason, and recomputation that is not tried."""
    words = ["--world=8", "--fabric=h200", "--data.seq_len=2097152", "--data.micro_num=1"]
    assert main(["layouts", file, *words]) == 0
    said = capsys.readouterr().out
    assert "NVLink 4 (efficiencies assumed, not measured)" in said
    assert "does not fit in 128.6 GiB, with all recomputed" in said
    assert "  mtp tensor 2" in said
    assert "all" in said.split("the first one")[0]
    assert "--parallel.tensor.size 8" in said.split("the first one")[1]
    assert "parallel.tensor.size=8 must divide model.num_kv_heads=4" in said


def test_changes_that_would_make_it_fit_are_suggested(
    file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a plan that ends in "it does not fit", and a suggestion that does not help."""
    words = ["--fabric", "h200", "--data.micro_num", "1"]
    long = [*words, "--world", "2", "--data.seq_len", "1048576"]
    assert main(["layouts", file, *long, "--batch", "1"]) == 0
    said = capsys.readouterr().out
    (remedy,) = re.findall(r"does not fit: .*\n  it fits with (.*)", said)
    assert main(["layouts", file, *long, "--batch", "1", *remedy.split()]) == 0
    assert "is marked *" in capsys.readouterr().out

    words += ["--parallel.tensor.size", "1", "--parallel.weight.size", "1"]
    longer = [*words, "--world", "1", "--data.seq_len"]
    assert main(["layouts", file, *longer, "4194304"]) == 1
    (tokens,) = re.findall(r"--data.seq_len of about (\d+) or less", capsys.readouterr().out)
    assert main(["layouts", file, *longer, tokens]) == 0

    capsys.readouterr()
    small = replace(load_fabric("h100x8_ib400").device, memory_gib=4)
    machine = file.replace("model.yaml", "small.yaml")
    Path(machine).write_text(replace(load_fabric("h100x8_ib400"), device=small).to_yaml())
    large = [*words, "--fabric", machine, "--data.seq_len", "1024"]
    assert main(["layouts", file, *large, "--world", "1"]) == 1
    (ranks,) = re.findall(r"use (\d+) ranks or more", capsys.readouterr().out)
    assert main(["layouts", file, *large, "--world", ranks]) == 0


def test_states_that_exceed_host_memory_do_not_fit(file: str) -> None:
    """Catches layouts that fit the device on the assumption of unlimited host memory."""
    config = _config(file, "--optimizer.offload_states", "true", "--data.seq_len", "1024")
    fabric = load_fabric("h200")
    assert search(config, 4, fabric, rows=16).num_fitting > 0
    little = replace(fabric, host=HostSpec(memory_gib=0.01))
    found = search(config, 4, little, rows=16)
    assert not found.fitting
    assert "MiB of the host" in as_text(found, 1)


def test_the_configuration_is_compared_at_the_same_batch(
    file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a row whose step has another batch, and keys of another layout than the first."""
    whole = _config(file, "--training.global_batch_size=16", "--data.micro_num=null")
    assert search(whole, 2, load_fabric("cpu")).rows == 16
    for rows in (16, 4):
        own = evaluate(whole, 4, load_fabric("cpu"), rows=rows)
        assert own.case.micro_num == rows // 2
        assert f"--training.global_batch_size {rows}" in own.overrides
    words = ["layouts", file, "--world", "4", "--batch"]
    assert main([*words, "16", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["configured"]["micro_num"] == 16 // 2
    assert main([*words, "4", "--parallel.tensor.size=1"]) == 0
    said = capsys.readouterr().out
    assert "the configuration as it is is marked *" in said
    assert main([*words, "9"]) == 0
    assert re.search(r"as it is: 9 sequences a step cannot be shared", capsys.readouterr().out)

    config, fabric = _config(file), load_fabric("h100x8_ib400")
    found = search(config, 2, fabric, rows=16)
    fastest, second = found.fitting[:2]
    said = as_text(replace(found, fitting=(second,), own=fastest), 1)
    keys = said.split("the first one\n")[1].split("\n\n")[0]
    assert [line.strip() for line in keys.splitlines()] == fastest.overrides


def test_modes_without_any_layout_are_reported(
    file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a mode that is silently missing in the ranking."""
    assert main(["layouts", file, "--world", "16", "--batch", "2"]) == 0
    said = capsys.readouterr().out
    assert "mtp, msp, fsp: no sizes share the sequences of a step evenly" in said
    assert "--parallel.tensor.size 8" in said.split("the first one")[1]


def test_plans_are_available_as_json(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches JSON that is mixed with text, or differs from the text report."""
    assert main(["layouts", file, "--world", "4", "--json", "--top", "2"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["layouts"]) == 2
    best = found["layouts"][0]
    assert sum(best["memory_bytes"].values()) < found["usable_bytes"]
    assert best["seconds"]["step"] > best["seconds"]["exposed"] >= 0
    assert {t["kind"] for t in best["transfers"]} & {"all_gather", "all_reduce", "all_to_all"}
    assert found["configured"]["tensor"] == 2


def test_a_configuration_that_does_not_fit_the_ranks_is_reported(
    file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a search that fails because the given configuration does not fit the ranks."""
    assert main(["layouts", file, "--world", "9", "--batch", "18"]) == 0
    said = capsys.readouterr().out
    assert "the configuration as it is: parallel.tensor.size=2 must divide the world size 9" in said


@pytest.mark.slow
def test_1024_ranks_are_searched_in_seconds(file: str) -> None:
    """Catches a search whose cost grows with the number of ranks or micro-batches."""
    config = _config(file, "--data.seq_len", "131072")
    began = time.process_time()
    found = search(config, 1024, load_fabric("h100x8_ib400"), rows=1024)
    assert time.process_time() - began < 40
    assert found.num_fitting > 50
