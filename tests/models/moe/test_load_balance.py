"""Expert loads and the biases that balance them, against a plain loop over the model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import isp
from isp.config import JobConfig
from isp.core.layers.vocab_loss import IGNORED
from isp.core.mesh import Mode
from isp.core.mesh.config import PipelineConfig
from isp.loop.parallel_run import ParallelRun
from isp.models.huggingface.interface import RouterCoefficients
from isp.models.moe.load_balance import ExpertLoad
from isp.models.traced_model import TracedModel
from tests.loop.test_loops import raised
from tests.models.models import (
    Rows,
    documents_of,
    job,
    packed_rows,
    plain_loss,
    tiny,
    trained_plainly,
)
from tests.ranks import run_each

RATE = 0.07
DATA = [packed_rows(4, 24, [[24], [10, 1, 13], [3, 21], [24]], seed) for seed in range(2)]
NOTHING = DATA[1].labels
assert NOTHING is not None
NOTHING[0] = IGNORED  # of the first sequence nothing counts


def _biases(model: nn.Module) -> dict[str, Tensor]:
    named = (*model.named_buffers(), *model.named_parameters())
    return {name: x for name, x in named if name.endswith("e_score_correction_bias")}


@contextmanager
def _counted(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Yield the number of tokens routed to each expert in this context."""
    counts: dict[str, Tensor] = {}

    def count(name: str, numbers: Tensor) -> None:
        counts[name] = counts.get(name, 0) + torch.bincount(numbers.flatten(), minlength=4)

    experts = [(n, m) for n, m in model.named_modules() if n.endswith(".experts")]
    hooks = [
        module.register_forward_pre_hook(lambda _, given, name=name: count(name, given[1]))
        for name, module in experts
    ]
    yield counts
    for hook in hooks:
        hook.remove()


class Steps(NamedTuple):
    biases: dict[str, Tensor]
    loads: list[tuple[float | None, int | None]]
    losses: list[float]


def _plainly(kind: str) -> Steps:
    loads: list[tuple[float | None, int | None]] = []
    biases: dict[str, Tensor] = {}

    def loss(model: nn.Module, rows: Rows) -> Tensor:
        found = plain_loss(model, rows)
        with torch.no_grad(), _counted(model) as counts:
            for row in range(len(rows.input_ids)):
                for document in documents_of(rows, row):
                    assert rows.labels is not None
                    if (rows.labels[row, document][1:] != IGNORED).any():
                        model(rows.input_ids[row : row + 1, document], use_cache=False)
        loads.append(
            (
                max((of.max() / of.double().mean()).item() for of in counts.values()),
                sum(int((of == 0).sum()) for of in counts.values()),
            )
        )
        for (name, bias), of in zip(_biases(model).items(), counts.values(), strict=True):
            bias.data += RATE * (of.double().mean() - of).sign().view_as(bias)
            biases[name] = bias.detach().clone()
        return found

    losses = trained_plainly(_model(kind), DATA, loss).losses
    return Steps(biases, loads, losses)


class Case(NamedTuple):
    config: JobConfig
    kind: str = "deepseek_v3"
    loads_from: str = ""
    """The case whose checkpoint is loaded after the steps; "": its own."""


TWO = replace(job().data, micro_num=2)
PIPELINE = replace(job().parallel, pipeline=PipelineConfig(size=2))

CASES = {
    "isp, recomputed": Case(job(2, 4, expert=2, recompute=1.0)),
    "heads x context": Case(job(4, 4, context=2), "glm4_moe"),
    "fsp": Case(job(2, mode=Mode.FSP), "glm4_moe", "heads x context"),
    "mtp": Case(job(2, mode=Mode.MTP), "glm4_moe", "fsp"),
    "pipeline": Case(replace(job(recompute=0.5), data=TWO, parallel=PIPELINE), "ernie4_5_moe"),
}


def _model(kind: str) -> Any:
    sizes: dict[str, Any] = {"num_hidden_layers": 2}
    if kind == "ernie4_5_moe":
        sizes |= {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16}
    model = tiny(kind, **sizes)
    for index, bias in enumerate(_biases(model).values()):
        bias.data = (
            0.3 * torch.randn(bias.shape, generator=torch.Generator().manual_seed(index)).double()
        )
    return model


def _step(run: ParallelRun, rows: Rows) -> tuple[float, Any]:
    if run.config.parallel.pipeline.size == 1:
        outcome = run.step(run.loss(*rows))
        return outcome.loss, outcome
    assert rows.labels is not None
    num = run.count(rows.labels[:, 1:] != IGNORED)
    batches = [rows.part(index, 2)._asdict() for index in range(2)]
    run.forward_backward(batches, lambda scores, _: -scores.log_probs.sum() / num, last=True)
    outcome = run.step()
    return outcome.loss, outcome


