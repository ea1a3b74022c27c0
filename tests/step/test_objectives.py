"""Runs of `training.objective` against the formulas on plain models, in float64."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from isp.cli.options import check_planned
from isp.config import ConfigError, JobConfig, load_config
from isp.config.data import Format
from isp.data.dataset import IGNORE_INDEX, Sample
from isp.data.examples import SourceReader
from isp.data.sources import open_datasets
from isp.data.tokenizer import load_tokenizer
from isp.models.huggingface.tiny import kept_in_float64
from isp.step.job_models import check_models
from isp.train.data import check_data
from tests.data.chat_folder import CHATML, chat_folder, write_lines
from tests.models.folders import small_config, write_folder
from tests.train.jobs import numbers, run_folders, run_forked

JOB = """
job: {{name: job, dump_folder: {folder}/out}}
model: {{hf: {folder}/model, loss_chunk_tokens: 24}}
data: {{source: {folder}/pairs.jsonl, seq_len: 96, valid_fraction: 0.2}}
optimizer: {{lr: 1.0e-2}}
lr_scheduler: {{min_lr_factor: 1.0}}
training: {{steps: 3, device: cpu, dtype: float64, objective: dpo}}
validation: {{freq: 3, steps: 2}}
"""
TEXTS = [
    {
        "prompt": "say " + "a" * (i % 7),
        "chosen": "yes" * (1 + i % 4),
        "rejected": "no" * (i % 5 + 1),
    }
    for i in range(40)
]
MSP = ("--parallel.tensor.size=2", "--parallel.tensor.mode=msp", "--data.micro_num=2")
CONTEXT = (
    "--parallel.tensor.size=4",
    "--parallel.weight.size=2",
    "--parallel.sequence_2D.enable=true",
    "--parallel.sequence_2D.head_size=2",
    "--parallel.sequence_2D.context_size=2",
    "--data.micro_num=2",
)
PIPELINE = ("--parallel.pipeline.size=2", "--data.micro_num=2")
MTP = (
    "--parallel.tensor.size=2",
    "--parallel.tensor.mode=mtp",
    "--parallel.weight.vocab_parallel_loss=true",
    "--data.micro_num=2",
)
CASES = [
    (2, MSP, ("sigmoid", 0.1)),
    (4, CONTEXT, ("ipo", 0.0)),
    (2, PIPELINE, ("sigmoid_norm", 0.2)),
]


@pytest.fixture
def job(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    write_folder(tmp_path / "model", "llama")
    write_lines(tmp_path / "pairs.jsonl", TEXTS)
    path = tmp_path / "job.yaml"
    path.write_text(JOB.format(folder=tmp_path))
    return path


def _documents(sample: Sample) -> list[tuple[Tensor, Tensor]]:
    """Return the tokens and labels of each document that has labels."""
    tokens, labels, positions = map(torch.from_numpy, sample[:3])
    lengths = (positions == 0).nonzero().flatten().diff(append=torch.tensor([len(tokens)])).tolist()
    cut = zip(tokens.split(lengths), labels.split(lengths), strict=True)
    return [(of, to) for of, to in cut if (to != IGNORE_INDEX).any()]


def _log_probs(model: nn.Module, document: tuple[Tensor, Tensor], each: bool) -> Tensor:
    tokens, labels = document
    found = model(tokens[None]).logits[0].log_softmax(-1)
    found = found.gather(-1, labels[:, None].clamp(min=0))[:, 0][labels != IGNORE_INDEX]
    return found.mean() if each else found.sum()


Objective = Callable[[nn.Module, nn.Module, list[tuple[Tensor, Tensor]], JobConfig], list[Tensor]]
"""The losses of (trained model, second model, documents of a sequence)."""


def _preferences(
    policy: nn.Module, other: nn.Module, documents: list[tuple[Tensor, Tensor]], config: JobConfig
) -> list[Tensor]:
    """Return the preference losses of pairs."""
    dpo, losses = config.training.dpo, []
    each = dpo.loss_type != "sigmoid"
    for chosen, rejected in zip(documents[::2], documents[1::2], strict=True):
        gains = []
        for document in (chosen, rejected):
            with torch.no_grad():
                before = _log_probs(other, document, each)
            gains.append(_log_probs(policy, document, each) - before)
        margin = gains[0] - gains[1]
        if dpo.loss_type == "ipo":
            losses.append((margin - 1 / (2 * dpo.beta)) ** 2)
            continue
        right, wrong = F.logsigmoid(dpo.beta * margin), F.logsigmoid(-dpo.beta * margin)
        losses.append(-(1 - dpo.label_smoothing) * right - dpo.label_smoothing * wrong)
    assert len(losses) > 1
    return losses


def _divergences(
    student: nn.Module, other: nn.Module, documents: list[tuple[Tensor, Tensor]], config: JobConfig
) -> list[Tensor]:
    """Return the divergences of tokens that have a label."""
    distill, losses = config.training.distill, list[Tensor]()
    for tokens, labels in documents:
        with torch.no_grad():
            logits, chosen = (other(tokens[None]).logits[0] / distill.temperature).topk(
                distill.top_k
            )
        log_q = logits.log_softmax(-1)
        log_p = (student(tokens[None]).logits[0] / distill.temperature).log_softmax(-1)
        found = (log_q.exp() * (log_q - log_p.gather(-1, chosen))).sum(-1)
        losses += found[labels != IGNORE_INDEX].unbind()
    return losses


def _rewards(
    model: nn.Module, _: nn.Module, documents: list[tuple[Tensor, Tensor]], __: JobConfig
) -> list[Tensor]:
    """Return the reward losses of pairs."""
    of_each = [model(tokens[None]).logits[0, 0] for tokens, _ in documents]
    pairs = zip(of_each[::2], of_each[1::2], strict=True)
    return [-F.logsigmoid(chosen - rejected) for chosen, rejected in pairs]


def _plainly(config: JobConfig, objective: Objective) -> list[tuple[float, float]]:
    """Return losses and gradient norms of training in one process."""
    second = config.training.distill.teacher or config.model.hf
    kind = AutoModelForCausalLM
    if config.training.objective == "reward":
        kind = AutoModelForSequenceClassification
    model, other = (
        kept_in_float64(kind.from_pretrained(folder)) for folder in (config.model.hf, second)
    )
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2]},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    own = config.optimizer
    optimizer = torch.optim.AdamW(groups, own.lr, (own.beta1, own.beta2), own.eps, own.weight_decay)
    dataset, found = open_datasets(config.data, seed=config.training.seed).train, []
    for step in range(config.training.steps):
        samples = (dataset.sample(2 * step), dataset.sample(2 * step + 1))
        losses = [loss for s in samples for loss in objective(model, other, _documents(s), config)]
        loss = torch.stack(losses).mean()
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), config.training.max_norm)
        optimizer.step()
        found.append((loss.item(), norm.item()))
    return found


def _check(
    job: Path,
    num_ranks: int,
    layout: tuple[str, ...],
    keys: tuple[str, ...],
    objective: Objective,
) -> None:
    """Check that a run has the losses and gradient norms of the formula."""
    run_forked(job, *layout, *keys, num_ranks=num_ranks)
    (run,) = run_folders(job)
    plain = _plainly(load_config(job, keys), objective)
    for record, expected in zip(numbers(run), plain, strict=True):
        assert record[1:3] == pytest.approx(expected, rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "layout", "loss"), CASES)
def test_pairs_train_as_in_one_process(
    job: Path, num_ranks: int, layout: tuple[str, ...], loss: tuple[str, float]
) -> None:
    """Catches a pair that is split, a scalar counted twice, and a reference model that is
    updated.
    """
    keys = (f"--training.dpo.loss_type={loss[0]}", f"--training.dpo.label_smoothing={loss[1]}")
    _check(job, num_ranks, layout, keys, _preferences)


def test_a_reward_model_trains_as_in_one_process(job: Path) -> None:
    """Catches a reward of another token than the last, of padding, or of a rank's tokens."""
    config = small_config("llama", num_labels=1, pad_token_id=271)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(job.parent / "model")
    _check(job, 2, MSP, ("--training.objective=reward",), _rewards)
    with pytest.raises(ValueError, match="labels of a sequence: use objective reward with"):
        check_models(load_config(job))


