"""Tensor groups as heads x context: sizes, groups, and refusals."""

from __future__ import annotations

import pytest

from isp.cli.program import main
from isp.config import ConfigError, load_config
from isp.core.mesh import (
    Axis,
    DevicePlacementConfig,
    Mode,
    ParallelConfig,
    Sequence2DConfig,
    TensorConfig,
    Topology,
)
from isp.core.mesh.partition import divisors


def _parallel(tensor: int, *, head_first: bool = True, mode: Mode = Mode.ISP, **sizes: int):
    placement = DevicePlacementConfig(head_first=head_first)
    two = Sequence2DConfig(enable=True, device_placement_strategy=placement, **sizes)
    return ParallelConfig(tensor=TensorConfig(size=tensor, mode=mode), sequence_2D=two)


def test_groups_follow_head_first_and_context_first():
    """Catches neighbors of the wrong axis, and ranks in another order than their tokens."""
    near = Topology.create(8, _parallel(8, context_size=4))
    assert near.groups(Axis.HEAD) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert near.groups(Axis.CONTEXT) == [[0, 2, 4, 6], [1, 3, 5, 7]]
    far = Topology.create(8, _parallel(4, head_size=2, head_first=False))
    assert far.groups(Axis.CONTEXT) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert far.groups(Axis.HEAD) == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert "tensor 4 = head 2 x context 2" in far.describe()


def test_describing_sizes_does_not_list_groups():
    """Catches a report that takes a line for each group, or leaves out a mesh."""
    msp = Topology.create(4, ParallelConfig(tensor=TensorConfig(size=2, mode=Mode.MSP)))
    assert msp.sizes() == ["world 4 = pipeline 1 x data 2 x tensor 2"]
    assert Topology.create(8, _parallel(4, context_size=2)).sizes() == [
        "world 8 = pipeline 1 x data 2 x tensor 4",
        "tensor 4 = head 2 x context 2",
        "world 8 = pipeline 1 x weight_data 8 x weight 1",
    ]


@pytest.mark.parametrize("head_first", [True, False])
def test_head_and_context_groups_partition_the_tensor_groups(head_first):
    """Catches a rank in no group, and groups of both axes that share more than one rank."""
    for tensor in (1, 2, 6, 8):
        for context in divisors(tensor):
            topology = Topology.create(
                24, _parallel(tensor, head_first=head_first, context_size=context)
            )
            sequences = topology.groups(Axis.TENSOR)
            for rank in range(24):
                head, other = (topology.group_of(a, rank) for a in (Axis.HEAD, Axis.CONTEXT))
                assert (len(head), len(other)) == (tensor // context, context)
                assert set(head) & set(other) == {rank}
                assert any({*head, *other} <= set(sequence) for sequence in sequences)
            for axis in (Axis.HEAD, Axis.CONTEXT):
                served = topology.groups(topology.channel_axis(axis))
                assert served == topology.groups(axis) or len(topology.groups(axis)[0]) == 1


def test_without_two_axes_the_head_group_is_the_tensor_group():
    """Catches a second process group with the same ranks."""
    for parallel in (ParallelConfig(tensor=TensorConfig(size=4)), _parallel(4, mode=Mode.MSP)):
        topology = Topology.create(4, parallel)
        assert topology.channel_axis(Axis.HEAD) is Axis.TENSOR
        assert topology.groups(Axis.CONTEXT) == [[0], [1], [2], [3]]
        assert "context" not in topology.describe()


@pytest.mark.parametrize(
    ("tensor", "sizes", "heads", "head_size"),
    [
        (8, {}, (32, 8), 8),
        (16, {}, (32, 8), 8),
        (8, {}, (32, 2), 2),
        (8, {}, (32, 1), 1),
        (6, {}, (12, 4), 2),
        (4, {}, (6, 3), 1),
        (8, {"context_size": 2}, (32, 1), 4),
        (8, {"head_size": 2}, (32, 8), 2),
    ],
)
def test_a_missing_head_or_context_size_is_derived(tensor, sizes, heads, head_size):
    """Catches needless copies of KV heads, and sizes that do not multiply to the group's size."""
    found = _parallel(tensor, **sizes).for_heads(*heads)
    assert found.sequence_2D.sizes == (head_size, tensor // head_size)


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (["head_size=3"], r"head_size=3 must divide parallel.tensor.size=8: use 1, 2, 4 or 8"),
        (["context_size=16"], r"context_size=16 must divide parallel.tensor.size=8"),
        (["head_size=2", "context_size=2"], r"not parallel.tensor.size=8: use context_size=4"),
        (
            ["head_size=8"],
            r"head_size=8 leaves ranks without any of the 4 query heads: use 1, 2 or 4",
        ),
        (["exchange=rings"], r"exchange"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(tmp_path, words, fault):
    """Catches a size that would fail, or hang, on the ranks."""
    path = tmp_path / "job.yaml"
    path.write_text(
        "model: {vocab_size: 64, hidden_size: 32, num_layers: 2, num_heads: 4}\n"
        "data: {source: README.md, seq_len: 64}\n"
        "parallel: {tensor: {size: 8}, sequence_2D: {enable: true}}\n"
    )
    with pytest.raises(ConfigError, match=fault):
        load_config(path, [f"--parallel.sequence_2D.{word}" for word in words])
    off = load_config(path, ["--parallel.tensor.mode=mtp", "--parallel.tensor.size=4"])
    assert "parallel.sequence_2D is not used in mtp mode" in " ".join(off.unused())
    forgotten = ["--parallel.sequence_2D.enable=false", "--parallel.sequence_2D.head_size=2"]
    assert "sequence_2D is not used: set" in " ".join(load_config(path, forgotten).unused())
    assert load_config(path).unused() == []
    assert load_config(path).topology(8).head == 4


def test_the_topology_command_refuses_axes_that_a_mode_ignores(capsys):
    """Catches groups that are shown without the requested axis."""
    asked = ["topology", "--world", "8", "--tensor", "4", "--context", "2"]
    assert main([*asked, "--mode", "mtp"]) != 0
    assert "--context 2 needs --mode isp, not mtp" in capsys.readouterr().err
    assert main(asked) == 0
    assert "tensor 4 = head 2 x context 2" in capsys.readouterr().out
