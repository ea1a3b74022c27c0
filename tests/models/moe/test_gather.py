"""Experts of users' models, sharded over the ranks and gathered as linears are."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.flop_counter import FlopCounterMode

import isp
from isp.config import JobConfig
from isp.core.mesh import ParallelConfig
from isp.core.weights.pool import Lease
from isp.loop.parallel_run import ParallelRun
from isp.models.traced_model import TracedModel
from isp.parity.compare import Check, CheckCase
from isp.parity.layouts import layouts_of
from isp.parity.subjects import Subject
from model.config import ModelConfig
from model.decoder import Decoder
from tests.models.models import (
    TOLERANCE,
    Rows,
    Trained,
    assert_trained_as,
    job,
    packed_rows,
    tiny,
    trained,
    trained_plainly,
)
from tests.models.own import VOCAB, Own, OwnBlock
from tests.ranks import run_each, run_ranks

DOCUMENTS = [[1, 30, 7, 26], [20, 44]]


class OwnExperts(nn.Module):
    """Three experts for tokens with number 0; a rank without such tokens uses none of them."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.up = nn.Parameter(0.3 * torch.randn(3, size, size))
        self.down = nn.Parameter(0.3 * torch.randn(3, 1, size))
        self.bias = nn.Parameter(torch.randn(3, size))
        self.norm = nn.LayerNorm(size)
        self.trouble = ""
        self.factor, self.more = torch.ones(()), torch.ones(())

    def forward(self, x: Tensor, numbers: Tensor, *, weights: Tensor) -> Any:
        if self.trouble == "writes":
            weights /= weights.sum()
        chosen = numbers[:, 0] == 0
        out = torch.zeros_like(x)
        if chosen.any():
            out[chosen] = self._of_all(self.norm(x[chosen])) * weights[chosen] * self.factor
        if self.trouble == "gives its weights":
            return self.up[0, :1].expand_as(x)
        return (out, None) if self.trouble == "two" else out

    def _of_all(self, x: Tensor) -> Tensor:
        inside = torch.einsum("nd,eid->eni", x, self.up) + self.bias.unsqueeze(1)
        if self.trouble == "fails in backward":
            inside.register_hook(_fail)
        if self.trouble == "gives more":
            self.more = inside
        first = x @ self.up[0].T.view(self.up.shape[1:])  # a separate read, transposed
        return (F.silu(inside) * self.down).sum(0) + first * self.down[2]


def _fail(_: Tensor) -> None:
    raise ArithmeticError("as planned")


