"""Inference layers against training layers with the same weights, and under guards."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from isp.core.comm import Channel
from isp.core.comm.channel import DryChannel
from isp.core.mesh import Axis, Mode
from isp.core.mesh.layout import ParameterLayout
from isp.core.weights.wp_communicator import LocalWeights
from isp.tensor_parallel import (
    ColumnParallelLinear,
    InferenceLayerNormColumnParallelLinear,
    InferenceRowParallelLinear,
    InferenceVocabParallelEmbedding,
    InferenceWorkspace,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from tests.core.megatron.layers import CLOSE, DTYPE, INNER, WIDTH, drawn, fill, group
from tests.host_syncs import HostSyncs
from tests.ranks import run_each, run_ranks
from tests.toolkit import Operations, ToolkitLayers

V, MOST = 23, 16
TOKENS = [(8, 2), (4, 1), (3, 2), (1, 1), (16,)]
"""Shapes of tokens: some divide by 2 and 4 ranks, some by none; one fills the buffers."""
CASES = {
    f"{tokens}, split {split}, bias {bias}": (tokens, split, bias)
    for tokens, split, bias in product(TOKENS, (True, False), (True, False))
}


class NewMemory(Operations):
    """Records the operations that allocate memory."""

    def __init__(self) -> None:
        super().__init__(self._look)
        self.made: list[str] = []

    def _look(self, name: str, args: tuple[Any, ...], out: Any) -> None:
        of_args, of_out = (
            {x.untyped_storage().data_ptr() for x in tree_leaves(of) if isinstance(x, Tensor)}
            for of in (args, out)
        )
        if of_out - of_args:
            self.made.append(name)


class Layers:
    """An embedding and an MLP with norms, as training layers and as inference layers."""

    def __init__(self, channel: Channel, *, split: bool, sums: bool, bias: bool) -> None:
        self.channel, self.split = channel, split
        options: dict[str, Any] = {"group": channel, "bias": bias, "dtype": DTYPE}
        self.table = VocabParallelEmbedding(
            V, WIDTH, group=channel, reduce_scatter_embeddings=split, dtype=DTYPE
        )
        self.table.weight.data.copy_(self.table.layouts["weight"].shard(drawn(V, WIDTH)))
        self.column = ColumnParallelLinear(WIDTH, INNER, sequence_parallel=split, **options)
        self.row = RowParallelLinear(
            INNER, WIDTH, sequence_parallel=split, input_is_parallel=True, **options
        )
        fill(self.column, drawn(INNER, WIDTH, seed=2), drawn(INNER, seed=3))
        fill(self.row, drawn(WIDTH, INNER, seed=4), drawn(WIDTH, seed=5))
        self.norms = [nn.RMSNorm(WIDTH, eps=1e-6, dtype=DTYPE) for _ in range(2)]
        for seed, norm in enumerate(self.norms):
            norm.weight.data.copy_(drawn(WIDTH, seed=6 + seed))
        self.workspace = InferenceWorkspace(
            channel, WIDTH, max_tokens=MOST, split_tokens=sums, dtype=DTYPE
        )
        self.fast_table = InferenceVocabParallelEmbedding(self.table, self.workspace)
        self.fast_column = InferenceLayerNormColumnParallelLinear(
            self.column, self.workspace, norm=self.norms[0]
        )
        self.fast_row = InferenceRowParallelLinear(self.row, self.workspace)

    @torch.no_grad()
    def training(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the residual after the MLP for this rank's tokens, and its norm for all tokens."""
        x = self.table(ids)
        y, _ = self.row(torch.tanh(self.column(self.norms[0](x))[0]))
        x = x + y
        normed = self.norms[1](x)
        return x, self.channel.all_gather(normed).wait() if self.split else normed

    def inference(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        residual = self.fast_table(ids)
        inner = self.fast_column(residual).tanh_()
        normed = self.fast_row.add_norm(inner, residual, self.norms[1])
        return residual.value, normed

    @staticmethod
    def plain(ids: Tensor, *, bias: bool) -> tuple[Tensor, Tensor]:
        """Return residual and norm computed without ranks."""
        b1, b2 = (drawn(INNER, seed=3), drawn(WIDTH, seed=5)) if bias else (None, None)
        x = drawn(V, WIDTH)[ids]
        normed = F.rms_norm(x, (WIDTH,), drawn(WIDTH, seed=6), 1e-6)
        inner = torch.tanh(F.linear(normed, drawn(INNER, WIDTH, seed=2), b1))
        x = x + F.linear(inner, drawn(WIDTH, INNER, seed=4), b2)
        return x, F.rms_norm(x, (WIDTH,), drawn(WIDTH, seed=7), 1e-6)


def ids_of(tokens: tuple[int, ...]) -> Tensor:
    return torch.randint(V, tokens, generator=torch.Generator().manual_seed(7))


def _as_training(rank: int, case: tuple[tuple[int, ...], bool, bool]) -> None:
    tokens, split, bias = case
    channel, ids = group(), ids_of(tokens)
    splits = split and channel.size > 1 and tokens[0] % channel.size == 0
    layers = Layers(channel, split=splits, sums=split, bias=bias)
    residual, normed = layers.inference(ids)
    for found, expected in zip((residual, normed), layers.training(ids), strict=True):
        assert torch.equal(found, expected)
    whole, whole_normed = Layers.plain(ids, bias=bias)
    torch.testing.assert_close(normed, whole_normed, **CLOSE)
    own = whole.chunk(channel.size)[channel.rank] if splits else whole
    torch.testing.assert_close(residual, own, **CLOSE)
    inner = drawn(*tokens, INNER // channel.size, seed=8)
    with torch.no_grad():
        assert torch.equal(layers.fast_row(inner), layers.row(inner)[0])


@pytest.mark.parametrize("world", [1, 2, 4])
def test_inference_layers_give_the_bits_of_training_layers(world: int) -> None:
    """Catches a sum in another order, a bias added twice, tokens of another rank, stale buffers."""
    run_each(world, _as_training, CASES)


def _guarded(rank: int) -> None:
    layers = Layers(group(), split=True, sums=True, bias=True)
    shapes = [ids_of((8, 2)), ids_of((3,)), ids_of((4, 1))]
    expected = [[x.clone() for x in layers.inference(ids)] for ids in shapes]
    for ids, before in zip(shapes, expected, strict=True):
        with HostSyncs() as host, NewMemory() as memory:
            again = layers.inference(ids)
        assert host.followed > 8
        assert not host.found, host.found
        assert not memory.made, memory.made
        assert all(torch.equal(a, b) for a, b in zip(again, before, strict=True))
        where = [x.data_ptr() for x in again]
        assert [x.data_ptr() for x in layers.inference(ids)] == where
    with NewMemory() as memory:
        layers.training(shapes[0])
    assert len(memory.made) > 8


@pytest.mark.parametrize("world", [1, 2])
def test_a_call_allocates_no_memory_and_does_not_sync(world: int) -> None:
    """Catches what a CUDA graph cannot capture: a new tensor, or a value that the host reads."""
    run_ranks(world, _guarded)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bfloat16_norms_round_as_torch_does(dtype: torch.dtype) -> None:
    """Catches a norm computed in the dtype of the residual, and a weight rounded too early."""
    workspace = InferenceWorkspace(Channel.solo(), WIDTH, max_tokens=MOST, dtype=dtype)
    norm = nn.RMSNorm(WIDTH, eps=1e-6, dtype=dtype)
    norm.weight.data.copy_(drawn(WIDTH, seed=2))
    x = drawn(4, 3, WIDTH).to(dtype)
    with torch.no_grad():
        assert torch.equal(workspace.norm(workspace.begin(x), norm), norm(x))


class Gathering(LocalWeights):
    """Weights that are gathered, which the inference layers do not support."""

    gathers_weights = True


def linear(mode: Mode = Mode.MTP, *, gathers: bool = False, dtype: torch.dtype = DTYPE) -> Any:
    communicator = Gathering() if gathers else LocalWeights()
    layers = ToolkitLayers(mode=mode, communicator=communicator, dtype=dtype)
    return layers.column(WIDTH, (INNER,), std=0.02)


def of_two_ranks() -> Any:
    layer = linear()
    layer.layouts["weight"] = ParameterLayout(
        global_shape=(2 * INNER, WIDTH), parts=2, index=1, reduce_over=Axis.DATA
    )
    return layer


def megatron(kind: Any, **options: Any) -> Any:
    return kind(WIDTH, WIDTH, group=Channel.solo(), dtype=DTYPE, **options)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: linear(Mode.ISP, gathers=True), "as in isp mode: build it in mtp or msp"),
        (lambda: linear(dtype=torch.float32), "float32 on cpu, the workspace torch.float64"),
        (of_two_ranks, "part 1 of 2 .* rank 0 of 1"),
        (lambda: megatron(ColumnParallelLinear, gather_output=True), "gathers its output"),
        (lambda: megatron(ColumnParallelLinear, skip_bias_add=True), "skip_bias_add"),
        (
            lambda: megatron(ColumnParallelLinear, skip_weight_param_allocation=True),
            "no weight of its own",
        ),
    ],
)
def test_layers_that_cannot_be_used_for_inference_are_refused(make: Any, words: str) -> None:
    """Catches layers of isp mode, of another dtype or part, and options without an inference
    form.
    """
    workspace = InferenceWorkspace(Channel.solo(), WIDTH, max_tokens=MOST, dtype=DTYPE)
    with pytest.raises(ValueError, match=words):
        InferenceLayerNormColumnParallelLinear(make(), workspace)


