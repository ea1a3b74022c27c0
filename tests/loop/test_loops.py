"""Training loops with failed and abandoned steps, evaluation in between, and dropout."""

from __future__ import annotations

import copy
import gc
import math
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import orthogonal, weight_norm

import isp
from isp.config import JobConfig
from isp.core.layers.vocab_loss import IGNORED
from isp.core.mesh import Axis
from isp.core.rng import generator_states
from isp.loop.parallel_run import ParallelRun
from isp.models.runtime import sharded_modules
from tests.models.models import (
    TOLERANCE,
    Rows,
    Trained,
    assert_trained_as,
    job,
    plain_loss,
    tiny,
    trained,
    trained_plainly,
    whole_weights,
)
from tests.models.own import VOCAB, Own
from tests.ranks import run_each, run_ranks


def _data(steps: int = 3, seed: int = 0) -> list[Rows]:
    generator = torch.Generator().manual_seed(seed)
    return [Rows(torch.randint(VOCAB, (1, 64), generator=generator)) for _ in range(steps)]


def raised(fn: Callable[..., Any], *args: Any) -> str:
    with pytest.raises((RuntimeError, ArithmeticError, TypeError, ValueError)) as raised:
        fn(*args)
    return str(raised.value)


def _evaluate(run: ParallelRun, rows: Rows) -> float:
    with torch.no_grad():
        return run.loss(*rows).item()


Trouble = Callable[[ParallelRun, Rows], None]


def _nothing(run: ParallelRun, rows: Rows) -> None:
    """Do nothing: the loop without trouble."""


def _two_losses(run: ParallelRun, rows: Rows) -> None:
    first = run.loss(*rows)
    second = run.loss(*rows)
    assert "last call" in raised(run.step, first)
    assert "the unchanged loss" in raised(run.step, 2 * second)


def _evaluation_between(run: ParallelRun, rows: Rows) -> None:
    loss = run.loss(*rows)
    assert abs(_evaluate(run, rows) - loss.item()) < TOLERANCE
    assert "last call" in raised(run.step, loss)


def _failing(run: ParallelRun, rows: Rows) -> None:
    block: Any = run.model.get_submodule("blocks.1")
    block.trouble = "failure"
    assert raised(_loss, run, rows) == "as planned"
    block.trouble = ""
    _evaluate(run, rows)
    block.trouble = "failure"
    assert raised(_evaluate, run, rows) == "as planned"
    block.trouble = ""


def _failing_in_backward(run: ParallelRun, rows: Rows) -> None:
    loss = run.loss(*rows)
    loss.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run.step(loss)


def _other_order(run: ParallelRun, rows: Rows) -> None:
    block: Any = run.model.get_submodule("blocks.1")
    block.trouble = "other order"
    said = raised(_loss, run, rows)
    assert "in blocks.1, linear of blocks.1.k was called where linear of blocks.1.q came" in said
    block.trouble = ""


def _direct_call(run: ParallelRun, rows: Rows) -> None:
    positions = torch.arange(64).unsqueeze(0)
    assert "through the run's `loss`" in raised(run.model, rows.input_ids, positions)


def _backward_by_hand(run: ParallelRun, rows: Rows) -> None:
    loss = run.loss(*rows)
    assert "outside of step" in raised(loss.backward)
    assert "outside of step" in raised((2 * run.loss(*rows)).backward)


def _frozen_later(run: ParallelRun, rows: Rows) -> None:
    block = run.model.get_submodule("blocks.1")
    block.requires_grad_(False)
    assert "blocks.1.norm1.weight was trained when" in raised(_loss, run, rows)
    _evaluate(run, rows)
    block.requires_grad_(True)


def _replaced(run: ParallelRun, rows: Rows) -> None:
    """Check that parameters replaced unnoticed are refused by name, and that `to` is followed."""
    norm: Any = run.model.get_submodule("blocks.1.norm1")
    own, values = norm.weight, norm.weight.data
    own.data = values.float()
    assert "norm1.weight was float64 [32] on cpu when" in raised(_loss, run, rows)
    assert "is float32 [32] on cpu now" in raised(_evaluate, run, rows)
    own.data = values
    norm.weight = nn.Parameter(values.clone())
    assert "norm1.weight is another parameter than" in raised(_loss, run, rows)
    norm.weight = own
    run.model.to("cpu:0")
    assert own.data_ptr() != values.data_ptr()


def _saving(run: ParallelRun, rows: Rows) -> None:
    whole_weights(run)


