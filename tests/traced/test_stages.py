"""Pipelines of models that know nothing of stages."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from isp.parallel import ParallelConfig, PipelineConfig
from isp.traced.model import TracedModel
from isp.train.check import Case, Check
from isp.train.check_layouts import layouts_of
from isp.train.check_reference import Subject
from isp.train.check_subjects import HuggingFaceSubject, OwnSubject
from tests.traced.own import VOCAB, OwnBlock

transformers = pytest.importorskip("transformers", minversion="5.23")


class Plain(nn.Module):
    """Whose blocks may use the first hidden state again."""

    def __init__(self, *, uses_first: bool = False) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, 32), nn.Embedding(64, 32)
        self.first_norm, self.norm = nn.LayerNorm(32), nn.LayerNorm(32)
        self.blocks = nn.ModuleList(OwnBlock(32, 4, 2, 0.0) for _ in range(4))
        self.head = nn.Linear(32, VOCAB)
        self.uses_first = uses_first

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        first = x = self.first_norm(self.tokens(ids) + self.positions(positions))
        for block in self.blocks:
            x = block(x) + first if self.uses_first else block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def _gemma() -> Subject:
    """Tied, with a scaled embedding."""
    return HuggingFaceSubject(transformers.AutoConfig.for_model("gemma3_text"), layers=4)


def _own() -> Subject:
    return OwnSubject(Plain())


@pytest.mark.parametrize(
    ("subject", "layout", "case"),
    [
        (_gemma, "1x2 Interleaved1F1B 2x2", Case(packed=True, recomputed=True)),
        (_gemma, "mtp2 1F1B 2", Case(packed=True, recomputed=False)),
        (_own, "2x1 ZBVZeroBubble 2x2", Case(packed=True, recomputed=True)),
        (_own, "1x1 InterleavedZeroBubble 2x2", Case(packed=False, recomputed=False)),
    ],
    ids=["tied, interleaved", "tied, mtp", "own, V", "own, zero bubble"],
)
def test_stages_compute_what_the_model_does(subject: object, layout: str, case: Case) -> None:
    """Catches hidden states of another stage, gradients that do not come back or are counted twice,
    and tied weights whose two gradients are not added."""
    assert callable(subject)
    made: Subject = subject()
    (chosen,), _ = layouts_of(layout, made, ParallelConfig())
    verdict = Check(made, [chosen], cases=[case]).run(chosen)
    assert verdict.agrees, verdict


def _pipeline(size: int) -> ParallelConfig:
    return ParallelConfig(pipeline=PipelineConfig(size=size))


def test_blocks_that_need_more_than_a_hidden_state_are_refused() -> None:
    """Catches stages that train as another model: the first hidden state is zero on later ones."""
    with pytest.raises(ValueError, match=r"pipeline.size=2 cuts Plain into 2 .* use more of the"):
        TracedModel(Plain(uses_first=True)).check_layout(_pipeline(2), 48)


def test_more_stages_than_blocks_and_loose_parameters_are_refused_by_name() -> None:
    model = Plain()
    with pytest.raises(ValueError, match="4 layers cannot be cut into 5 stages"):
        TracedModel(copy.deepcopy(model)).check_layout(_pipeline(5), 48)
    shared = model.blocks[3]
    assert isinstance(shared, OwnBlock)
    shared.q.weight = model.blocks[0].q.weight  # type: ignore[union-attr, assignment]
    with pytest.raises(ValueError, match=r"blocks.0.q.weight is used by several stages"):
        TracedModel(model).check_layout(_pipeline(2), 48)
