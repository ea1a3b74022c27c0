"""The random numbers of a model in training, which differ from rank to rank as tokens do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from isp.layers.factory import LayerFactory
from isp.rng import generator_states, restore_generators

__all__ = ["random_numbers"]


@contextmanager
def random_numbers(training: bool, layers: LayerFactory) -> Iterator[None]:
    """A forward whose draws (dropout) follow from one number of the host's generator, and the rank.

    Where the ranks of a sequence have the same tokens (mtp), they draw the same. Nothing is drawn
    but in `training`.
    """
    if not training:
        yield
        return
    rank = dist.get_rank() if dist.is_initialized() else 0
    if not layers.mode.facts.splits_sequence:
        rank -= layers.tensor.rank
    seed = int(torch.randint(1 << 48, ()))
    before = generator_states(layers.device)
    torch.manual_seed(seed + rank)
    try:
        yield
    finally:
        restore_generators(layers.device, before)
