"""A checkpoint is gone on from by any layout as by transformers: a weight in a wrong place, a cache
of other heads than those that decode, tokens of another rank's prompt."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from isp.data.tokenizer import HFTokenizer
from isp.inference.source import open_source
from tests.data.test_tokenizer import template, write_tokenizer
from tests.inference.models import DECODER, PROMPTS, checkpoint_of, made, opened, saved
from tests.inference.test_engine import DECODED, check, greedy
from tests.ranks import run_each

ISP = "--parallel.tensor.mode=isp"
CASES = {
    2: {"llama": [], "qwen3": ["--parallel.tensor.mode=fsp"], "gemma3_text": [ISP]},
    4: {"llama": [ISP], "qwen3": [ISP, "--parallel.weight.size=1"], "gemma3_text": []},
}
"""The model and its layout on so many ranks."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    """Checkpoints of the decoder, and a folder of another model, with transformers' models."""
    found = {}
    for family in (*DECODER, "gemma3_text"):
        write = checkpoint_of if family in DECODER else saved
        found[family] = write(family, tmp_path_factory.mktemp(family)), made(family)
    return found


def of_layout(rank: int, case: tuple[Path, int, list[str]]) -> tuple[Tensor, Tensor]:
    path, ranks, overrides = case
    source, engine = opened(path, rank, ranks, overrides)
    greedy(engine, PROMPTS[:1], 2)  # a prompt more leaves nothing behind
    found = greedy(engine, PROMPTS, DECODED + 1)
    planned = source.model.cache_bytes(engine.cache.capacity, 8, ranks)
    assert engine.cache.num_bytes == len(PROMPTS) * planned  # what is planned is what there is
    return found


def test_one_rank_writes_what_transformers_writes(models: dict[str, tuple[Path, Any]]) -> None:
    for family, (path, model) in models.items():
        check(of_layout(0, (path, 1, [])), model, name=family)


@pytest.mark.parametrize("ranks", CASES)
def test_every_layout_writes_the_same(ranks: int, models: dict[str, tuple[Path, Any]]) -> None:
    cases = {name: (models[name][0], ranks, words) for name, words in CASES[ranks].items()}
    for name, of_ranks in run_each(ranks, of_layout, cases, timeout_seconds=110).items():
        for found in of_ranks:
            check(found, models[name][1], name=name)


def test_prompts_begin_as_the_texts_of_a_run(
    models: dict[str, tuple[Path, Any]], tmp_path: Path
) -> None:
    """Catches a prompt without the token that texts began with, or with one that they had not."""
    file = write_tokenizer(tmp_path, ["<s>", "</s>"])
    parsed = {**json.loads(file.read_text()), "post_processor": template("<s>")}
    file.write_text(json.dumps(parsed))
    source = replace(open_source(models["llama"][0]), tokenizer=HFTokenizer(file))
    assert source.data["add_bos"]
    for add_bos, begin in ((True, [4]), (False, [])):
        of_run = replace(source, data={**source.data, "add_bos": add_bos})
        assert of_run.encode("the cat") == [*begin, 1, 2]
        assert of_run.encode("") == begin
    folder = models["gemma3_text"][0]  # has no tokenizer of its own
    assert open_source(folder, tokenizer=str(file)).encode("the cat") == [4, 1, 2]


def test_an_end_that_is_no_token_is_refused(
    models: dict[str, tuple[Path, Any]], tmp_path: Path
) -> None:
    """Catches a traceback for a folder whose generation would end at what is no token."""
    folder = shutil.copytree(models["gemma3_text"][0], tmp_path / "folder")
    (folder / "generation_config.json").write_text('{"eos_token_id": [0, [1]]}')
    with pytest.raises(ValueError, match=r"has the eos_token_id \[1\], which is no token: correct"):
        open_source(folder, tokenizer="bytes")
