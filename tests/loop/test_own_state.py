"""The state of a run in a user's training loop, against the unmodified model in one process."""

from __future__ import annotations

import copy
import gc
import resource
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

import isp
from isp.checkpoint.agreement import CheckpointError
from isp.config import JobConfig
from isp.core.layers.vocab_loss import IGNORED
from isp.core.mesh import Axis, Mode
from isp.loop.parallel_run import ParallelRun
from tests.loop.test_loops import raised
from tests.loop.test_own_outputs import _staged
from tests.models.huggingface.test_adapters import _with_lora
from tests.models.models import (
    TOLERANCE,
    Rows,
    Trained,
    assert_trained_as,
    job,
    packed_rows,
    plain_loss,
    tiny,
    trained,
    trained_plainly,
)
from tests.models.own import Own
from tests.ranks import run_each

DOCUMENTS = [[24], [10, 14], [3, 21], [24]]
DATA = [packed_rows(4, 24, DOCUMENTS, seed) for seed in range(4)]
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
    """Train two steps, then two in another layout with a model of other initial weights."""
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
    """Catches a state, a count or a position that a checkpoint loses or finds under another
    name.
    """
    model = tiny("llama")
    case = (copy.deepcopy(model), tiny("llama", seed=1), FSP, ISP, tmp_path)
    expected = trained_plainly(model, DATA)
    assert_trained_as(expected, run_each(4, _interrupted, {"fsp to isp": case})["fsp to isp"])


def _resumed_after_failures(rank: int, case: tuple[Any, Path]) -> None:
    """Check that masters and dropout resume bit by bit, also after failed saves and a wrong
    load.
    """
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
    assert "Older checkpoints are unchanged" in said
    assert "is a type, which a checkpoint cannot store" in _failed(run.save, folder, {"it": int})
    other = isp.parallelize(foreign, job(2, 2))
    assert "belongs to another model, judging" in raised(other.load, folder)
    assert run.load(folder) == {}
    assert run.num_steps == 1
    assert _equal(trained(run, DATA[1:3]), expected)


def test_a_failed_save_keeps_the_last_checkpoint(tmp_path: Path) -> None:
    """Catches lost random states or masters, and a partial checkpoint."""
    run_each(2, _resumed_after_failures, {"own": (tiny("llama"), tmp_path)})


# -- weights ---------------------------------------------------------------------------------


def _streamed(rank: int, case: tuple[Any, Any, JobConfig]) -> None:
    """Load whole weights into the plain model after each step; it must give the run's loss."""
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
    alive: list[tuple[str, Any]] = []
    for name, weight in run.named_weights():
        alive.append((name.partition(".layers.")[2][:1], weakref.ref(weight)))
        assert len({block for block, whole in alive if whole() is not None}) == 1
    narrow = dict(run.named_weights(torch.bfloat16, to_rank=1))
    assert {x.dtype for x in narrow.values()} == ({torch.bfloat16} if rank == 1 else set())
    assert "to_rank=4 must be a rank, from 0 to 3" in raised(lambda: run.named_weights(to_rank=4))


def test_named_weights_load_into_the_plain_model() -> None:
    """Catches a missing name, shard or adapter, and weights that are not copies."""
    cases = {
        "msp": (tiny("phi3"), tiny("phi3", seed=1), job(2, mode=Mode.MSP)),
        "mtp, tied": (tiny("gemma3_text"), tiny("gemma3_text", seed=1), job(2, mode=Mode.MTP)),
        "adapters": (_with_lora(), tiny("llama", seed=1), job(2, 4)),
    }
    run_each(4, _streamed, cases)


# -- gradients, modes, adapters --------------------------------------------------------------


def _inspected(rank: int, case: tuple[Any, Any, JobConfig]) -> float:
    """Check gradient norms, the model without adapters, and dropout off; return the first norm."""
    model, base, config = case
    run = isp.parallelize(model, config).eval()
    rows = DATA[0].part(run.dp_rank, run.dp_size)
    assert "run.grad_norm cannot be called now: there are no gradients" in raised(run.grad_norm)
    for weight in (1.0, -1.0):
        run.backward(weight * run.log_probs(*rows).log_probs.sum())
    assert run.grad_norm() < TOLERANCE
    assert "run.grad_norm() has summed" in raised(_backward, run, rows)
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
        assert not run.model.training
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


def test_a_loop_can_read_norms_and_switch_off_adapters_and_dropout() -> None:
    """Catches a norm of some ranks' gradients only, adapters that still apply, dropout in
    evaluation.
    """
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
    found = run_each(4, _inspected, cases)["adapters"]
    assert all(abs(norm / expected.item() - 1) < TOLERANCE for norm in found)


# -- memory ----------------------------------------------------------------------------------


