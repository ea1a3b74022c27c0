"""A user's losses of per-token results, against the unmodified model in one process."""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import isp
from isp.core.layers.vocab_loss import IGNORED
from isp.core.mesh import Mode
from isp.loop.parallel_run import ParallelRun
from isp.loop.token_query import TokenScores
from tests.loop.test_loops import raised
from tests.models.models import (
    TOLERANCE,
    Rows,
    Trained,
    assert_trained_as,
    job,
    packed_rows,
    plain_loss,
    plain_scores,
    tiny,
    trained_plainly,
    whole_weights,
)
from tests.models.own import Own
from tests.ranks import run_each, run_programs, run_ranks

ROOT = Path(__file__).parents[2]
LENGTH, TEMPERATURE = 24, 0.7
DOCUMENTS = [[24], [10, 1, 13], [3, 21], [24]]
BATCHES = [packed_rows(4, LENGTH, DOCUMENTS, seed) for seed in range(3)]
WEIGHTS = torch.rand(3, 4, LENGTH, dtype=torch.float64, generator=torch.Generator().manual_seed(7))

Score = Callable[[Rows], TokenScores]
Loss = Callable[[Score, Rows, Tensor, Tensor], Tensor]
"""A loss of (function that scores rows, rows, weights [B, S] of tokens, earlier scores)."""


def _weighted(score: Score, rows: Rows, weights: Tensor, _: Tensor) -> Tensor:
    """Return a loss with weights of tokens and a z-loss."""
    found = score(rows)
    return (weights * (0.1 * found.logsumexp**2 - found.log_probs)).sum()


def _dpo(score: Score, rows: Rows, _: Tensor, before: Tensor) -> Tensor:
    """Return a DPO loss; rows are pairs, and each row of a pair is scored by a call of its own."""
    chosen, rejected = (
        score(Rows(*(None if x is None else x[start::2] for x in rows))).log_probs.sum(1)
        for start in (0, 1)
    )
    margins = (chosen - before[::2].sum(1)) - (rejected - before[1::2].sum(1))
    return -F.logsigmoid(0.1 * margins).sum()


def _ipo(score: Score, rows: Rows, _: Tensor, before: Tensor) -> Tensor:
    """Return an IPO loss of log-probabilities per token."""
    gains = (score(rows).log_probs - before).mean(1)
    return ((gains[::2] - gains[1::2] - 0.5) ** 2).sum()


def _grpo(score: Score, rows: Rows, weights: Tensor, before: Tensor) -> Tensor:
    """Return a GRPO loss with clipping, a KL term and an entropy bonus."""
    found = score(rows)
    ratio = (found.log_probs - 1.01 * before).exp()
    gain = torch.minimum(ratio * weights, ratio.clamp(0.8, 1.2) * weights)
    change = before - found.log_probs
    assert found.entropy is not None
    return -(gain - 0.04 * (change.exp() - change - 1) + 0.01 * found.entropy).sum()


LOSSES: dict[str, Loss] = {"weighted": _weighted, "dpo": _dpo, "ipo": _ipo, "grpo": _grpo}


def _trained_plainly(model: nn.Module, loss_of: Loss) -> Trained:
    with torch.no_grad():
        before = [plain_scores(model, rows, TEMPERATURE).log_probs for rows in BATCHES]

    def total(model: nn.Module, _: int) -> Tensor:
        given = zip(BATCHES, WEIGHTS, before, strict=True)
        losses = [
            loss_of(lambda rows: plain_scores(model, rows, TEMPERATURE), *each) for each in given
        ]
        return torch.stack(losses).sum()

    return trained_plainly(model, range(2), total)


def _part(run: ParallelRun, rows: Rows) -> Rows:
    return rows.part(run.dp_rank, run.dp_size)


def _trained(run: ParallelRun, loss_of: Loss) -> Trained:
    """Train two steps; each batch has its own backward, except that the first two share a
    scalar.
    """

    def score(rows: Rows) -> TokenScores:
        return run.log_probs(*rows, temperature=TEMPERATURE, entropy=loss_of is _grpo)

    parts = [_part(run, rows) for rows in BATCHES]
    weights = [w.chunk(run.dp_size)[run.dp_rank] for w in WEIGHTS]
    with torch.no_grad():
        before = [score(rows).log_probs for rows in parts]
    losses, norms = [], []
    for _ in range(2):
        found = [loss_of(score, *given) for given in zip(parts[:2], weights, before, strict=False)]
        run.backward(torch.stack(found).sum())
        run.backward(loss_of(score, parts[2], weights[2], before[2]))
        outcome = run.step()
        losses.append(outcome.loss)
        norms.append(outcome.grad_norm)
    return Trained(losses, norms, whole_weights(run))


