"""How things are cut into parts, and how groups and cuts are shown."""

from __future__ import annotations

import pytest
import torch

from isp.cli import main
from isp.core.mesh import Mode, ParallelConfig, TensorConfig, Topology, WeightConfig
from isp.core.mesh.partition import chunk_range
from isp.core.mesh.picture import describe_cuts
from isp.tensor_parallel import VocabUtility, divide, split_tensor_along_last_dim


def test_divide() -> None:
    """Catches a remainder that is dropped."""
    assert divide(12, 4) == 3
    with pytest.raises(ValueError, match="13 does not divide by 4"):
        divide(13, 4)


def test_split_along_the_last_dim() -> None:
    """Catches another dim being split, copies nobody asked for, and parts out of order."""
    x = torch.arange(24).view(2, 3, 4)
    views = split_tensor_along_last_dim(x, 2)
    assert torch.equal(views[0], x[..., :2])
    assert torch.equal(views[1], x[..., 2:])
    assert all(v.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for v in views)
    copies = split_tensor_along_last_dim(x, 2, contiguous=True)
    assert all(c.is_contiguous() and torch.equal(c, v) for c, v in zip(copies, views, strict=True))
    with pytest.raises(ValueError, match="4 does not divide by 3"):
        split_tensor_along_last_dim(x, 3)


@pytest.mark.parametrize("world", [1, 4, 8])
@pytest.mark.parametrize("length", [0, 3, 8, 50, 1600])
def test_parts_are_those_of_torch_chunk(length: int, world: int) -> None:
    """Catches parts that overlap, leave a gap, or are not those of the tables on the ranks."""
    parts = [chunk_range(length, world, i) for i in range(world)]
    assert [i for part in parts for i in part] == list(range(length))
    pieces = torch.arange(length).chunk(world)
    assert [len(p) for p in parts if p] == [len(piece) for piece in pieces if len(piece)]


@pytest.mark.parametrize("rank", range(8))
def test_vocabulary_ranges(rank: int) -> None:
    """Catches a range that is off by a rank, and two ways of asking that disagree."""
    expected = (rank * 200, (rank + 1) * 200)
    assert VocabUtility.vocab_range_from_global_vocab_size(1600, rank, 8) == expected
    assert VocabUtility.vocab_range_from_per_partition_vocab_size(200, rank, 8) == expected
    uneven = VocabUtility.vocab_range_from_global_vocab_size(50, rank, 8)
    assert uneven == (7 * rank, min(50, 7 * rank + 7))
    with pytest.raises(ValueError, match="rank 8 is not one of 8"):
        VocabUtility.vocab_range_from_global_vocab_size(50, 8, 8)


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


def test_the_picture_of_a_weight_in_megatrons_modes() -> None:
    """Catches column and row mixed up, and a replica left out."""
    assert describe_cuts(topology(Mode.MTP), (16, 8)) == MEGATRON


def test_the_picture_of_a_weight_in_isp() -> None:
    """Catches a picture that is not where the rows really lie, and an endless list of replicas."""
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
def test_a_weight_that_cannot_be_cut_has_no_picture(shape: tuple[int, int], what: str) -> None:
    """Catches a picture of a layout that the run would refuse."""
    with pytest.raises(ValueError, match=what):
        describe_cuts(topology(Mode.MSP), shape)


def test_the_command_line_draws_a_weight(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches an option that is parsed and dropped, or a shape that is half read."""
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
    """Catches groups printed in another order than Megatron-LM's."""
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
    """Catches an option of `isp topology` that is parsed and dropped."""
    words = ["--world", "8", "--mode", "isp", "--tensor", "2", "--weight", "4", "--zero1", "1"]
    assert main(["topology", *words]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert "[0, 1, 2, 3]  [4, 5, 6, 7]" in lines["weight"]
    assert "[0]  [4]" in lines["zero1"]
