"""`broadcast_data` from the first rank of a group, in disjoint groups."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from isp.core.comm import Channel
from isp.tensor_parallel import broadcast_data
from tests.ranks import run_ranks


def batch(seed: int) -> dict[str, Tensor]:
    """Return the first rank's data: tensors of several shapes, one empty, one scalar, one
    strided.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(100, (2, 6 + seed), generator=generator)
    return {
        "tokens": tokens,
        "strided": tokens.T,
        "scalar": torch.tensor(seed),
        "none": torch.empty(0, 3, dtype=torch.int64),
        "mask": torch.rand(4, generator=generator) < 0.5,
        "half": torch.randn(3, 5, generator=generator).bfloat16(),
        "unasked": torch.ones(2),
    }


INTS = ["tokens", "scalar", "none", "strided"]


def _run(rank: int, ranks_of_groups: list[list[int]]) -> dict[str, object]:
    channel = Channel.solo()
    for number, ranks in enumerate(ranks_of_groups):
        group = dist.new_group(ranks)
        if rank in ranks:
            channel, seed = Channel(group), number
    channel.log.collect()
    first = channel.rank == 0
    data = batch(seed) if first else None
    found: dict[str, object] = {}
    got = broadcast_data(INTS, data, torch.int64, channel=channel)
    got |= broadcast_data(["mask"], data, torch.bool, channel=channel)
    got |= broadcast_data(["half"], data, torch.bfloat16, channel=channel)
    expected = batch(seed)
    assert list(got) == [*INTS, "mask", "half"]
    assert all(
        torch.equal(x, expected[key]) and x.dtype == expected[key].dtype for key, x in got.items()
    )
    found["kinds"] = [t.kind for t in channel.log.take()]
    got["tokens"].zero_()
    assert data is None or data["tokens"].any(), "the first rank's own tensor was written to"
    # The data of other ranks are ignored.
    mine = {"tokens": torch.full((3,), rank)}
    shared = broadcast_data(["tokens"], mine, torch.int64, channel=channel)
    assert shared["tokens"].tolist() == [ranks_of_groups[seed][0]] * 3
    assert broadcast_data([], None, torch.int64, channel=channel) == {}
    channel.log.collect()
    faults = []
    wrong = {"tokens": batch(0)["tokens"], "labels": torch.zeros(2), "deep": torch.zeros((1,) * 9)}
    for keys, dtype in (
        (["tokens", "labels"], torch.int64),
        (["tokens", "positions"], torch.int64),
        (["deep"], torch.float32),
        (["text"], torch.float32),
    ):
        here = {**wrong, "text": "abc"} if first else None
        with pytest.raises(ValueError, match="data") as raised:
            broadcast_data(keys, here, dtype, channel=channel)  # type: ignore[arg-type]
        faults.append(str(raised.value))
    found["faults"] = faults
    found["sent"] = len(channel.log.take())
    # No rank is a collective ahead: the next call works.
    again = broadcast_data(["tokens"], data, torch.int64, channel=channel)
    assert torch.equal(again["tokens"], expected["tokens"])
    return found


@pytest.mark.parametrize(
    "groups",
    [[[0, 1, 2, 3]], [[0, 1], [2, 3], [4, 5], [6, 7]], [[1, 2, 5, 6], [0, 3, 4, 7]]],
    ids=str,
)
def test_all_ranks_receive_the_data_of_the_first(groups: list[list[int]]) -> None:
    """Catches shapes that receivers must know, one transfer for each tensor, an error on some ranks
    only for which others wait, and data of another group.
    """
    for found in run_ranks(sum(map(len, groups)), _run, groups):
        assert found["kinds"] == ["broadcast"] * 6, "shapes and values, for each of three dtypes"
        assert found["faults"] == [
            "data['labels'] is not a tensor of torch.int64",
            "data has no 'positions'",
            "data['deep'] has more than 8 dims",
            "data['text'] is not a tensor of torch.float32",
        ]
        assert found["sent"] == 4, "no value travelled"


def test_a_group_of_one_gets_its_own_tensors() -> None:
    """Catches copies, and skipped checks, where no transfer is needed."""
    data, channel = batch(1), Channel.solo()
    channel.log.collect()
    got = broadcast_data(INTS, data, torch.int64, channel=channel)
    assert all(got[key] is data[key] for key in INTS)
    assert channel.log.take() == []
    with pytest.raises(ValueError, match="'half'"):
        broadcast_data(["half"], data, torch.float32, channel=channel)
    with pytest.raises(ValueError, match="'tokens'"):
        broadcast_data(["tokens"], None, torch.int64, channel=channel)
    with pytest.raises(ValueError, match="named twice"):
        broadcast_data(["mask", "mask"], data, torch.bool, channel=channel)