def _loss(run: ParallelRun, rows: Rows) -> Tensor:
    return run.loss(*rows)


TROUBLES: dict[str, Trouble] = {
    "nothing": _nothing,
    "two losses": _two_losses,
    "evaluation between": _evaluation_between,
    "failing": _failing,
    "failing in backward": _failing_in_backward,
    "other order": _other_order,
    "direct call": _direct_call,
    "backward by hand": _backward_by_hand,
    "frozen later": _frozen_later,
    "replaced": _replaced,
    "saving": _saving,
}


def _train(rank: int, case: tuple[nn.Module, JobConfig, list[Rows], Trouble]) -> Trained:
    model, config, data, trouble = case
    run = isp.parallelize(model, config)
    limit, comm = run.mesh[Axis.WEIGHT]._timeout, config.comm
    assert limit() == timedelta(seconds=comm.init_timeout_seconds)
    found = trained(run, data, trouble)
    assert limit() == timedelta(seconds=comm.train_timeout_seconds)
    return found


def test_failed_and_abandoned_steps_change_nothing() -> None:
    """Catches a gradient or gathered weight that remains, a plan that continues in the middle, and
    a first step whose collectives have torch's timeout.
    """
    data, model = _data(), Own().double()
    expected = trained_plainly(model, data)
    cases = {
        name: (copy.deepcopy(model), job(2, 2, recompute=0.5), data, trouble)
        for name, trouble in TROUBLES.items()
    }
    for name, of_ranks in run_each(2, _train, cases).items():
        assert_trained_as(expected, of_ranks, name)


def test_parametrized_weights_train_as_in_the_unmodified_model() -> None:
    """Catches parameters of a parametrization sharded as those of a linear, or without the
    gradients of other ranks' tokens.
    """
    data, model = _data(2), Own().double()
    for block, compute in zip(model.blocks, (weight_norm, orthogonal), strict=False):
        compute(block.get_submodule("q"))
        compute(block.get_submodule("down"))
    expected = trained_plainly(model, data)
    config = job(2, 2, recompute=0.5)
    assert_trained_as(expected, run_ranks(2, _train, (model, config, data, _nothing)))


Write = Callable[[nn.Module], None]


