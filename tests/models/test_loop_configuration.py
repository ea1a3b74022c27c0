"""The configuration of a caller's own loop: what it may leave out, and what would do nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import isp
from isp.train import host_memory
from isp.train.host_memory import check_memory_of_states
from tests.models.models import job, tiny
from tests.models.own import Own
from tests.ranks import run_each


def test_a_file_needs_no_other_sections(tmp_path: Path) -> None:
    """Catches a library that asks for text or sizes which its caller brings."""
    (tmp_path / "own.yaml").write_text("optimizer: {lr: 0.01}")
    run = isp.parallelize(Own(), tmp_path / "own.yaml")
    assert run.config.optimizer.lr == 0.01


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            "training: {global_batch_size: 8}",
            r"training\.global_batch_size=8 has no effect in .* leave the key out",
        ),
        ("model: {compile: true}", r"model\.compile=true .* the Own that .* use auto or false"),
        ("model: {mlp_tile_tokens: 8}", r"model\.mlp_tile_tokens=8: .* of Own can .* use 0"),
    ],
)
def test_keys_that_would_do_nothing_are_refused(tmp_path: Path, keys: str, message: str) -> None:
    """Catches a key that is ignored: the caller's sequences are the batch, and the model is his."""
    (tmp_path / "own.yaml").write_text(keys)
    with pytest.raises(ValueError, match=message):
        isp.parallelize(Own(), tmp_path / "own.yaml")
    assert not dist.is_initialized()


FILES = {
    "isp 3": "data: {seq_len: 100}\nvalidation: {freq: 10}\nparallel: {tensor: {size: 3}}",
    "mtp 3": "parallel: {tensor: {mode: mtp, size: 3}}",  # as many do not divide 32 heads
}


def _of_file(rank: int, path: Path) -> float:
    heads = {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 48}
    run = isp.parallelize(tiny("llama", **heads), path)
    return run.step(run.loss(torch.arange(12).unsqueeze(0))).loss


def test_sections_and_sizes_that_are_not_read_refuse_nothing(tmp_path: Path) -> None:
    """Catches sizes, lengths and defaults that nobody asked for and that do not divide."""
    cases = {name: tmp_path / name for name in FILES}
    for name, path in cases.items():
        path.write_text(FILES[name] + "\ntraining: {dtype: float64}\n")
    losses = [x for of_ranks in run_each(3, _of_file, cases).values() for x in of_ranks]
    assert losses == pytest.approx([losses[0]] * 6, rel=1e-9)  # float64, sums in another order


def test_states_that_a_host_has_no_room_for_are_refused_beforehand(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Catches a pool that fails once ranks have met; frozen weights have no states."""
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 2**10)
    config = job(offload_states=True)
    with pytest.raises(ValueError, match=r"ranks keep .* of optimizer states in this machine"):
        isp.parallelize(Own(), config)
    assert not dist.is_initialized()
    check_memory_of_states(config, config.topology(1), 1, num_trained=0)