def _off_the_device(rank: int, config: JobConfig) -> None:
    """Check training with weights that leave the device.

    On the CPU `to` moves nothing, so this calls `_leave`, which frees them as on a device.
    """
    run, other = (isp.parallelize(Own(), config) for _ in range(2))
    for count, rows in enumerate(DATA):
        expected = trained(other, [rows])
        assert _equal(trained(run, [rows]), expected)
        weights = [*run.model.parameters()]
        if count % 2:
            run.loss(*rows.part(run.dp_rank, run.dp_size))
        run._leave()
        assert not any(p.untyped_storage().nbytes() for p in weights)
        assert "call run.to(run.device)" in raised(run.loss, *rows)
        assert "call run.to(run.device)" in raised(run.step)
        assert run.to("cpu") is run
    assert "is on cpu, or on 'cpu'" in raised(run.to, "cuda")
    _backward(run, DATA[0].part(run.dp_rank, run.dp_size))
    assert "run.to('cpu') cannot be called now: gradients" in raised(run._leave)


def test_weights_leave_the_device_and_come_back() -> None:
    """Catches a view of freed memory, a state that is lost, and a gradient that remains."""
    cases = {"masters": job(2, 2, dtype="bfloat16"), "zero1": job(2, 1), "data": job(1, 1)}
    run_each(2, _off_the_device, cases)


# -- an optimizer of torch -------------------------------------------------------------------

Named = list[tuple[str, nn.Parameter]]


def _adamw(named: Named) -> torch.optim.Optimizer:
    """Return AdamW without decay of norms and biases, chosen by name as users' loops do."""
    kinds = [
        [p for n, p in named if ("norm" in n or "bias" in n) is flat] for flat in (True, False)
    ]
    groups = [{"params": kinds[0], "weight_decay": 0.0}, {"params": kinds[1], "lr": 3e-3}]
    return torch.optim.AdamW(groups, lr=1e-2, amsgrad=True)


def _sgd(named: Named) -> torch.optim.Optimizer:
    return torch.optim.SGD(named, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1)


def _rmsprop(named: Named) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(named, lr=1e-3, momentum=0.9, centered=True)


def _own(seed: int = 0) -> Own:
    return Own(seed=seed).double()


def _schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.StepLR:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)


