"""Optimizer states in host memory and in bfloat16, against float32 states on the device."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor

from isp.config import load_config
from isp.core.comm import Mesh, pinned_memory
from isp.core.mesh import Topology
from isp.core.optim.config import GradScalerConfig, OptimizerConfig, ParamGroupConfig
from isp.core.optim.main_grads import MainGradients
from isp.core.optim.states import StateMemory
from isp.core.optim.zero1 import Zero1Optimizer
from isp.step import host_memory as train_memory
from isp.step.job_models import trained_model
from tests.core.optim.places import Spec, loss, place
from tests.core.optim.test_update_rules import plain_optimizer
from tests.ranks import run_each
from tests.streams import Device
from tests.toolkit import topology
from tests.train.jobs import numbers, run_folders, run_forked, tensors, write_job

SPECS = [
    Spec("embedding", (300, 24), dim=0),  # cut into several buckets
    Spec("uneven", (5, 3), dim=0),  # none of its rows on some ranks
    Spec("odd", (131, 7), dim=0),  # rows that can be cut at every 64th alone
    Spec("wide", (40, 64), dim=1),
    Spec("norm", (70,)),
]
CONFIG = OptimizerConfig(
    lr=1e-2,
    weight_decay=0.1,
    param_groups=(ParamGroupConfig(pattern="odd", lr_scale=0.5, weight_decay=0.3),),
)
LION = replace(CONFIG, name="lion")
STEPS = 4
SMALL = 4096
"""Bytes of a bucket, fewer than the states of most parameters."""


class Way(NamedTuple):
    """A layout, and how states are stored."""

    ranks: Topology
    dtype: torch.dtype
    config: OptimizerConfig


WAYS = {
    "bfloat16": Way(topology(4, weight=2), torch.bfloat16, CONFIG),
    "float32": Way(topology(4, zero1=2), torch.float32, CONFIG),
    "float64": Way(topology(4), torch.float64, CONFIG),
    "lion": Way(topology(4, weight=4), torch.bfloat16, LION),
    "narrow": Way(topology(4, weight=2), torch.bfloat16, replace(CONFIG, moment_dtype="bfloat16")),
    "scaled": Way(
        topology(4), torch.float16, replace(CONFIG, grad_scaler=GradScalerConfig(initial_scale=2.0))
    ),
}


def _trained(
    rank: int, way: Way, *, on_host: bool, bucket_bytes: int = SMALL
) -> tuple[list[Any], list[Tensor], int]:
    """Return results, weights and states after some steps, one of them skipped, and state
    buckets.
    """
    mesh = Mesh(way.ranks, rank)
    items = [place(spec, mesh, way.dtype) for spec in SPECS]
    gradients = MainGradients(items, mesh)
    config = replace(way.config, offload_states=on_host)
    optimizer = Zero1Optimizer(gradients, mesh, config, max_norm=5.0, stream_bytes=bucket_bytes)
    results = []
    for step in range(STEPS):
        gradients.zero()
        poison = math.inf if step == 1 else 1.0
        total = loss(items, SPECS, mesh, step + 1) + items[-1].parameter.double().sum() * poison
        optimizer.scale_loss(total).backward()
        gradients.reduce()
        results.append(optimizer.step(config.lr * (step + 1)))
    shards = optimizer.state_dict()["parameters"].values()
    states = [x for shard in shards for _, x in sorted(shard["tensors"].items())]
    own = sum(x.nbytes for x in states) if on_host else 0
    if on_host and torch.promote_types(way.dtype, torch.float32) == way.dtype:
        own -= sum(shard["tensors"]["master"].nbytes for shard in shards)
    assert optimizer.host_bytes == own
    weights = [item.parameter.detach() for item in items]
    return results, [*weights, *states], len(optimizer._stream._buckets)


def _compared(rank: int, way: Way) -> tuple[bool, list[bool], int]:
    plain, expected, _ = _trained(rank, way, on_host=False)
    hosted, found, buckets = _trained(rank, way, on_host=True)
    same = all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    return same and str(plain) == str(hosted), [r.skipped for r in plain], buckets


def test_states_on_the_host_change_no_bit() -> None:
    """Catches rows in no bucket or in two, and a master that its weights do not follow.

    With groups, clipping, a skipped step, and a loss scale.
    """
    for name, of_ranks in run_each(4, _compared, WAYS).items():
        for same, skipped, buckets in of_ranks:
            assert same, name
            assert skipped == [False, True, False, False]
            assert buckets > 6


def _rounded(rank: int, name: Literal["adamw", "lion"]) -> None:
    config = OptimizerConfig(name=name, lr=1e-2, moment_dtype="bfloat16")
    mesh = Mesh(topology(1), 0)
    # lion's plain rule adds in another order: too little in float64 to round a moment otherwise
    dtype, error = (torch.float32, 0.0) if name == "adamw" else (torch.float64, 1e-12)
    items = [place(spec, mesh, dtype) for spec in SPECS]
    gradients = MainGradients(items, mesh)
    optimizer = Zero1Optimizer(gradients, mesh, config, stream_bytes=SMALL)
    plain = [item.parameter.detach().clone().requires_grad_() for item in items]
    groups = [
        {"params": [p for p in plain if p.dim() > 1]},
        {"params": [p for p in plain if p.dim() < 2], "weight_decay": 0.0},
    ]
    rule = plain_optimizer(groups, config)

    def moments(p: Tensor) -> list[Tensor]:
        return [kept for kept in rule.state[p].values() if kept.numel() == p.numel()]

    for step in range(10):
        gradients.zero()
        loss(items, SPECS, mesh, step).backward()
        gradients.reduce()
        for p, item in zip(plain, items, strict=True):
            p.grad = gradients.grad(item.parameter).clone()
        optimizer.step(config.lr)
        rule.step()
        for kept in (kept for p in plain for kept in moments(p)):
            kept.copy_(kept.bfloat16())
    for p, item in zip(plain, items, strict=True):
        state = optimizer.state_dict()["parameters"][item.name]["tensors"]
        assert state.pop("master").dtype is dtype
        assert {x.dtype for x in state.values()} == {torch.bfloat16}
        found = [x.to(dtype) for _, x in sorted(state.items())]
        torch.testing.assert_close(found, moments(p), rtol=0, atol=0)
        torch.testing.assert_close(item.parameter.detach(), p.detach(), rtol=error, atol=error)


def test_bfloat16_moments_are_rounded_once_a_step() -> None:
    """Catches arithmetic in bfloat16, moments rounded twice or never, and narrow masters."""
    run_each(1, _rounded, {"adamw": "adamw", "lion": "lion"})


def _faults(rank: int, way: Way) -> tuple[list[str], int, int]:
    """Return the faults that a device with streams would have, operations followed, and buckets."""
    hosted: list[Tensor] = []

    def apart(memory: StateMemory, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Return each state in memory of its own, since the checker follows whole allocations."""
        hosted.append(torch.zeros(shape, dtype=dtype))
        return hosted[-1]

    with Device() as device, mock.patch.object(StateMemory, "take", apart):
        _, _, buckets = _trained(rank, way, on_host=True, bucket_bytes=2**16)
        for memory in map(device._of, hosted):  # the host, which writes a checkpoint of them
            device.faults += memory.late(memory.written, device.host)
        return device.faults, device.touched, buckets


