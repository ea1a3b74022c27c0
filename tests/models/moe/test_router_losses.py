"""Router losses against their formulas on the unmodified model, in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
import transformers
from packaging.version import Version
from torch import Tensor, nn

import isp
from isp.config import JobConfig
from isp.core.layers.vocab_loss import IGNORED
from isp.core.mesh import Mode
from isp.core.mesh.config import PipelineConfig
from isp.models.huggingface.interface import RouterCoefficients
from isp.models.traced_model import TracedModel
from model.config import ModelConfig
from model.decoder import Decoder
from tests.loop.test_loops import raised
from tests.model.folders import in_float64
from tests.models.models import (
    Rows,
    Trained,
    assert_trained_as,
    documents_of,
    job,
    packed_rows,
    plain_loss,
    tiny,
    trained,
    trained_plainly,
    whole_weights,
)
from tests.ranks import run_each

DATA = [packed_rows(4, 24, [[24], [10, 1, 13], [3, 21], [24]], seed) for seed in range(2)]
NOTHING = DATA[1].labels
assert NOTHING is not None
NOTHING[0] = IGNORED  # of the first sequence nothing counts


def _router_losses(model: Any, rows: Rows, of: RouterCoefficients) -> Tensor:
    """Return the router losses of all documents of a data rank that have a label."""
    logits: list[Tensor] = []
    for row in range(len(rows.input_ids)):
        for document in documents_of(rows, row):
            assert rows.labels is not None
            if (rows.labels[row, document][1:] == IGNORED).all():
                continue
            ids = rows.input_ids[row : row + 1, document]
            logits += model(ids, use_cache=False, output_router_logits=True).router_logits
    probabilities = [of_layer.softmax(-1) for of_layer in logits]
    every = torch.cat(probabilities)
    chosen = every.topk(model.config.num_experts_per_tok).indices
    shares = torch.zeros_like(every).scatter(1, chosen, 1).mean(0)
    aux = every.shape[1] * (shares * every.mean(0)).sum()
    return of.aux * aux + of.z * (torch.cat(logits).logsumexp(-1) ** 2).mean()


def _plainly(model: nn.Module, of: RouterCoefficients, ranks: int) -> Trained:
    def loss(model: nn.Module, rows: Rows) -> Tensor:
        parts = (rows.part(rank, ranks) for rank in range(ranks))
        return plain_loss(model, rows) + sum(_router_losses(model, p, of) for p in parts) / ranks

    return trained_plainly(model, DATA, loss)


AS_DECODER = ModelConfig(
    vocab_size=96,
    hidden_size=32,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=48,
    num_experts=4,
    experts_per_token=2,
    moe_intermediate_size=16,
    norm_topk_prob=False,
    norm_eps=1e-6,
    qk_norm=True,
)
"""The small Qwen3-MoE."""


class Case(NamedTuple):
    kind: str
    config: JobConfig
    ranks: int
    """Data ranks, of 4 ranks."""
    of: RouterCoefficients = RouterCoefficients(0.3, 0.2)
    asked: bool = False
    """Whether the model's configuration enables the losses, instead of a key."""
    frozen: bool = False
    """Whether routers are frozen; gradients still pass through them to earlier layers."""
    halves: bool = False
    """Whether each step runs backward twice, for half of the loss each."""
    plain_decoder: bool = False
    """Whether ISP's decoder runs with the model's weights."""


CASES = {
    "isp": Case("qwen3_moe", job(2, 4), 2),
    "recomputed, asked for by the model": Case(
        "mixtral", job(4, 2, recompute=1.0), 1, RouterCoefficients(0.3), asked=True
    ),
    "heads x context": Case("olmoe", job(4, 4, context=2), 1),
    "halves": Case("mixtral", job(2, 4, recompute=0.5), 2, halves=True),
    "mtp": Case("qwen3_moe", job(2, mode=Mode.MTP), 2),
    "the plain decoder": Case("qwen3_moe", job(2, 2), 2, plain_decoder=True),
    "routers frozen": Case("qwen3_moe", job(2, 2), 2, frozen=True),
    "without a loss of its own": Case("deepseek_v3", job(2, 2), 2),
}
if Version(transformers.__version__) < Version("5.23"):  # it records no logits of these routers
    del CASES["without a loss of its own"]


def _model(case: Case) -> Any:
    asked = {"output_router_logits": True, "router_aux_loss_coef": case.of.aux}
    model = tiny(case.kind, **(asked if case.asked else {}))
    if case.plain_decoder:
        in_float64(model)  # its angles, too
    return model


def _run(rank: int, case: Case) -> Trained:
    keys = {} if case.asked else {"router_aux_loss_coef": case.of.aux}
    model = replace(case.config.model, router_z_loss_coef=case.of.z, **keys)
    plain = _model(case)
    if case.plain_decoder:
        decoder = Decoder(AS_DECODER).double()
        decoder.load_state_dict(plain.state_dict())
        plain = decoder
    run = isp.parallelize(plain, replace(case.config, model=model))
    with torch.no_grad():
        assert run.loss(*DATA[0].part(run.dp_rank, run.dp_size)).isfinite()
    if not case.halves:
        return trained(run, DATA)
    losses, norms = [], []
    for rows in DATA:
        for _ in range(2):
            run.backward(run.loss(*rows.part(run.dp_rank, run.dp_size)) / 2)
        outcome = run.step()
        losses.append(outcome.loss)
        norms.append(outcome.grad_norm)
    return Trained(losses, norms, whole_weights(run))


def test_router_losses_equal_their_formulas() -> None:
    """Catches loads of a rank's tokens only, a loss for each layer instead of all, counted
    padding.
    """
    found = run_each(4, _run, CASES, timeout_seconds=100)
    for name, case in CASES.items():
        expected = _plainly(_model(case), case.of, case.ranks)
        assert_trained_as(expected, found[name], name)


def test_router_losses_are_refused_where_they_cannot_be_computed() -> None:
    """Catches a requested loss that is left out."""
    dense = replace(job().model, router_aux_loss_coef=0.1)
    assert "does not record router logits" in raised(
        isp.parallelize, tiny("llama"), replace(job(), model=dense)
    )
    staged = replace(job().parallel, pipeline=PipelineConfig(size=2))
    model = TracedModel(tiny("mixtral"), router_losses=RouterCoefficients(0.1))
    assert "over all layers together" in raised(model.check_layout, staged, 24)
