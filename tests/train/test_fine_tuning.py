"""Runs on conversations: equal in every layout, and resumed in the middle of an epoch."""

from __future__ import annotations

from pathlib import Path

import pytest

from isp.config import load_config
from isp.data.packing import ExampleDataset
from isp.data.sources import open_datasets
from isp.metrics import read_metrics
from isp.train.data import check_data
from tests.data.chat_folder import chat_folder, write_lines
from tests.train.jobs import numbers, run_folders, run_forked

JOB = """
job: {{name: job, dump_folder: {folder}/out}}
model: {{vocab_size: 272, hidden_size: 16, num_layers: 1, num_heads: 2, intermediate_size: 24}}
data: {{source: {folder}/talks.jsonl, tokenizer: {folder}/model, seq_len: 128, micro_num: 2,
       valid_fraction: 0.1}}
parallel: {{tensor: {{size: 2, mode: isp}}, weight: {{size: 2}}}}
optimizer: {{lr: 1.0e-2}}
lr_scheduler: {{min_lr_factor: 1.0}}
training: {{steps: 6, device: cpu, dtype: float64}}
validation: {{freq: 3, steps: 100}}
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """Return a job of 2 ranks, with its tokenizer and 60 conversations of 50 to 110 tokens."""
    chat_folder(tmp_path / "model")
    talks = [
        {
            "messages": [
                {"role": "user", "content": "why" * (1 + i % 7)},
                {"role": "assistant", "content": "so " * (1 + i % 11)},
            ]
        }
        for i in range(60)
    ]
    write_lines(tmp_path / "talks.jsonl", talks)
    path = tmp_path / "job.yaml"
    path.write_text(JOB.format(folder=tmp_path))
    return path


def test_a_run_resumes_inside_an_epoch_in_another_layout(job: Path) -> None:
    """Catches rows repeated or skipped after a stop, and data ranks that change the batch."""
    run_forked(job)
    whole = numbers(run_folders(job)[0])
    log = (run_folders(job)[0] / "logs/rank_0.log").read_text()
    assert "talks.jsonl without held-out documents: " in log, "how much is trained is told"
    assert "tokens trained, those in [[ ]]: <|im_start|>user\\nwhywhy" in log
    assert "<|im_start|>assistant\\n[[so " in log, "an example is shown"
    assert '--chat --prompt "Hello"' in log, "what is typed next is a message, as in training"
    assert "longer than data.seq_len=128 truncated, 0 without a trained token dropped" in log
    train = open_datasets(load_config(job).data, seed=0).train
    assert isinstance(train, ExampleDataset)
    assert train.samples_per_epoch > 4, "an epoch goes on after the stop"
    real = [128 - train.sample(i).padding for i in range(2 * 6)]
    assert whole[-1][4] == sum(real) < 12 * 128, "padding counts as tokens"
    last = read_metrics(run_folders(job)[0] / "metrics.jsonl")[-1]
    assert last.padding == 1 - sum(real[-2:]) / (2 * 128)
    other = ["--job.name", "other", "--checkpoint.interval=1"]
    run_forked(job, *other, "--training.steps=2")
    run_forked(
        job,
        *other,
        "--parallel.tensor.size=1",
        "--data.micro_num=1",
        "--checkpoint.auto_resume=true",
    )
    first, second = run_folders(job, "other")[0], run_folders(job, "other")[-1]
    found = numbers(first)
    assert [record[0] for record in found] == list(range(1, 7))
    assert first == second
    assert [record[4] for record in found] == [record[4] for record in whole]
    for (_, loss, norm, *_), (_, expected, wanted_norm, *_) in zip(found, whole, strict=True):
        assert loss == pytest.approx(expected, rel=1e-9)
        assert norm == pytest.approx(wanted_norm, rel=1e-9)
    assert whole[0][1] > whole[-1][1]


def test_missing_templates_are_refused_before_ranks_start(job: Path) -> None:
    """Catches a message that every rank prints, although one process can check before they
    start.
    """
    (job.parent / "model/chat_template.jinja").unlink()
    with pytest.raises(ValueError, match=r"has no chat template .*data\.chat_template"):
        check_data(load_config(job))
    each = "{% for m in messages %}{{ m.content }}{% endfor %}"
    (job.parent / "own.jinja").write_text(each)
    check_data(load_config(job, [f"--data.chat_template={job.parent}/own.jinja"]))