def _by_torch(model: Any, make: Callable[[Named], torch.optim.Optimizer]) -> Trained:
    model = copy.deepcopy(model)
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    optimizer = make(named)
    schedule, losses, norms = _schedule(optimizer), [], []
    for rows in DATA:
        loss = plain_loss(model, rows)
        loss.backward()
        losses.append(loss.item())
        norms.append(torch.nn.utils.clip_grad_norm_([p for _, p in named], 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return Trained(losses, norms, {n: p.detach() for n, p in model.named_parameters()})


def _stepped(run: ParallelRun, rows: Rows) -> Trained:
    """Take a step of the mean loss, in a pipeline of two micro-batches if there are stages."""
    if run.mesh[Axis.PIPELINE].size == 1:
        return trained(run, [rows])
    part = rows.part(run.dp_rank, run.dp_size)
    assert part.labels is not None
    total = run.count(part.labels[:, 1:] != IGNORED)
    batches = [part.part(index, 2)._asdict() for index in range(2)]
    run.forward_backward(batches, lambda scores, _: -scores.log_probs.sum() / total)
    norm = run.grad_norm()
    outcome = run.step()
    assert outcome.grad_norm == norm
    return Trained([outcome.loss], [norm], {})


def _by_own_optimizer(rank: int, case: tuple[Any, Any, Any, JobConfig, JobConfig, Path]) -> Trained:
    """Train two steps in one layout and two in another."""
    model, other, make, before, behind, folder = case
    parts: list[Trained] = []
    for number, (of_part, config) in enumerate([(model, before), (other, behind)]):
        run = isp.parallelize(of_part, config, optimizer=make)
        assert run.optimizer is not None
        schedule = _schedule(run.optimizer)
        if number:
            extra: Any = run.load(folder)
            schedule.load_state_dict(extra["schedule"])
        for rows in DATA[2 * number : 2 * number + 2]:
            parts.append(_stepped(run, rows))
            schedule.step()
        run.save(folder, {"schedule": schedule.state_dict()})
    assert "stepped by run.step" in raised(run.optimizer.step)
    assert "groups and schedulers of run.optimizer set the learning rate" in raised(
        lambda: run.step(lr=1.0)
    )
    losses, norms = ([x for part in parts for x in getattr(part, of)] for of in ("losses", "norms"))
    return Trained(losses, norms, parts[-1].weights)


@pytest.mark.slow
def test_an_optimizer_of_torch_trains_as_on_the_unmodified_model(tmp_path: Path) -> None:
    """Catches a state, a count or a rate other than the plain optimizer's, also after a load."""
    layouts = {
        "stages": (partial(tiny, "llama"), _adamw, _staged("1F1B"), FSP),
        "adapters": (_with_lora, _sgd, job(2, 2), job(4, 4)),
        "data": (_own, _rmsprop, job(2, 1), job(1, 4)),
    }
    models = {name: (of(), of(seed=1)) for name, (of, *_) in layouts.items()}
    for base, same in zip(*(model.parameters() for model in models["adapters"]), strict=True):
        if not base.requires_grad:  # in no checkpoint
            same.data.copy_(base)
    cases = {
        name: (*copy.deepcopy(models[name]), *case, tmp_path / name)
        for name, (_, *case) in layouts.items()
    }
    for name, of_ranks in run_each(4, _by_own_optimizer, cases).items():
        assert_trained_as(_by_torch(models[name][0], layouts[name][1]), of_ranks, name)


def _fused(named: Named) -> torch.optim.Optimizer:
    """Return torch's fused AdamW with the options of ISP's adamw."""
    kinds = [[p for _, p in named if (p.dim() < 2) is flat] for flat in (True, False)]
    groups = [
        {"params": own, "weight_decay": decay} for own, decay in zip(kinds, (0.0, 0.1), strict=True)
    ]
    return torch.optim.AdamW(groups, 1e-2, (0.9, 0.95), weight_decay=0.0, fused=True)


def _beside_the_own_rule(rank: int, case: tuple[JobConfig, Path]) -> None:
    config, folder = case
    own, run = isp.parallelize(Own(), config), isp.parallelize(Own(), config, optimizer=_fused)
    for rows in DATA[:2]:
        assert _equal(trained(run, [rows]), trained(own, [rows]))
        for model in (run.model, own.model):
            with torch.no_grad():
                model.get_parameter("blocks.1.up.weight").mul_(0.5)
    run._leave()
    run.to("cpu").save(folder / "torch")
    own.save(folder / "own")
    assert "optimizer states were saved by isp, and this" in raised(run.load, folder / "own")
    other = isp.parallelize(Own(seed=1), config)
    other.load(folder / "torch")
    expected = trained(own, DATA[2:])
    assert _equal(trained(run, DATA[2:]), expected)
    assert _equal(trained(other, DATA[2:]), expected)


def test_an_optimizer_of_torch_has_the_masters_and_clipping_of_isps_rule(tmp_path: Path) -> None:
    """Catches weights that do not follow their masters, and masters that lose written values."""
    run_each(2, _beside_the_own_rule, {"own": (job(2, 2, dtype="bfloat16"), tmp_path)})


def test_an_optimizer_that_needs_whole_weights_is_refused() -> None:
    """Catches an optimizer that would treat a rank's rows as the whole weight."""
    model, matrices, of = Own(), Own(), torch.optim
    for parameter in matrices.parameters():
        parameter.requires_grad_(parameter.dim() == 2)
    refused: dict[str, tuple[nn.Module, Callable[[list[Any]], torch.optim.Optimizer]]] = {
        "(weight) depends on other": (matrices, of.Muon),
        "of the weight, of which each rank holds": (model, of.Adafactor),
        "without a closure": (model, of.LBFGS),
        "does not update temperature": (model, lambda own: of.SGD(own[1:], lr=0.1)),
        "were not passed to the function": (
            model,
            lambda own: of.SGD([*own, torch.ones(1)], lr=0.1),
        ),
    }
    for said, (of_case, make) in refused.items():

        def by_parameters(named: Named, make: Any = make) -> torch.optim.Optimizer:
            return cast(torch.optim.Optimizer, make([p for _, p in named]))

        assert said in raised(partial(isp.parallelize, of_case, job(), optimizer=by_parameters))
    narrow = job(moment_dtype="bfloat16")
    said = raised(lambda: isp.parallelize(model, narrow, optimizer=_sgd))
    assert "optimizer.moment_dtype=bfloat16 applies only to isp's own" in said


def _without_effect(rank: int, _: None) -> None:
    """Check optimizers made before and after sharding; without the model, the refusal is
    gone too.
    """
    model = Own().double()
    before = torch.optim.SGD(model.parameters(), lr=1.0)
    run = isp.parallelize(model, job(2, 2))
    behind = torch.optim.AdamW([*torch.nn.Linear(2, 2).parameters(), *run.model.parameters()])
    assert "this SGD has parameters of a parallelized model" in raised(before.step)
    assert "this AdamW has parameters of a parallelized model" in raised(behind.step)
    torch.optim.SGD(Own().parameters()).step()
    del run, model
    gc.collect()
    behind.step()


def test_optimizers_without_effect_are_refused() -> None:
    """Catches a step that silently trains nothing, and hooks that outlive their model."""
    run_each(2, _without_effect, {"own": None})
