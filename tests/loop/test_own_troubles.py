"""A user's losses in loops where something fails, is left out, or happens in between."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

import isp
from isp.loop.parallel_run import ParallelRun
from isp.loop.token_query import TokenScores
from tests.loop.test_loops import raised
from tests.loop.test_own_losses import BATCHES, LENGTH
from tests.models.models import (
    VOCAB,
    Rows,
    Trained,
    assert_trained_as,
    job,
    tiny,
    trained,
    trained_plainly,
)
from tests.models.own import Own
from tests.ranks import run_each

ROWS = BATCHES[0]


def _loss_of(run: ParallelRun, rows: Rows) -> Tensor:
    return run.log_probs(*rows).log_probs.sum() / 100


def _fails(where: str, run: ParallelRun, fn: Callable[..., object], *args: Any) -> None:
    """Raise in the forward of a block, or in its backward."""

    def fail(_: nn.Module, __: Any, output: Tensor) -> None:
        if where == "forward":
            raise ZeroDivisionError
        output.register_hook(lambda _: 1 / 0)

    hook = run.model.get_submodule("model.layers.1").register_forward_hook(fail)
    try:
        raised(fn, *args)
    finally:
        hook.remove()


def _in_the_model(run: ParallelRun, rows: Rows) -> None:
    _fails("forward", run, run.log_probs, *rows)
    run.backward(_loss_of(run, rows))
    _fails("forward", run, run.hidden, rows.input_ids)
    _fails("backward", run, lambda: run.backward(_loss_of(run, rows)))
    # the gradients computed so far are incomplete
    assert "call run.backward(loss) first" in raised(run.step)
    run.backward(_loss_of(run, rows))
    run.zero_grad()


def _in_the_loss(run: ParallelRun, rows: Rows) -> None:
    batches, calls = [rows._asdict()] * 2, []

    def loss(scores: TokenScores, _: Mapping[str, Any]) -> Tensor:
        calls.append(scores)
        return scores.log_probs.sum() * (1 / (2 - len(calls)))

    raised(run.forward_backward, batches, loss)
    assert len(calls) == 2
    assert "call run.backward(loss) first" in raised(run.step)
    assert "one scalar" in raised(run.forward_backward, batches, lambda scores, _: scores.log_probs)
    assert "has no input_ids" in raised(run.forward_backward, [{"rows": 1}], loss)
    found = run.log_probs(*rows).log_probs
    found.register_hook(lambda _: 1 / 0)
    raised(run.backward, found.sum())
    run.backward(_loss_of(run, rows))
    run.zero_grad()


def _between(run: ParallelRun, rows: Rows) -> None:
    """Run forwards between a forward and its backward, and backward of graphs with stale
    weights.
    """
    found, other = _loss_of(run, rows), _loss_of(run, rows)
    with torch.no_grad():
        run.loss(*rows)
        run.log_probs(*rows)
    pending = run.loss(*rows)
    run.backward(found)
    assert "run.step(loss) cannot be called now: gradients" in raised(run.step, pending)
    assert "loss.backward()" in raised(_loss_of(run, rows).backward)
    run.zero_grad()
    assert "go backward once" in raised(run.backward, _loss_of(run, rows) + 1 * other)


def _left_alone(run: ParallelRun, rows: Rows) -> None:
    """Check that only the results keep a forward alive whose backward never runs."""
    alive: list[weakref.ref[Any]] = []

    def watch(_: nn.Module, __: Any, output: Tensor) -> None:
        def hook(gradient: Tensor) -> None:
            """Do nothing; the graph keeps this function alive."""

        output.register_hook(hook)
        alive.append(weakref.ref(hook))

    handle = run.model.get_submodule("model.layers.1").register_forward_hook(watch)
    found = run.log_probs(*rows)
    handle.remove()
    assert alive[0]() is not None
    del found
    assert alive[0]() is None


TROUBLES: dict[str, Callable[[ParallelRun, Rows], None]] = {
    "in the model": _in_the_model,
    "in the loss": _in_the_loss,
    "between": _between,
    "left alone": _left_alone,
}


def _troubled(rank: int, trouble: Callable[[ParallelRun, Rows], None]) -> Trained:
    return trained(isp.parallelize(tiny("llama"), job(2, 2)), [ROWS] * 2, trouble)


def test_failed_and_abandoned_passes_change_nothing() -> None:
    """Catches gradients of a failed backward, and forwards that stay in memory or block others."""
    expected = trained_plainly(tiny("llama"), [ROWS] * 2)
    for name, of_ranks in run_each(2, _troubled, TROUBLES).items():
        assert_trained_as(expected, of_ranks, name)


def _impossible_choices(rank: int, _: None) -> None:
    run, ids = isp.parallelize(tiny("llama"), job()), ROWS.input_ids
    pick = ids.unsqueeze(-1)
    assert "not both" in raised(lambda: run.logits(ids, pick, top_k=1))
    assert "top_k=97 must be from 1 to 96" in raised(lambda: run.logits(ids, top_k=97))
    assert "pick has 96" in raised(run.logits, ids, torch.full_like(pick, VOCAB))
    assert f"pick must be [4, {LENGTH}, k]" in raised(run.logits, ids, ids)
    assert "use run.logits" in raised(isp.parallelize(Own(), job()).hidden, ids)


def test_impossible_choices_of_logits_are_refused() -> None:
    """Catches token choices that would be gathered from the wrong position, or not at all."""
    run_each(1, _impossible_choices, {"llama": None})
