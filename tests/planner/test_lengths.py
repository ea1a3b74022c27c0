"""`isp plan`: growth of memory with the sequence length, the longest length, and the ladder."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from isp.cli import main, output
from isp.cli.output import show_progress
from isp.cli.plan_command import gib
from isp.config import ConfigError, load_config
from isp.planner import lengths, load_fabric
from isp.planner.fabric import HostSpec
from isp.planner.lengths import Budget, MemoryOption, Planned, climb
from isp.planner.memory import Memory, memory
from isp.step import host_memory
from isp.step.host_memory import check_host_memory

TEXT = """
model:
  {vocab_size: 2048, hidden_size: 256, num_layers: 4, num_heads: 8, num_kv_heads: 2,
   intermediate_size: 704}
data: {source: python-stdlib, seq_len: 16384, micro_num: 2}
parallel: {tensor: {size: 2}, weight: {size: 4}}
training: {dtype: bfloat16}
"""
MIB = 2**20


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "model.yaml"
    path.write_text(TEXT)
    return str(path)


def _planned(file: str, *words: str, world: int = 4) -> Planned:
    return Planned(load_config(file, words), world, on_cpu=False)


def test_the_longest_row_fits_and_the_next_does_not(file: str) -> None:
    """Catches a search that stops too early, or extrapolates where memory is not linear."""
    planned, budget = _planned(file), Budget(300 * MIB, None)
    found = planned.longest(budget)
    assert found.next_len - found.seq_len == planned.unit == 1024
    assert planned.peak(found.seq_len) == found.memory
    assert budget.excess(found.memory) <= 0 < budget.excess(planned.peak(found.next_len))


@pytest.mark.parametrize("head_first", ["true", "false"])
def test_the_context_rank_with_most_keys_is_planned(file: str, head_first: str) -> None:
    """Catches a plan of the first rank instead of the one with the end of a long document."""
    words = ["--parallel.tensor.size=8", "--parallel.weight.size=1", "--data.micro_bsz=3"]
    two = ["enable=true", "context_size=4", f"device_placement_strategy.head_first={head_first}"]
    planned = _planned(file, *words, *(f"--parallel.sequence_2D.{word}" for word in two), world=8)
    case = planned.case(4096)
    totals = [memory(case, rank).total for rank in range(8)]
    assert planned.peak(4096).total == max(totals) > totals[0]


def test_host_memory_limits_the_length_too(file: str) -> None:
    """Catches states offloaded to a host that has no room for them."""
    planned = _planned(file, "--optimizer.offload_states", "true")
    memory = planned.peak(planned.unit)
    assert memory.host > 0
    assert memory.optimizer == 0
    assert planned.longest(Budget(300 * MIB, memory.host)).seq_len > 0
    assert planned.longest(Budget(300 * MIB, memory.host - 1)).seq_len == 0


def test_offloaded_states_and_inputs_share_host_memory(file: str) -> None:
    """Catches one of the two that is forgotten where both are offloaded."""
    states, inputs = ["--optimizer.offload_states", "true"], ["--model.checkpoint_offload", "true"]
    inputs += ["--model.checkpoint", "1"]
    each = [_planned(file, *words).growth(32768) for words in (states, inputs, states + inputs)]
    fixed, slopes = zip(*((g.fixed.host, g.per_token.host) for g in each), strict=True)
    assert fixed[0] > 0 == fixed[1]
    assert slopes[0] == 0 < slopes[1] == 4 * 256 * 2  # layers, features, bytes
    assert (fixed[2], slopes[2]) == (fixed[0], slopes[1])


def test_memory_of_a_third_length_is_on_the_line_of_two(file: str) -> None:
    """Catches a slope at another moment, and one of a row's tokens where a rank has a part of
    them.
    """
    planned = _planned(file, "--optimizer.offload_states", "true")
    growth = planned.growth(131072)
    assert growth.tokens == 131072 // 2
    other = planned.peak(262144)
    foreseen = growth.fixed.total + growth.per_token.total * 2 * growth.tokens
    assert foreseen == pytest.approx(other.total, rel=0.01)
    assert growth.fixed.host == other.host
    assert growth.fixed.weights == other.weights
    assert growth.per_token.weights == 0


def test_an_option_that_shortens_rows_is_skipped(
    file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a ladder that ends below an earlier length."""
    again, not_again = {"model.checkpoint": 1.0}, {"model.checkpoint": 0.0}
    states = {"optimizer.offload_states": True}
    given = {"up": again, "down": not_again, "on": states}
    monkeypatch.setattr(lengths, "OPTIONS", [MemoryOption(*each) for each in given.items()])
    steps = climb(_planned(file), Budget(200 * MIB, None))
    assert [step.taken for step in steps] == [True, True, False, True]
    assert [step.keys["model.checkpoint"] for step in steps] == [0.0, 1.0, 0.0, 1.0]