def _run(rank: int, name: str, folder: Path) -> Steps:
    case = CASES[name]
    model = replace(case.config.model, moe_router_bias_update_rate=RATE)
    run = isp.parallelize(_model(case.kind), replace(case.config, model=model))
    losses, loads = [], []
    for rows in DATA:
        part = rows.part(run.dp_rank, run.dp_size)
        with torch.no_grad():
            run.log_probs(part.input_ids, part.labels, part.position_ids)  # counts for nothing
        loss, outcome = _step(run, part)
        losses.append(loss)
        loads.append((outcome.expert_load, outcome.unused_experts))
    run.save_pretrained(folder / case.kind)
    run.save(folder / name)
    own = {name: bias for name, bias in _biases(run.model).items() if bias.is_contiguous()}
    for bias in own.values():
        bias.data.zero_()
    run.load(folder / (case.loads_from or name))
    biases = {name: bias.clone() for name, bias in own.items()}
    return Steps(biases, loads, losses)


def test_biases_move_as_in_a_plain_loop(tmp_path: Path) -> None:
    """Catches counts of one rank, of recomputation or of padding, and an update missing in a
    layout.
    """
    found = run_each(
        4, partial(_run, folder=tmp_path), {name: name for name in CASES}, timeout_seconds=100
    )
    plain = {kind: _plainly(kind) for kind in {case.kind for case in CASES.values()}}
    for name, case in CASES.items():
        expected = plain[case.kind]
        for of_rank in found[name]:
            assert of_rank.biases.keys() <= expected.biases.keys(), name
            for layer, bias in of_rank.biases.items():
                assert (bias - expected.biases[layer]).abs().max() < 1e-12, (name, layer)
            for ours, theirs in zip(of_rank.losses, expected.losses, strict=True):
                assert abs(ours - theirs) < 1e-9, name
            for (load, unused), (other, none) in zip(of_rank.loads, expected.loads, strict=True):
                assert (round(load, 9), unused) == (round(other, 9), none), name
        exported = load_file(tmp_path / case.kind / "model.safetensors")
        own = [x for n, x in exported.items() if n.endswith("e_score_correction_bias")]
        assert len(own) == len(expected.biases)


def test_an_update_rate_without_biases_is_refused() -> None:
    """Catches a rate without effect."""
    of = RouterCoefficients(bias_rate=0.001)
    model = TracedModel(tiny("qwen3_moe"), router_losses=of)
    assert "has a bias for choosing experts" in raised(model.check_layout, job().parallel, 24)


def _half(rank: int, _: None) -> Any:
    run = isp.parallelize(
        _model("ernie4_5_moe").bfloat16(),
        replace(
            job(dtype="bfloat16"), model=replace(job().model, moe_router_bias_update_rate=RATE)
        ),
    )
    run.step(run.loss(*DATA[0]))
    moved = [bias.clone() for bias in _biases(run.model).values()]
    run.model.get_parameter("model.norm.weight").data.fill_(float("inf"))
    outcome = run.step(run.loss(*DATA[0]))
    again = [*_biases(run.model).values()]
    routers = [p for n, p in run.model.named_parameters() if n.endswith("mlp.gate.weight")]
    dtypes = {x.dtype for x in (*again, *routers)}
    return outcome.skipped, all(map(torch.equal, moved, again)), dtypes, len(routers)


def test_biases_are_float32_and_a_skipped_step_does_not_move_them() -> None:
    """Catches biases too coarse for their increments, and counts of skipped steps."""
    ((skipped, equal, dtypes, num_routers),) = run_each(1, _half, {"": None})[""]
    assert skipped
    assert equal
    assert dtypes == {torch.float32}
    assert num_routers == 1


def test_tokens_of_no_expert_are_not_counted() -> None:
    """Catches entries routed beyond a layer's experts that count for an expert of a larger
    layer.
    """
    model = nn.ModuleDict({"small": nn.Identity(), "large": nn.Identity()})
    load = ExpertLoad(model, {"small": 2, "large": 4}, torch.device("cpu"), rate=0.0)
    numbers = torch.tensor([[0, 2], [1, 0]])  # 2: no expert of the small layer
    with load.counting():
        for layer in model.values():
            layer(numbers)
    assert load.tokens().tolist() == [[2, 1, 0, 0], [2, 1, 1, 0]]
