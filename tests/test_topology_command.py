"""`isp topology`: the groups that it prints."""

from __future__ import annotations

from isp.cli import main


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
