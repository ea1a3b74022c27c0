"""Limits of foreign code: computation without end, or with unbounded memory, is one error."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Thread

import numpy as np
import pytest

from isp.config import load_config
from isp.data import rendering, tokenizer
from isp.data.rendering import TemplateFailure, render
from isp.data.tokenizer import HFTokenizer
from isp.models.huggingface import adapters as lora
from isp.models.huggingface import make
from isp.step.job_models import trained_model
from isp.utils.limits import check_in_child, limited
from tests.models.folders import write_folder, write_job

GIB = 2**30


def _loop() -> None:
    while True:
        pass


def _pattern() -> None:
    re.fullmatch("(a+)+", "a" * 60 + "!")


def _stubborn() -> None:
    while True:
        with suppress(Exception):
            time.sleep(0.01)


def _grow() -> None:
    kept = []
    while True:
        kept.append(bytearray(10**5))


FOREVER = [_loop, _pattern, _stubborn]
GROWING = [_grow, lambda: "a" * (2 * GIB), lambda: [0] * GIB]


@pytest.mark.parametrize("code", FOREVER)
def test_code_without_end_is_ended(code: Callable[[], object]) -> None:
    """Catches a limit that a library's own `except` swallows, or that leaves a timer running."""
    before = signal.getsignal(signal.SIGALRM), resource.getrlimit(resource.RLIMIT_AS)
    begin = time.monotonic()
    fault = r"file\.json takes more than 0\.2 s"
    with pytest.raises(ValueError, match=fault), limited("file.json", seconds=0.2, most_bytes=GIB):
        code()
    with pytest.raises(ValueError, match=fault):
        check_in_child("file.json", code, seconds=0.2, most_bytes=GIB)
    assert time.monotonic() - begin < 20
    assert (signal.getsignal(signal.SIGALRM), resource.getrlimit(resource.RLIMIT_AS)) == before


@pytest.mark.parametrize("code", GROWING)
def test_code_that_grows_is_ended(code: Callable[[], object]) -> None:
    """Catches a process, and with it the run, that the system kills for lack of memory."""
    fault = r"file\.json takes more than 0\.25 GiB of memory"
    limit = GIB // 4
    with pytest.raises(ValueError, match=fault), limited("file.json", seconds=60, most_bytes=limit):
        code()
    with pytest.raises(ValueError, match=fault):
        check_in_child("file.json", code, seconds=60, most_bytes=limit)


def test_a_limit_in_a_thread_does_not_affect_other_threads() -> None:
    """Catches a limit in a reader thread with which allocations of the main thread fail."""
    found = []

    def in_thread() -> None:
        with limited("file.json", seconds=60, most_bytes=GIB):
            found.append(resource.getrlimit(resource.RLIMIT_AS))

    thread = Thread(target=in_thread)
    thread.start()
    thread.join()
    assert found == [resource.getrlimit(resource.RLIMIT_AS)]


def test_limits_nest_and_keep_an_earlier_timer() -> None:
    """Catches an inner limit that removes the outer one, and a lost timer of the caller."""
    rung = []
    old_timer = signal.setitimer(signal.ITIMER_REAL, 0)
    old = signal.signal(signal.SIGALRM, lambda *_: rung.append(time.monotonic()))
    try:
        begin = time.monotonic()
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(ValueError, match="outer"):
            _nested()
        while not rung and time.monotonic() - begin < 10:
            time.sleep(0.01)
        assert len(rung) == 1
        assert rung[0] - begin >= 0.3
    finally:
        signal.setitimer(signal.ITIMER_REAL, *old_timer)
        signal.signal(signal.SIGALRM, old)


def test_the_error_of_a_child_is_raised() -> None:
    """Catches an error that is lost or taken for a limit, and a child process that remains."""
    with pytest.raises(ValueError, match=r"^file\.json: no number$"):
        check_in_child("file.json", lambda: _raise("no number\nmore"), seconds=60, most_bytes=GIB)
    with pytest.raises(ValueError, match="GiB of memory"):
        check_in_child("file.json", os.abort, seconds=60, most_bytes=GIB)
    check_in_child("file.json", lambda: None, seconds=60, most_bytes=GIB)
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


def _nested() -> None:
    with limited("outer", seconds=0.2, most_bytes=GIB):
        with limited("inner", seconds=60, most_bytes=GIB):
            pass
        with limited("inner", seconds=60, most_bytes=GIB):
            _loop()


def _raise(text: str) -> None:
    raise RuntimeError(text)


# -- inputs that contain foreign code ----------------------------------------------------------

FOR, END = "{% for i in range(99999) %}" * 3, "{% endfor %}" * 3
TEMPLATES = {
    "loops without end": f"{FOR}{END}",
    "output without end": f"{FOR}x{END}",
    "macros that call each other": (
        "{% macro a(n) %}{% if n %}{{ a(n - 1) }}{{ a(n - 1) }}{% endif %}{% endmacro %}{{ a(60) }}"
    ),
    "a product": "{{ 'x' * 10 ** 10 }}",
    "a width": "{{ 'x' | center(10 ** 10) }}",
    "a power": "{{ 3 ** (10 ** 9) % 7 }}",
    "strings that double": (
        "{% set n = namespace(x='x') %}"
        "{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}"
    ),
}


