"""`isp generate` on one rank and on two, and what it refuses before ranks meet."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.processors import TemplateProcessing

from isp.cli import launch as launch_module
from isp.cli import main
from isp.foreign.shown import printable
from tests.inference.models import checkpoint_of, made, saved, written
from tests.ranks import launch_forked

NEW = 12


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint_of("llama", tmp_path_factory.mktemp("llama"))


def text_of(prompt: str) -> str:
    """What transformers writes, with escapes for what a terminal would obey."""
    tokens = written(made("llama"), list(prompt.encode()), NEW)
    end = tokens.index(256) if 256 in tokens else NEW
    return printable(bytes(t for t in tokens[:end] if t < 256).decode(errors="replace"))


def said(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(["generate", *words])
    return code, *capsys.readouterr()


def test_text_is_printed_in_the_order_of_prompts(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("from a\nfile")
    words = (str(checkpoint), "--max_new_tokens", str(NEW))
    code, out, err = said(capsys, *words, "--prompt", "The end")
    assert (code, out) == (0, f"{text_of('The end')}\n")
    assert "step_0, 0 steps, float64, 1 rank" in err
    assert "tokens/s" in err
    code, out, _ = said(capsys, *words, "--prompt", "The end", "--prompt", str(file))
    heads = ["--- 1 of 2: The end", "--- 2 of 2: from a file"]
    texts = [text_of("The end"), text_of("from a\nfile")]
    assert (code, out) == (0, f"{heads[0]}\n{texts[0]}\n{heads[1]}\n{texts[1]}\n")
    stop = texts[0][3:5]
    _, out, _ = said(capsys, *words, "--prompt", "The end", "--stop", stop)
    assert out == f"{texts[0][: texts[0].index(stop)]}\n"


def test_ranks_and_modes_draw_the_same(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [str(checkpoint), "--prompt", "The end", "--prompt", "x", "--temperature", "1.5"]
    words += ["--seed", "5", "--max-new-tokens", str(NEW)]
    _, alone, _ = said(capsys, *words)
    monkeypatch.setattr(launch_module, "launch", launch_forked)
    for mode in ("mtp", "isp"):
        code, out, err = said(capsys, *words, "--nproc", "2", f"--parallel.tensor.mode={mode}")
        assert (code, out) == (0, alone)
        assert f"2 ranks, {mode}" in err
    _, other, _ = said(capsys, *words[:-3], "6", *words[-2:])
    assert other != alone


def test_one_rank_generates_where_more_do_not_divide_the_heads(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (str(checkpoint), "--prompt", "The end", "--max-new-tokens", str(NEW), "--nproc", "3")
    code, out, err = said(capsys, *words)
    assert (code, out) == (0, f"{text_of('The end')}\n")
    (note,) = [line for line in err.splitlines() if line.startswith("note: ")]
    assert note.startswith("note: on one rank, not 3: parallel.tensor.size=3 must divide")


def test_faults_are_reported_in_a_line(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gpt2 = saved("gpt2", tmp_path / "gpt2")
    no_text, wide = tmp_path / "no_text", tmp_path / "wide.json"
    no_text.write_bytes(b"\xff")
    tokenizer = Tokenizer(WordLevel({"x": 258, "</s>": 0, "<s>": 1}, "x"))
    tokenizer.save(str(wide))
    tokenizer.post_processor = TemplateProcessing(single="<s> $0", special_tokens=[("<s>", 1)])
    llama = saved("llama", tmp_path / "llama")
    tokenizer.save(str(llama / "tokenizer.json"))
    capsys.readouterr()
    bytes_ = ("--tokenizer", "bytes")
    for words, fault in (
        ((str(tmp_path / "none"), "--prompt", "x"), "does not exist"),
        ((str(tmp_path), "--prompt", "x"), "is not a checkpoint"),
        ((str(llama), "--prompt", ""), "the prompt '' is empty"),
        ((str(llama), "--prompt", "x"), "token 258 for the prompt, but the model has only 258"),
        ((str(checkpoint), "--prompt", str(no_text)), "no_text is not a text file"),
        ((str(checkpoint), "--prompt", "x", f"--tokenizer={wide}"), "has 259 entries"),
        ((str(gpt2), "--prompt", "x", f"--tokenizer={wide}"), "and the model 258"),
        ((str(checkpoint), "--prompt", "x", "--top-p", "2"), "--top-p 2.0"),
        ((str(checkpoint), "--prompt", "x", "--parallel.tensor.size", "2"), "use --nproc 2"),
        (
            (str(checkpoint), "--prompt", "x", "--parallel.pipeline.size=2"),
            "pipeline.size=2 is for",
        ),
        ((str(checkpoint), "--prompt", "x", "--optimizer.lr=1"), "optimizer"),
        ((str(gpt2), "--prompt", "x"), "--tokenizer"),
        ((str(gpt2), "--prompt", "x" * 60, *bytes_, "--max-new-tokens", "6"), "--max-new-tokens 5"),
    ):
        code, out, err = said(capsys, *words)
        assert (code, out) == (2, ""), err
        assert err.startswith("error: ")
        assert err.count("\n") == 1, err
        assert fault in err
    code, out, err = said(capsys, str(gpt2), "--prompt", "x" * 60, *bytes_, "--max-new-tokens", "5")
    assert code == 0, err