class Case:
    def __init__(self, name: str, loss: str, *sizes: int, chunk: int = 5, **keys: Any) -> None:
        self.name, self.loss = name, loss
        self.config = job(*sizes, **keys)
        self.config = replace(
            self.config, model=replace(self.config.model, loss_chunk_tokens=chunk)
        )


CASES = {
    "isp": Case("llama", "dpo", 2, 4),
    "isp, recomputed": Case("qwen3", "grpo", 4, 2, recompute=1.0),
    "msp": Case("llama", "ipo", 2, 2, mode=Mode.MSP),
    "context, a cap behind the head": Case("gemma2", "grpo", 4, 4, context=2),
    "a bias of the head, whole logits": Case("phi", "weighted", 2, 4, chunk=0),
    "an own module": Case("own", "ipo", 2, 2),
}


def _model(name: str) -> nn.Module:
    return Own().double() if name == "own" else tiny(name)


def _run(rank: int, case: Case) -> Trained:
    return _trained(isp.parallelize(_model(case.name), case.config), LOSSES[case.loss])


def test_a_users_losses_equal_those_of_the_unmodified_model() -> None:
    """Catches a label at the wrong position, a scalar counted twice, and logits without
    gradients.
    """
    found = run_each(4, _run, CASES, timeout_seconds=100)
    for name, case in CASES.items():
        expected = _trained_plainly(_model(case.name), LOSSES[case.loss])
        assert_trained_as(expected, found[name], name)


def _padded(rank: int, ends: tuple[int, int, bool]) -> None:
    """Compare rows with padding, of a length that does not divide, with their tokens alone."""
    left, right, positions = ends
    run = isp.parallelize(tiny("llama"), job(2, 2))
    ids = torch.randint(3, 96, (2, 13), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :left] = mask[1, right:] = 0
    given = torch.arange(13).expand(2, 13) if positions else None
    with torch.no_grad():
        found = run.log_probs(ids, position_ids=given, attention_mask=mask, entropy=True)
        for row, seen in enumerate(mask.bool()):
            alone = run.log_probs(ids[row : row + 1, seen], entropy=True)
            for scores, expected in zip(found, alone, strict=True):
                assert scores is not None
                assert expected is not None
                assert scores.shape == ids.shape
                assert not scores[row, ~seen].any()
                assert (scores[row, seen] - expected[0]).abs().max() < TOLERANCE
    mask[:, 6] = 0
    assert "inside a document" in raised(lambda: run.log_probs(ids, attention_mask=mask))


def _in_order(rank: int, _: None) -> None:
    run = isp.parallelize(tiny("llama"), job(2, 2))
    rows = _part(run, BATCHES[0])
    before = whole_weights(run)
    assert "call run.backward(loss) first" in raised(run.step)
    found = run.log_probs(*rows)
    assert "loss.backward()" in raised(found.log_probs.sum().backward)
    loss = run.log_probs(*rows).log_probs.sum()
    run.backward(loss)
    assert "that waits for a backward" in raised(run.backward, loss.detach())
    with torch.no_grad():
        assert "run.zero_grad()" in raised(run.loss, *rows)
    assert "run.zero_grad()" in raised(run.step, run.loss(*rows))
    run.zero_grad()
    nothing = Rows(rows.input_ids, torch.full_like(rows.input_ids, IGNORED))
    run.backward(run.log_probs(*nothing).log_probs.sum())
    outcome = run.step()
    assert (outcome.skipped, outcome.valid_tokens) == (True, 0)
    after = whole_weights(run)
    assert all(torch.equal(after[name], weight) for name, weight in before.items())
    assert "temperature=0" in raised(lambda: run.log_probs(*rows, temperature=0))
    assert run.count(torch.ones(257, dtype=torch.bfloat16)).item() == 257 * run.dp_size


def _beside_a_reference(rank: int, name: str) -> None:
    """Check two models in one process, one of which is frozen as a whole."""
    policy, plain = isp.parallelize(tiny(name), job(2, 4)), tiny(name, seed=1)
    reference = isp.parallelize(copy.deepcopy(plain).requires_grad_(False), job(2, 4))
    rows = _part(policy, BATCHES[0])
    found = policy.log_probs(*rows, temperature=TEMPERATURE)
    with torch.no_grad():
        fixed = reference.log_probs(*rows, temperature=TEMPERATURE, entropy=True)
        expected = plain_scores(plain, rows, TEMPERATURE)
        evaluated = reference.loss(*rows)
    policy.backward((found.log_probs - fixed.log_probs).sum())
    assert policy.step().grad_norm > 0
    assert found.entropy is None
    for scores, alone in zip(fixed, expected, strict=True):
        assert scores is not None
        assert alone is not None
        assert (scores - alone).abs().max() < TOLERANCE
    assert evaluated.isfinite()
    assert "frozen: call run.loss under" in raised(reference.loss, *rows)


