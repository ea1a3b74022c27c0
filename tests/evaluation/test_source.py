"""Each layout reads a checkpoint or folder correctly: weights, and each rank's tokens."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from isp.data.tokenizer import HFTokenizer
from isp.evaluation.source import open_source
from tests.data.test_tokenizer import template, write_tokenizer
from tests.evaluation.models import DECODER, PROMPTS, checkpoint_of, made, opened, read, saved
from tests.ranks import run_each


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    """Return checkpoints of the decoder and a folder of another model, with models of
    transformers.
    """
    found = {}
    for family in (*DECODER, "gemma3_text"):
        write = checkpoint_of if family in DECODER else saved
        found[family] = write(family, tmp_path_factory.mktemp(family)), made(family)
    return found


def logits_of(rank: int, case: tuple[Path, int, list[str]]) -> Tensor:
    path, ranks, overrides = case
    _, engine = opened(path, rank, ranks, overrides)
    return engine.logits(PROMPTS, [1] * len(PROMPTS))


def check(found: Tensor, model: Any, name: str) -> None:
    expected = torch.stack([read(model, tuple(prompt))[-1] for prompt in PROMPTS])
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9, msg=lambda m: f"{name}: {m}")


def test_every_layout_reads_a_checkpoint_and_a_folder(
    models: dict[str, tuple[Path, Any]],
) -> None:
    """Catches weights in the wrong place, and tokens of another rank."""
    for family, (path, model) in models.items():
        check(logits_of(0, (path, 1, [])), model, family)
    cases = {
        f"{name} {mode}": (path, 4, [f"--parallel.tensor.mode={mode}", *words])
        for name, (path, _) in models.items()
        for mode, words in (("mtp", ()), ("isp", ["--parallel.weight.size=1"]))
    }
    for name, of_ranks in run_each(4, logits_of, cases, timeout_seconds=110).items():
        for found in of_ranks:
            check(found, models[name.split()[0]][1], name)


def test_prompts_have_a_bos_as_the_texts_of_their_run(
    models: dict[str, tuple[Path, Any]], tmp_path: Path
) -> None:
    """Catches a prompt without the BOS of the training texts, or with one that they lack."""
    file = write_tokenizer(tmp_path, ["<s>", "</s>"])
    parsed = {**json.loads(file.read_text()), "post_processor": template("<s>")}
    file.write_text(json.dumps(parsed))
    source = replace(open_source(models["llama"][0]), tokenizer=HFTokenizer(file))
    assert source.data["add_bos"]
    for add_bos, begin in ((True, [4]), (False, [])):
        of_run = replace(source, data={**source.data, "add_bos": add_bos})
        assert of_run.encode("the cat") == [*begin, 1, 2]
        assert of_run.encode("") == begin
    folder = models["gemma3_text"][0]  # a folder without a tokenizer
    assert open_source(folder, tokenizer=str(file)).encode("the cat") == [4, 1, 2]


def test_an_invalid_eos_token_id_is_refused(
    models: dict[str, tuple[Path, Any]], tmp_path: Path
) -> None:
    """Catches a traceback for a folder whose eos_token_id contains a value that is no token."""
    folder = shutil.copytree(models["gemma3_text"][0], tmp_path / "folder")
    (folder / "generation_config.json").write_text('{"eos_token_id": [0, [1]]}')
    with pytest.raises(ValueError, match=r"has the eos_token_id \[1\], which is no token: correct"):
        open_source(folder, tokenizer="bytes")
