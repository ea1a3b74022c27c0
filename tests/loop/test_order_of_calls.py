"""The order of a run's calls: each call in each state, against the table of states."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

import isp
from isp.checkpoint import CheckpointError
from isp.loop.parallel_run import _NEXT_STATE, Call, ParallelRun, State
from tests.models.models import VOCAB, job, tiny
from tests.models.own import Own

IDS = torch.randint(VOCAB, (1, 16), generator=torch.Generator().manual_seed(0))
BATCHES = [{"input_ids": IDS}]


def _loss(run: ParallelRun) -> torch.Tensor:
    return run.log_probs(IDS).log_probs.mean()


def _backward(run: ParallelRun, last: bool = False) -> None:
    run.backward(_loss(run), last=last)


def _forward_backward(run: ParallelRun, last: bool = False) -> None:
    run.forward_backward(BATCHES, lambda scores, _: scores.log_probs.mean(), last=last)


def _step_of_loss(run: ParallelRun) -> None:
    run.step(run.loss(IDS))


CALLS: dict[Call, Callable[[ParallelRun, Path], object]] = {
    Call.LOG_PROBS: lambda run, _: run.log_probs(IDS),
    Call.LOGITS: lambda run, _: run.logits(IDS),
    Call.HIDDEN: lambda run, _: run.hidden(IDS),
    Call.LOSS: lambda run, _: run.loss(IDS),
    Call.LOSS_NO_GRAD: lambda run, _: torch.no_grad()(run.loss)(IDS),
    Call.FORWARD_BACKWARD_NO_GRAD: lambda run, _: torch.no_grad()(
        partial(_forward_backward, run)
    )(),
    Call.BACKWARD: lambda run, _: _backward(run),
    Call.FORWARD_BACKWARD: lambda run, _: _forward_backward(run),
    Call.LAST_BACKWARD: lambda run, _: _backward(run, last=True),
    Call.LAST_FORWARD_BACKWARD: lambda run, _: _forward_backward(run, last=True),
    Call.GRAD_NORM: lambda run, _: run.grad_norm(),
    Call.STEP: lambda run, _: run.step(),
    Call.STEP_OF_LOSS: lambda run, _: _step_of_loss(run),
    Call.ZERO_GRAD: lambda run, _: run.zero_grad(),
    Call.SAVE_PRETRAINED: lambda run, folder: run.save_pretrained(folder / "weights"),
    Call.NAMED_WEIGHTS: lambda run, _: dict(run.named_weights()),
    Call.SAVE: lambda run, folder: run.save(folder / "saved"),
    Call.LOAD: lambda run, folder: run.load(folder),
    Call.TO_HOST: lambda run, _: run._leave(),  # as `to` does on a device
    Call.TO_DEVICE: lambda run, _: run.to("cpu"),
}
WITHOUT_MOVE = {
    (Call.TO_HOST, State.AWAY),
    *((Call.TO_DEVICE, state) for state in State if state is not State.AWAY),
}
"""Calls of `to` that move nothing, and so are not checked against the table."""


def _into(run: ParallelRun, state: State) -> None:
    """Bring a run that is READY into `state` with the fewest calls."""
    if state in (State.ADDED, State.LAST, State.SUMMED):
        _backward(run, last=state is State.LAST)
    if state is State.SUMMED:
        run.grad_norm()
    if state is State.AWAY:
        run._leave()
    assert run._state is state


def _back(run: ParallelRun) -> None:
    """Bring a run back to READY."""
    run.to("cpu").zero_grad()
    assert run._state is State.READY


def test_each_call_is_allowed_or_refused_as_the_table_says(tmp_path: Path) -> None:
    """Catches a call allowed in a state in which it loses gradients, one refused without need, and
    a state that a call forgets to enter.
    """
    run = isp.parallelize(tiny("llama"), job())  # ends in a linear, as `hidden` needs
    run.save(tmp_path)
    assert set(CALLS) == set(_NEXT_STATE) == set(Call)
    for call, after in _NEXT_STATE.items():
        for state in State:
            if (call, state) in WITHOUT_MOVE:
                continue
            _into(run, state)
            if state in after:
                CALLS[call](run, tmp_path)
                assert run._state is after[state], (call, state)
            else:
                with pytest.raises(RuntimeError, match="cannot be called now") as refused:
                    CALLS[call](run, tmp_path)
                # A call of several (a forward, then its backward) may be refused at the first.
                assert state.value[0] in str(refused.value), (call, state)
                assert run._state is state, (call, state)
            _back(run)


def test_a_refusal_names_the_call_what_is_pending_and_what_to_do() -> None:
    """Catches a message that is assembled wrongly."""
    run = isp.parallelize(Own(), job())
    _into(run, State.SUMMED)
    loss = _loss(run)
    with pytest.raises(RuntimeError) as refused:
        run.backward(loss)
    assert str(refused.value) == (
        "run.backward cannot be called now: run.grad_norm() has summed the gradients over the"
        " ranks; call run.step(), or run.zero_grad() to drop the gradients"
    )


def test_a_to_that_moves_nothing_is_allowed_in_each_state() -> None:
    """Catches a `to` without a move that is refused, or that drops gradients."""
    run = isp.parallelize(Own(), job())
    for state in State:
        _into(run, state)
        # On CPU ranks the host is the run's device, so where weights are away, name another.
        run.device = torch.device("cuda", 0) if state is State.AWAY else torch.device("cpu")
        assert run.to("cpu") is run
        assert run._state is state
        run.device = torch.device("cpu")
        _back(run)


def test_a_load_without_a_checkpoint_keeps_the_gradients(tmp_path: Path) -> None:
    """Catches gradients dropped before it is known whether there is a checkpoint."""
    run = isp.parallelize(Own(), job())
    _into(run, State.ADDED)
    with pytest.raises(CheckpointError):
        run.load(tmp_path)
    assert run._state is State.ADDED
    assert run.step().grad_norm > 0
