"""Channels made from torch's groups and meshes, and errors that say what to pass instead."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import isp
from isp import tensor_parallel as tp
from isp.core.comm import Channel, streams
from isp.core.comm.channel import check_channel
from isp.data_parallel import DataParallelBucket
from tests.ranks import run_ranks


def _from_torch(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    unnamed = init_device_mesh("cpu", (2, 2))
    tensor = [Channel.from_mesh(mesh, "tensor"), Channel.from_mesh(mesh, 1)]
    tensor += [Channel.from_mesh(mesh["tensor"])]
    tensor += [Channel.from_group(mesh.get_group("tensor"), name="tensor")]
    tensor += [Channel.from_mesh(unnamed, 1)]
    for channel in tensor:
        assert (channel.size, channel.rank) == (2, rank % 2)
        gathered = channel.all_gather(torch.tensor([rank])).wait()
        assert gathered.tolist() == [rank // 2 * 2, rank // 2 * 2 + 1]
    assert [channel.name for channel in tensor] == ["tensor"] * 4 + [""]
    assert all(channel.sums_locally for channel in tensor)
    log = isp.Channel.solo().log
    assert Channel.from_mesh(mesh, "data", log=log).log is log

    with pytest.raises(ValueError, match=r"dim='model' is no dimension .*: pass one of 'data', 't"):
        Channel.from_mesh(mesh, "model")
    with pytest.raises(ValueError, match=r"dim=None is no dimension of .*: pass one of 'data', 't"):
        Channel.from_mesh(mesh)
    with pytest.raises(ValueError, match=r"dim=2 is no dimension of .*: pass one of 0, 1"):
        Channel.from_mesh(unnamed, 2)
    with pytest.raises(TypeError, match=r"mesh must be a torch DeviceMesh, got a ProcessGroup: "):
        Channel.from_mesh(dist.group.WORLD)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"got a DeviceMesh: pass Channel.from_mesh\(device_mesh"):
        Channel.from_group(mesh)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"channel must be an isp.Channel, got a DeviceMesh: pass"):
        check_channel("channel", mesh)
    with pytest.raises(TypeError, match=r"got a ProcessGroup: pass isp.Channel.from_group\(group"):
        check_channel("channel", dist.group.WORLD)
    others = dist.new_group([0, 1])
    if rank > 1:
        with pytest.raises(ValueError, match="this rank is not in the group"):
            Channel.from_group(others)
    # torch names such a backend cpu:gloo, and that of a mesh may be undefined
    mixed = dist.new_group(backend="cpu:gloo")
    assert streams.backend_name(mixed) == "gloo"
    assert Channel.from_group(mixed).sums_locally


def test_a_channel_is_made_from_torchs_groups_and_meshes() -> None:
    """Catches wrong ranks, a lost name, and a backend that is not recognized."""
    run_ranks(4, _from_torch)


def test_a_wrong_group_is_refused_with_what_to_pass() -> None:
    """Catches a wrong type that fails only later, where no message names the argument."""
    solo = Channel.solo()
    with pytest.raises(TypeError, match=r"group must be a torch ProcessGroup, got the method"):
        Channel(solo.all_gather)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="got None: call init_process_group first, or use Channel"):
        Channel.from_group(None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"got int 2: pass one of dist.new_group"):
        Channel.from_group(2)  # type: ignore[arg-type]
    check_channel("channel", solo)
    with pytest.raises(TypeError, match=r"got the class Channel: pass isp.Channel.from_group"):
        check_channel("channel", Channel)


_X = torch.zeros(2, 2)
_WRONG: dict[str, Callable[[], object]] = {
    "group of a column linear": lambda: tp.ColumnParallelLinear(4, 4, group=4),  # type: ignore[arg-type]
    "group of a row linear": lambda: tp.RowParallelLinear(4, 4, group=None),  # type: ignore[arg-type]
    "group of an embedding": lambda: tp.VocabParallelEmbedding(4, 4, group=_X.size),  # type: ignore[arg-type]
    "group of a workspace": lambda: tp.InferenceWorkspace(2, 4, max_tokens=2),  # type: ignore[arg-type]
    "channel of a mapping": lambda: tp.copy_to_tensor_model_parallel_region(_X, 2),  # type: ignore[arg-type]
    "channel of a split": lambda: tp.split_tensor_into_1d_equal_chunks(_X, 2),  # type: ignore[arg-type]
    "channel of a gather": lambda: tp.gather_split_1d_tensor(_X, 2),  # type: ignore[arg-type]
    "channel of an exchange": lambda: tp.all_to_all_sp2hp(_X, 2),  # type: ignore[arg-type]
    "channel of a broadcast": lambda: tp.broadcast_data([], {}, torch.int64, channel=2),  # type: ignore[arg-type]
    "channel of a loss": lambda: tp.vocab_parallel_cross_entropy(_X, _X, channel=2),  # type: ignore[arg-type]
    "channel of replicas": lambda: DataParallelBucket(torch.nn.Linear(2, 2), 2),  # type: ignore[arg-type]
    "channel of attention": lambda: isp.DistributedAttention(print, 2),  # type: ignore[arg-type]
    "channel of a checkpoint": lambda: tp.checkpoint(  # type: ignore[misc]
        abs,
        True,
        _X,
        tracker=tp.RngStatesTracker(_X.device),
        channel=2,  # type: ignore[arg-type]
    ),
}


@pytest.mark.parametrize("what", _WRONG)
def test_public_functions_check_their_channel(what: str) -> None:
    """Catches a public function that accepts any object as a channel and fails inside."""
    name = what.split()[0]
    with pytest.raises(TypeError, match=rf"^{name} must be an isp.Channel, got .*: pass isp"):
        _WRONG[what]()


def test_attention_checks_its_local_attention() -> None:
    """Catches the two arguments of DistributedAttention in the wrong order."""
    with pytest.raises(TypeError, match="local_attention must be callable, got Channel"):
        isp.DistributedAttention(Channel.solo(), Channel.solo())  # type: ignore[arg-type]
