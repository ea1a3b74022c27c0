"""Plans of heads x context: choice of the exchange, splits of the tensor group, balance."""

from __future__ import annotations

from pathlib import Path

import pytest

from isp.cli import main
from isp.config import JobConfig, load_config
from isp.core.mesh import Axis, ContextExchange
from isp.planner import Candidate, load_fabric, search
from isp.planner.case import PlanCase
from isp.planner.exchange import choose_exchange
from isp.planner.lengths import Planned
from isp.train.monitor.balance import balance_text

TEXT = """
model:
  {vocab_size: 2048, hidden_size: 512, num_layers: 4, num_heads: 8, num_kv_heads: 2,
   intermediate_size: 704}
data: {source: python-stdlib, seq_len: 65536, micro_num: 1}
parallel: {tensor: {size: 8}, weight: {size: 8}, sequence_2D: {enable: true}}
training: {dtype: bfloat16}
"""
TWO = ["--parallel.sequence_2D.head_size 2", "--parallel.sequence_2D.context_size 4"]
EXCHANGE = "--parallel.sequence_2D.exchange="


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "model.yaml"
    path.write_text(TEXT)
    return str(path)


def _peak(config: JobConfig) -> int:
    return Planned(config, 8, on_cpu=False).peak(65536).total


def test_a_ring_is_chosen_where_a_gather_does_not_fit(file: str) -> None:
    """Catches a choice that ignores memory, or overrides the user's key."""
    config = load_config(file)
    gather, ring = (_peak(load_config(file, [EXCHANGE + kind])) for kind in ("gather", "ring"))
    assert ring < gather
    for usable, expected in ((None, "gather"), (gather, "gather"), (gather - 1, "ring")):
        chosen, why = choose_exchange(config, 8, usable, on_cpu=False)
        assert chosen.parallel.sequence_2D.exchange == expected
        assert why.startswith(f"{expected} (auto)")
    asked = load_config(file, [f"{EXCHANGE}gather"])
    assert choose_exchange(asked, 8, 1, on_cpu=False)[0] == asked
    alone = load_config(file, ["--parallel.sequence_2D.enable=false"])
    assert choose_exchange(alone, 8, 1, on_cpu=False) == (alone, "")


def test_the_chosen_exchange_is_reported(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a plan of another exchange than the run's."""
    assert main(["plan", file, "--memory", "80"]) == 0
    assert "context   4 ranks, gather (auto): planned to take" in capsys.readouterr().out
    main(["plan", file, "--memory", "0.5"])
    assert "context   4 ranks, ring (auto)" in capsys.readouterr().out


def test_layouts_are_searched_over_heads_x_context(file: str) -> None:
    """Catches splits that are not tried, cannot be configured, or leave a rank without a head."""
    config, fabric = load_config(file), load_fabric("h100x8_ib400")
    found = search(config, 8, fabric)
    assert isinstance(found.own, Candidate)
    assert found.own.overrides[-4:-2] == TWO
    isp = [c for c in found.fitting if c.case.mode == "isp"]
    assert len({(c.case.topology.head, c.case.topology.context) for c in isp}) > 3
    for candidate in isp:
        topology = candidate.case.topology
        assert topology.head <= 8
        words = [word for pair in candidate.overrides for word in pair.split(" ")]
        assert PlanCase.of(load_config(file, words), 8).topology == topology
        sizes = [candidate.case.size(axis) for axis in Axis]
        assert sizes == [topology.size(axis) for axis in Axis]


def test_neighbors_of_an_axis_share_a_node(file: str) -> None:
    """Catches transfers priced by the links of the other axis."""
    fabric = load_fabric("h100x8_ib400")
    place = "--parallel.sequence_2D.device_placement_strategy.head_first"
    for head_first, inside in (("true", Axis.HEAD), ("false", Axis.CONTEXT)):
        words = ["--parallel.tensor.size=16", "--parallel.sequence_2D.head_size=2"]
        if inside is Axis.HEAD:
            words[1] = "--parallel.sequence_2D.head_size=8"
        case = PlanCase.of(load_config(file, [*words, f"{place}={head_first}"]), 16)
        wires = {axis: fabric.wire(case, axis) for axis in (Axis.HEAD, Axis.CONTEXT)}
        assert wires.pop(inside) == "inside"
        assert set(wires.values()) == {"between"}


def test_the_balance_of_the_configured_row_is_reported(
    file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a balance for other documents than those of a row."""
    assert main(["prefetch", file]) == 0
    assert "4 context ranks attends to 0.0% more than the mean" in capsys.readouterr().out
    packed = load_config(file, ["--data.micro_bsz=3", "--data.seq_len=8"])
    assert "in a row of 3 x 8 tokens" in balance_text(packed)
    assert balance_text(load_config(file, ["--parallel.sequence_2D.enable=false"])) == ""
    assert ContextExchange.AUTO is packed.parallel.sequence_2D.exchange