def test_wrong_sizes_and_missing_options_are_refused() -> None:
    """Catches tensors or layers that do not fit the workspace and would be computed wrongly."""
    workspace = InferenceWorkspace(Channel.solo(), WIDTH, max_tokens=MOST, dtype=DTYPE)
    column = InferenceLayerNormColumnParallelLinear(linear(), workspace)
    with pytest.raises(ValueError, match="17 tokens at once are more than max_tokens=16"):
        column(drawn(17, WIDTH))
    with pytest.raises(ValueError, match=rf"\[3, 5\] has 5 features, expected {WIDTH}$"):
        column(drawn(3, 5))
    narrow = InferenceWorkspace(Channel.solo(), 5, max_tokens=MOST, dtype=DTYPE)
    normed: Any = torch.nn.RMSNorm(5)
    with pytest.raises(ValueError, match=f"has {WIDTH} input features.*make the workspace with"):
        InferenceLayerNormColumnParallelLinear(linear(), narrow, norm=normed)
    with pytest.raises(ValueError, match="output features, and the residual of the workspace 5"):
        InferenceRowParallelLinear(megatron(RowParallelLinear, input_is_parallel=True), narrow)
    table = VocabParallelEmbedding(8, WIDTH, group=Channel.solo(), dtype=DTYPE)
    with pytest.raises(ValueError, match="output features, and the residual of the workspace 5"):
        InferenceVocabParallelEmbedding(table, narrow)
    dry = DryChannel("tensor", 2, 0)
    half = RowParallelLinear(8, WIDTH, group=dry, input_is_parallel=True, dtype=DTYPE)
    of_two = InferenceWorkspace(dry, WIDTH, max_tokens=MOST, dtype=DTYPE)
    with pytest.raises(ValueError, match="8 features, expected 4, this rank's part of 8"):
        InferenceRowParallelLinear(half, of_two)(drawn(2, 8))
    with pytest.raises(ValueError, match="without a norm"):
        column(workspace.begin(drawn(2, WIDTH)))
    with pytest.raises(ValueError, match="input_is_parallel=True"):
        InferenceRowParallelLinear(megatron(RowParallelLinear), workspace)
    with pytest.raises(ValueError, match="symmetric_memory=True is not possible: it is memory"):
        InferenceWorkspace(Channel.solo(), WIDTH, max_tokens=1, symmetric_memory=True)


def test_results_of_one_slot_share_a_buffer() -> None:
    """Catches a buffer for each block where only one block needs it at a time."""
    workspace = InferenceWorkspace(Channel.solo(), WIDTH, max_tokens=MOST, dtype=DTYPE)
    layers = [linear(), linear()]
    x = drawn(3, WIDTH)
    for slot, shared in (("block", True), ("", False)):
        fast = [InferenceLayerNormColumnParallelLinear(y, workspace, slot=slot) for y in layers]
        where = {y(x).data_ptr() for y in fast}
        assert (len(where) == 1) is shared