@pytest.mark.parametrize("kind", TEMPLATES)
def test_a_chat_template_is_limited(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a template that hangs, or takes all memory, in `isp data inspect` or in training."""
    monkeypatch.setattr(rendering, "_MOST_SECONDS", 0.5)
    with pytest.raises(TemplateFailure, match=r"takes more than (0\.5 s|1 GiB)"):
        render(TEMPLATES[kind], [{"role": "user", "content": "a"}], variables={})


def _tokenizer(folder: Path, **parts: object) -> Path:
    """Write a byte-level tokenizer.json with some of its parts replaced."""
    described = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": {"</s>": 0, "a": 1}, "unk_token": "a"},
    }
    file = folder / "tokenizer.json"
    file.write_text(json.dumps(described | parts))
    return file


def _replace(pattern: dict[str, str], content: str) -> dict[str, object]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def _split(pattern: str) -> dict[str, object]:
    split = {"pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"type": "Split", **split}


GROWTH = [_replace({"String": "q"}, "q" * 1000) for _ in range(6)]
TOKENIZERS: dict[str, dict[str, object]] = {
    "a text that grows": {"normalizer": {"type": "Sequence", "normalizers": GROWTH}},
    "a text that grows a little": {
        "normalizer": _replace({"String": "a"}, "a " * 300),
        "pre_tokenizer": {"type": "Whitespace"},
    },
    "a pattern that backtracks": {"pre_tokenizer": _split("(a|a|aa)+$")},
    "a rule that backtracks": {"normalizer": _replace({"Regex": "(a+)+$"}, "b")},
    "no tokenizer": {"model": {"type": "unheard of"}},
}


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_tokenizer_is_tried_before_it_is_used(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a process that hangs in, or is aborted by, a native library."""
    pytest.importorskip("tokenizers")
    monkeypatch.setattr(tokenizer, "_MOST_SECONDS", 10.0)
    monkeypatch.setattr(tokenizer, "_MOST_BYTES", GIB)
    file = _tokenizer(tmp_path, **TOKENIZERS[kind])
    with pytest.raises(ValueError, match=r"^data\.tokenizer=.*tokenizer\.json"):
        HFTokenizer(file)
    HFTokenizer(_tokenizer(tmp_path))  # a file that has changed is tried again


NO_UNKNOWN: dict[str, dict[str, object]] = {
    "WordLevel": {"vocab": {"</s>": 0, "a": 1}, "unk_token": "[UNK]"},
    "WordPiece": {
        "vocab": {"</s>": 0, "a": 1},
        "unk_token": "[UNK]",
        "continuing_subword_prefix": "##",
        "max_input_chars_per_word": 100,
    },
    "Unigram": {"vocab": [["</s>", 0.0], ["a", -1.0]], "unk_id": None},
}


@pytest.mark.parametrize("kind", NO_UNKNOWN)
def test_a_tokenizer_without_an_unknown_token_is_accepted(tmp_path: Path, kind: str) -> None:
    """Catches a trial with texts that such a tokenizer cannot encode, and a traceback for a user's
    text that it cannot encode.
    """
    pytest.importorskip("tokenizers")
    keys = ("single_word", "lstrip", "rstrip", "normalized")
    end = {"id": 0, "content": "</s>", "special": True, **dict.fromkeys(keys, False)}
    file = _tokenizer(tmp_path, model={"type": kind, **NO_UNKNOWN[kind]}, added_tokens=[end])
    tokenizer = HFTokenizer(file)
    assert tokenizer.encode("a a").tolist() == [1, 1]
    for encode in (tokenizer.encode, tokenizer.encode_prompt, tokenizer.encode_with_offsets):
        with pytest.raises(ValueError, match=r"^data\.tokenizer=.* begins with 'b': .*: use a"):
            encode("b")
    with pytest.raises(ValueError, match=r"^data\.tokenizer=.* cannot decode tokens: "):
        tokenizer.decode(np.array([-1]))


SIZES = {
    "layers": ("llama", {"num_hidden_layers": 10**9}),
    "a list of layers": ("qwen3", {"num_hidden_layers": 10**9}),
}


@pytest.mark.parametrize("kind", SIZES)
def test_the_sizes_of_a_folder_are_limited(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a config.json of one kilobyte whose model takes all memory before it is refused."""
    monkeypatch.setattr(make, "_MODEL_BYTES", GIB // 8)
    monkeypatch.setattr(make, "_MODEL_SECONDS", 3.0)
    monkeypatch.setattr(make, "_CONFIG_BYTES", GIB // 8)
    monkeypatch.setattr(make, "_CONFIG_SECONDS", 2.0)
    model_type, sizes = SIZES[kind]
    folder = write_folder(tmp_path / "model", model_type, weights=False)
    config = load_config(write_job(tmp_path, folder))
    file = folder / "config.json"
    described = json.loads(file.read_text())
    described.pop("layer_types", None)
    file.write_text(json.dumps(described | sizes))
    with pytest.raises(ValueError, match=r"config\.json|cannot build") as refused:
        _ = trained_model(config)
    assert len(str(refused.value).splitlines()) == 1


def test_the_pattern_of_an_adapter_is_limited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches an adapter_config.json whose module pattern backtracks without end."""
    pytest.importorskip("peft")
    monkeypatch.setattr(lora, "_MOST_SECONDS", 0.5)
    folder = write_folder(tmp_path / "model", "llama", weights=False)
    pattern = r"(([a-z]|[a-z_]|[.0-9])+)+!"
    words = [f"--model.adapter.target_modules={pattern}", "--model.adapter.r=2"]
    config = load_config(write_job(tmp_path, folder), words)
    with pytest.raises(ValueError, match=r"model\.adapter\.target_modules=.* takes more than 0\.5"):
        _ = trained_model(config)
