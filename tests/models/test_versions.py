"""Models under versions of transformers that call the same arguments by other names."""

from __future__ import annotations

import importlib
import inspect
import re
import runpy
from pathlib import Path
from unittest import mock

import pytest
import setuptools

import isp
from isp.models.model import TracedModel
from isp.models.versions import NEWEST_TRANSFORMERS, OLDEST_TRANSFORMERS, warn_of_version
from isp.train.check import Check, CheckCase
from isp.train.check_layouts import Layout
from isp.train.check_subjects import Subject
from tests.models.models import job, tiny

pytest.importorskip("transformers")
ROOT = Path(__file__).parents[2]

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
    for page in ("README.md", "isp/models/README.md", "constraints.txt"):
        text = " ".join(Path(page).read_text().replace("#", "").split())
        assert f"transformers {OLDEST_TRANSFORMERS} to {NEWEST_TRANSFORMERS}" in text, page
