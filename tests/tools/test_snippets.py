"""The code blocks of README.md and docs/: what they show can be typed as it is.

A comment directly before a block says who else is responsible for it:

    <!-- not run: REASON -->
    <!-- run by tests/path/test_x.py -->

Of all other blocks, `yaml` is loaded as a configuration, `isp` commands of `bash` are parsed, and
`python` is run: the blocks of a page in order, in one namespace, on one CPU rank. A configuration
that begins with a comment `# NAME.yaml` is the file that commands of its page mean by this name.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import re
import shlex
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import chdir, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import yaml

from isp.cli import program
from isp.config import JobConfig, load_config
from isp.config.keys import KeyTable
from tests.ranks import run_programs
from tests.train.jobs import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

_FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r"<!-- (not run|run by):? +(.*\S) -->\s*\Z")
_LANGUAGES = {"", "bash", "python", "yaml"}
_BEFORE_A_COMMAND = {"do", "then", "time", "nohup", "exec", "srun", "if"}

_SIZES = {
    "hidden_size": 1024,
    "intermediate_size": 256,
    "num_hidden_layers": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "head_dim": 16,
    "vocab_size": 512,
    "max_position_embeddings": 1 << 20,
}
"""Of a model that can be split in every layout of a page; no weights are made."""


class Block(NamedTuple):
    """One fenced block of a page."""

    page: Path
    line: int
    language: str
    text: str
    reason: str
    """Why it is not run here; empty if it is."""
    runner: str
    """The file of the test that runs it; empty if that is this one."""

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def is_run_here(self) -> bool:
        return not self.reason and not self.runner


def _blocks(page: Path) -> Iterator[Block]:
    """Yield the fenced blocks of a page, in order."""
    text = page.read_text()
    for found in _FENCE.finditer(text):
        said = _COMMENT.search(text[: found.start()])
        reason = said[2] if said and said[1] == "not run" else ""
        runner = said[2] if said and said[1] == "run by" else ""
        line = text.count("\n", 0, found.start()) + 1
        yield Block(page, line, found[2], textwrap.dedent(found[3]), reason, runner)


BLOCKS = [block for page in PAGES for block in _blocks(page)]


def _pages_with(language: str) -> list[Path]:
    here = (block for block in BLOCKS if block.language == language and block.is_run_here)
    return [*dict.fromkeys(block.page for block in here)]


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def test_comments_name_a_test_and_languages_are_spelled_one_way() -> None:
    """Catches a block that nothing runs, since its test is gone or its language is not known."""
    wrong = [b.place for b in BLOCKS if b.runner and not (ROOT / b.runner).is_file()]
    wrong += [b.place for b in BLOCKS if b.language not in _LANGUAGES]
    assert wrong == []


# -- configurations


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of a dense model and of one with experts, and a text."""
    place = tmp_path_factory.mktemp("models")
    experts = {"num_experts": 64, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    for name, more in (("llama", {}), ("qwen3_moe", experts)):
        (place / name).mkdir()
        described = {"model_type": name, **_SIZES, **more}
        (place / name / "config.json").write_text(json.dumps(described))
    (place / "text.txt").write_text("some text\n" * 100)
    return place


def _with_existing(values: dict[str, Any], folders: Path) -> dict[str, Any]:
    """Return the values of a file with a model, and with folders and text that exist."""
    values = {key: {} if section is None else section for key, section in values.items()}
    values.setdefault("model", {"hf": "llama"})
    values.setdefault("data", {})
    values["data"] = {"source": "text.txt"} | values["data"]
    model, training = values["model"], values.get("training", {})
    if (folder := model.get("hf")) is not None and not (ROOT / str(folder)).is_dir():
        model["hf"] = _folder(str(folder), folders)
    for method in ("dpo", "distill"):
        for key, value in training.get(method, {}).items():
            if isinstance(value, str) and "/" in value:
                training[method][key] = _folder(value, folders)
    return values


def _folder(name: str, folders: Path) -> str:
    """Return a folder with a model of the same kind, by its name."""
    has_experts = re.search(r"(?i)moe|mixtral|-a\d+b|deepseek|gpt-oss|expert", name)
    return str(folders / ("qwen3_moe" if has_experts else "llama"))


def _load(text: str, overrides: Sequence[str], folders: Path, ranks: int | None = None) -> None:
    """Load a configuration as a command does, and lay it out on its ranks."""
    path = folders / "page.yaml"
    path.write_text(yaml.safe_dump(_with_existing(yaml.safe_load(text) or {}, folders)))
    words = [_in_words(word, folders) for word in overrides]
    config = load_config(path, words)
    if ranks is not None:
        config.for_ranks(ranks)
        config.topology(ranks)


def _in_words(word: str, folders: Path) -> str:
    """Return a word of a command line, with a model's folder that exists."""
    if (found := re.fullmatch(r"(--model\.hf=)?(\.*/[\w./-]+)", word)) is None:
        return word
    return (found[1] or "") + _folder(found[2], folders)


@pytest.mark.parametrize("page", _pages_with("yaml"), ids=_name)
def test_configurations_are_read(page: Path, folders: Path) -> None:
    """Catches a key that was renamed, a value that is refused, sections that do not fit."""
    faults = []
    for block in _blocks(page):
        if block.language == "yaml" and block.is_run_here:
            try:
                _load(block.text, [], folders)
            except Exception as error:
                faults.append(f"{block.place}: {error}")
    assert not faults, "\n".join(faults)


# -- commands


def _commands(text: str) -> Iterator[list[str]]:
    """Yield the words of each command in a shell script, without redirections."""
    for line in text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="();<>|&")
        lexer.whitespace_split = True
        words: list[str] = []
        skips = False
        for word in [*lexer, ";"]:
            if word.strip("();|&") == "":
                if words:
                    yield words
                words, skips = [], False
            elif word.strip("<>&") == "":
                skips = True
            elif skips:
                skips = False
            else:
                words.append(word)