@torch.no_grad()
def _in_place(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.mul_(0.5)


def _by_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.clamp_(-0.05, 0.05)


def _other_storage(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = 0.5 * parameter.data
    model.to("cpu:0")


def _write(rank: int, case: tuple[Own, JobConfig, list[Rows], Write]) -> Any:
    """Return the whole weights after a step and a write to them, and the loss computed with
    them.
    """
    model, config, data, write = case
    run = isp.parallelize(model, config)
    run.step(run.loss(*data[0]))
    write(model)
    expected = [parameter.clone() for parameter in model.parameters()]
    whole = copy.deepcopy(whole_weights(run))
    loss = run.loss(*data[1])
    model.to("cpu:0")
    run.step(loss, lr=0.0)
    for parameter, before in zip(model.parameters(), expected, strict=True):
        assert torch.equal(parameter, before)
    run.step(run.loss(*data[2]), lr=0.1)
    for parameter, before in zip(model.parameters(), expected, strict=True):
        assert not parameter.numel() or not torch.equal(parameter, before)
    return whole, loss.item()


LAYOUTS = {
    "gathered": job(2, 2, dtype="float32"),
    "zero1": job(1, 1, dtype="float32"),
    "bfloat16": job(2, 2, dtype="bfloat16"),
    "bfloat16 zero1": job(1, 1, dtype="bfloat16"),
    "bfloat16 on the host": job(1, 2, dtype="bfloat16", offload_states=True),
}


def test_values_written_into_weights_are_kept() -> None:
    """Catches masters and updates in flight that undo a write, weights gathered before it, and
    storage that no step updates. The write follows a step, so that all of these exist.
    """
    data, model = _data(), Own(dropout=0.0)
    cases = {
        f"{name} {write.__name__}": (copy.deepcopy(model), config, data, write)
        for write in (_in_place, _by_data, _other_storage)
        for name, config in LAYOUTS.items()
        if write is _in_place or name in ("gathered", "bfloat16 zero1")
    }
    for name, of_ranks in run_each(2, _write, cases).items():
        weights, loss = of_ranks[0]
        assert of_ranks[1][1] == loss
        assert all(torch.equal(x, of_ranks[1][0][n]) for n, x in weights.items()), name
        plain = copy.deepcopy(model)
        plain.load_state_dict({n: x.float() for n, x in weights.items()}, strict=False)
        expected = plain_loss(plain, data[1]).item()
        # The second: 8 bits of mantissa, in a few layers
        tolerance = 1e-5 if "bfloat16" not in name else 5e-3
        assert abs(loss - expected) < tolerance * expected, name


def _masks(rank: int, model: Own, config: JobConfig, rows: Rows) -> dict[str, Any]:
    run = isp.parallelize(model, config)
    masks: list[Tensor] = []
    dropout = model.get_submodule("blocks.0.dropout")
    dropout.register_forward_hook(lambda *found: masks.append((found[-1] != 0).detach()))
    torch.manual_seed(7)
    loss = run.loss(*rows)
    forward = len(masks)
    norm = run.step(loss).grad_norm
    after = generator_states(torch.device("cpu"))["cpu"]
    model.eval()
    evaluated = [_evaluate(run, rows) for _ in range(2)]
    return {"masks": masks, "forward": forward, "norm": norm, "after": after, "eval": evaluated}


def test_dropout_differs_between_ranks_and_repeats_in_a_recompute() -> None:
    """Catches ranks of one sequence that drop the same features, a recomputation that drops others,
    a generator of the user that differs between ranks afterwards, and dropout in evaluation.
    """
    rows, model = _data(1)[0], Own(dropout=0.5).double()
    kept, again = (
        run_ranks(2, _masks, copy.deepcopy(model), job(2, 2, recompute=share), rows)
        for share in (0.0, 1.0)
    )
    for first, second in (kept, again):
        assert torch.equal(first["after"], second["after"])
        assert (first["masks"][0] == second["masks"][0]).double().mean() < 0.6
        assert first["eval"] == [first["eval"][0]] * 2
    for short, full in zip(kept, again, strict=True):
        assert (short["forward"], len(short["masks"])) == (2, 2 + 4)  # two evaluations after it
        assert torch.equal(full["masks"][2], full["masks"][0])  # a recomputation may stop early
        assert not torch.equal(full["masks"][1], full["masks"][0])
        assert abs(short["norm"] - full["norm"]) < TOLERANCE


def _two(rank: int, models: list[nn.Module], data: list[Rows]) -> list[Trained]:
    runs = [
        isp.parallelize(model, job(2, weight)) for model, weight in zip(models, (2, 1), strict=True)
    ]
    losses: list[list[float]] = [[], []]
    norms: list[list[float]] = [[], []]
    for rows in data:
        pending = [run.loss(*rows) for run in runs]  # both in flight at the same time
        for index, run in enumerate(runs):
            outcome = run.step(pending[index])
            losses[index].append(outcome.loss)
            norms[index].append(outcome.grad_norm)
    return [Trained(losses[i], norms[i], whole_weights(run)) for i, run in enumerate(runs)]


def test_two_models_in_one_process_are_independent() -> None:
    """Catches attention, masks or plans of one model used by another model of the process."""
    data, models = _data(2), [tiny("llama"), tiny("llama", seed=1, num_hidden_layers=2)]
    plain = [trained_plainly(model, data) for model in models]
    for of_rank in run_ranks(2, _two, models, data):
        for found, expected in zip(of_rank, plain, strict=True):
            assert_trained_as(expected, [found])


def test_buffers_keep_their_dtype() -> None:
    """Catches buffers converted to the dtype of the weights."""
    model = Own()
    run = isp.parallelize(model, job(dtype="bfloat16"))
    assert model.head.weight.dtype == torch.bfloat16
    assert model.head.weight is model.tokens.weight
    assert (model.precise.dtype, model.passing.dtype) == (torch.float64, torch.float32)
    assert 0 < run.step(run.loss(*_data(1)[0])).grad_norm < 1e3


def test_whole_weights_are_freed_as_they_are_sharded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a whole model that stays in memory until all of its shards exist."""
    model, alive = Own(), []
    wholes = [weakref.ref(parameter) for parameter in model.parameters()]

    def own_part(*args: Any, real: Callable[..., Tensor] = sharded_modules._own_part) -> Tensor:
        alive.append(sum(whole() is not None for whole in wholes))
        return real(*args)

    monkeypatch.setattr(sharded_modules, "_own_part", own_part)
    isp.parallelize(model, job())
    assert alive == list(range(len(wholes), 0, -1))


def test_parameters_of_no_called_module_are_waited_for_with_the_model() -> None:
    """Catches updated weights read before they have arrived because no module that owns them is
    called.
    """
    model = Own()
    parts = isp.parallelize(model, job()).train_step.chunks[0].parts()
    called = {"tokens", "positions", "norm", "head", "blocks.0", "blocks.1", "blocks.2"}
    assert parts.keys() == {*called, ""}
    assert parts[""] is model


IDS = torch.zeros(1, 8, dtype=torch.int64)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ((torch.zeros(64, dtype=torch.int64),), "[batch, sequence], got [64]"),
        ((IDS, torch.zeros(1, 7)), "labels must have the"),
        ((IDS, None, torch.zeros(2, 8)), "position_ids must"),
        ((IDS, torch.full((1, 8), -1)), "labels has -1: use"),
        ((IDS, torch.full((1, 8), VOCAB)), f"below {VOCAB}"),
        (
            (IDS - 100,),
            f"input_ids has -100: the model has embeddings for tokens from 0 to {VOCAB - 1};",
        ),
        ((IDS + VOCAB, IDS), f"input_ids has {VOCAB}: the model has embeddings for tokens from 0"),
        ((IDS.double(),), "input_ids has dtype torch.float64: pass integers (torch.long)"),
        ((IDS, IDS.float()), "labels has dtype torch.float32: pass integers (torch.long)"),
        ((IDS.tolist(),), "input_ids is a list: pass a tensor of integers, [batch, sequence]"),
        ((IDS, IDS, IDS + 1), "as an attention_mask is: pass a mask by name"),
    ],
)
def test_wrong_rows_are_refused(rows: tuple[Any, ...], said: str) -> None:
    """Catches rows that would be broadcast or truncated, invalid ids, and losses without a
    token.
    """
    run = isp.parallelize(Own(), job())
    assert said in raised(run.loss, *rows)
    if len(rows) == 1:
        assert said in raised(run.logits, *rows)


def test_wrong_keywords_are_refused_with_what_to_pass() -> None:
    """Catches a mask or a rate that fails deep inside with an error of Python or torch."""
    run = isp.parallelize(Own(), job())
    said = raised(lambda: run.loss(IDS, attention_mask=IDS))  # type: ignore[arg-type]
    assert "leave it out, pad sequences at their end and set the labels of padding to -100" in said
    loss = run.loss(IDS)
    for rate in ("fast", torch.ones(())):
        assert "pass a number such as 1e-5" in raised(run.step, loss, rate)
    for rate in (math.nan, math.inf, -1e-3):
        assert f"lr={rate}): lr must be a finite number of at least 0" in raised(
            run.step, loss, rate
        )
    assert run.step(loss, lr=1e-3).loss == loss.item()


def test_a_batch_without_labels_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    """Catches a silent loss of 0 or NaN: in `step`, in per-token results, and in an evaluation."""
    run, nothing = isp.parallelize(Own(), job()), torch.full_like(IDS, IGNORED)
    for _ in range(2):
        outcome = run.step(run.loss(IDS, nothing))
        assert (outcome.loss, outcome.skipped, outcome.valid_tokens) == (0.0, True, 0)
        run.backward(run.log_probs(IDS, nothing).log_probs.sum())
        assert run.step().loss == 0.0
        with torch.no_grad():
            assert run.loss(IDS, nothing).item() == 0.0
    said = [text for text in caplog.messages if "all labels of a batch are -100 (ignore_in" in text]
    assert len(said) == 1


def _dropped(rank: int, make: Callable[[], nn.Module]) -> list[str]:
    """Return which parts of a dropped run, and of the weights it trained, are still alive."""
    run = isp.parallelize(make(), job(weight=2))
    run.step(run.loss(*_data()[0]))
    run.loss(*_data()[0])  # a forward without a step
    step = run.train_step
    left = {
        "run": weakref.ref(run),
        "gradients": weakref.ref(step.gradients),
        "optimizer": weakref.ref(step.optimizer),
        "weight": weakref.ref(next(run.model.parameters())),
    }
    del run, step
    gc.collect()
    return [name for name, ref in left.items() if ref() is not None]


def test_a_dropped_run_is_freed() -> None:
    """Catches hooks and registries that keep a model, its gradients and states alive."""
    cases = {"own": Own, "llama": lambda: tiny("llama")}
    assert run_each(2, _dropped, cases) == {"own": [[], []], "llama": [[], []]}