class Table(nn.Module):
    """A stack of matrices that are no experts; a slice of it is the output."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.randn(1, 4, size))

    def forward(self, x: Tensor, high: Tensor) -> Tensor:
        assert high.dtype is torch.bool
        return self.rows[:, 2:3].expand_as(x)


class _Block(OwnBlock):
    def __init__(self, experts: OwnExperts) -> None:
        super().__init__(32, 4, 2, 0.0)
        self.experts, self.table, self.gate = experts, Table(32), nn.Linear(32, 1)
        self.unused = torch.zeros(())

    def forward(self, x: Tensor, numbers: Tensor) -> Tensor:
        x = super().forward(x)
        x = x + 0.1 * self.table(x, numbers > 0)
        tokens, numbers = x.flatten(0, 1), numbers.reshape(-1, 1)
        weights = torch.sigmoid(self.gate(x)).flatten(0, 1)
        if self.experts.trouble == "reads from elsewhere":
            self.experts.factor = self.norm2.weight.mean()
        y = self.experts(tokens, numbers, weights=weights)
        self.unused = self.experts(torch.cos(tokens), numbers, weights=weights).detach().mean()
        y = y + self.experts(torch.sin(tokens), numbers, weights=weights)
        return x + y.view(x.shape)


class Chosen(Own):
    """A model whose first and last block share their experts, which only low tokens use."""

    def __init__(self, trouble: str = "") -> None:
        super().__init__()
        first, second = OwnExperts(32), OwnExperts(32)
        second.trouble = trouble
        self.blocks = nn.ModuleList(_Block(experts) for experts in (first, second, first))

    def forward(self, ids: Tensor, positions: Tensor) -> Any:
        x = self.tokens(ids) + self.positions(positions)
        for block in self.blocks:
            x = block(x, ids // (VOCAB // 2))
        return self.head(self.norm(x))


def _half_frozen() -> nn.Module:
    model = tiny("qwen3_moe", **SIZES)
    model.model.layers[0].mlp.experts.requires_grad_(False)
    model.model.layers[1].mlp.experts.down_proj.requires_grad_(False)
    return model


SIZES = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "uneven": lambda: tiny("qwen3_moe", **SIZES),
    "half frozen": _half_frozen,
    "unused on a rank": lambda: Chosen().double(),
    "from elsewhere": lambda: Chosen("reads from elsewhere").double(),
}


def _job(recompute: float, **keys: Any) -> JobConfig:
    """Return a configuration that poisons freed buffers, so that a late read gives NaN."""
    config = job(1, 2, recompute=recompute)
    weight = replace(config.parallel.weight, poison_freed_buffers=True, **keys)
    return replace(config, parallel=replace(config.parallel, weight=weight))


def _data() -> list[Rows]:
    """Return rows of two ranks, of which the second only has high tokens."""
    data = [packed_rows(2, 64, DOCUMENTS, seed) for seed in (1, 2)]
    for rows in data:
        rows.input_ids[1] = VOCAB // 2 + rows.input_ids[1] % (VOCAB // 2)
    return data


def _train(rank: int, case: tuple[nn.Module, JobConfig, list[Rows]]) -> tuple[Trained, int]:
    model, config, data = case
    run = isp.parallelize(model, config)

    @torch.no_grad()
    def evaluate(run: ParallelRun, rows: Rows) -> None:
        run.loss(*rows)

    found, built = trained(run, data, evaluate), run.train_step.built
    own = sum(p.parameter.numel() for p in built.parameters if _is_cut(p.name, p.parameter))
    return found, own


def _is_cut(name: str, parameter: Tensor) -> bool:
    return parameter.dim() == 3 and "table" not in name


def test_experts_of_every_kind_train_as_in_a_plain_loop() -> None:
    """Catches a gradient of experts that is lost, summed twice or of stale weights, also for a
    tensor that is no argument; ranks that hang where none of their tokens uses an expert; and a
    graph whose backward serves another call.
    """
    data, models = _data(), {name: make() for name, make in MODELS.items()}
    expected = {name: trained_plainly(model, data) for name, model in models.items()}
    cases = {
        f"{name}, {recompute}": (copy.deepcopy(model), _job(recompute), data)
        for name, model in models.items()
        for recompute in ((0.4,) if name == "half frozen" else (0.0, 1.0))
    }
    last = models["unused on a rank"]
    cases["unused on a rank, at once"] = last, _job(0.0, overlap=False), data
    for case, of_ranks in run_each(2, _train, cases, timeout_seconds=100).items():
        plain = expected[case.partition(",")[0]]
        assert_trained_as(plain, (found for found, _ in of_ranks), case)
        cut = sum(w.numel() for name, w in plain.weights.items() if _is_cut(name, w))
        assert [3 * own for _, own in of_ranks] == [2 * cut, cut], case


def _between(rank: int, recompute: float) -> tuple[int, int]:
    """Return the number of whole weights alive between forward and backward, and of all
    gathered.
    """
    run = isp.parallelize(tiny("qwen3_moe", **SIZES), _job(recompute, memory_pool=False))
    communicator, whole = run.train_step.built.communicator, []
    assert communicator is not None
    lease = communicator.pool.lease

    def watched(*what: Any) -> Lease:
        made = lease(*what)
        whole.append(StorageWeakRef(made.tensor.untyped_storage()))
        return made

    communicator.pool.lease = watched  # type: ignore[method-assign]
    loss = run.loss(*_data()[0].part(rank, 2))
    communicator.drain()
    alive = sum(not ref.expired() for ref in whole)
    assert loss.requires_grad
    return alive, len(whole)


def test_no_graph_keeps_a_whole_weight() -> None:
    """Catches a graph of experts that keeps whole weights: those of all layers at the same time."""
    for recompute in (0.0, 1.0):
        for alive, made in run_ranks(2, _between, recompute):
            assert alive == 0
            assert made > 12  # those that were launched before it are not counted


def test_outputs_of_experts_do_not_share_memory_with_weights() -> None:
    """Catches an output in a buffer that another weight is then gathered into."""
    model, data = Chosen("gives its weights").double(), _data()[:1]
    expected = trained_plainly(model, data)
    for recompute in (0.0, 1.0):
        for found, _ in run_ranks(2, _train, (copy.deepcopy(model), _job(recompute), data)):
            numbers = found.losses + found.norms
            assert numbers == pytest.approx(expected.losses + expected.norms, rel=TOLERANCE)


def _refused(rank: int, trouble: str) -> str:
    run = isp.parallelize(Chosen(trouble).double(), _job(0.0))
    with pytest.raises((RuntimeError, TypeError)) as raised:
        run.loss(*_data()[0].part(0, 2))
    return str(raised.value)


def test_experts_that_would_lose_gradients_are_refused() -> None:
    """Catches gradients that silently differ from the plain model's."""
    faults = {
        "writes": "modifies an input",
        "two": "returns a tuple",
    }
    cases = {trouble: trouble for trouble in faults}
    for trouble, of_ranks in run_each(2, _refused, cases).items():
        for found in of_ranks:
            assert faults[trouble] in found
            assert "blocks.1.experts" in found


