"""`isp.parallelize` on 4 ranks against the unmodified model in a plain loop."""

from __future__ import annotations

import copy
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import isp
from isp.checkpoint.agreement import CheckpointError
from isp.core.layers.vocab_loss import IGNORED
from isp.core.mesh import Axis, Mode
from tests.models.folders import load_folder
from tests.models.models import (
    TOLERANCE,
    Rows,
    Trained,
    assert_trained_as,
    job,
    packed_rows,
    plain_loss,
    tiny,
    trained_plainly,
)
from tests.ranks import run_each, run_ranks

FOUR = [[1, 30, 7, 26], [64], [20, 44], [33, 31]]
TWO = [[50, 14], [64]]


def _data() -> list[Rows]:
    """Return steps of four rows (two a rank), of two, and one whose first rank has no labels."""
    steps = [packed_rows(4, 64, FOUR, 1), packed_rows(2, 64, TWO, 2), packed_rows(4, 64, FOUR, 3)]
    empty = steps[2].labels
    assert empty is not None
    empty[:2] = IGNORED
    return steps


def _train(rank: int, case: tuple[nn.Module, Any, list[Rows], Path]) -> Any:
    model, config, data, folder = case
    run = isp.parallelize(model, config)
    channel = run.mesh[Axis.DATA]
    losses, norms = [], []
    for rows in data:
        loss = run.loss(*rows.part(channel.rank, channel.size))
        outcome = run.step(loss)
        assert outcome.loss == loss.item()
        losses.append(outcome.loss)
        norms.append(outcome.grad_norm)
    with torch.no_grad():
        part = data[0].part(channel.rank, channel.size)
        evaluated = run.loss(*part).item()
        unlabelled = run.loss(part[0], torch.full_like(part[0], IGNORED), *part[2:])
        assert unlabelled == 0, "as the step reports it"
    run.save_pretrained(folder)
    return losses, norms, evaluated


CASES = {
    "cohere": job(2, 2),  # norms [H, d], which are not decayed
    "gpt2": job(2, 4, recompute=0.5),  # Conv1D, and a tied head
    "mistral": job(4, 2, context=2),  # rows with different documents, packed
    "deepseek_v3": job(2, 4),  # experts, values smaller than keys, a buffer that is saved
    "gemma3_text": job(2, mode=Mode.MTP, recompute=0.5),  # a tied head, norms of heads
    "phi3": job(2, mode=Mode.MSP),  # fused projections
    "qwen2_moe": job(2, mode=Mode.FSP, recompute=0.5),  # biases of columns, experts
}


def test_a_parallelized_model_trains_as_the_unmodified_one(tmp_path: Path) -> None:
    """Catches a gradient, norm or update that is not that of the global mean, and lost weights."""
    data = _data()
    models = {name: tiny(name) for name in CASES}
    cases = {name: (models[name], config, data, tmp_path / name) for name, config in CASES.items()}
    for name, of_ranks in run_each(4, _train, cases).items():
        expected = trained_plainly(models[name], data)
        losses, norms, evaluated = of_ranks[0]
        assert of_ranks == [of_ranks[0]] * 4
        loaded = load_folder(tmp_path / name)
        weights = {n: p.detach() for n, p in loaded.named_parameters()}
        assert_trained_as(expected, [Trained(losses, norms, weights)], name)
        moved = copy.deepcopy(models[name])
        moved.load_state_dict(loaded.state_dict())
        moved.save_pretrained(tmp_path / "theirs")
        theirs = load_file(tmp_path / "theirs" / "model.safetensors")
        assert load_file(tmp_path / name / "model.safetensors").keys() == theirs.keys()
        assert abs(plain_loss(moved, data[0]).item() - evaluated) < TOLERANCE, name
        assert abs(evaluated - losses[0]) > 1e-3


def _save_in_vain(rank: int, folder: Path) -> str:
    run = isp.parallelize(tiny("llama"), job(1, 2))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 0:  # as on a disk that is nearly full
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
    try:
        run.save_pretrained(folder)
    except CheckpointError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    return ""


@pytest.mark.parametrize("fault", ["no folder", "no space"])
def test_a_failed_write_of_weights_is_raised_on_all_ranks(tmp_path: Path, fault: str) -> None:
    """Catches ranks that wait in a gather for a failed rank, and a partial file that remains."""
    folder = tmp_path / "hf"
    if fault == "no folder":
        folder.write_text("a file")
    answers = run_ranks(2, _save_in_vain, folder, timeout_seconds=60)
    message = "FileExistsError" if fault == "no folder" else "cannot be written: "
    assert all(f"writing {folder} failed on rank 0: " in answer for answer in answers), answers
    assert all(message in answer for answer in answers), answers
    assert fault == "no folder" or not list(folder.iterdir())
