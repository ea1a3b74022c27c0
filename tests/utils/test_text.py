"""Text for users: no credentials in URLs, no control characters, and durations."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from isp.cli import main
from isp.cli.failures import report
from isp.cli.output import say
from isp.config import load_config, to_yaml
from isp.config.data import SourcePart
from isp.metrics import read_metrics
from isp.train.folder.environment import Environment, RankPlace
from isp.train.folder.log_files import run_logging
from isp.utils.text import (
    format_duration,
    parse_duration,
    printable,
    redacted,
    redacted_values,
    shown,
)
from tests.step.test_phases import ALONE
from tests.train.jobs import run_folders, write_job

SECRET = "s3cr3t"
URLS = {
    f"https://me:{SECRET}@host/a.txt": "https://***@host/a.txt",
    f"https://{SECRET}@host:80/a": "https://***@host:80/a",
    f"https://me:{SECRET}@a@host/a": "https://***@host/a",
    f"simplecache::s3+x://k:{SECRET}@bucket/a": "simplecache::s3+x://***@bucket/a",
    f"https://host/a?token={SECRET}": "https://host/a?token=***",
    f"https://host/a?version=2&api_key={SECRET}#x": "https://host/a?version=2&api_key=***#x",
    f"https://host/a#access_token={SECRET}&b=1": "https://host/a#access_token=***&b=1",
    f"https://b/a?X-Amz-Credential={SECRET}%2F1&X-Amz-Date={SECRET}&X-Amz-Signature=x": (
        "https://b/a?X-Amz-Credential=***&X-Amz-Date=***&X-Amz-Signature=***"
    ),
    f"https://b/a?AWSAccessKeyId={SECRET}&Expires=1&Signature={SECRET}%3D": (
        "https://b/a?AWSAccessKeyId=***&Expires=***&Signature=***"
    ),
    f"https://b/a?sv=2024&se={SECRET}&sig={SECRET}": "https://b/a?sv=***&se=***&sig=***",
    f"https://b/a?Expires=1&Policy={SECRET}&Signature=x&Key-Pair-Id={SECRET}": (
        "https://b/a?Expires=***&Policy=***&Signature=***&Key-Pair-Id=***"
    ),
    f"https://b/a?x-goog-signature={SECRET}&amp;b=1": "https://b/a?x-goog-signature=***&amp;b=1",
}
AS_THEY_ARE = (
    "https://host/a?version=2&expires=3&tokenizer=bytes",
    "s3://bucket/folder/*.jsonl",
    "hf://owner/name:train",
    "mail me@host",
    "a?b",
    "key=value",
)


@pytest.mark.parametrize("url", URLS)
def test_credentials_in_urls_are_removed(url: str) -> None:
    """Catches a kind of credential that remains, and other text that is removed."""
    expected = URLS[url]
    for before, after in (("", ""), ("'", "' cannot be read"), ("(\n", "\n)"), ('{"a": "', '"}')):
        assert redacted(f"{before}{url}{after}") == f"{before}{expected}{after}"
    assert redacted(expected) == expected
    assert SECRET not in SourcePart(path=url).title
    assert redacted_values({"a": [url, 1, None], "b": (url,)}) == {
        "a": [expected, 1, None],
        "b": (expected,),
    }


@pytest.mark.parametrize("text", AS_THEY_ARE)
def test_text_without_credentials_is_unchanged(text: str) -> None:
    """Catches a URL that is shortened although nothing in it is secret."""
    assert shown(text) == text


@pytest.mark.parametrize("part", ["a", "#", "?a=", "://", "&token=", ":", "=.", "://@"])
@pytest.mark.timeout(20)
def test_any_text_takes_linear_time(part: str) -> None:
    """Catches a file name, or a line of a log, that takes hours to print."""
    text = part * 300_000
    assert redacted(redacted(text)) == redacted(text)
    assert len(shown(f"https://a?token={text}")) > 0


OBEYED = {
    "escape": "\x1b[2J",
    "C1": "\x9b2J",
    "bell": "\x07",
    "carriage return": "\r",
    "backspace": "\b\b",
    "null": "\0",
    "delete": "\x7f",
    "right to left": "\u202e",
    "isolate": "\u2066",
    "mark": "\u200f",
    "line separator": "\u2028",
    "half a character": "\ud800",
    "tag": "\U000e0041",
}
KEPT = "tab\tand\nline, naïve 東京\u3000 👩\u200d💻 می\u200cخو \xa0 \xad"


@pytest.mark.parametrize("kind", OBEYED)
def test_control_characters_are_escaped(kind: str) -> None:
    """Catches a control character that remains, and other text that is changed."""
    text = OBEYED[kind]
    assert printable(f"{KEPT}{text}{KEPT}") == f"{KEPT}{repr(text)[1:-1]}{KEPT}"


def _logged(text: str, folder: Path, capsys: Any) -> str:
    with pytest.MonkeyPatch.context() as patch:
        # pytest's log capture keeps the raw text, with which its reports would fail.
        patch.setattr(logging.getLogger(), "handlers", [])
        with run_logging(folder / "log", rank=0, terminal=sys.stdout):
            logging.getLogger("isp").info("%s", text)
            logging.getLogger("isp").warning("a traceback", exc_info=ValueError(text))
    return capsys.readouterr().out + (folder / "log").read_text()


def _raised(error: Exception) -> Exception:
    try:
        raise error
    except Exception as raised:
        return raised


def _reported(text: str, folder: Path, capsys: Any) -> str:
    assert report(_raised(FileNotFoundError(2, "absent", text))) == 2
    file = folder / "error.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
        patch.setenv("RANK", "0")
        report(_raised(ValueError(text)))
    found: dict[str, Any] = json.loads(file.read_text())["message"]
    said = found["message"] + found["extraInfo"]["py_callstack"]
    return f"{capsys.readouterr().err}{said}"


def _said(text: str, _: Path, capsys: Any) -> str:
    say(text)
    say(text, error=True)
    return "".join(capsys.readouterr())


def _described(text: str, _: Path, __: Any) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "orig_argv", ["isp", f"--data.source={text}"])
        patch.setenv("NCCL_X", text.replace("\0", "").encode(errors="replace").decode())
        return Environment.of([RankPlace("host", "cpu")]).to_json()


LEAVES = {"log": _logged, "error": _reported, "print": _said, "env.json": _described}


@pytest.mark.parametrize("way", LEAVES)
def test_every_output_is_escaped(
    way: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches output that does not pass through the function that escapes it."""
    text = " ".join([*URLS, *OBEYED.values()])
    found = LEAVES[way](text, tmp_path, capsys)
    assert "***" in found
    assert SECRET not in found
    assert printable(found) == found


