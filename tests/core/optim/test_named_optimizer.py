"""An optimizer of torch that the configuration names."""

from __future__ import annotations

from pathlib import Path

import pytest

from isp.config import load_config
from isp.core.optim.config import OptimizerConfig
from isp.core.optim.torch_optimizer import count_states, optimizer_of
from isp.step.job_models import check_models
from tests.train.jobs import numbers, run_folders, run_forked, write_job

KEYS = ("--training.dtype", "float64", "--lr_scheduler.warmup_steps", "3")
ALONE = ("--parallel.tensor.size", "1", "--parallel.weight.size", "1")


def test_torchs_adamw_by_name_equals_adamw(tmp_path: Path) -> None:
    """Catches a rate that ignores the schedule, norms that decay, betas left at torch's defaults,
    and states or step counts that another layout does not resume.
    """
    job, named = write_job(tmp_path), ("--optimizer.name", "torch.optim:AdamW")
    run_forked(job, *KEYS, "--training.steps", "4")
    run_forked(job, *KEYS, "--training.steps", "2", *named, "--job.name", "named")
    more = (*KEYS, *ALONE, "--training.steps", "4", *named, "--job.name", "named")
    run_forked(job, *more, num_ranks=1)
    (plain,), (own,) = run_folders(job), run_folders(job, "named")
    expected, found = numbers(plain), numbers(own)
    assert [step for step, *_ in found] == [1, 2, 3, 4]
    for there, here in zip(expected, found, strict=True):
        assert here == pytest.approx(there, rel=1e-9)


def test_optimizers_that_cannot_be_sharded_are_refused(tmp_path: Path) -> None:
    """Catches an optimizer that reads whole weights or does not exist, and keys without effect."""
    job = write_job(tmp_path)
    for name, said in {
        "torch.optim:Adafactor": "of which each rank holds",
        "torch.optim:Nothing": r"optimizer.name=torch.optim:Nothing cannot be used",
        "nowhere.at:All": "cannot be used: No module named 'nowhere'",
    }.items():
        with pytest.raises(ValueError, match=said):
            check_models(load_config(job, ["--optimizer.name", name]))
    with pytest.raises(ValueError, match="must be adamw, lion, muon, or module:Class"):
        OptimizerConfig(name="adam")
    with pytest.raises(
        ValueError, match=r"optimizer\.offload_states=True applies only to isp's own"
    ):
        OptimizerConfig(name="torch.optim:NAdam", offload_states=True)
    make = optimizer_of(OptimizerConfig(name="torch.optim:NAdam"), ())
    assert make is not None
    assert count_states(make) == 2
