"""The order of a run's calls: each call in each state, against the table of states."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import isp
from isp.loop.parallel_run import _NEXT_STATE, ParallelRun, State
from tests.models.models import job
from tests.models.own import VOCAB, Own

IDS = torch.randint(VOCAB, (1, 16), generator=torch.Generator().manual_seed(0))
BATCHES = [{"input_ids": IDS}]


def _loss(run: ParallelRun) -> torch.Tensor:
    return run.log_probs(IDS).log_probs.mean()


def _backward(run: ParallelRun, last: bool = False) -> None:
    run.backward(_loss(run), last=last)


def _forward_backward(run: ParallelRun, last: bool = False) -> None:
    run.forward_backward(BATCHES, lambda scores, _: scores.log_probs.mean(), last=last)


def _leave(run: ParallelRun) -> None:
    """Do what `to` does on a device; for a CPU rank, "cpu" is where its weights are."""
    if run._state is not State.AWAY:
        run._leave()


def _step_of_loss(run: ParallelRun) -> None:
    run.step(run.loss(IDS))


CALLS: dict[str, Callable[[ParallelRun, Path], object]] = {
    "log_probs": lambda run, _: run.log_probs(IDS),
    "logits": lambda run, _: run.logits(IDS),
    "hidden": lambda run, _: run.logits(IDS),  # the model's last call is no linear
    "loss": lambda run, _: run.loss(IDS),
    "loss under torch.no_grad()": lambda run, _: torch.no_grad()(run.loss)(IDS),
    "forward_backward under torch.no_grad()": lambda run, _: torch.no_grad()(
        partial(_forward_backward, run)
    )(),
    "backward": lambda run, _: _backward(run),
    "forward_backward": lambda run, _: _forward_backward(run),
    "backward(.., last=True)": lambda run, _: _backward(run, last=True),
    "forward_backward(.., last=True)": lambda run, _: _forward_backward(run, last=True),
    "grad_norm": lambda run, _: run.grad_norm(),
    "step": lambda run, _: run.step(),
    "step(loss)": lambda run, _: _step_of_loss(run),
    "zero_grad": lambda run, _: run.zero_grad(),
    "save_pretrained": lambda run, _: dict(run.named_weights()),  # no model of transformers
    "named_weights": lambda run, _: dict(run.named_weights()),
    "save": lambda run, folder: run.save(folder / "saved"),
    "load": lambda run, folder: run.load(folder),
    "to('cpu')": lambda run, _: _leave(run),
    "to(run.device)": lambda run, _: run.to("cpu"),
}


def _into(run: ParallelRun, state: State) -> None:
    """Bring a run that is READY into `state`, by the fewest calls."""
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


def test_each_call_in_each_state_does_what_the_table_says(tmp_path: Path) -> None:
    """Catches a call that comes in a state in which it loses gradients, one that is refused for
    nothing, and a state that a call forgets to enter."""
    run: Any = isp.parallelize(Own(), job())
    run.save(tmp_path)
    assert CALLS.keys() == _NEXT_STATE.keys()
    for call, after in _NEXT_STATE.items():
        for state in State:
            _into(run, state)
            if state in after:
                CALLS[call](run, tmp_path)
                assert run._state is after[state], (call, state)
            else:
                with pytest.raises(RuntimeError, match="may not come now") as refused:
                    CALLS[call](run, tmp_path)
                # A call of several (a forward, then its backward) may be refused at the first.
                assert state.value[0] in str(refused.value), (call, state)
                assert run._state is state, (call, state)
            _back(run)


def test_a_refusal_names_the_call_what_is_pending_and_the_way_out() -> None:
    """Catches words that are put together wrongly."""
    run = isp.parallelize(Own(), job())
    _into(run, State.SUMMED)
    loss = _loss(run)
    with pytest.raises(RuntimeError) as refused:
        run.backward(loss)
    assert str(refused.value) == (
        "run.backward may not come now: run.grad_norm() has summed the gradients over the ranks:"
        " call run.step(), or run.zero_grad() to drop the gradients"
    )
