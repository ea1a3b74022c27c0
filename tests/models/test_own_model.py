"""A model of one's own enters by the door: no decoder, no attention, a loss of its own.

B batch, S sequence, D hidden size, F inner size, V vocabulary; ' what a rank has of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from isp.attention import LocalAttention
from isp.layers.factory import LayerFactory
from isp.layers.loss import vocab_parallel_cross_entropy
from isp.layers.module import RowsOf, bind_names, init_weights, named_parameters
from isp.models.build import parameter_shapes
from isp.models.protocol import LanguageModel
from isp.models.schedule import schedule_text
from isp.parallel import Mode, ParallelConfig, PipelineSchedule
from isp.parallel.context import Windows
from isp.weights.declare import DeclaredBlock, DeclaredUse
from isp.weights.parameter import ShardedParameter
from tests.ranks import run_ranks
from tests.train.runs import Layout, Meshes, Numbers, Task, largest_difference, make_run


@dataclass(frozen=True)
class Mlp:
    """A language model that looks at no other token: x + down(gelu(up(norm(x)))), `depth` times."""

    vocab_size: int = 24
    hidden_size: int = 16
    inner_size: int = 32
    depth: int = 4
    tied: bool = False

    @property
    def num_parameters(self) -> int:
        block = 2 * self.hidden_size * self.inner_size + self.hidden_size
        return self.depth * block + (2 - self.tied) * self.vocab_size * self.hidden_size

    @property
    def tied_weight(self) -> str | None:
        return "table.weight" if self.tied else None

    @property
    def earlier_names(self) -> Mapping[str, RowsOf]:
        return {}

    @property
    def flop_rule(self) -> str:
        return "6 x parameters x tokens"

    @property
    def attention_windows(self) -> Windows:
        return ()

    def check_layout(self, parallel: ParallelConfig, seq_len: int) -> None:
        pass

    def flops(self, document_lengths: Iterable[int]) -> int:
        return 6 * self.num_parameters * sum(document_lengths)

    def build(
        self,
        layers: LayerFactory,
        stages: Iterable[int] = (0,),
        num_stages: int = 1,
        *,
        attention: LocalAttention | None = None,
    ) -> tuple[MlpChunk, ...]:
        per_stage, chunks = self.depth // num_stages, list[MlpChunk]()
        for stage in stages:
            span = range(stage * per_stage, (stage + 1) * per_stage)
            chunks.append(MlpChunk(self, layers, span, chunks[0].table if chunks else None))
        return tuple(chunks)


class MlpBlock(nn.Module):
    def __init__(self, model: Mlp, layers: LayerFactory) -> None:
        super().__init__()
        self.norm = layers.rms_norm(model.hidden_size, eps=1e-5)
        self.up = layers.column(model.hidden_size, (model.inner_size,), std=0.3)
        self.down = layers.row(model.inner_size, model.hidden_size, std=0.3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.gelu(self.up(self.norm(x))))
        return x + y


class MlpChunk(nn.Module):
    def __init__(
        self, model: Mlp, layers: LayerFactory, span: range, table: nn.Module | None
    ) -> None:
        super().__init__()
        self.first, self.last = span.start == 0, span.stop == model.depth
        sizes = model.vocab_size, model.hidden_size
        self.table = self.head = None
        if self.first or (self.last and model.tied):
            self.table = table or layers.embedding(*sizes, std=0.3)
        self.blocks = nn.ModuleDict({str(i): MlpBlock(model, layers) for i in span})
        if self.last:
            tied_to = self.table if model.tied else None
            self.head = layers.head(*reversed(sizes), std=0.3, tied_to=tied_to)
        self.splits_logits, self.channel = layers.splits_logits, layers.loss_channel
        self.first_logit = layers.first_logit(model.vocab_size)
        bind_names(self)

    def forward(self, x: Tensor, positions: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        for part in self.parts().values():
            x = part(x)
        return x

    def loss(self, output: Tensor, labels: Tensor, expected: Tensor) -> Tensor:
        """The decoder's loss, twice as much where the label is odd."""
        losses = vocab_parallel_cross_entropy(
            output, labels, first=self.first_logit, channel=self.channel
        )
        return (losses * (1 + labels % 2)).sum()

    def shards(self) -> Iterator[ShardedParameter]:
        return named_parameters(self)

    def init_weights(self, seed: int | None) -> None:
        init_weights(self, seed)

    def parts(self) -> dict[str, nn.Module]:
        blocks = {f"blocks.{i}": block for i, block in self.blocks.items()}
        parts = {"table": self.table if self.first else None, **blocks, "head": self.head}
        return {name: part for name, part in parts.items() if part is not None}

    def weight_blocks(self) -> tuple[DeclaredBlock, ...]:
        def block(name: str, part: nn.Module) -> DeclaredBlock:
            layers = part.named_children() if name.startswith("blocks.") else [(name, part)]
            uses = (
                DeclaredUse(name=name, layer=layer, weight_in_backward=name != "table")
                for name, layer in layers
                if name != "norm"
            )
            return DeclaredBlock(name=name, module=part, uses=tuple(uses))

        return tuple(block(name, part) for name, part in self.parts().items())


LAYOUTS = [
    Layout(mode=Mode.ISP, tensor=2, weight=2, micro=2),
    Layout(mode=Mode.MTP, tensor=2, micro=2),
    Layout(mode=Mode.ISP, pipeline=2, micro=2),
    Layout(mode=Mode.ISP, pipeline=2, micro=2, schedule=PipelineSchedule.ZBV, chunks=2),
]


def _numbers(rank: int, layouts: list[Layout], model: Mlp) -> list[Numbers]:
    meshes, found = Meshes(rank), []
    for layout in layouts:
        run = make_run(meshes.of(layout), layout, Task(model=model))  # type: ignore[arg-type]
        found.append(run.numbers(range(3)))
        run.close()
    return found


@pytest.mark.parametrize("tied", [False, True])
def test_trains_alike_in_every_layout(tied: bool) -> None:
    """Catches a step that knows its model: a decoder's sizes, names, tie or loss."""
    model: LanguageModel = Mlp(tied=tied)
    (alone,) = run_ranks(1, _numbers, [Layout(micro=2)], model)
    for found in run_ranks(2, _numbers, LAYOUTS, model):
        for layout, numbers in zip(LAYOUTS, found, strict=True):
            pairs = zip(numbers, alone[0], strict=True)
            worst = max(largest_difference(mine, wanted) for mine, wanted in pairs)
            assert worst < 1e-9, layout  # float64, sums in another order
    first, _, last = (loss for loss, _ in alone[0])
    assert last < first


def test_its_shapes_and_its_plan_are_known_without_ranks() -> None:
    """Catches a plan, or names for groups and checkpoints, that are a decoder's alone."""
    model = Mlp()
    shapes = parameter_shapes(model)
    assert shapes["blocks.3.up.weight"] == (model.inner_size, model.hidden_size)
    assert sum(torch.Size(shape).numel() for shape in shapes.values()) == model.num_parameters
    text = schedule_text(model, ParallelConfig(), 1)
    assert all(name in text for name in ("table", "blocks.0", "blocks.3", "head"))
