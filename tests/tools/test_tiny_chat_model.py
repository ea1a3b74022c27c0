"""The tiny chat model and its conversations, and the configuration that trains on them."""

from __future__ import annotations

import json
import runpy
import sys
from itertools import islice
from pathlib import Path

import pytest

from isp.config import load_config
from isp.data.dataset import IGNORE_INDEX
from isp.metrics import read_metrics
from isp.train import main
from tests.data.chat_folder import load
from tests.ranks import run_programs

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the tool writes."""
    folder = tmp_path_factory.mktemp("tiny")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["make_tiny_chat_model.py", str(folder)])
        runpy.run_path(str(ROOT / "tools/make_tiny_chat_model.py"), run_name="__main__")
    return folder


def test_its_masks_are_those_of_transformers(made: Path) -> None:
    """Catches a template or a tokenizer that is saved otherwise than it was made."""
    from transformers import AutoTokenizer

    theirs, ours = AutoTokenizer.from_pretrained(made / "model"), load(made / "model")
    with (made / "chat.jsonl").open() as lines:
        for line in islice(lines, 50):
            messages = json.loads(line)["messages"]
            wanted = theirs.apply_chat_template(messages, return_assistant_tokens_mask=True)
            found = ours.example(messages, "here")
            assert found.tokens.tolist() == wanted["input_ids"]
            mask = (found.labels != IGNORE_INDEX).tolist()
            assert mask == [trained == 1 for trained in wanted["assistant_masks"]]
            assert 8 < sum(mask) < len(mask)


def test_its_configuration_trains(made: Path, tmp_path: Path) -> None:
    """Catches a shipped configuration that does not fit the model, the data or its ranks."""
    overrides = [
        f"--model.hf={made / 'model'}",
        f"--data.tokenizer={made / 'model'}",
        f"--data.source={made / 'chat.jsonl'}",
        f"--job.dump_folder={tmp_path}",
        "--training.steps=4",
        "--lr_scheduler.warmup_steps=0",
        "--data.seq_len=256",
        "--validation.freq=0",
    ]
    config = load_config(ROOT / "configs/chat.yaml", overrides)
    assert config.unused() == []
    run_programs(4, lambda rank: main(config))
    losses = [r.loss for r in read_metrics(tmp_path / "chat/latest/metrics.jsonl")]
    assert len(losses) == 4
    assert losses[3] < losses[0] < 7.5
