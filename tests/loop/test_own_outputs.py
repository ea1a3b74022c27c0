"""Losses of logits and hidden states, also in pipelines, against the plain model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import isp
from isp.config import JobConfig
from isp.core.mesh import Axis, Mode
from isp.core.mesh.config import PipelineConfig, PipelineSchedule
from isp.loop.token_query import TokenScores
from tests.loop.test_loops import raised
from tests.loop.test_own_losses import BATCHES, LENGTH, _model
from tests.models.models import (
    TOLERANCE,
    VOCAB,
    Rows,
    Trained,
    assert_trained_as,
    job,
    packed_rows,
    plain_logits,
    plain_scores,
    tiny,
    trained_plainly,
    whole_weights,
)
from tests.ranks import run_each

HALF = 0.5  # a temperature
RANDOM = torch.Generator().manual_seed(5)
WEIGHTS = torch.rand(4, LENGTH, dtype=torch.float64, generator=RANDOM)
TEACHER = 3 * torch.randn(4, LENGTH, VOCAB, dtype=torch.float64, generator=RANDOM)
ROWS = BATCHES[0]


class Plain:
    """The unmodified model with the calls of a run: each document alone, whole logits."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def hidden(self, ids: Tensor, positions: Tensor) -> Tensor:
        head, found = self._model.get_output_embeddings(), []
        hook = head.register_forward_pre_hook(lambda _, given: found.append(given[0]))
        try:
            self.logits(ids, None, positions)
        finally:
            hook.remove()
        return torch.cat(found, 1).view(*ids.shape, -1)

    def logits(
        self, ids: Tensor, pick: Tensor | None, positions: Tensor, top_k: int | None = None
    ) -> Any:
        logits = plain_logits(self._model, Rows(ids, position_ids=positions))
        if top_k is not None:
            return (logits / HALF).topk(top_k)
        return logits if pick is None else logits.gather(-1, pick)


Ask = Any
"""A `Plain`, or a run."""


def _full(ask: Ask, rows: Rows, weights: Tensor, teacher: Tensor) -> Tensor:
    logits = ask.logits(rows.input_ids, None, rows.position_ids)
    distance = F.kl_div(logits.log_softmax(-1), teacher.softmax(-1), reduction="none")
    return (distance.sum(-1) * weights).sum()


def _picked(ask: Ask, rows: Rows, weights: Tensor, teacher: Tensor) -> Tensor:
    """Return a KL loss of the teacher's largest logits, one of which is requested twice."""
    best, pick = teacher.topk(7)
    pick[..., 6] = pick[..., 0]
    logits = ask.logits(rows.input_ids, pick, rows.position_ids)
    distance = F.kl_div(logits.log_softmax(-1), best.softmax(-1), reduction="none")
    return (distance.sum(-1) * weights).sum()


def _top(ask: Ask, rows: Rows, weights: Tensor, teacher: Tensor) -> Tensor:
    """Return a loss of the model's own largest logits, at a temperature."""
    how = {} if isinstance(ask, Plain) else {"temperature": HALF}
    best, tokens = ask.logits(rows.input_ids, None, rows.position_ids, top_k=50, **how)
    gain = best.log_softmax(-1) * teacher.gather(-1, tokens)
    return (gain.sum(-1) * weights).sum()


def _valued(ask: Ask, rows: Rows, weights: Tensor, teacher: Tensor) -> Tensor:
    """Return a loss of the user's value head (in `HEADS`) and of logits."""
    values = HEADS[0](ask.hidden(rows.input_ids, rows.position_ids)).squeeze(-1)
    return ((values - teacher[..., 0]) ** 2 * weights).sum() + _picked(ask, rows, weights, teacher)


HEADS: list[nn.Linear] = []
LOSSES: dict[str, Callable[..., Tensor]] = {
    "full": _full,
    "picked": _picked,
    "top": _top,
    "valued": _valued,
}


class Case:
    def __init__(self, name: str, loss: str, *sizes: int, exchanged: bool = False, **keys: Any):
        self.name, self.loss = name, loss
        config = job(*sizes, **keys)
        weight = replace(config.parallel.weight, vocab_parallel_loss=exchanged)
        self.config = replace(
            config,
            model=replace(config.model, loss_chunk_tokens=5),
            parallel=replace(config.parallel, weight=weight),
        )


