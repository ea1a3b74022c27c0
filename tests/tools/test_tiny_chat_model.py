"""The tiny chat model, its conversations, and the configuration that trains on them."""

from __future__ import annotations

import json
import runpy
import sys
from itertools import islice
from pathlib import Path

import pytest
import torch

from isp.cli import main as isp
from isp.config import load_config
from isp.data.dataset import IGNORE_INDEX
from isp.metrics import read_metrics
from isp.train.run import main
from tests.data.chat_folder import load, write_lines
from tests.ranks import run_programs

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder that the tool writes."""
    folder = tmp_path_factory.mktemp("tiny")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["make_tiny_chat_model.py", str(folder)])
        runpy.run_path(str(ROOT / "tools/make_tiny_chat_model.py"), run_name="__main__")
    return folder


def test_the_masks_equal_those_of_transformers(made: Path) -> None:
    """Catches a template or a tokenizer that changes when it is saved."""
    from transformers import AutoTokenizer

    theirs, ours = AutoTokenizer.from_pretrained(made / "model"), load(made / "model")
    with (made / "chat.jsonl").open() as lines:
        for line in islice(lines, 50):
            messages = json.loads(line)["messages"]
            expected = theirs.apply_chat_template(messages, return_assistant_tokens_mask=True)
            found = ours.example(messages, "here")
            assert found.tokens.tolist() == expected["input_ids"]
            mask = (found.labels != IGNORE_INDEX).tolist()
            assert mask == [trained == 1 for trained in expected["assistant_masks"]]
            assert 8 < sum(mask) < len(mask)


def test_generate_applies_the_chat_template(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a prompt without the template, or with special tokens that the template has already
    added.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, question = str(made / "model"), "What is dumps in json?"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    talk = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": question}]
    write_lines(tmp_path / "talks.jsonl", [{"messages": talk}, {"messages": talk[1:]}])
    write_lines(tmp_path / "ended.jsonl", [{"messages": [*talk, {**talk[1], "role": "assistant"}]}])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float64")
    texts = []
    for messages in (talk, talk[1:]):
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        written = model.generate(torch.tensor([ids]), max_new_tokens=5, do_sample=False)
        texts.append(tokenizer.decode(written[0, len(ids) :], skip_special_tokens=True))
    words = ["generate", folder, "--dtype=float64", "--max-new-tokens=5", "--prompt"]
    assert isp([*words, question, "--chat"]) == 0
    out, _ = capsys.readouterr()
    assert out == f"{texts[1]}\n"
    assert isp([*words, str(tmp_path / "talks.jsonl")]) == 0
    out, _ = capsys.readouterr()
    assert out.startswith("--- 1 of 2: ")
    assert all(text in out for text in texts)
    for more, fault in (
        ([str(tmp_path / "ended.jsonl")], "line 1: its last message is the assistant's"),
        ([question, "--chat-template=x.jinja"], "--chat-template is only used with --chat"),
        ([question, "--chat", "--chat-template=x.jinja"], "x.jinja cannot be read"),
        ([question, "--chat", "--tokenizer=bytes"], "bytes has no chat template"),
    ):
        assert isp([*words, *more]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert fault in line
    assert load(made / "model").turn_end() == tokenizer.convert_tokens_to_ids("<|im_end|>")


@pytest.mark.parametrize(("name", "data"), [("chat", "chat"), ("dpo", "pairs")])
def test_the_shipped_configurations_train(made: Path, tmp_path: Path, name: str, data: str) -> None:
    """Catches a shipped configuration that does not fit the model, the data or its ranks."""
    overrides = [
        f"--model.hf={made / 'model'}",
        f"--data.tokenizer={made / 'model'}",
        f"--data.source={made / f'{data}.jsonl'}",
        f"--job.dump_folder={tmp_path}",
        "--training.steps=4",
        "--lr_scheduler.warmup_steps=0",
        "--data.seq_len=256",
        "--validation.freq=0",
    ]
    config = load_config(ROOT / f"configs/{name}.yaml", overrides)
    assert config.unused() == []
    run_programs(4, lambda rank: main(config))
    losses = [r.loss for r in read_metrics(tmp_path / f"{name}/latest/metrics.jsonl")]
    assert len(losses) == 4
    assert losses[3] < losses[0] < 7.5
