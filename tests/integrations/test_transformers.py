"""The Trainer of transformers in several layouts, compared with one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from torch import Tensor

from isp.core.layers.vocab_loss import IGNORED
from isp.core.mesh import Mode
from isp.integrations.transformers import Trainer
from tests.models.models import VOCAB, job, tiny
from tests.ranks import run_programs

TOLERANCE = 1e-9  # float64, sums in another order
LOGGED = 1e-6  # the Trainer adds up losses in float32
BATCH, EXAMPLES = 4, 20
LAYOUTS = {"isp": job(2, 2), "msp": job(2, 1, mode=Mode.MSP)}


def _examples(num: int, seed: int) -> list[dict[str, Tensor]]:
    """Return examples of unequal lengths, whose first tokens have no labels."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for index in range(num):
        ids = torch.randint(3, VOCAB, (7 + (5 * index) % 13,), generator=generator)
        labels = ids.clone()
        labels[: index % 5] = IGNORED
        found.append({"input_ids": ids, "labels": labels})
    return found


def _collate(examples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    def padded(key: str, value: int) -> Tensor:
        rows = [each[key] for each in examples]
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value)

    ids = padded("input_ids", 0)
    return {"input_ids": ids, "labels": padded("labels", IGNORED), "attention_mask": ids.ne(0)}


class Found(NamedTuple):
    logs: list[dict[str, float]]
    weights: dict[str, Tensor]
    accuracy: float


def _accuracy(found: Any) -> dict[str, float]:
    hits = found.predictions.argmax(-1)[:, :-1] == found.label_ids[:, 1:]
    return {"hits": float(hits[found.label_ids[:, 1:] != IGNORED].sum())}


def _train(kind: Any, folder: Path, batch: int, resume: str | None = None, **keys: Any) -> Found:
    """Train, evaluate and save with user code of transformers, and return the results."""
    args = transformers.TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=batch, gradient_accumulation_steps=2,
        per_device_eval_batch_size=batch, num_train_epochs=2, learning_rate=1e-2,
        lr_scheduler_type="cosine", warmup_steps=2, weight_decay=0.1, max_grad_norm=1.0,
        logging_steps=1, eval_strategy="steps", eval_steps=3, save_steps=2, report_to="none",
        use_cpu=True, disable_tqdm=True, remove_unused_columns=False,
        label_names=["labels"],
    )  # fmt: skip
    trainer = kind(
        model=tiny("llama", num_hidden_layers=2), args=args, data_collator=_collate,
        train_dataset=_examples(EXAMPLES, 0), eval_dataset=_examples(8, 1), **keys,
    )  # fmt: skip
    if kind is Trainer:
        with pytest.raises(RuntimeError, match=r"use isp\.integrations\.transformers\.Trainer"):
            torch.nn.parallel.DistributedDataParallel(trainer.model)
        ids = torch.ones(1, 2, dtype=torch.long)
        for rows in ({"token_type_ids": ids}, {"attention_mask": ids.tril(-1) + 0 * ids}):
            with pytest.raises(
                ValueError, match=r"a batch (has token_type_ids|with labels is pad)"
            ):
                trainer._run_model(ids, labels=ids, **rows)
    trainer.train(resume_from_checkpoint=resume and str(folder / resume))
    trainer.save_model(str(folder / "last"))
    trainer.compute_metrics = _accuracy
    hits = trainer.evaluate()["eval_hits"]
    torch.distributed.barrier() if torch.distributed.is_initialized() else None
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder / "last")
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    return Found(trainer.state.log_history, weights, hits)


def _plain(rank: int, folder: Path) -> Found:
    return _train(transformers.Trainer, folder, BATCH)


def _parallel(rank: int, folder: Path) -> dict[str, Found]:
    found = {}
    for name, config in LAYOUTS.items():
        batch = BATCH // (4 // config.parallel.tensor.size)
        own = folder / name
        found[name] = _train(Trainer, own, batch, isp_config=config)
        if name == "isp":
            again = _train(Trainer, own, batch, resume="checkpoint-4", isp_config=config)
            found["isp, resumed"] = again
    return found


def _same(found: Found, expected: Found, name: str) -> None:
    assert len(found.logs) == len(expected.logs), name
    for own, plain in zip(found.logs, expected.logs, strict=True):
        for key in ("loss", "grad_norm", "learning_rate", "eval_loss", "epoch", "step"):
            assert (key in own) == (key in plain), (name, key)
            tolerance = LOGGED if key == "loss" else TOLERANCE
            assert abs(own.get(key, 0.0) - plain.get(key, 0.0)) < tolerance, (name, key, own, plain)
    for key, weight in expected.weights.items():
        assert (found.weights[key] - weight).abs().max() < TOLERANCE, (name, key)
    assert found.accuracy == expected.accuracy


def test_the_trainer_gives_the_results_of_one_process(tmp_path: Path) -> None:
    """Catches ranks of a sequence with different sequences, a mean over ranks instead of labels, an
    evaluation that counts samples twice, and a run that does not resume where it stopped.
    """
    (expected,) = run_programs(1, _plain, tmp_path / "plain")
    assert sum("loss" in log for log in expected.logs) == 6
    for of_rank in run_programs(4, _parallel, tmp_path):
        for name, found in of_rank.items():
            _same(found, expected, name)
