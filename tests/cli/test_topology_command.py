"""`isp topology`: the groups of a layout, and a drawing of how ranks split a weight."""

from __future__ import annotations

import pytest

from isp.cli import main
from isp.cli.topology_command import describe_cuts
from isp.core.mesh import Mode, ParallelConfig, TensorConfig, Topology, WeightConfig


def topology(mode: Mode, world: int = 8) -> Topology:
    parallel = ParallelConfig(tensor=TensorConfig(size=4, mode=mode), weight=WeightConfig(size=4))
    return Topology.create(world, parallel)


MEGATRON = """\
column linear, weight 16x8: cut by outputs, each rank computes its share of them
  [0:4, :]    ranks 0, 4
  [4:8, :]    ranks 1, 5
  [8:12, :]   ranks 2, 6
  [12:16, :]  ranks 3, 7
row linear, weight 16x8: cut by inputs, the ranks' products are summed
  [:, 0:2]  ranks 0, 4
  [:, 2:4]  ranks 1, 5
  [:, 4:6]  ranks 2, 6
  [:, 6:8]  ranks 3, 7"""


def test_a_weight_is_drawn_in_megatrons_modes() -> None:
    """Catches columns and rows that are swapped, and a missing replica."""
    assert describe_cuts(topology(Mode.MTP), (16, 8)) == MEGATRON


def test_a_weight_is_drawn_in_isp_mode() -> None:
    """Catches rows drawn at ranks that do not hold them, and an endless list of replicas."""
    lines = describe_cuts(topology(Mode.ISP, world=64), (6, 8)).splitlines()
    assert "cut by outputs" in lines[0]
    assert [line.strip() for line in lines[1:]] == [
        "[0:2, :]      ranks 0, 4, 8, .., 60",
        "[2:4, :]      ranks 1, 5, 9, .., 61",
        "[4:6, :]      ranks 2, 6, 10, .., 62",
        "[nothing, :]  ranks 3, 7, 11, .., 63",
    ]


@pytest.mark.parametrize(
    ("shape", "what"), [((18, 8), "18 outputs of .* column"), ((16, 9), "9 inputs of .* row")]
)
def test_a_weight_that_cannot_be_split_is_not_drawn(shape: tuple[int, int], what: str) -> None:
    """Catches a drawing of a layout that the run would refuse."""
    with pytest.raises(ValueError, match=what):
        describe_cuts(topology(Mode.MSP), shape)


def test_the_command_line_draws_a_weight(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches an option that is parsed but not used, and a shape that is read in part."""
    words = ["topology", "--world", "8", "--tensor", "4", "--mode", "mtp", "--shape"]
    assert main([*words, "16x8"]) == 0
    assert capsys.readouterr().out.endswith(f"\n\n{MEGATRON}\n")
    assert main([*words, "17x8"]) == 2
    assert capsys.readouterr().out == ""
    for wrong in ("16", "16x", "x", "16x8x2", "0x8"):
        with pytest.raises(SystemExit):
            main([*words, wrong])
        assert "argument --shape" in capsys.readouterr().err


def test_topology_prints_megatrons_order(capsys):
    """Catches groups printed in another order than that of Megatron-LM."""
    assert main(["topology", "--world", "16", "--tensor", "2", "--pipeline", "4"]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert "[0, 1]  [2, 3]" in lines["tensor"]
    assert "[0, 2]  [1, 3]  [4, 6]" in lines["data"]
    assert "[0, 4, 8, 12]  [1, 5, 9, 13]" in lines["pipeline"]


def test_topology_of_many_ranks_fits_in_lines(capsys):
    """Catches a page of numbers for 1,024 ranks."""
    assert main(["topology", "--world", "1024", "--tensor", "4", "--weight", "64"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) < 200
    assert (
        "tensor       [0, 1, 2, 3]  [4, 5, 6, 7]  [8, 9, 10, 11]  ..  [1020, 1021, 1022, 1023]"
        in lines
    )
    assert any("[64, 65, 66, .., 127]" in line for line in lines if line.startswith("weight "))


def test_topology_takes_every_size(capsys):
    """Catches an option of `isp topology` that is parsed but not used."""
    words = ["--world", "8", "--mode", "isp", "--tensor", "2", "--weight", "4", "--zero1", "1"]
    assert main(["topology", *words]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert "[0, 1, 2, 3]  [4, 5, 6, 7]" in lines["weight"]
    assert "[0]  [4]" in lines["zero1"]
