"""Models under versions of transformers that call the same arguments by other names."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import logging
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import setuptools
from torch import nn

import isp
from isp.models import known_code
from isp.models.huggingface.patches import calls as adapters
from isp.models.huggingface.tiny import tiny_model
from isp.models.huggingface.versions import (
    NEWEST_TRANSFORMERS,
    OLDEST_TRANSFORMERS,
    warn_of_version,
)
from isp.models.known_code import check_code, source_hash
from isp.models.traced_model import TracedModel
from isp.parity.compare import Check, CheckCase
from isp.parity.layouts import Layout
from isp.parity.subjects import Subject
from tests.models.models import instead_of, job, tiny

pytest.importorskip("transformers")
ROOT = Path(__file__).parents[3]

_NAMES = {
    "bart": (
        ["BartLearnedPositionalEmbedding"],
        "past_key_values_length|cache_length",
    ),
    "deepseek_v32": (
        ["DeepseekV32Indexer", "DeepseekV32Attention", "DeepseekV32DecoderLayer"],
        "past_key_values|cache",
    ),
}
"""Of a type: classes that have an argument, and names of it up to transformers 5.23, and since."""


def _rename(monkeypatch: pytest.MonkeyPatch, space: str, name: str) -> None:
    """Make the classes of `_NAMES` anew from their source, with an argument of another name."""
    module = importlib.import_module(f"transformers.models.{space}.modeling_{space}")
    kinds, known = _NAMES[space]
    for kind in kinds:
        source = re.sub(r" *@deprecate_kwarg\(.*\n", "", inspect.getsource(getattr(module, kind)))
        monkeypatch.setattr(module, kind, None)  # puts the class back at the end
        exec(re.sub(rf"\b({known})\b", name, source), vars(module))


@pytest.mark.parametrize(
    ("space", "name"),
    [(space, name) for space, (_, known) in _NAMES.items() for name in known.split("|")],
)
def test_an_argument_may_have_either_name(
    monkeypatch: pytest.MonkeyPatch, space: str, name: str
) -> None:
    """Catches a model that one version of transformers alone runs, or runs right."""
    from transformers import AutoConfig

    _rename(monkeypatch, space, name)
    subject = Subject.of_config(AutoConfig.for_model(space))
    case = CheckCase(packed=True, recomputed=False)
    assert Check(subject, [Layout(2, 1)], cases=[case]).run(Layout(2, 1)).agrees


def test_an_indexer_that_takes_its_cache_by_an_unknown_name_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Catches a version of transformers of which a failed assertion is all that is said."""
    _rename(monkeypatch, "deepseek_v32", "states")
    with pytest.raises(ValueError, match=r"DeepseekV32Indexer takes .*, states, and gave no"):
        TracedModel(tiny("deepseek_v32"))


@pytest.mark.parametrize("version", ["5.17.0", "5.20.1", "5.24.3"])
def test_versions_in_the_range_are_not_warned_of(
    version: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Catches a range that is compared as text or as whole versions."""
    warn_of_version.cache_clear()
    warn_of_version(version)
    assert not caplog.records


@pytest.mark.parametrize("version", ["4.57.3", "5.9.0", "5.25.0.dev0"])
def test_another_version_is_warned_of_once(
    version: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a version that is refused, and a warning for each model or rank."""
    monkeypatch.setattr("transformers.__version__", version)
    warn_of_version.cache_clear()
    with mock.patch.dict("os.environ", RANK="1", WORLD_SIZE="2"):
        warn_of_version(version)
    assert "transformers" not in caplog.text
    warn_of_version.cache_clear()
    for _ in range(2):
        isp.parallelize(tiny("llama"), job())
    (record,) = [record for record in caplog.records if "transformers" in record.getMessage()]
    assert f"transformers {version} is not one of the versions" in record.getMessage()


def test_the_range_is_the_same_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a requirement, a pin or a page that is left behind when the range moves."""
    monkeypatch.chdir(ROOT)
    with mock.patch.object(setuptools, "setup") as setup:
        runpy.run_path("setup.py")
    required = [x for x in setup.call_args.kwargs["extras_require"]["hf"] if "transformers" in x]
    oldest, newest = ([*map(int, v.split("."))] for v in (OLDEST_TRANSFORMERS, NEWEST_TRANSFORMERS))
    assert required == [f"transformers>={OLDEST_TRANSFORMERS},<{newest[0]}.{newest[1] + 1}"]
    pinned = re.findall(r"^transformers==(.*)", Path("constraints.txt").read_text(), re.MULTILINE)
    assert oldest <= [*map(int, pinned[0].split("."))][:2] <= newest
    for page in ("README.md", "docs/reference/architectures.md", "constraints.txt"):
        text = " ".join(Path(page).read_text().replace("#", "").split())
        assert f"transformers {OLDEST_TRANSFORMERS} to {NEWEST_TRANSFORMERS}" in text, page


_XGLM = "transformers.models.xglm.modeling_xglm"

_SCALED = "self.q_proj(hidden_states) * self.scaling"


@pytest.fixture
def compared(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """The log of comparisons, where no code was compared before; no other test sees them."""
    caches = known_code._is_known, known_code._compare
    for of_process in caches:
        of_process.cache_clear()
    with caplog.at_level(logging.INFO, known_code.__name__):
        yield caplog
    for of_process in caches:
        of_process.cache_clear()


def _xglm() -> Any:
    from transformers import AutoConfig

    return tiny_model(AutoConfig.for_model("xglm", num_layers=2))


def _change(monkeypatch: pytest.MonkeyPatch, folder: Path, scaled: str) -> None:
    """Let XGLM's module be another file, in which queries are `scaled` otherwise."""
    module = importlib.import_module(_XGLM)
    text = inspect.getsource(module)
    assert text.count(_SCALED) == 1
    instead_of(monkeypatch, folder, _XGLM, "XGLMForCausalLM", text.replace(_SCALED, scaled))


def _names_of(log: pytest.LogCaptureFixture) -> list[str]:
    """Return the classes in the log lines of comparisons."""
    lines = [r.getMessage() for r in log.records if r.name == known_code.__name__]
    return re.findall(r"(\w+) \(transformers [\d.]+\) is not .* gives the same", "\n".join(lines))


def test_known_code_is_not_compared(compared: pytest.LogCaptureFixture) -> None:
    """Catches a comparison before each run."""
    with mock.patch.object(known_code, "tiny_model", side_effect=AssertionError):
        check_code(_xglm())
        check_code(nn.Linear(1, 1))
    assert not _names_of(compared)


def test_changed_code_that_computes_the_same_is_trusted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, compared: pytest.LogCaptureFixture
) -> None:
    """Catches a refusal for each release, a comparison for each model, and rounding."""
    _change(monkeypatch, tmp_path, "self.scaling * self.q_proj(hidden_states)")
    for _ in range(2):
        isp.parallelize(_xglm(), job())
    assert _names_of(compared) == ["XGLMAttention"]


