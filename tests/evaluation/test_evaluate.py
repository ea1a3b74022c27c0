"""Losses by position, and passkeys."""

from __future__ import annotations

import random
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from isp.cli import launch as launch_module
from isp.cli import main
from isp.config import load_config
from isp.data.tokenizer import ByteTokenizer
from isp.evaluation.evaluate import count_found, open_rows, text_losses
from isp.evaluation.passkey import Passkey, PasskeyPrompts
from isp.metrics import read_metrics
from isp.metrics.evaluation import Evaluation, PositionBucket, TextLosses
from isp.train.folder.run_folder import RunFolder
from tests.evaluation.models import checkpoint_of, made, opened, saved, written
from tests.ranks import launch_forked, run_each

LENGTH = 32
CONFIG = """
model: {vocab_size: 258, hidden_size: 32, num_layers: 2, num_heads: 4, intermediate_size: 48}
data: {source: TEXT, valid_source: TEXT, seq_len: 32, micro_bsz: 3, pack: false}
training: {steps: 1, dtype: float64, global_batch_size: 6}
validation: {freq: 1, steps: 1}
"""


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "text.txt"
    rng = random.Random(0)
    file.write_text("".join(rng.choices("abcdefgh ", k=7 * LENGTH)))
    return file


def evaluated(folder: Path, *words: str) -> Evaluation:
    """Run the command on rows of 32 tokens and return the result that it writes."""
    words = ("--lengths=5,8,32", "--keys=0", f"--output={folder}", *words)
    assert main(["evaluate", *words]) == 0
    return Evaluation.load(folder / "evaluation.json")


def losses(evaluation: Evaluation) -> list[float]:
    assert evaluation.text is not None
    return [bucket.loss or 0.0 for bucket in evaluation.text.buckets]