CASES = {
    "isp, a bias of the head": Case("phi", "picked", 2, 4),
    "isp, logits exchanged": Case("llama", "full", 4, 2, exchanged=True),
    "isp, largest, exchanged": Case("qwen3", "top", 4, 1, exchanged=True),
    "isp, context": Case("qwen3", "valued", 4, 4, context=2, recompute=1.0),
    "mtp, largest": Case("llama", "top", 2, 2, mode=Mode.MTP),
    "fsp": Case("qwen3", "full", 2, 2, mode=Mode.FSP),
    "whole logits": Case("own", "top", 2, 4),
}


def _head() -> nn.Linear:
    torch.manual_seed(3)
    HEADS[:] = [nn.Linear(32, 1).double()]
    return HEADS[0]


def _run(rank: int, case: Case) -> tuple[Trained, Tensor]:
    run, head = isp.parallelize(_model(case.name), case.config), _head()
    rows = ROWS.part(run.dp_rank, run.dp_size)
    others = [x.chunk(run.dp_size)[run.dp_rank] for x in (WEIGHTS, TEACHER)]
    run.backward(LOSSES[case.loss](run, rows, *others), last=True)
    assert "last=True" in raised(run.backward, torch.zeros(()))
    outcome = run.step()
    of_head = torch.zeros(1) if head.weight.grad is None else head.weight.grad
    of_head = run.mesh[Axis.DATA].all_reduce(of_head).wait()
    return Trained([outcome.loss], [outcome.grad_norm], whole_weights(run)), of_head


def test_losses_of_logits_equal_those_of_the_unmodified_model() -> None:
    """Catches logits at the wrong positions, and gradients of ranks counted twice or not at all."""
    found = run_each(4, _run, CASES, timeout_seconds=100)
    for name, case in CASES.items():
        model, head = _model(case.name), _head()

        def loss(model: nn.Module, _: int, of: str = case.loss) -> Tensor:
            return LOSSES[of](Plain(model), ROWS, WEIGHTS, TEACHER)

        expected = trained_plainly(model, range(1), loss)
        for of_rank, of_head in found[name]:
            assert_trained_as(expected, [of_rank], name)
            if head.weight.grad is not None:
                apart = (of_head - head.weight.grad).abs().max() / of_head.abs().max()
                assert apart < TOLERANCE, name


# -- rewards ------------------------------------------------------------------------------------


def _pairs(sides: str) -> dict[str, Tensor]:
    """Return the chosen rows, then the rejected ones, padded."""
    ids = torch.randint(3, VOCAB, (4, 13), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    for row, length in enumerate((13, 9, 6, 11)):
        mask[row, slice(0, 13 - length) if sides == "left" else slice(length, 13)] = 0
    return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}


def _reward_loss(logits: Tensor, mask: Tensor) -> Tensor:
    """Return the Bradley-Terry loss of pairs, or a loss of labels."""
    if logits.shape[-1] == 1:
        return -F.logsigmoid(logits[::2, 0] - logits[1::2, 0]).sum()
    if logits.dim() == 2:
        return (logits.log_softmax(-1) * torch.arange(3)).sum()
    return (logits.log_softmax(-1) * torch.arange(3) * mask.unsqueeze(-1)).sum()


REWARDS = {
    "isp": ("llama", "SequenceClassification", job(2, 4), 1),
    "mtp": ("llama", "SequenceClassification", job(2, 2, mode=Mode.MTP), 3),
    "gpt2's own": ("gpt2", "SequenceClassification", job(2, 2), 1),
    "tokens": ("qwen2", "TokenClassification", job(4, 4, context=2), 3),
}


def _rewarding(name: str, kind: str, num_labels: int) -> Any:
    return tiny(name, kind=kind, num_labels=num_labels, classifier_dropout=0.0)


def _reward(rank: int, case: tuple[str, str, JobConfig, int]) -> Trained:
    """Train a step of rows padded on the left, then one of rows padded on the right."""
    name, kind, config, num_labels = case
    run = isp.parallelize(_rewarding(name, kind, num_labels), config)
    losses, norms = [], []
    for sides in ("left", "right"):
        pairs = {k: x.chunk(run.dp_size)[run.dp_rank] for k, x in _pairs(sides).items()}
        run.backward(_reward_loss(run.logits(**pairs), pairs["attention_mask"]))
        outcome = run.step()
        losses.append(outcome.loss)
        norms.append(outcome.grad_norm)
    assert "make a loss of run.logits" in raised(run.loss, pairs["input_ids"])
    assert "run.log_probs needs logits of tokens" in raised(run.log_probs, pairs["input_ids"])
    return Trained(losses, norms, whole_weights(run))


