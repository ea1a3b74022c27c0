"""The state of a run of the caller's own loop, beside the unmodified model on one process."""

from __future__ import annotations

import copy
import resource
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import isp
from isp.checkpoint.agreement import CheckpointError
from isp.config import JobConfig
from isp.parallel import Mode
from isp.train.parallel_run import ParallelRun
from tests.models.models import (
    Rows,
    Trained,
    job,
    packed_rows,
    plain_loss,
    tiny,
    trained,
    trained_plainly,
    worst,
)
from tests.models.own import Own
from tests.models.test_adapters import _with_lora
from tests.models.test_loops import raised
from tests.ranks import run_each

TOLERANCE = 1e-9  # float64, sums in another order

DOCUMENTS = [[24], [10, 14], [3, 21], [24]]
DATA = [packed_rows(4, 24, DOCUMENTS, seed) for seed in range(4)]
MODELS: dict[str, Callable[..., Any]] = {"llama": partial(tiny, "llama"), "lora": _with_lora}
ISP, FSP = job(2, 4, recompute=0.5), job(2, mode=Mode.FSP)


def _equal(found: Trained, expected: Trained) -> bool:
    weights = all(torch.equal(found.weights[name], w) for name, w in expected.weights.items())
    return found[:2] == expected[:2] and weights


def _failed(fn: Callable[..., Any], *args: Any) -> str:
    with pytest.raises(CheckpointError) as error:
        fn(*args)
    return str(error.value)


# -- checkpoints -----------------------------------------------------------------------------


def _interrupted(rank: int, case: tuple[Any, Any, JobConfig, JobConfig, Path]) -> Trained:
    """Two steps in one layout, two in another, of a model that began with other weights."""
    model, other, before, behind, folder = case
    first = isp.parallelize(model, before)
    begun = trained(first, DATA[:2])
    first.save(folder, {"epoch": 1, "order": torch.arange(3)})
    for rows in DATA[2:]:
        trained(first, [rows])
        first.save(folder / "more", keep=1)
    run = isp.parallelize(other, behind)
    assert "is not a checkpoint" in _failed(run.load, folder / "more" / "step_3")
    assert run.load(folder / "more" / "step_4") == {}
    extra: Any = run.load(folder)
    assert (run.num_steps, extra["epoch"], extra["order"].tolist()) == (2, 1, [0, 1, 2])
    ended = trained(run, DATA[2:])
    return Trained(begun.losses + ended.losses, begun.norms + ended.norms, ended.weights)


def test_a_checkpoint_resumes_in_any_layout(tmp_path: Path) -> None:
    """Catches a state, a count or a place that a checkpoint loses; one found by the wrong name."""
    models = {
        "llama": (tiny("llama"), tiny("llama", seed=1)),
        "lora": (_with_lora(), _with_lora(1)),
    }
    cases = {
        "llama": (*copy.deepcopy(models["llama"]), FSP, ISP, tmp_path / "a"),
        "lora": (*copy.deepcopy(models["lora"]), job(2, 2), job(4, 4), tmp_path / "b"),
    }
    for name, of_ranks in run_each(4, _interrupted, cases).items():
        expected = trained_plainly(models[name][0], DATA)
        for found in of_ranks:
            assert worst(found, expected) < TOLERANCE, name


def _unharmed(rank: int, case: tuple[Any, Path]) -> None:
    """Of masters and dropout every bit goes on; a failed save and a foreign model change none."""
    foreign, folder = case
    run = isp.parallelize(Own(dropout=0.2), job(2, 2, dtype="bfloat16"))
    trained(run, DATA[:1])
    run.save(folder)
    expected = trained(run, DATA[1:3])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:  # as on a disk that is nearly full
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 12, before[1]))
    said = _failed(run.save, folder)
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "failed on rank 1" in said
    assert "Older checkpoints are as they were" in said
    assert "is a type, which a checkpoint cannot keep" in _failed(run.save, folder, {"it": int})
    other = isp.parallelize(foreign, job(2, 2))
    assert "is of another model, by the shapes" in raised(other.load, folder)
    assert run.load(folder) == {}
    assert run.num_steps == 1
    assert _equal(trained(run, DATA[1:3]), expected)


def test_a_failed_save_leaves_the_last_one(tmp_path: Path) -> None:
    """Catches random states or masters that are lost, and a half written checkpoint."""
    run_each(2, _unharmed, {"own": (tiny("llama"), tmp_path)})


# -- weights ---------------------------------------------------------------------------------