def _leased(rank: int, trouble: str) -> tuple[int, bool]:
    """Return bytes still leased after a backward that ends inside the experts.

    Also return whether its gradients are right, or refused.
    """
    built = isp.parallelize(Chosen(trouble).double(), _job(0.0)).train_step.built
    (chunk,), communicator, right = built.chunks, built.communicator, True
    assert communicator is not None
    experts: Any = chunk.model.get_submodule("blocks.1.experts")
    ids, positions = (x[:1, :32] for x in (_data()[0].input_ids, torch.arange(64).view(1, -1)))
    total = chunk(ids, positions, None).square().sum()
    if trouble == "gives more":
        with pytest.raises(RuntimeError, match=r"blocks\.1\.experts other than through its result"):
            experts.more.sum().backward()
    elif trouble:
        with pytest.raises(ArithmeticError, match="as planned"):
            total.backward()
        del total
        gc.collect()  # the exception holds the graph
    else:
        of_both = torch.autograd.grad(total, [experts.bias, experts.up], retain_graph=True)
        (of_bias,) = torch.autograd.grad(total, [experts.bias])
        right = bool(of_bias.any()) and torch.equal(of_bias, of_both[0])
    communicator.drain()
    return communicator.pool.leased_bytes, right


def test_a_backward_that_ends_inside_experts_frees_their_weights() -> None:
    """Catches buffers that are lost when backward fails, or does not reach the experts' input, and
    weights that are read after they are freed.
    """
    cases = {trouble: trouble for trouble in ("", "fails in backward", "gives more")}
    for case, of_ranks in run_each(2, _leased, cases).items():
        assert of_ranks == [(0, True)] * 2, case


DECODER = ModelConfig(
    vocab_size=64,
    hidden_size=32,
    num_layers=4,
    num_heads=4,
    intermediate_size=48,
    num_experts=5,
    shared_expert_intermediate_size=24,
    num_dense_layers=1,
    mlp_tile_tokens=5,
)
LAYOUTS = "1x4, 2x2x2, mtp2, fsp2, 1x2 1F1B 2"


@pytest.mark.slow
def test_the_decoder_with_experts_trains_equally_in_every_layout() -> None:
    """Catches a shared expert summed or split wrongly, and a router gradient of some tokens
    only.
    """
    subject = Subject.of_decoder(DECODER, layers=4)
    layouts, _ = layouts_of(LAYOUTS, subject, ParallelConfig())
    check = Check(subject, layouts, cases=[CheckCase(packed=True, recomputed=True)])
    found = run_each(check.num_ranks, check.on_rank, {str(layout): layout for layout in layouts})
    for layout in layouts:
        assert check.verdict(layout, found[str(layout)]).agrees, str(layout)
    names = [name for name in check.references[True].gradients if "layers.3.mlp" in name]
    assert len(names) == 7
    assert all(check.references[True].gradients[name].abs().max() > 0 for name in names)


def test_flops_count_the_experts_that_a_token_uses() -> None:
    """Catches an MFU that counts all experts, or none, and a forgotten router or shared expert."""
    tokens = 32
    ids = torch.arange(tokens).unsqueeze(0)
    theirs = tiny("qwen3_moe", **{**SIZES, "num_experts": 8})
    for model in (theirs, Decoder(DECODER).double()):
        traced = TracedModel(model, in_place=False)
        attention = 3 * sum(
            call.sizes.num_heads * 2 * call.sizes.head_size * tokens**2
            for call in traced.trace.calls
            if call.sizes is not None
        )
        with FlopCounterMode(display=False) as counter:
            traced.interface.forward(model, ids, ids).sum().backward()
        counts = counter.get_flop_counts()["Global"]
        products = sum(counts[op] for op in counts if "mm" in str(op) and "bmm" not in str(op))
        assert traced.flops([tokens]) - attention == products