@pytest.fixture(scope="module")
def run(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run of one step in float64."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "config.yaml").write_text(CONFIG.replace("TEXT", str(text)))
    words = ["--job.dump_folder", str(folder), "--job.name", "run"]
    assert main(["train", str(folder / "config.yaml"), *words]) == 0
    return folder / "run" / "latest"


def test_the_mean_equals_the_validation_loss_of_the_run(run: Path, tmp_path: Path) -> None:
    """Catches a wrong position, and other held-out tokens than those of the run."""
    (record,) = read_metrics(RunFolder(run).metrics_file)
    found = evaluated(tmp_path, str(run), "--rows=6", "--batch-tokens=100")
    assert found.trained_length == LENGTH
    assert found.text is not None
    assert found.text.rows == 6
    assert [bucket.tokens for bucket in found.text.buckets] == [30, 18, 144]
    assert found.text.loss_within(LENGTH) == pytest.approx(record.val_loss, rel=0, abs=1e-9)


def test_the_saved_micro_num_does_not_limit_the_ranks(run: Path) -> None:
    """Catches a saved data.micro_num that only fits the ranks of the run."""
    config = load_config(run / "config.yaml")
    assert config.for_ranks(2).data.num_micro_batches == 1


def test_ranks_are_started_and_one_writes_the_result(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches results that differ from those of one rank, and files that each rank writes."""
    words = (str(run), "--lengths=5,33,150", "--rows=1", "--keys=2", "--depths=2")
    alone = evaluated(tmp_path, *words)
    monkeypatch.setattr(launch_module, "launch", launch_forked)
    png = tmp_path / "new" / "a.png"
    found = evaluated(tmp_path, *words, "--nproc=2", "--parallel.tensor.mode=isp", f"--png={png}")
    assert png.read_bytes().startswith(b"\x89PNG")
    assert losses(found) == pytest.approx(losses(alone), rel=0, abs=1e-9)
    assert found.passkeys == alone.passkeys
    assert found.layout == "2 ranks, isp"
    assert re.match(rf"isp evaluate --nproc=2 .*{run} ", found.command)


def of_layout(rank: int, case: tuple[Path, Path, int, list[str]]) -> list[float | None]:
    path, text, ranks, words = case
    source, engine = opened(path, rank, ranks, words)
    rows = open_rows(source, files=[str(text)], length=33)
    assert rows is not None
    found = text_losses(
        engine, rows.dataset, lengths=(5, 8, 33), rows=4, batch_tokens=70, source=""
    )
    return [bucket.loss for bucket in found.buckets]


def test_every_layout_gives_the_same_results(run: Path, text: Path, tmp_path: Path) -> None:
    """Catches a layout with other results, for a run and for folders; rows do not divide by 4."""
    models = {
        "run": (run, ("mtp", "isp")),
        "qwen3": (saved("qwen3", tmp_path / "qwen3"), ("fsp", "isp")),
        "gemma": (saved("gemma3_text", tmp_path / "gemma"), ("msp", "isp")),
    }
    alone = {name: of_layout(0, (path, text, 1, [])) for name, (path, _) in models.items()}
    cases = {
        f"{name} {mode}": (path, text, 4, [f"--parallel.tensor.mode={mode}"])
        for name, (path, modes) in models.items()
        for mode in modes
    }
    for name, of_ranks in run_each(4, of_layout, cases, timeout_seconds=100).items():
        for found in of_ranks:
            assert found == pytest.approx(alone[name.split()[0]], rel=0, abs=1e-9), name


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_losses_equal_those_of_transformers(family: str, text: Path, tmp_path: Path) -> None:
    """Catches losses that differ from transformers', for a checkpoint and for a folder."""
    write = checkpoint_of if family == "llama" else saved
    folder = write(family, tmp_path / family)
    words = ["--tokenizer=bytes", "--dtype=float64", "--rows=2", f"--data={text}"]
    found = evaluated(tmp_path, str(folder), *words)
    read: list[Any] = []
    whole = [*text.read_bytes(), 256]
    for begin in range(0, len(whole) - 1, LENGTH):
        row = torch.tensor(whole[begin : begin + LENGTH + 1])
        if len(row) > LENGTH:
            with torch.no_grad():
                logits = made(family)(row[None, :-1]).logits[0]
            read.append(torch.nn.functional.cross_entropy(logits, row[1:], reduction="none"))
    sums = {
        tuple(float(x[a:b].sum()) for a, b in ((0, 5), (5, 8), (8, 32))) for x in read
    }  # the two evaluated rows are among these
    expected = {tuple(a + b for a, b in zip(x, y, strict=True)) for x in sums for y in sums - {x}}
    assert found.text is not None
    mine = [(bucket.loss or 0.0) * bucket.tokens for bucket in found.text.buckets]
    assert any(mine == pytest.approx(list(both), rel=0, abs=1e-9) for both in expected)


def asked() -> list[Passkey]:
    """Return prompts with answers that the plain model writes, and prompts with other answers."""
    found = []
    for number in range(10, 40):
        prompt = f"number {number} is"
        tokens = written(made("llama"), list(prompt.encode()), 2)
        with suppress(ValueError):  # tokens that are no bytes, or bytes that are no text
            text = bytes(tokens).decode()
            wrong = f"{text[:-1]}?"  # wrong in its last token
            found.append(Passkey(text, prompt, text))
            # the text after the key does not matter
            found.append(Passkey(text, prompt, f"{text}\0"))
            found.append(Passkey(wrong, prompt, wrong))
            found.append(Passkey(text, f"{prompt} ", text))  # the right key after another prompt
    return found


def is_written(passkey: Passkey) -> bool:
    """Return whether greedy decoding of the plain model writes the key."""
    key = list(passkey.key.encode())
    return written(made("llama"), list(passkey.prompt.encode()), len(key)) == key


def found_by_layout(rank: int, case: tuple[Path, int, str]) -> list[int]:
    """Return the keys found for each prompt of `asked` alone, then for all in one batch."""
    path, ranks, mode = case
    source, engine = opened(path, rank, ranks, [f"--parallel.tensor.mode={mode}"])
    every = asked()
    return [count_found(engine, source, batch) for batch in (*([one] for one in every), every)]


def test_a_key_is_found_if_greedy_decoding_writes_it(tmp_path: Path) -> None:
    """Catches a wrong position, an ignored last token, tokens of another prompt, and a rank that
    only has its part of the logits.
    """
    path = saved("llama", tmp_path)
    expected = [int(is_written(passkey)) for passkey in asked()]
    assert 3 < sum(expected) < len(expected) - 3
    expected.append(sum(expected))
    assert found_by_layout(0, (path, 1, "isp")) == expected
    cases = {mode: (path, 2, mode) for mode in ("mtp", "isp")}
    for of_ranks in run_each(2, found_by_layout, cases, timeout_seconds=100).values():
        assert of_ranks == [expected, expected]


def byte_prompts(digits: int) -> PasskeyPrompts:
    return PasskeyPrompts(lambda text: ByteTokenizer().encode(text).tolist(), digits=digits)


def test_prompts_are_as_long_as_the_length_allows() -> None:
    """Catches a prompt that is too long or needlessly short, and a key at the wrong depth."""
    prompts = byte_prompts(3)
    for length in (prompts.shortest, 150, 1000):
        for first, depth in enumerate((0.0, 0.3, 1.0)):
            key, prompt, answer = prompts.make("407", first, length=length, depth=depth)
            assert length - len("There and back again. ") < len(prompt + answer) <= length
            assert prompt.count(key) == 2
            assert prompt.endswith("The pass key is")
            filler = length - prompts.shortest
            assert abs(prompt.index("The pass key") - depth * filler) <= 0.3 * 22 + 22
    with pytest.raises(ValueError, match=f"cannot have {prompts.shortest - 1} tokens"):
        prompts.make("407", length=prompts.shortest - 1, depth=0.0)


def test_fillers_begin_with_different_sentences() -> None:
    """Catches prompts that only differ in their keys, of which all or none are found."""
    drawn = [byte_prompts(3).draw(random.Random(i), length=300, depth=1.0) for i in range(40)]
    assert len({passkey.prompt.split(".")[0] for passkey in drawn}) == 5
    assert len({passkey.key for passkey in drawn}) > 20


def test_prompts_fit_with_tokens_of_several_letters() -> None:
    """Catches a prompt too long under byte-pair encoding, where keys have one to five tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    prompts = byte_prompts(5)
    rng = random.Random(0)
    texts = [prompts.draw(rng, length=400, depth=0.5).prompt for _ in range(20)]
    encoding = Tokenizer(models.BPE())
    encoding.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    encoding.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False)
    encoding.train_from_iterator(texts, trainer)

    def encode(text: str) -> list[int]:
        return encoding.encode(text).ids  # type: ignore[no-any-return]

    prompts, sizes = PasskeyPrompts(encode, digits=5), set()
    for _ in range(20):
        passkey = prompts.draw(rng, length=200, depth=rng.random())
        sizes.add(len(encode(passkey.answer)))
        used = len(encode(passkey.prompt + passkey.answer))
        assert 200 - len(encode("There and back again. ")) - 5 <= used <= 200
    assert len(sizes) > 1


def test_losses_that_are_not_finite_are_none() -> None:
    """Catches a mean over buckets of which one has no finite loss."""
    parts = ((0, 2, 4, 1.0), (2, 4, 8, None), (4, 8, 0, None))
    buckets = [PositionBucket(begin=a, end=b, tokens=n, loss=loss) for a, b, n, loss in parts]
    found = TextLosses(source="", rows=1, length=8, buckets=tuple(buckets))
    assert [found.loss_within(n) for n in (2, 4, 8)] == [1.0, None, None]


def test_faults_are_reported_in_one_line(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a traceback, or an error without the cause, for wrong options and files."""
    gpt2, short = saved("gpt2", tmp_path / "gpt2"), tmp_path / "short.txt"
    short.write_text("short")
    capsys.readouterr()
    for words, told in (
        ((str(tmp_path / "none"),), "does not exist"),
        ((str(run), f"--data={short}"), "no sequences of 128 tokens"),
        ((str(run), "--lengths=1000000"), "or name files with --data"),
        ((str(run), f"--output={short}"), "File exists"),
        ((str(gpt2), "--tokenizer=bytes", "--lengths=65"), "table of 64 positions"),
        ((str(run), "--optimizer.lr=1"), "optimizer"),
        ((str(run), "--rows=0", "--keys=0"), "nothing to evaluate"),
        ((str(run), "--rows=0", "--lengths=8"), "nothing to evaluate: name text with --data, or"),
        ((str(run), f"--png={tmp_path}"), "is a folder: name a file in it"),
    ):
        assert main(["evaluate", *words]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("error: ")
        assert err.count("\n") == 1, err
        assert told in err
    with pytest.raises(SystemExit):
        main(["evaluate", str(run), "--lengths=8,4"])
    assert "8,4 must increase" in capsys.readouterr().err
