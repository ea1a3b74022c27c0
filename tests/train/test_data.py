"""The micro-batches of a step, as sent to the ranks that share a sequence."""

from __future__ import annotations

import torch

from isp.core.comm import Channel
from isp.core.mesh import Axis
from isp.core.micro_batch import MicroBatch
from isp.train.data import share_micro_batches, stacked
from model.config import ModelConfig
from tests.ranks import run_ranks
from tests.train.runs import SEQ_LEN, Layout, Meshes, Task

LAYOUT = Layout(tensor=2)
TASK = Task(
    model=ModelConfig(
        vocab_size=30, hidden_size=8, num_layers=1, num_heads=2, num_kv_heads=2, intermediate_size=8
    )
)


def _shared(rank: int, device: str) -> list[tuple[list[int], list[list[int]] | None]]:
    """Return the bounds of each micro-batch, and its tokens unless the device is meta."""
    host = Meshes(rank).of(LAYOUT)[Axis.TENSOR]
    found = share_micro_batches(
        stacked(_batches(), torch.device("cpu")) if rank == 0 else None,
        shape=(1, SEQ_LEN),
        micro_num=3,
        packed=True,
        tensor=host if device == "cpu" else Channel.solo(),
        host=host,
        device=torch.device(device),
    )
    assert all(batch.positions.device.type == device for batch in found)
    return [
        (batch.cu_seqlens.tolist(), None if batch.tokens.is_meta else batch.tokens.tolist())
        for batch in found
        if batch.cu_seqlens is not None
    ]


def _batches() -> list[MicroBatch]:
    return [TASK.batch(1, place) for place in range(3)]


def test_bounds_of_documents_are_known_to_every_host() -> None:
    """Catches bounds that would have to be fetched from a device, or differ from those that were
    read.
    """
    bounds = [batch.cu_seqlens.tolist() for batch in _batches() if batch.cu_seqlens is not None]
    tokens = [batch.tokens.tolist() for batch in _batches()]
    assert [len(b) for b in bounds] == [3, 4, 5]
    assert run_ranks(2, _shared, "cpu") == [list(zip(bounds, tokens, strict=True))] * 2
    assert run_ranks(2, _shared, "meta") == [[(of_one, None) for of_one in bounds]] * 2
