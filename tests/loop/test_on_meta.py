"""Models that are passed on the meta device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import isp
from isp.config import JobConfig
from isp.core.mesh import Axis
from isp.models.loading import parameters_on_meta
from tests.models.models import VOCAB, Rows, job, packed_rows, tiny
from tests.models.own import OwnBlock
from tests.ranks import run_ranks


def _llama() -> nn.Module:
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(tiny("llama").config)
    return model


class Plain(nn.Module):
    """Modules with a `reset_parameters` of torch, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, 32)
        self.blocks = nn.ModuleList(OwnBlock(32, 4, 2, 0.0) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, VOCAB)
        self.register_buffer("angles", torch.arange(64) / 64)

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        x = self.tokens(ids) + self.angles[positions].unsqueeze(-1).to(self.norm.weight.dtype)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def _plain() -> nn.Module:
    with parameters_on_meta():
        return Plain()


def _train(
    rank: int, made: Callable[[], nn.Module], config: JobConfig, rows: Rows
) -> tuple[list[float], float]:
    model = made()
    run = isp.parallelize(model, config)
    data, ids = run.mesh[Axis.DATA], rows.input_ids
    mine: Tensor = ids.chunk(data.size)[data.rank]
    losses = [run.step(run.loss(mine)).loss for _ in range(2)]
    own = sum(p.numel() for p in model.parameters())
    assert not any(t.is_meta for t in (*model.parameters(), *model.buffers()))
    return losses, float(own)


@pytest.mark.parametrize("made", [_llama, _plain])
def test_initial_weights_are_equal_in_every_layout(made: Callable[[], nn.Module]) -> None:
    """Catches ranks that draw their shards independently, and buffers without values."""
    rows = packed_rows(2, 64, [[64], [64]])
    (alone, whole), *_ = run_ranks(1, _train, made, job(), rows)
    (spread, part), *_ = run_ranks(4, _train, made, job(tensor=2, weight=4), rows)
    assert spread == pytest.approx(alone, rel=1e-6)  # HF's norms and angles are float32
    assert alone[1] < alone[0]
    assert part < 0.4 * whole, "a rank has its part alone"


def test_buffers_without_values_are_refused() -> None:
    """Catches a model that trains with uninitialized buffers."""
    with torch.device("meta"):
        model = Plain()
    with pytest.raises(ValueError, match=r"has buffers on the meta.*isp.parameters_on_meta\(\)"):
        isp.parallelize(model, job())


def test_a_model_with_some_weights_is_refused() -> None:
    """Catches loaded weights that are initialized again."""
    model = _plain()
    model.get_submodule("norm").to_empty(device="cpu")
    with pytest.raises(ValueError, match="other parameters are not"):
        isp.parallelize(model, job())
