"""Process groups of a mesh: how many there are and which axes share one without delays."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from isp.config import load_config
from isp.core.comm import Mesh, World
from isp.core.comm.tag import Tag
from isp.core.mesh import Axis, Mode, Topology
from isp.train.run import main as train
from tests.ranks import run_programs, run_ranks
from tests.toolkit import topology
from tests.train.jobs import write_job

LAYOUTS = {
    "tensor, weight, stage = world": topology(8, tensor=8, weight=8),
    "tensor, weight, stage = world, gradients of weight": topology(
        8, tensor=8, weight=8, own_reduce_group=True
    ),
    "tensor, data, weight, weight_data = zero1, stage = world": topology(8, tensor=2, weight=4),
    "tensor = weight, data, weight_data, zero1, stage = world": topology(
        8, tensor=2, mode=Mode.MSP, zero1=2
    ),
    "data = stage = world, weight_data = zero1": topology(8),
    "tensor, weight, pipeline, embedding, stage, world": topology(
        8, tensor=2, weight=2, pipeline=4
    ),
    "pipeline, embedding = world": topology(2, pipeline=2),
    "tensor, head, context, weight, weight_data = zero1, stage = world": topology(
        8, tensor=8, weight=4, context=2
    ),
    "none": topology(1),
}
"""Topologies by the description of their process groups."""


@pytest.mark.parametrize("said", LAYOUTS)
def test_axes_with_the_same_ranks_share_a_group_unless_it_delays_one(said: str) -> None:
    """Catches an unneeded group, a shared group that would delay a gather or a transfer of tokens,
    and a group whose ranks are not those of its axes.
    """
    ranks = LAYOUTS[said]
    line = next(line for line in ranks.describe().split("\n") if "process group" in line)
    number, _, named = line.partition(": ")
    assert (
        named.removesuffix(
            " (axes with the same ranks share a group where neither delays the other)"
        )
        == said
    )
    assert number.split()[0] == str(0 if ranks.world_size == 1 else len(said.split(", ")))
    for home, axes in ranks.process_groups.items():
        assert all(sorted(ranks.groups(axis)) == sorted(ranks.groups(home)) for axis in axes)


def _groups(rank: int, topology: Topology) -> tuple[int, dict[str, int]]:
    """Return the number of process groups other than the default one, and each channel's counts."""
    others = Mesh(topology, rank, backend="gloo")  # another mesh, whose timeouts must not matter
    assert dist.group.WORLD not in {channel.group for channel in others.opened}
    mesh = Mesh(topology, rank)
    waiting = []
    for axis in Axis:  # launch on all channels that share a group, then wait in another order
        ranks = topology.group_of(axis, rank)
        x = torch.tensor([rank], dtype=torch.float64)
        waiting.append((axis, sum(ranks), mesh[axis].all_reduce(x, tag=Tag(tensor="x"))))
    for axis, total, pending in reversed(waiting):
        assert pending.wait().item() == total, axis
    progress = {}
    for channel in mesh.opened:
        progress.update(channel.progress())
    groups = {channel.group for channel in mesh.opened} - {None, dist.group.WORLD}
    return len(groups), progress


def _groups_of_foreign_default(rank: int, topology: Topology) -> list[tuple[str, bool]]:
    """Return the groups' backends if torch chose the default one's, and whether ranks sum
    locally.
    """
    dist.init_process_group(rank=rank, world_size=2)
    mesh = Mesh(topology, rank, backend=World(torch.device("cpu")).backend)
    found = [
        (str(dist.get_backend(c.group)), c.sums_locally) for c in mesh.opened if c.group is not None
    ]
    dist.destroy_process_group()
    return found


def test_groups_have_the_right_backend_whatever_the_default_group_has() -> None:
    """Catches groups of a loop that called init_process_group() without a backend: torch then has
    one for each device and names none, so that a channel could not tell which one its transfers
    use.
    """
    for found in run_programs(2, _groups_of_foreign_default, topology(2, tensor=2)):
        assert set(found) == {("gloo", True)}


def test_channels_that_share_a_group_count_separately() -> None:
    """Catches a message with the name of one axis and the count of another, and extra groups."""
    for added, progress in run_ranks(2, _groups, topology(2, tensor=2, weight=2)):
        assert added == 2  # tensor and weight
        counts = {"tensor": 2, "weight": 2, "stage": 1, "world": 1}  # head; expert_weight
        assert progress == {f"{name} group [0, 1]": count for name, count in counts.items()}


def _timeouts(rank: int, topology: Topology) -> set[float]:
    mesh = Mesh(topology, rank)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mesh.set_timeout(7)
    return {channel._timeout().total_seconds() for channel in mesh.opened if channel.group}


def test_a_timeout_is_set_without_a_warning() -> None:
    """Catches a name that torch 2.14 deprecates, and a timeout that transfers do not have."""
    assert run_ranks(2, _timeouts, topology(2, tensor=2)) == [{7.0}, {7.0}]


def _opened(_: int, job: Path) -> tuple[list[str], list[str], str]:
    """Return the groups and host channels that a run opens, and how the topology describes them."""
    config, groups, hosts = load_config(job, ["--training.steps=1"]), list[str](), list[str]()
    new_group, open_host = dist.new_group, Mesh.open_host

    def making(*args: Any, **options: Any) -> Any:
        groups.append(options["group_desc"])
        return new_group(*args, **options)

    def opening(mesh: Mesh, axis: Axis, name: str) -> Any:
        hosts.append(name)
        return open_host(mesh, axis, name)

    with (
        mock.patch.object(dist, "new_group", making),
        mock.patch.object(Mesh, "open_host", opening),
    ):
        train(config)
    return groups, hosts, config.topology(2).describe()


def test_the_log_of_a_start_lists_every_group(tmp_path: Path) -> None:
    """Catches a group that a run opens and does not list, on CPU or GPU."""
    for groups, hosts, said in run_programs(2, _opened, write_job(tmp_path)):
        assert groups == ["tensor", "weight", "checkpoint"]
        lines = said.split("\n")[-2:]
        assert lines[0].startswith("3 process groups per rank: tensor, weight, stage = world")
        of_gpus = ", ".join([*hosts, groups[-1]])
        assert lines[1] == (
            f"a run adds 1 for values in CPU memory: checkpoint; on GPUs 3: {of_gpus}"
        )