class IspCall(NamedTuple):
    """A command line of `isp`, and on how many ranks a launcher starts it."""

    words: list[str]
    ranks: int | None


def _isp_call(words: Sequence[str]) -> IspCall | None:
    """Return what a command line runs of `isp`, None if it runs something else."""
    pending = [*words]
    while pending and (pending[0] in _BEFORE_A_COMMAND or re.match(r"\w+=", pending[0])):
        del pending[0]
    if pending[:1] == ["isp"]:
        return IspCall(pending[1:], None)
    if pending[:1] not in (["torchrun"], ["python"]) or "-m" not in pending:
        return None
    place = pending.index("-m")
    launcher, called = pending[:place], pending[place + 1 :]
    if called[:1] != ["isp"]:
        return None
    sizes = re.findall(r"--n(?:nodes|proc[-_]per[-_]node)[ =](\d+)", " ".join(launcher))
    return IspCall(called[1:], math.prod(map(int, sizes)) if sizes else None)


def _parsed(call: IspCall) -> argparse.Namespace | None:
    """Return what the parser of `isp` makes of a call, None if it prints and exits as --help does.

    Raises ValueError with the parser's message.
    """
    program._check_removed(call.words)
    said = StringIO()
    try:
        with redirect_stderr(said), redirect_stdout(StringIO()):
            return program._parse(program._split(call.words))
    except SystemExit as ended:
        if ended.code:
            raise ValueError(said.getvalue().splitlines()[-1]) from None
        return None


def _check_call(call: IspCall, files: Mapping[str, str], folders: Path) -> None:
    """Parse a call of `isp`, and load its configuration: the page's, or the repository's."""
    args = _parsed(call)
    if args is None:
        return
    keys = KeyTable.of(JobConfig)
    for word in args.overrides:
        path = tuple(word.removeprefix("--").partition("=")[0].split("."))
        if word.startswith("--") and path not in keys.hints and path not in keys.sections:
            raise ValueError(f"{word}: no such key")
    name = getattr(args, "config", None)
    if name is None or not name.endswith(".yaml"):
        return
    nproc = getattr(args, "nproc", None)
    ranks = call.ranks if nproc is None or call.words[0] not in ("train", "profile") else nproc
    if getattr(args, "parallel", None) == "auto":
        ranks = None
    if (text := files.get(Path(name).name)) is None and (ROOT / name).is_file():
        text = (ROOT / name).read_text()
    if text is not None:
        _load(text, args.overrides, folders, ranks)
    elif name.startswith("configs/"):
        raise ValueError(f"{name}: no such file")


