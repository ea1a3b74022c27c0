"""Likelihoods are those of transformers' logits, in every layout: a token of another document, a
score that begins too early, a row's padding that counts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from isp.evaluation.scoring import Continuation, Score, batches, log_likelihoods, scores
from tests.evaluation.models import made, opened, saved
from tests.ranks import run_each

BATCH_TOKENS = 40
"""Some are read together, and others in the next batch."""


def continuations() -> list[Continuation]:
    """Of unequal lengths; the last is what the model would write, token by token."""
    drawn = torch.Generator().manual_seed(0)
    found = []
    for context, count in ((1, 1), (7, 3), (20, 1), (2, 30), (1, 60), (5, 4)):
        tokens = torch.randint(256, (context + count,), generator=drawn).tolist()
        found.append(Continuation(tokens[:context], tokens[context:]))
    prompt = torch.tensor([[5, 3, 9]])
    mask = torch.ones_like(prompt)
    written = made("llama").generate(prompt, attention_mask=mask, max_new_tokens=6, do_sample=False)
    return [*found, Continuation([5, 3, 9], written[0, 3:].tolist())]


def expected() -> list[Score]:
    model, found = made("llama"), []
    for context, tokens in continuations():
        with torch.no_grad():
            logits = model(torch.tensor([[*context, *tokens]])).logits[0, len(context) - 1 : -1]
        likely = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None]).sum()
        found.append(Score(float(likely), logits.argmax(-1).tolist() == list(tokens)))
    return found


def of_layout(rank: int, case: tuple[Path, int, str]) -> tuple[list[Score], list[float]]:
    path, ranks, mode = case
    _, engine = opened(path, rank, ranks, [f"--parallel.tensor.mode={mode}"])
    asked = continuations()
    return (
        list(scores(engine, asked, batch_tokens=BATCH_TOKENS)),
        list(log_likelihoods(engine, asked, batch_tokens=BATCH_TOKENS)),
    )


def check(found: tuple[list[Score], list[float]]) -> None:
    likely = [score.log_likelihood for score in expected()]
    assert [score.log_likelihood for score in found[0]] == pytest.approx(likely, rel=1e-8)
    assert found[1] == pytest.approx(likely, rel=1e-8)
    assert [score.is_greedy for score in found[0]] == [False] * (len(likely) - 1) + [True]


def test_scores_are_those_of_transformers_in_every_layout(tmp_path: Path) -> None:
    path = saved("llama", tmp_path)
    check(of_layout(0, (path, 1, "isp")))
    cases = {mode: (path, 2, mode) for mode in ("mtp", "isp")}
    for of_ranks in run_each(2, of_layout, cases, timeout_seconds=100).values():
        for found in of_ranks:
            check(found)


def test_batches_are_in_order_and_not_beyond_the_limit() -> None:
    lengths = [3, 1, 4, 9, 2, 2, 2]
    assert list(batches(lengths, lengths, 8)) == [[3, 1], [4], [9], [2, 2, 2]]
    assert list(batches([], [], 8)) == []
