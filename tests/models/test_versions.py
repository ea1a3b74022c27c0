"""Models under versions of transformers that call the same arguments by other names."""

from __future__ import annotations

import importlib
import inspect
import re

import pytest

from isp.models.model import TracedModel
from isp.train.check import Check, CheckCase
from isp.train.check_layouts import Layout
from isp.train.check_subjects import Subject
from tests.models.models import tiny

pytest.importorskip("transformers")

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