@pytest.mark.parametrize(
    ("scaled", "differs"),
    [
        ("self.q_proj(hidden_states * self.scaling)", "has other logits with isp's"),
        (
            "self.scaling * self.q_proj(hidden_states.detach())",
            r"has other gradients \(.*\) with isp's",
        ),
        ("self.q_proj(hidden_states) * self.scale", "no attribute 'scale'"),
    ],
)
def test_changed_code_that_computes_something_else_is_refused(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    compared: pytest.LogCaptureFixture,
    scaled: str,
    differs: str,
) -> None:
    """Catches a run that silently computes what an earlier version did."""
    _change(monkeypatch, tmp_path, scaled)
    named = r"XGLMAttention \(transformers [\d.]+\) is not code that isp knows.*"
    with pytest.raises(ValueError, match=f"{named}{differs}.*: .*isp.register_mixer"):
        isp.parallelize(_xglm(), job())
    # the user's own forward is for the code that there is
    monkeypatch.setitem(adapters._forwards, f"{_XGLM}.XGLMAttention", lambda *_: None)
    check_code(_xglm())
    assert not _names_of(compared)


def test_a_subclass_of_known_code_is_known_if_it_overrides_nothing(
    compared: pytest.LogCaptureFixture,
) -> None:
    """Catches the forward of a subclass that is replaced by that of its base."""
    model = _xglm()
    attention = model.model.layers[1].self_attn
    kind = type(attention)
    attention.__class__ = type("Plain", (kind,), {"more": 1, "__init__": lambda *_: None})
    check_code(model)
    attention.__class__ = type("Other", (kind,), {"forward": lambda *_: None})
    with pytest.raises(ValueError, match=r"Other .* a small copy of the model has no .*Other"):
        check_code(model)
    with pytest.raises(ValueError, match=r"Other .* Sequential has no configuration"):
        check_code(nn.Sequential(attention))
    assert not compared.records
    check_code(nn.Sequential(attention), allow_unchecked=True)
    assert "could not be compared with code that it knows: Sequential" in compared.text


_TEXT = """
@final
class Own(Base):
    def forward(self, x):
        return half(x) + 1

def half(x):
    return x / 2
"""


@pytest.mark.parametrize(
    ("old", "new", "is_same"),
    [
        (
            "return half(x) + 1",
            "'Words.'  # a comment\n        return (half(x)\n            + 1)",
            True,
        ),
        ("def half", "def unread(): ...\n\ndef half", True),
        ("x / 2", "x / 3", False),
        ("half(x) + 1", "half(x) + 2", False),
        ("Base", "nn.Module", False),
        ("@final\n", "", False),
    ],
)
def test_a_hash_is_of_what_code_computes(old: str, new: str, is_same: bool) -> None:
    """Catches words and formatting that count, and functions and decorators that do not."""
    assert old in _TEXT
    known, found = source_hash(_TEXT, "Own"), source_hash(_TEXT.replace(old, new), "Own")
    assert known is not None
    assert (found == known) is is_same
    assert source_hash(_TEXT, "Other") is None