def test_states_are_offloaded_first_where_they_alone_do_not_fit(file: str) -> None:
    """Catches a ladder whose first options do not help."""
    planned = _planned(file)
    states = planned.peak(planned.unit).states
    names = [step.option for step in climb(planned, Budget(states - 1, None))]
    assert names[1:3] == ["moments in bfloat16", "states on the host"]


def test_following_the_advice_gives_what_it_says(
    file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches advice that does not give the promised length, and JSON with other content."""
    words = ["plan", file, "--memory", "0.7", "--host-memory", "64GiB", "--max-seq-len"]
    long = ["--data.seq_len", "50000"]  # does not divide by any size
    assert main([*words, *long]) == 0
    said = capsys.readouterr().out
    # four ranks share the memory that the system does not use
    assert "14.40 GiB of its host's" in said
    assert re.search(r"data.seq_len=50000 does not fit: [789]\d\d\.\d MiB", said)
    (enough,) = re.findall(r"data.seq_len=50000 fits with `.*`: (.*)", said)
    (best,) = re.findall(r"the longest: (.*)", said)
    plan = words[:-1]
    assert main([*plan, *long]) == 1
    assert main([*plan, *long, *enough.split()]) == 0
    assert main([*plan, *best.split()]) == 0
    further = re.sub(r"seq_len (\d+)", lambda m: f"seq_len {int(m[1]) + 1024}", best)
    assert main([*plan, *further.split()]) == 1
    capsys.readouterr()
    assert main([*words, *long, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert f"longest data.seq_len: {found['longest']['seq_len']:,}" in said
    lengths = [step["longest"]["seq_len"] for step in found["ladder"] if step["taken"]]
    assert len(lengths) > 4
    assert lengths == sorted(lengths)
    assert 0 < 2 * lengths[0] < lengths[-1]
    assert found["ladder"][-1]["growth"]["fixed_bytes"]["optimizer"] == 0
    keys = re.findall(r"--model\S+ \S+|--optim\S+ \S+", best)
    assert keys in [step["overrides"] for step in found["ladder"]]
    assert sum(found["memory"]["bytes"].values()) > found["device_bytes"]


def test_advised_options_are_not_refused(file: str) -> None:
    """Catches forgotten copies for background saves, and a host planned to its last byte."""
    words = ["--checkpoint.interval=5", "--model.checkpoint=1", "--model.checkpoint_offload=true"]
    fabric = load_fabric("h100x8_ib400")
    fabric = replace(fabric, host=HostSpec(memory_gib=0.1))
    budget = Budget.of(fabric, 4)
    longest = _planned(file, *words).longest(budget)
    assert isinstance(longest.beyond, Memory)
    assert budget.on_host(longest.beyond)
    config = load_config(file, [*words, f"--data.seq_len={longest.seq_len}"])
    with mock.patch.object(host_memory, "attainable_bytes", return_value=int(0.092 * 2**30)):
        check_host_memory(config, config.topology(4), 4)


def test_progress_does_not_mix_with_other_output(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a log without progress, and a progress line inside JSON output."""
    now = iter(range(0, 100, 3))
    monkeypatch.setattr(output.time, "monotonic", lambda: next(now))
    lines = "lengths: 0 of 4\nlengths: 1 of 4\nlengths: 3 of 4\n"
    for same, mixes, shown in ((False, False, lines), (True, True, lines), (True, False, "")):
        now = iter(range(0, 100, 3))
        monkeypatch.setattr(os.path, "sameopenfile", lambda one, other, same=same: same)
        assert list(show_progress([3, 4, 5, 6], "lengths", mixes=mixes)) == [3, 4, 5, 6]
        assert capsys.readouterr() == ("", shown)


def test_a_run_without_background_saves_plans_no_copies(file: str) -> None:
    """Catches host copies that are planned but never made."""
    words = "--checkpoint.interval=5", "--checkpoint.async_mode=disabled"
    with_copies, without = _planned(file, *words[:1]).peak(2048), _planned(file, *words).peak(2048)
    assert without.host == _planned(file).peak(2048).host == 0
    assert with_copies.host == with_copies.weights + with_copies.optimizer
    states = _planned(file, words[0], "--optimizer.offload_states=true").peak(2048)
    assert states.host == with_copies.host + with_copies.optimizer


def test_memory_too_small_for_any_row_is_reported(
    file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a search that never ends, or a traceback, where weights alone do not fit."""
    assert main(["plan", file, "--memory", "0.001", "--max-seq-len"]) == 1
    said = capsys.readouterr().out
    assert re.search(r"no sequence of 1,024 tokens fits: [\d.]+ MiB at the .*: ", said)
    assert "data.seq_len=16384 fits with none of them: use more ranks (--world)" in said
    assert main(["plan", file, "--memory", "0.001", "--max-seq-len", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["longest"]["seq_len"] == 0


def test_a_configuration_that_fits_gets_no_advice(
    file: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches needless advice, a column with the heading of another length, and sizes reported as
    0.
    """
    monkeypatch.setattr(lengths, "OPTIONS", ())  # the first step already sets keys
    words = ["plan", file, "--memory", "4", "--max-seq-len", "--data.seq_len", "2"]
    assert main([*words, "--optimizer.offload_states", "true", "--host-memory", "0.02"]) == 1
    said = capsys.readouterr().out
    assert re.search(r"no sequence of 1,024 tokens fits: 0\.01\d\d GiB in the memory of the", said)
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "data.seq_len=2 fits as it is" in said
    assert "GiB at 2,048" in said
    assert "data.seq_len=2 fits with" not in said
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["growth"]["seq_len"] == 2048


def test_an_error_at_a_tried_length_says_that_the_planner_chose_it(file: str) -> None:
    """Catches an error about a length that only the planner tried, as if the user had set it."""
    planned = _planned(file, "--data.micro_bsz", "8000000", "--data.seq_len", "2")
    text = r"^sequences of 2,048 tokens, planned to see how memory grows: data"
    with pytest.raises(ConfigError, match=text):
        planned.growth(2)
    with pytest.raises(ConfigError, match=r"^sequences of 1,024 tokens, the shortest tried: data"):
        planned.longest(Budget(300 * MIB, None))


@pytest.mark.parametrize(
    ("text", "size"), [("80", 80), ("0.5TiB", 512), ("80GB", 80e9 / 2**30), ("512MiB", 0.5)]
)
def test_sizes_are_parsed_with_their_units(text: str, size: float) -> None:
    """Catches decimal gigabytes read as binary ones."""
    assert gib(text) == pytest.approx(size, rel=1e-12)


@pytest.mark.parametrize("size", ["80GBs", "-1", "nan", "0", "GB"])
def test_malformed_sizes_are_refused(
    file: str, size: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a memory of zero, or with an unknown unit."""
    with pytest.raises(SystemExit):
        main(["plan", file, "--memory", size])
    assert f"{size} must be a size: 80 and 80GiB are multiples of" in capsys.readouterr().err
