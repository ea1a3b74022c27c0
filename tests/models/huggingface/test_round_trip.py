"""From a folder of transformers through training and back to transformers, in every digit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from isp.checkpoint.state import CheckpointWeights
from isp.cli import main
from isp.metrics import StepRecord, read_metrics
from isp.models.huggingface.tiny import kept_in_float64
from isp.models.loading import folder_model
from isp.models.runtime.stage_module import StageModule
from tests.models.folders import write_folder, write_job
from tests.models.models import alone
from tests.train.jobs import numbers, run_folders, run_forked

ISP = ("--parallel.tensor.size=2", "--parallel.weight.size=4", "--data.micro_num=1")
ALONE = ("--data.micro_num=2",)
"""The micro-batches of the two data ranks of `ISP`."""
STEPS = 5

KINDS: dict[str, dict[str, Any]] = {
    "gemma3_text": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5},
    "qwen3_moe": {},
    "qwen2_moe": {
        "use_sliding_window": True,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}
PROMPT = torch.arange(100, 112)[None]
"""A prompt longer than the window."""
NEW_TOKENS = 12


@pytest.mark.parametrize("kind", KINDS)
def test_a_trained_folder_gives_the_same_logits_and_text_in_transformers(
    tmp_path: Path, kind: str
) -> None:
    """Catches training that differs between layouts, and an export of other weights or settings.

    In transformers the exported folder must give the logits of the trained weights and, token by
    token with its cache, the text that they give in ISP.
    """
    source = write_folder(tmp_path / "model", kind, own_names=True, **KINDS[kind])
    steps = f"--training.steps={STEPS}", "--model.checkpoint=0"
    alone, spread = (write_job(tmp_path, source, name) for name in ("alone", "spread"))
    run_forked(alone, *ALONE, *steps, num_ranks=1)
    run_forked(spread, *ISP, *steps, num_ranks=4)
    (one,), (many,) = run_folders(alone, "alone"), run_folders(spread, "spread")
    expected, found = numbers(one), numbers(many)
    assert len(expected) == len(found) == STEPS
    assert expected[-1][1] < expected[0][1] - 0.3, "it learns"
    for there, here in zip(expected, found, strict=True):
        assert here == pytest.approx(there, rel=1e-9)
    loads, others = ([_load(r) for r in read_metrics(x / "metrics.jsonl")] for x in (one, many))
    assert loads == others
    assert (loads[0] is None) == (not kind.endswith("moe"))

    assert main(["checkpoint", "export", str(many), "--hf", str(tmp_path / "hf")]) == 0
    text, ours = _greedy(source, many)
    theirs = _loaded(tmp_path / "hf")
    names = [load_file(x / "model.safetensors").keys() for x in (source, tmp_path / "hf")]
    assert names[0] == names[1], "other names than those of the source"
    _assert_close(theirs(text).logits, ours)
    before = _loaded(source)(text).logits
    assert (before - ours).abs().max() > 1e-2, "it was trained"
    settings = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    generated = theirs.generate(PROMPT, max_new_tokens=NEW_TOKENS, **settings)
    assert torch.equal(generated, text)


def _load(record: StepRecord) -> tuple[float, int | None] | None:
    return record.expert_load and (round(record.expert_load, 9), record.unused_experts)


@torch.no_grad()
def _greedy(source: Path, run: Path) -> tuple[Tensor, Tensor]:
    """Return the greedy text after `PROMPT` by the weights of `run`, and all its logits.

    The traced model computes it in one process, from the start for each token.
    """
    chunk = alone(folder_model(str(source), "float64"))
    weights = CheckpointWeights(run)
    for item in chunk.shards():
        name, shard = item.name, item.parameter
        shard.copy_(weights.read(name))
    text = PROMPT
    for _ in range(NEW_TOKENS):
        text = torch.cat([text, _logits(chunk, text)[:, -1:].argmax(-1)], dim=1)
    return text, _logits(chunk, text)


def _logits(chunk: StageModule, tokens: Tensor) -> Tensor:
    """Return logits [1, S, V] of tokens [1, S]."""
    return chunk.logits(chunk(tokens, torch.arange(tokens.shape[1])[None], None))


def _loaded(folder: Path) -> Any:
    """Return the model that transformers loads from a folder, entirely in float64."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    return kept_in_float64(model).eval()


def _assert_close(found: Tensor, expected: Tensor) -> None:
    assert (found - expected).abs().max() < 1e-9 * expected.abs().max()