def test_classification_models_train_as_in_transformers() -> None:
    """Catches logits of another token than the last, and attention to padding."""
    found = run_each(4, _reward, REWARDS, timeout_seconds=100)
    for name, (kind, head, _, num_labels) in REWARDS.items():

        def loss(model: Any, sides: str) -> Tensor:
            rows = _pairs(sides)
            positions = (rows["attention_mask"].cumsum(1) - 1).clamp(min=0)
            logits = model(**rows, position_ids=positions).logits
            return _reward_loss(logits, rows["attention_mask"])

        model = _rewarding(kind, head, num_labels)
        expected = trained_plainly(model, ("left", "right"), loss)
        assert_trained_as(expected, found[name], name)


# -- micro-batches, in pipelines ------------------------------------------------------------------


def _micro_batches() -> list[dict[str, Tensor]]:
    """Return pairs of unequal lengths and numbers, with the tensors that a loss needs."""
    found = []
    for seed, (rows, length) in enumerate([(4, 16), (8, 12), (4, 9), (4, 14)]):
        packed = packed_rows(rows, length, [[length], [5, length - 5]] * (rows // 2), seed)
        weights = torch.rand(rows, length, dtype=torch.float64, generator=RANDOM)
        found.append({**packed._asdict(), "weights": weights})
    return found


MICRO_BATCHES = _micro_batches()


def _preference(scores: TokenScores, batch: Mapping[str, Tensor]) -> Tensor:
    """Return a preference loss with a clipped ratio and entropy."""
    assert scores.entropy is not None
    weights, before = batch["weights"], batch["before"]
    gains = ((scores.log_probs - before) * weights).sum(1)
    ratio = (scores.log_probs - 1.01 * before).exp()
    clipped = torch.minimum(ratio * weights, ratio.clamp(0.8, 1.2) * weights).sum()
    return (
        -F.logsigmoid(gains[::2] - gains[1::2]).sum() - clipped - (scores.entropy * weights).sum()
    )


def _staged(
    schedule: str,
    chunks: int = 1,
    tensor: int = 2,
    weight: int = 1,
    exchanged: bool = False,
    **keys: Any,
) -> JobConfig:
    pipeline = PipelineConfig(size=2, schedule=PipelineSchedule(schedule), num_chunks=chunks)
    config = job(tensor, weight, **keys)
    split = replace(config.parallel.weight, vocab_parallel_loss=exchanged)
    return replace(
        config,
        data=replace(config.data, micro_num=4),
        model=replace(config.model, loss_chunk_tokens=5),
        parallel=replace(config.parallel, pipeline=pipeline, weight=split),
    )


PIPELINES = {
    "none": job(2, 2),
    "1F1B": _staged("1F1B", weight=2, exchanged=True),
    "chunks": _staged("InterleavedZeroBubble", 2, weight=2),
    "a V": _staged("ZBVZeroBubble", 2, mode=Mode.MTP),
}


def _pipelined(rank: int, config: JobConfig) -> Trained:
    """Train one step of two `forward_backward` calls, whose gradients are summed."""
    model = tiny("llama", num_hidden_layers=4, tie_word_embeddings=True)
    frozen = copy.deepcopy(model).requires_grad_(False)
    reference, run = isp.parallelize(frozen, config), isp.parallelize(model, config)
    with torch.no_grad():
        batches = []
        for batch in MICRO_BATCHES:
            batch = {k: x.chunk(run.dp_size)[run.dp_rank] for k, x in batch.items()}
            rows = [batch[name] for name in Rows._fields]
            before = reference.log_probs(*rows, temperature=HALF).log_probs
            batches.append({**batch, "before": before})
    how: dict[str, Any] = {"temperature": HALF, "entropy": True}
    found = run.forward_backward(batches, _preference, **how)
    with torch.no_grad():
        assert torch.equal(found, run.forward_backward(batches, _preference, **how))
    run.forward_backward(batches, _preference, last=True, **how)
    outcome = run.step()
    if run.mesh[Axis.PIPELINE].size > 1:
        assert "run.forward_backward" in raised(run.log_probs, batches[0]["input_ids"])
        assert "run.forward_backward" in raised(run.loss, batches[0]["input_ids"])
        assert "len(batches)=1" in raised(run.forward_backward, batches[:1], _preference)
    return Trained([outcome.loss], [outcome.grad_norm], dict(run.named_weights()))


def _plainly_scored(model: nn.Module, batch: Mapping[str, Tensor]) -> TokenScores:
    return plain_scores(model, Rows(*(batch[name] for name in Rows._fields)), HALF)


@pytest.mark.slow
def test_a_pipeline_runs_backward_of_a_users_loss() -> None:
    """Catches a stage that runs backward of something else, and gradients of one call only."""
    found = run_each(4, _pipelined, PIPELINES, timeout_seconds=100)
    model = tiny("llama", num_hidden_layers=4, tie_word_embeddings=True)
    with torch.no_grad():
        before = [_plainly_scored(model, batch).log_probs for batch in MICRO_BATCHES]

    def loss(model: Any, _: int) -> Tensor:
        given = [{**b, "before": old} for b, old in zip(MICRO_BATCHES, before, strict=True)]
        return 2 * sum(_preference(_plainly_scored(model, b), b) for b in given)

    expected = trained_plainly(model, range(1), loss)
    for name, of_ranks in found.items():
        for of_rank in of_ranks:
            weights = {n: w for n, w in of_rank.weights.items() if n in expected.weights}
            assert_trained_as(expected, [of_rank._replace(weights=weights)], name)


# -- steps whose loss does not reach every weight ------------------------------------------------


def _reaching(ask: Ask, step: int, part: slice = slice(None)) -> Tensor:
    """Return the loss of a step; that of step 1 uses hidden states only, so it skips the head."""
    rows = Rows(*(None if x is None else x[part] for x in BATCHES[step]))
    if step == 1:
        found = ask.hidden(rows.input_ids, rows.position_ids)
        return ((found**2).mean(-1) * WEIGHTS[part]).sum()
    return _picked(ask, rows, WEIGHTS[part], TEACHER[part])


def _one_block(seed: int = 0) -> Any:
    return tiny("qwen3", seed=seed, num_hidden_layers=1)


def _reached(rank: int, case: tuple[JobConfig, JobConfig, Any, Path]) -> Trained:
    """Train three steps, the last of which is another run's, in another layout."""
    before, after, make, folder = case
    losses, norms, run = list[float](), list[float](), None
    for step in range(3):
        if run is None or step == 2:
            config = before if run is None else after
            run = isp.parallelize(_one_block(seed=step), config, optimizer=make)
            if step:
                run.load(folder)
        size = 4 // run.dp_size
        run.backward(_reaching(run, step, slice(run.dp_rank * size, (run.dp_rank + 1) * size)))
        outcome = run.step()
        losses.append(outcome.loss)
        norms.append(outcome.grad_norm)
        if step == 1:
            run.save(folder)
    return Trained(losses, norms, whole_weights(run))


def _torchs(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    kinds = [[p for _, p in named if (p.dim() < 2) is flat] for flat in (True, False)]
    groups = [{"params": kinds[0], "weight_decay": 0.0}, {"params": kinds[1], "weight_decay": 0.1}]
    return torch.optim.AdamW(groups, 1e-2, (0.9, 0.95))


def test_a_weight_that_no_loss_reaches_is_not_updated(tmp_path: Path) -> None:
    """Catches a head that decays, moves by momentum, or counts a step in which it has no
    gradient.
    """
    layouts: dict[int, dict[str, tuple[JobConfig, JobConfig, Any]]] = {
        1: {"alone": (job(), job(), None)},
        2: {"zero1": (job(), job(2, 2), None)},
        4: {
            "isp": (job(2, 4, recompute=1.0), job(2, mode=Mode.MSP), None),
            "torch": (job(2, 2), job(1, 2), _torchs),
        },
    }
    expected = trained_plainly(
        _one_block(), range(3), lambda model, step: _reaching(Plain(model), step)
    )
    for ranks, cases in layouts.items():
        named = {name: (*case, tmp_path / f"{name}{ranks}") for name, case in cases.items()}
        for name, found in run_each(ranks, _reached, named).items():
            assert_trained_as(expected, found, name)
