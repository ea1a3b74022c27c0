"""Pipelines of models that are written without stages."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import isp
from isp.core.attention.api import Relative
from isp.core.attention.backends.cpu import CpuAttention
from isp.core.attention.kinds import AttentionKind
from isp.core.mesh import ParallelConfig, PipelineConfig
from isp.models.known_code import local_layers
from isp.models.traced_model import TracedModel
from isp.parity.compare import Check, CheckCase
from isp.parity.layouts import layouts_of
from isp.parity.subjects import Subject
from tests.models.own import VOCAB, OwnBlock

transformers = pytest.importorskip("transformers")


class Plain(nn.Module):
    """A model with a parameter outside of modules, and a linear between blocks."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, 32), nn.Embedding(64, 32)
        self.first_norm, self.norm = nn.LayerNorm(32), nn.LayerNorm(32)
        self.blocks = nn.ModuleList(OwnBlock(32, 4, 2, 0.0) for _ in range(4))
        self.between, self.head = nn.Linear(32, 32), nn.Linear(32, VOCAB)
        self.gains = nn.Parameter(torch.rand(32))

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        x = self.first_norm(self.tokens(ids) + self.positions(positions)) * self.gains
        for number, block in enumerate(self.blocks):
            x = block(self.between(x) if number == 2 else x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class UsesFirst(Plain):
    """A model whose blocks use the first hidden state again."""

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        first = x = self.tokens(ids)
        for block in self.blocks:
            x = block(x) + first
        logits: Tensor = self.head(x)
        return logits


class SharesInput(OwnBlock):
    """A block whose first instance stores its input where later ones find it."""

    given: Tensor | None = None
    first: SharesInput

    def forward(self, x: Tensor) -> Tensor:
        if self.first is self:
            self.given = x
        return super().forward(x if self.first.given is None else x + self.first.given)


class ByAttribute(Plain):
    """A model whose blocks use the first hidden state again through an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(SharesInput(32, 4, 2, 0.0) for _ in range(4))
        for block in self.blocks:
            vars(block)["first"] = self.blocks[0]


class Writes(OwnBlock):
    """A block that writes in place into its input."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(1.5))


class Biased(OwnBlock):
    """A block whose attention has a distance bias that is passed to it."""

    def forward(self, x: Tensor, profiles: Tensor) -> Tensor:  # type: ignore[override]
        q, k, v = (f(x).unflatten(-1, (-1, self.head)) for f in (self.q, self.k, self.v))
        states = self.up(x)[..., :12].unflatten(-1, (4, 3))
        y = isp.attention(q, k, v, relative=Relative(states, profiles))
        return x + self.out(y.flatten(2))


class OneBias(Plain):
    """A model whose blocks share a distance bias that only attention reads."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Biased(32, 4, 2, 0.0) for _ in range(4))
        self.profiles = nn.Embedding(3, 7)

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        x, profiles = self.tokens(ids), self.profiles(torch.arange(3, device=ids.device))
        for block in self.blocks:
            x = block(x, profiles)
        logits: Tensor = self.head(x)
        return logits


def _gemma() -> Subject:
    """Return a Gemma: tied weights, with a scaled embedding."""
    return Subject.of_config(transformers.AutoConfig.for_model("gemma3_text"), layers=4)


def _two_streams() -> Subject:
    """Return a model whose blocks return two tensors, in float32 or wider."""
    return Subject.of_config(transformers.AutoConfig.for_model("zaya"))


def _lists() -> Subject:
    """Return a model with a list of modules that are no blocks, and also return tensors of
    tokens.
    """
    return Subject.of_config(transformers.AutoConfig.for_model("granite_swa"))


def _own() -> Subject:
    return Subject.of_module(Plain())


def _writing() -> Subject:
    model = Plain()
    model.blocks = nn.ModuleList(Writes(32, 4, 2, 0.0) for _ in range(4))
    return Subject.of_module(model)


@pytest.mark.parametrize(
    ("subject", "layout", "case"),
    [
        (_gemma, "1x2 Interleaved1F1B 2x2", CheckCase(packed=True, recomputed=True)),
        (_gemma, "mtp2 1F1B 2", CheckCase(packed=True, recomputed=False)),
        (_two_streams, "1x1 1F1B 2", CheckCase(packed=True, recomputed=True)),
        (_lists, "1x1 1F1B 2", CheckCase(packed=True, recomputed=True)),
        (_own, "2x1 ZBVZeroBubble 2x2", CheckCase(packed=True, recomputed=True)),
        (_writing, "1x1 InterleavedZeroBubble 2x2", CheckCase(packed=False, recomputed=False)),
    ],
    ids=[
        "tied, interleaved",
        "tied, mtp",
        "two streams",
        "lists",
        "own, V",
        "writing, zero bubble",
    ],
)
def test_stages_compute_as_the_whole_model(subject: object, layout: str, case: CheckCase) -> None:
    """Catches hidden states of another stage, gradients that are lost or counted twice, and tied
    weights whose two gradients are not summed.
    """
    assert callable(subject)
    made = subject()
    (chosen,), _ = layouts_of(layout, made, ParallelConfig())
    verdict = Check(made, [chosen], cases=[case]).run(chosen)
    assert verdict.agrees, verdict


class Scaled(OwnBlock):
    """A block whose attention has a scale of its own."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, self.head)) for f in (self.q, self.k, self.v))
        return x + self.out(isp.attention(q, k, v, scale=0.5).flatten(2))


def test_every_stage_chooses_the_attention_of_all_stages_when_built(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Catches a collective choice made in a forward, where a later stage waits for the first one's
    output, and one made only by the stages that have such layers.
    """
    model = Plain()
    model.blocks[0] = Scaled(32, 4, 2, 0.0)
    made: list[float | None] = []

    def make(kind: AttentionKind, *_: object, **__: object) -> CpuAttention:
        made.append(kind.scale)
        return CpuAttention(scale=kind.scale)

    monkeypatch.setattr("isp.models.runtime.mixers.make_attention", make)
    layers = local_layers()
    traced = TracedModel(model, in_place=False)
    for stage in (0, 1):
        traced.build(layers, [stage], 2)
        assert made == [0.5, None]
        made.clear()


def _pipeline(size: int) -> ParallelConfig:
    return ParallelConfig(pipeline=PipelineConfig(size=size))


@pytest.mark.parametrize("kind", [UsesFirst, ByAttribute, OneBias])
def test_blocks_that_need_more_than_a_hidden_state_are_refused(kind: type[Plain]) -> None:
    """Catches stages that train another model: outputs of the tables would be zero on later stages,
    and an attribute set by an earlier block would be missing.
    """
    with pytest.raises(ValueError, match=r"size=2 cannot cut \w+ into 2 stages: .* use more from"):
        TracedModel(kind()).check_layout(_pipeline(2), 48)


def test_a_rank_without_trained_weights_is_refused_before_ranks_start() -> None:
    """Catches a pipeline stage with nothing to train, which fails only on its rank."""
    model = Plain().requires_grad_(False)
    model.head.requires_grad_(True)
    with pytest.raises(ValueError, match="pipeline rank 0 has no trainable weights"):
        TracedModel(model).check_layout(_pipeline(2), 48)


def test_more_stages_than_blocks_and_shared_weights_are_refused_by_name() -> None:
    """Catches a second tied weight, whose two gradients would not be summed."""
    model = Plain()
    with pytest.raises(ValueError, match=r"4 layers cannot be cut into 5 stages: use at most 4$"):
        TracedModel(copy.deepcopy(model)).check_layout(_pipeline(5), 48)
    shared = model.blocks[3]
    assert isinstance(shared, OwnBlock)
    shared.q.weight = model.blocks[0].q.weight  # type: ignore[union-attr, assignment]
    with pytest.raises(ValueError, match=r"blocks.0.q.weight is used by several stages"):
        TracedModel(model).check_layout(_pipeline(2), 48)
    tied = Plain()
    tied.first_norm, tied.norm = nn.Linear(32, 32), nn.Linear(32, 32)  # type: ignore[assignment]
    tied.head.weight, tied.norm.weight = tied.tokens.weight, tied.first_norm.weight
    with pytest.raises(ValueError, match=r"first_norm.weight is used by several stages"):
        TracedModel(tied).check_layout(_pipeline(2), 48)