def _streamed(rank: int, case: tuple[Any, Any, JobConfig]) -> None:
    """Whole weights into the plain model behind each step, which then gives the run's own loss."""
    model, plain, config = case
    run = isp.parallelize(model, config)
    for rows in DATA[:2]:
        trained(run, [rows])
        weights = dict(run.named_weights(merge_adapters=True))
        missing, unexpected = plain.load_state_dict(weights, strict=False)
        assert {*missing} <= ({"lm_head.weight"} if plain.config.tie_word_embeddings else set())
        assert not unexpected
        with torch.no_grad():
            found = run.loss(*rows.part(run.dp_rank, run.dp_size)).item()
            assert abs(found - plain_loss(plain, rows).item()) < TOLERANCE
    before = copy.deepcopy(weights)
    trained(run, DATA[2:3])
    assert all(torch.equal(weights[name], weight) for name, weight in before.items())
    narrow = dict(run.named_weights(torch.bfloat16, to_rank=1))
    assert {x.dtype for x in narrow.values()} == ({torch.bfloat16} if rank == 1 else set())
    assert "to_rank=4 must be a rank, from 0 to 3" in raised(lambda: run.named_weights(to_rank=4))


def test_whole_weights_feed_a_plain_model() -> None:
    """Catches a name, a shard or an adapter that is missing, and weights that are not copies."""
    lora = _with_lora()
    cases = {
        "isp": (tiny("llama"), tiny("llama", seed=1), ISP),
        "msp": (tiny("phi3"), tiny("phi3", seed=1), job(2, mode=Mode.MSP)),
        "mtp, tied": (tiny("gemma3_text"), tiny("gemma3_text", seed=1), job(2, mode=Mode.MTP)),
        "adapters": (lora, tiny("llama", seed=1), job(2, 4)),
    }
    run_each(4, _streamed, cases)


# -- gradients, modes, adapters --------------------------------------------------------------


def _looked_at(rank: int, case: tuple[Any, Any, JobConfig]) -> float:
    """Norms before the step; the model below as a reference; dropout off. The first norm."""
    model, base, config = case
    run = isp.parallelize(model, config).eval()
    rows = DATA[0].part(run.dp_rank, run.dp_size)
    assert "between run.backward(loss) and" in raised(run.grad_norm)
    for weight in (1.0, -1.0):
        run.backward(weight * run.log_probs(*rows).log_probs.sum())
    assert run.grad_norm() < TOLERANCE
    assert "run.grad_norm(), which has summed" in raised(_backward, run, rows)
    run.zero_grad()
    _backward(run, rows)
    norm = run.grad_norm()
    assert run.grad_norm() == norm
    assert run.step(lr=1e-2).grad_norm == norm
    if base is None:
        assert "Own has no adapters" in raised(run.adapters_off().__enter__)
        with torch.no_grad():
            losses = {run.train(mode).loss(*rows).item() for mode in (True, True, False, False)}
        assert len(losses) == 3
        return norm
    with torch.no_grad():
        adapted = run.loss(*rows)
        with run.adapters_off():
            assert abs(run.loss(*rows).item() - plain_loss(base, DATA[0]).item()) < TOLERANCE
        assert run.loss(*rows) == adapted
    with run.adapters_off():
        assert "adapters have no gradient in" in raised(_backward, run, rows)
    return norm


def _backward(run: ParallelRun, rows: Rows) -> None:
    run.backward(run.log_probs(*rows).log_probs.sum())


def test_what_a_loop_may_look_at() -> None:
    """Catches a norm of some ranks' gradients, adapters that still add, dropout in evaluation."""
    lora, dropping = _with_lora(), Own(dropout=0.2).double()
    cases = {
        "adapters": (lora, tiny("llama"), job(2, 2, recompute=0.5)),
        "own": (dropping, None, job(2, 4)),
    }
    plain = copy.deepcopy(lora)
    plain_loss(plain, DATA[0], total=True).backward()
    expected = torch.nn.utils.get_total_norm(
        [p.grad for p in plain.parameters() if p.requires_grad]
    )
    found = run_each(4, _looked_at, cases)["adapters"]
    assert all(abs(norm / expected.item() - 1) < TOLERANCE for norm in found)


# -- memory ----------------------------------------------------------------------------------


def _away(rank: int, config: JobConfig) -> None:
    """On the CPU `to` moves nothing; what it does elsewhere is done here by hand."""
    run, other = (isp.parallelize(Own(), config) for _ in range(2))
    for count, rows in enumerate(DATA):
        expected = trained(other, [rows])
        assert _equal(trained(run, [rows]), expected)
        weights = [*run.model.parameters()]
        if count % 2:
            run.loss(*rows.part(run.dp_rank, run.dp_size))
        run._leave()
        assert not any(p.untyped_storage().nbytes() for p in weights)
        assert "call run.to('cpu')" in raised(run.loss, *rows)
        assert "call run.to('cpu')" in raised(run.step)
        assert run.to("cpu") is run
    assert "is on cpu, or on 'cpu'" in raised(run.to, "cuda")
    _backward(run, DATA[0].part(run.dp_rank, run.dp_size))
    assert "run.to comes between" in raised(run._leave)


def test_weights_leave_the_device_and_come_back() -> None:
    """Catches a view that has no memory any more, a state that is lost, a gradient that stays."""
    cases = {"masters": job(2, 2, dtype="bfloat16"), "zero1": job(2, 1), "data": job(1, 1)}
    run_each(2, _away, cases)