def test_a_frozen_reference_does_not_disturb_the_model() -> None:
    """Catches a second model that disturbs the first, or that needs trainable weights."""
    run_each(4, _beside_a_reference, {"llama": "llama"})


def _examples(rank: int, config: str) -> list[list[float]]:
    sys.path.insert(0, str(ROOT / "tools" / "examples"))
    import distill
    import dpo
    import grpo
    import trainer

    steps = {dpo: 10, distill: 6, grpo: 10, trainer: 4}
    return [example.main(config, num) for example, num in steps.items()]


@pytest.mark.slow
def test_the_examples_learn() -> None:
    """Catches an example that does not run, or whose loss does not fall."""
    (*_, found) = run_programs(4, _examples, str(ROOT / "configs" / "quickstart.yaml"))
    preferences, distances, rewards, losses = found
    assert abs(preferences[0] - math.log(2)) < 1e-5
    assert sum(preferences[-5:]) / 5 < 0.66
    assert distances[-1] < distances[0] / 2
    assert sum(rewards[-3:]) > sum(rewards[:3]) + 0.5
    assert losses[-1] < losses[0] - 1


def _accumulate(rank: int, case: Case) -> Trained:
    """Run micro-batches as users write them; before the last, a forward without backward."""
    run = isp.parallelize(_model(case.name), case.config)
    losses, norms = [], []
    for _ in range(2):
        *firsts, last = (_part(run, rows) for rows in BATCHES)
        for rows in firsts:
            run.backward(run.loss(*rows) / len(BATCHES))
        dropped = run.loss(*last)
        loss = run.loss(*last)
        assert "before the next one's run.loss" in raised(run.backward, dropped + loss)
        loss = run.loss(*last)
        assert "run.backward(loss / n) for each" in raised((loss / 3).backward)
        run.backward(loss / len(BATCHES), last=True)
        outcome = run.step()
        losses.append(outcome.loss)
        norms.append(outcome.grad_norm)
    return Trained(losses, norms, whole_weights(run))


ACCUMULATED = {
    "chunks, recomputed": Case("qwen3", "", 2, 4, recompute=1.0),
    "mtp": Case("llama", "", 2, mode=Mode.MTP),
    "an own module": Case("own", "", 1, 4),
}


def _with_another(rank: int, case: Case) -> Trained:
    """Run one scalar that sums the run's loss and a loss of results."""
    run = isp.parallelize(_model(case.name), case.config)
    rows = _part(run, BATCHES[0])
    scores = run.log_probs(*rows)
    run.backward(0.5 * run.loss(*rows) - scores.log_probs.sum() / 100)
    outcome = run.step()
    return Trained([outcome.loss], [outcome.grad_norm], whole_weights(run))


def test_gradients_of_micro_batches_are_summed() -> None:
    """Catches a factor that is not applied to the loss's precomputed gradient, gradients of the
    last micro-batch only, and a value summed over ranks that all have it.
    """
    found = run_each(4, _accumulate, ACCUMULATED, timeout_seconds=100)
    for name, case in ACCUMULATED.items():

        def mean(model: nn.Module, _: int) -> Tensor:
            return torch.stack([plain_loss(model, rows) for rows in BATCHES]).mean()

        expected = trained_plainly(_model(case.name), range(2), mean)
        assert_trained_as(expected, found[name], name)

    def both(model: nn.Module, _: int) -> Tensor:
        scores = plain_scores(model, BATCHES[0], 1.0)
        return 0.5 * plain_loss(model, BATCHES[0]) - scores.log_probs.sum() / 100

    (case,) = islice(ACCUMULATED.values(), 1)
    expected = trained_plainly(_model(case.name), range(1), both)
    assert_trained_as(expected, run_ranks(4, _with_another, case))


def test_padding_is_neither_seen_nor_scored() -> None:
    """Catches positions that count padding, and results at the wrong tokens."""
    run_each(4, _padded, {"left": (4, 13, False), "right": (0, 8, False), "one": (1, 12, True)})


def test_wrong_orders_of_a_users_calls_are_refused() -> None:
    """Catches gradients silently lost, and momentum that moves weights without gradients."""
    run_each(4, _in_order, {"llama": None})
