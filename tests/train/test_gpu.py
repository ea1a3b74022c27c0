"""Training steps on GPUs equal those of a CPU, in every mode, in float64.

Mirror images: one rank with NCCL whose other ranks have equal data. Real ranks: two, on two GPUs or
on the only one.
"""

from __future__ import annotations

import faulthandler
import os
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from isp.core.comm import Mesh, use_loopback
from isp.core.mesh import Mode, PipelineSchedule, WeightConfig
from model.config import ModelConfig
from tests.mirror import MirrorMesh, one_rank
from tests.train.runs import Layout, Numbers, Run, Task, Weights, largest_difference, make_run

CPU = torch.device("cpu")
NUM_GPUS = torch.cuda.device_count()
needs_gpu = (
    pytest.mark.gpu,
    pytest.mark.nccl,
    pytest.mark.skipif(NUM_GPUS == 0, reason="no CUDA device"),
)
STEPS = range(3)
TOLERANCE = 1e-9
"""Relative tolerance, since GPU kernels sum in another order."""
HANGS = 40
"""Seconds after which a collective is assumed to hang; a layout takes 5 to 12."""
MODEL = ModelConfig(
    vocab_size=52,
    hidden_size=32,
    num_layers=2,
    num_heads=8,
    num_kv_heads=4,
    intermediate_size=40,
    loss_chunk_tokens=5,
    init_std=0.3,
)
TIED = replace(MODEL, tie_embeddings=True, checkpoint=0.5, qk_norm=True)
VOCAB = WeightConfig(vocab_parallel_loss=True)
MIRRORED = {
    "isp": (Layout(tensor=2, weight=2, micro=2), MODEL),
    "isp, replicas": (Layout(tensor=2, weight=2, data=2, micro=2), TIED),
    "isp, vocabulary": (Layout(tensor=2, weight=4, data=2, options=VOCAB), TIED),
    "mtp": (Layout(mode=Mode.MTP, tensor=2, data=2), TIED),
    "msp": (Layout(mode=Mode.MSP, tensor=2, data=2), MODEL),
    "fsp": (Layout(mode=Mode.FSP, tensor=2, micro=2), MODEL),
}
"""Layouts of mirror worlds; with `data` ranks zero1 splits the states, so updated weights are
sent.
"""
PIPELINE = replace(MODEL, num_layers=4)
REAL = {
    **{str(mode): (Layout(mode=mode, tensor=2, micro=2), MODEL) for mode in Mode},
    "weights": (Layout(tensor=2, weight=2, micro=2), TIED),
    "replicas": (Layout(weight=2, data=2, micro=2), TIED),
    "1f1b": (Layout(pipeline=2, micro=4), PIPELINE),
    "zbv": (Layout(pipeline=2, micro=4, schedule=PipelineSchedule.ZBV, chunks=2), PIPELINE),
}


def _trained(run: Run) -> tuple[Numbers, Weights]:
    numbers, weights = run.numbers(STEPS), run.weights()
    run.close()
    return numbers, weights


def _mirrored(name: str, device: torch.device, *, overlap: bool) -> tuple[Numbers, Weights]:
    """Return the results of the last rank of a mirror world."""
    layout, model = MIRRORED[name]
    layout = replace(layout, options=replace(layout.options, overlap=overlap))
    with one_rank(device):
        mesh = MirrorMesh(layout.topology(), layout.world - 1)
        return _trained(make_run(mesh, layout, Task(model=model), device=device))


def _series(found: Numbers, expected: Numbers) -> Iterator[tuple[list[float], list[float]]]:
    """Yield the losses of both runs, then their norms."""
    for index in (0, 1):
        yield [step[index] for step in found], [step[index] for step in expected]


def _assert_same(found: tuple[Numbers, Weights], expected: tuple[Numbers, Weights]) -> None:
    for mine, theirs in _series(found[0], expected[0]):
        assert largest_difference(mine, theirs) < TOLERANCE
    for name, weight in expected[1].items():
        np.testing.assert_allclose(found[1][name], weight, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("isp", "cpu"),  # checks the mirror world itself
        *(pytest.param(name, "cuda", marks=needs_gpu) for name in MIRRORED),
    ],
)
def test_a_rank_of_a_mirror_mesh_trains_as_on_a_cpu(name: str, where: str) -> None:
    """Catches NCCL work without a wait, and a kernel that does not fit its tensor.

    With streams, all gathers, reductions, exchanges, losses, main gradients and published weights
    must have the values that a CPU computes one after the other.
    """
    expected = _mirrored(name, CPU, overlap=False)
    found = _mirrored(name, CPU if where == "cpu" else torch.device("cuda", 0), overlap=True)
    assert len({loss for loss, _ in expected[0]}) == len(STEPS)
    _assert_same(found, expected)


# -- real ranks --------------------------------------------------------------------------------

ON_ONE_GPU = {
    "NCCL_DEBUG": "WARN",
    "NCCL_IB_DISABLE": "1",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_CUMEM_ENABLE": "0",
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_ALGO": "Ring",
    "NCCL_PROTO": "Simple",
    "NCCL_MAX_NCHANNELS": "2",
}
"""Settings for two ranks that share a GPU: they send over a socket, with few thread blocks."""


def _alone(name: str) -> Numbers:
    layout, model = REAL[name]
    alone = Layout(micro=layout.global_batch)
    return _trained(make_run(Mesh(alone.topology(), 0), alone, Task(model=model)))[0]


def _on_gpu(rank: int, folder: str, expected: dict[str, Numbers]) -> None:
    """Train every layout, and print the differences from the expected results."""
    use_loopback()
    # NCCL refuses two ranks of one host on one GPU: give each rank another host id
    if NUM_GPUS == 1:
        os.environ.update(ON_ONE_GPU, NCCL_HOSTID=f"isp-{rank}")
    device = torch.device("cuda", rank % NUM_GPUS)
    torch.cuda.set_device(device)
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group(
        "nccl",
        store=store,
        rank=rank,
        world_size=2,
        device_id=device,
        timeout=timedelta(seconds=HANGS),
    )
    worst = {}
    for name, (layout, model) in REAL.items():
        faulthandler.dump_traceback_later(HANGS - 5)  # from here: it replaces the last one
        mesh = Mesh(layout.topology(), rank)
        run = make_run(mesh, layout, Task(model=model), device=device)
        mesh.set_timeout(HANGS)  # then torch's watchdog names the collective, and ends this rank
        series = _series(_trained(run)[0], expected[name])
        worst[name] = np.max([largest_difference(*one) for one in series])
        print(f"rank {rank}: {name} {worst[name]:.0e}", flush=True)
    faulthandler.cancel_dump_traceback_later()
    dist.destroy_process_group()
    assert all(difference < TOLERANCE for difference in worst.values()), worst


@pytest.mark.gpu
@pytest.mark.nccl
@pytest.mark.skipif(NUM_GPUS == 0, reason="no CUDA device")
@pytest.mark.timeout(300)
def test_two_ranks_train_as_one_cpu() -> None:
    """Catches ranks that order their transfers differently with NCCL, and receives read too
    early.
    """
    expected = {name: _alone(name) for name in REAL}
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_on_gpu, (folder, expected), nprocs=2)


def test_nan_is_a_difference() -> None:
    """Catches a loss that is NaN from some step on, which `max` would not count as a difference."""
    assert not largest_difference([1.0, float("nan")], [1.0, 1.0]) < TOLERANCE