def test_states_arrive_before_the_update_and_return_before_a_save() -> None:
    """Catches a buffer that is overwritten too early, and a checkpoint of states in flight."""
    cases = {name: WAYS[name] for name in ("bfloat16", "float32", "narrow")}
    for name, of_ranks in run_each(4, _faults, cases).items():
        for faults, touched, buckets in of_ranks:
            assert faults == [], name
            assert touched > 300
            assert buckets > 2  # as many as buffers, and one


# -- runs ----------------------------------------------------------------------------------------

SAVES = ("--training.dtype", "bfloat16", "--checkpoint.interval", "2", "--training.steps", "4")
HOST = ("--optimizer.offload_states", "true")
NARROW = ("--optimizer.moment_dtype", "bfloat16")


def test_runs_with_states_on_host_or_device_resume_each_other(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Catches a copy for a background save that is not of its step, and moments lost in between."""
    job = write_job(tmp_path)
    run_forked(job, *SAVES)
    run_forked(job, *SAVES, *HOST, "--job.name", "host")
    (plain,), (host,) = run_folders(job), run_folders(job, "host")
    for step in (2, 4):
        expected, found = tensors(plain, step), tensors(host, step)
        assert expected.keys() == found.keys()
        assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert "MiB of states per rank in host memory" in (host / "logs" / "rank_0.log").read_text()

    # on one rank, from the host to the device, and with narrow moments back to the host
    one = ("--parallel.tensor.size", "1", "--parallel.weight.size", "1", "--data.micro_num", "1")
    run_forked(job, *SAVES, *one, "--job.name", "host", "--training.steps", "6", num_ranks=1)
    run_forked(job, *SAVES, *NARROW, *HOST, "--training.steps", "6")
    told = (plain / "logs" / "rank_0.log").read_text()
    assert "optimizer.moment_dtype: float32 there, bfloat16 now" in told
    steps = [numbers(run_folders(job, name)[0])[4:] for name in ("job", "host")]
    assert steps[0][0][1] == pytest.approx(steps[1][0][1], rel=1e-2)  # bfloat16, other layouts
    moments = {n: x for n, x in tensors(plain, 6).items() if "exp_avg" in n}
    assert moments
    assert {x.dtype for x in moments.values()} == {torch.bfloat16}
    capfd.readouterr()


# -- too little memory ---------------------------------------------------------------------------


def test_too_little_host_memory_is_refused_before_ranks_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches states not counted, for which a machine swaps or a rank is killed."""
    config = load_config(write_job(tmp_path), [*SAVES, *HOST])
    numbers_of_model = trained_model(config).num_parameters
    states = 12 * numbers_of_model  # of two ranks, which share them
    copies = states + 2 * numbers_of_model
    monkeypatch.setattr(train_memory, "attainable_bytes", lambda: states + copies)
    train_memory.check_host_memory(config, config.topology(2), 2)
    monkeypatch.setattr(train_memory, "attainable_bytes", lambda: states + copies - 1000)
    with pytest.raises(
        ValueError,
        match=r"2 ranks keep .* of optimizer states and .* checkpoint\.async_mode=disabled",
    ):
        train_memory.check_host_memory(config, config.topology(2), 2)
    plain = replace(config, optimizer=replace(config.optimizer, offload_states=False))
    train_memory.check_host_memory(plain, config.topology(2), 2)


def test_a_failed_allocation_names_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an allocator's error that names no key of the configuration."""
    words = (
        r"optimizer.offload_states=true needs 0.00 GiB of host memory for a rank: .*_states=false"
    )
    monkeypatch.setattr(pinned_memory, "attainable_bytes", lambda: 100)
    with pytest.raises(ValueError, match=words):
        StateMemory([(torch.float32, 26)], torch.device("cpu"), on_host=True)
    StateMemory([(torch.float32, 25)], torch.device("cpu"), on_host=True)
    monkeypatch.setattr(pinned_memory, "attainable_bytes", lambda: None)
    with pytest.raises(ValueError, match=r"offload_states=true needs .*: .*allocate"):
        StateMemory([(torch.float32, 2**60)], torch.device("cpu"), on_host=True)


def test_bfloat16_moments_that_would_never_decay_are_refused() -> None:
    """Catches a second moment whose decay bfloat16 rounds away, so that it only grows."""
    with pytest.raises(ValueError, match=r"optimizer\.beta2=0\.999 .*; use at most 0\.996, or"):
        OptimizerConfig(moment_dtype="bfloat16", beta2=0.999)
    OptimizerConfig(moment_dtype="bfloat16", beta2=0.996)
    OptimizerConfig(moment_dtype="bfloat16", beta1=0.999, name="lion")  # no decay of its moment
    still = torch.ones(()).bfloat16()
    assert (still * 0.999).bfloat16() == still
    assert (still * 0.996).bfloat16() < still


@pytest.mark.gpu
@pytest.mark.parametrize("moments", ["float32", "bfloat16"])
def test_a_gpu_gets_the_same_bits_from_page_locked_memory(
    moments: Literal["float32", "bfloat16"],
) -> None:
    """Catches copies that CUDA streams do not order, and memory that is not page-locked."""
    mesh, device, found = Mesh(topology(1), 0), torch.device("cuda", 0), []
    for on_host in (False, True):
        config = OptimizerConfig(offload_states=on_host, moment_dtype=moments)
        items = [place(Spec("w", (4096, 1024), dim=0), mesh, torch.bfloat16, device)]
        gradients = MainGradients(items, mesh)
        optimizer = Zero1Optimizer(gradients, mesh, config, stream_bytes=2**20)
        for step in range(3):
            gradients.zero()
            (items[0].parameter.float() * (step + 1)).square().sum().backward()
            gradients.reduce()
            optimizer.step(1e-2)
        state = optimizer.state_dict()["parameters"]["w"]["tensors"]
        assert all(x.is_pinned() == on_host for x in state.values())
        found.append([items[0].parameter.detach().cpu(), *(x.cpu() for x in state.values())])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