def test_a_student_trains_as_in_one_process(job: Path) -> None:
    """Catches a teacher's logits at other tokens, a softmax over a rank's logits only, and a torch
    optimizer built for the teacher, which has no trainable weights.
    """
    teacher = write_folder(job.parent / "teacher", "qwen3", num_hidden_layers=3)
    (job.parent / "text.txt").write_text("".join(f"word {i} of many\n" for i in range(200)))
    keys = (
        "--training.objective=distill",
        f"--training.distill.teacher={teacher}",
        "--training.distill.top_k=20",
        "--training.distill.temperature=1.5",
        f"--data.source={job.parent}/text.txt",
    )
    _check(job, 2, (*MTP, "--optimizer.name=torch.optim:AdamW"), keys, _divergences)


def test_pairs_of_conversations_train_only_their_answers(tmp_path: Path) -> None:
    """Catches a trained prompt, given in its own key or as the common start of both answers."""
    chat_folder(tmp_path / "model", "{{ tools or '' }}" + CHATML)
    ask = [{"role": "user", "content": "why"}]
    answers = [[{"role": "assistant", "content": text}] for text in ("so", "no idea")]
    record = {"prompt": ask, "chosen": answers[0], "rejected": answers[1]}
    whole = {"chosen": ask + answers[0], "rejected": ask + answers[1]}
    lines = [{**line, "tools": [{"name": "why"}]} for line in (record, whole)]
    write_lines(tmp_path / "pairs.jsonl", lines)
    tokenizer = load_tokenizer(str(tmp_path / "model"))
    reader = SourceReader(
        str(tmp_path / "pairs.jsonl"),
        tokenizer,
        asked=Format.AUTO,
        text_key="text",
        template=None,
        key="data.source",
    )
    pairs = [examples for examples, _ in reader.read(tmp_path / "pairs.jsonl")]
    for one, two in zip(*pairs, strict=True):
        assert (one.tokens == two.tokens).all()
        assert (one.labels == two.labels).all()
    for example, words in zip(pairs[0], ("so", "no idea"), strict=True):
        answer = tokenizer.decode(example.labels[example.labels != IGNORE_INDEX])
        assert answer.removesuffix("\n").startswith(words)
        assert "why" not in answer


def test_bad_pairs_are_refused_before_ranks_start(job: Path) -> None:
    """Catches a run that would train on something other than requested."""
    with pytest.raises(ValueError, match="holds pairs of preferences: use dpo or reward"):
        check_data(load_config(job, ["--training.objective=sft"]))
    with pytest.raises(ConfigError, match=r"label_smoothing=0\.1 is not defined for"):
        load_config(job, ["--training.dpo.loss_type=ipo", "--training.dpo.label_smoothing=0.1"])
    with pytest.raises(ValueError, match="plans cover one model"):
        check_planned(load_config(job))
    with pytest.raises(ConfigError, match=r"leave out model\.adapter"):
        load_config(job, ["--training.objective=reward", "--model.adapter.r=4"])
    with pytest.raises(ValueError, match="train_on=all is for conversations"):
        check_data(load_config(job, ["--data.train_on=all"]))
    with pytest.raises(ConfigError, match="distill needs the folder of a teacher"):
        load_config(job, ["--training.objective=distill"])
    write_lines(job.parent / "pairs.jsonl", [{"chosen": "text"}])
    with pytest.raises(ValueError, match="'rejected' must be text"):
        check_data(load_config(job))