def _files(blocks: Sequence[Block]) -> dict[str, str]:
    """Return the configurations that begin with a comment that names them: `# long.yaml ..`."""
    found = {}
    for block in blocks:
        if block.language == "yaml" and (named := re.match(r"# ([\w./-]+\.yaml)\b", block.text)):
            found[Path(named[1]).name] = block.text
    return found


@pytest.mark.parametrize("page", _pages_with("bash"), ids=_name)
def test_commands_are_parsed(page: Path, folders: Path) -> None:
    """Catches an option or a key that was renamed, and a script that is gone."""
    faults, blocks = [], [*_blocks(page)]
    for block in blocks:
        if block.language != "bash" or not block.is_run_here:
            continue
        for words in _commands(block.text):
            try:
                if (call := _isp_call(words)) is not None:
                    _check_call(call, _files(blocks), folders)
                scripts = [
                    w for w in words if re.match(r"(tools|configs|tests)/.*\.(py|sh|yaml)$", w)
                ]
                if gone := [script for script in scripts if not (ROOT / script).is_file()]:
                    raise ValueError(f"{gone[0]}: no such file")
            except Exception as error:
                faults.append(f"{block.place}: {shlex.join(words)}: {error}")
    assert not faults, "\n".join(faults)


# -- Python


def _run(rank: int, blocks: Sequence[Block], folder: Path) -> None:
    """Run the blocks one after the other, in one namespace, in `folder`."""
    # Blocks may start ranks, as `isp.check` does; a daemon, as the ranks of tests are, may not.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    names = vars(ModuleType("page"))
    with chdir(folder), redirect_stdout(StringIO()):
        for block in blocks:
            exec(compile(block.text, block.place, "exec"), names)


@pytest.mark.parametrize("page", _pages_with("python"), ids=_name)
def test_python_runs(page: Path, tmp_path: Path) -> None:
    """Catches a name that was moved, and an example that no longer works."""
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    blocks = [b for b in _blocks(page) if b.language == "python" and b.is_run_here]
    run_programs(1, _run, blocks, tmp_path, timeout_seconds=30.0)


# -- the checks themselves


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("isp trian configs/quickstart.yaml", "invalid choice"),
        ("isp train configs/quickstart.yaml --nprocs 4", "did you mean --nproc"),
        ("isp train configs/gone.yaml", "no such file"),
        ("FOO=1 isp train configs/quickstart.yaml --optimizer.rate 1 > log", "no such key"),
        ("isp train configs/quickstart.yaml --nproc 3", "parallel"),
        ("torchrun --nnodes 1 --nproc-per-node 3 \\\n  -m isp train page.yaml", "parallel"),
        ("isp train page.yaml --parallel.tensor.size 3", "tensor"),
        ("isp evaluate RUN --html x", "was removed"),
    ],
)
def test_a_wrong_command_is_found(text: str, fault: str, folders: Path) -> None:
    """Catches a check that passes everything."""
    (words,) = _commands(text)
    call, page = _isp_call(words), (ROOT / "configs/quickstart.yaml").read_text()
    assert call is not None
    with pytest.raises(ValueError, match=fault):
        _check_call(call, {"page.yaml": page}, folders)


def test_a_comment_belongs_to_the_block_after_it(tmp_path: Path) -> None:
    """Catches a comment that is not seen, or excuses more than one block."""
    page = tmp_path / "page.md"
    page.write_text(
        "<!-- not run: needs a GPU -->\n```bash\nisp x\n```\n\n```yaml\na: 1\n```\n"
        "* a list\n\n  <!-- run by tests/tools/test_docs.py -->\n  ```python\n  1 / 0\n  ```\n"
    )
    found = [(b.language, b.reason, b.runner, b.text) for b in _blocks(page)]
    assert found == [
        ("bash", "needs a GPU", "", "isp x\n"),
        ("yaml", "", "", "a: 1\n"),
        ("python", "", "tests/tools/test_docs.py", "1 / 0\n"),
    ]