def test_commands_print_through_one_function() -> None:
    """Catches a command that prints without `say`."""
    pytest.importorskip("ruff")
    root = Path(__file__).parents[2]
    words = ["--select", "T20", "--ignore-noqa", "--no-cache", str(root / "isp")]
    subprocess.run([sys.executable, "-m", "ruff", "check", *words], check=True)


def test_a_run_of_a_signed_url_resumes_with_another_signature(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a signature that is saved anywhere, a resume that takes another signature for other
    data, and one that uses the saved URL although it is incomplete.
    """
    fsspec = pytest.importorskip("fsspec")
    from fsspec.implementations.memory import MemoryFileSystem

    class Signed(MemoryFileSystem):
        protocol = "signed"
        store: dict[str, Any] = {}  # noqa: RUF012
        pseudo_dirs = [""]  # noqa: RUF012

        @classmethod
        def _strip_protocol(cls, path: str) -> str:
            path = path.removeprefix("signed://").partition("?")[0]
            return f"/{path.partition('@')[2] or path}".replace("//", "/")

    fsspec.register_implementation("signed", Signed, clobber=True)
    monkeypatch.setenv("ISP_CACHE", str(tmp_path / "cache"))
    job = write_job(tmp_path)
    Signed().pipe("/b/text.txt", (tmp_path / "text.txt").read_bytes())
    said = ""
    for steps, signature in ((1, f"{SECRET}1"), (2, f"{SECRET}2")):
        url = f"signed://me:{SECRET}@b/text.txt?X-Amz-Signature={signature}"
        words = ["train", str(job), *ALONE, f"--data.source={url}", f"--training.steps={steps}"]
        monkeypatch.setattr(sys, "orig_argv", ["isp", *words])
        assert main(words) == 0
        said += "".join(capsys.readouterr())
    (run,) = run_folders(job)
    assert [record.step for record in read_metrics(run / "metrics.jsonl")] == [1, 2]
    kept = yaml.safe_load((run / "config.yaml").read_text())["data"]["source"]
    assert kept == "signed://***@b/text.txt?X-Amz-Signature=***"
    texts = [path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert len(texts) > 8
    assert not [text for text in texts if SECRET.encode() in text]
    assert SECRET not in said
    assert main(["train", str(run / "config.yaml")]) == 2
    message = "X-Amz-Signature=***: its credentials were left out (***)"
    assert message in capsys.readouterr().err
    assert SECRET in to_yaml(load_config(job, [f"--data.source={url}"]))


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        (90, 90),
        ("90", 90),
        ("1:30", 90),
        ("00:45", 45),
        ("01:30:00", 5400),
        ("36:00:00", 129600),
        ("1-12:00:00", 129600),
        (" 2-00:00:01 ", 172801),
        ("0090:00", 5400),
    ],
)
def test_durations_are_parsed(text: int | str, seconds: int) -> None:
    """Catches swapped fields, such as minutes read as hours."""
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "soon", "1h", "-5", 0, "0:00", "1:2:3:4", "1-2", "1-30:00", "1:90", "1:60:00", -1]
)
def test_malformed_durations_are_refused(text: int | str) -> None:
    """Catches a typing error that is read as another duration."""
    with pytest.raises(ValueError, match=r"must be|too large"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0:00:00"),
        (59.6, "0:01:00"),
        (5025, "1:23:45"),
        (86399, "23:59:59"),
        (129600, "1-12:00:00"),
    ],
)
def test_durations_are_formatted(seconds: float, text: str) -> None:
    """Catches 60 seconds in place of a minute, and durations that do not parse back."""
    assert format_duration(seconds) == text
    if seconds:
        assert parse_duration(text) == round(seconds)
