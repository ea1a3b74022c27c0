"""The architectures of transformers against their unmodified models."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import warnings
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

import isp
from isp.models.huggingface.tiny import tiny_config
from isp.parity.compare import CASES, Check, CheckCase, Differences, worst_of
from isp.parity.layouts import Layout
from isp.parity.subjects import Subject
from tests.models import models
from tests.ranks import run_ranks

transformers = pytest.importorskip("transformers")
ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "tools"))
import check_architectures as tool  # noqa: E402

THROUGHOUT = ("gpt_oss", "deepseek_v3")
"""Windows, sinks and experts; latent attention and experts."""

_ELSEWHERE = (*THROUGHOUT, "llama", "gpt2", "mixtral")
"""Trained in every layout below, or in test_parallelize.py and others."""

SELECTED = [name for name in tool.MECHANISMS if name not in _ELSEWHERE]
NAMES = [name for name in SELECTED if name in tool.ARCHITECTURES]  # older releases lack some
GROUPS = [NAMES[start::6] for start in range(6)]

COMBINATIONS = [(layout, packed) for packed, layout in product((True, False), tool.LAYOUTS)]


class _Job(NamedTuple):
    """One step of an architecture."""

    check: Check
    layout: Layout
    case: CheckCase


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _chosen(name: str) -> list[tuple[Layout, CheckCase]]:
    """A step of this architecture; together, those of all are in every layout, packed and not."""
    number = SELECTED.index(name)
    layout, packed = COMBINATIONS[number % len(COMBINATIONS)]
    return [(layout, CheckCase(packed, recomputed=number // 2 % 2 == 0))]


def _jobs(name: str, chosen: list[tuple[Layout, CheckCase]]) -> list[_Job]:
    """And one more in a mode that splits features, where the model's plan does; else, if no other
    splits the sequence, one that does."""
    subject = Subject.of_config(tool.config_of(name))
    fits = tool.layouts_of(subject)
    chosen = [(x if x in fits else Layout(x.tensor, x.weight), case) for x, case in chosen]
    check = Check(subject, fits, cases=list(dict.fromkeys(case for _, case in chosen)))
    number = [*SELECTED, *THROUGHOUT].index(name)
    split = [x for x in reversed(tool.SPLIT[2 * (number % 3) :][:2]) if x in fits]
    if not split and all(layout.tensor == 1 for layout, _ in chosen):
        split = [Layout(2, 1)]
    return [_Job(check, *step) for step in (*chosen, *((x, chosen[-1][1]) for x in split[:1]))]


def _on_rank(rank: int, jobs: list[_Job]) -> list[Differences]:
    return [job.check.on_rank(rank, job.layout, [job.case])[0] for job in jobs]


def _assert_equal(jobs: list[_Job]) -> None:
    of_ranks = run_ranks(4, _on_rank, jobs, timeout_seconds=110)
    wrong = {}
    for job, found in zip(jobs, map(worst_of, zip(*of_ranks, strict=True)), strict=True):
        assert len(found.gradients) == len(job.check.references[job.case.packed].gradients)
        if not found.agree:
            where = f"{job.check.subject.name}, {job.layout}, {job.case}"
            wrong[where] = found.loss, found.worst_gradient, found.miscounted
    assert wrong == {}


@pytest.mark.slow
@pytest.mark.parametrize("names", GROUPS, ids=lambda names: names[0])
def test_every_mechanism_is_its_unmodified_model(names: list[str]) -> None:
    """Catches a loss, gradient or step that is another in some layout of some mechanism.

    Where the model has a tensor-parallel plan, in one of the modes that follow it, too.
    """
    _assert_equal([job for name in names for job in _jobs(name, _chosen(name))])


@pytest.mark.slow
@pytest.mark.parametrize("name", THROUGHOUT)
def test_two_architectures_in_every_layout(name: str) -> None:
    """Catches what only one layout of windows, sinks, latent attention or experts gets wrong.

    What one of the two has packed in a layout, the other has not.
    """
    first = THROUGHOUT.index(name)
    chosen = [
        (layout, CheckCase((first + place) % 2 == 0, place // 2 % 2 == 0))
        for place, layout in enumerate(tool.LAYOUTS)
    ]
    _assert_equal(_jobs(name, chosen))


LEAKING = ("lfm2 (conv)", "qwen3_next", "nemotron_h", "jamba")


@pytest.mark.parametrize("name", ["llama", *LEAKING])
def test_documents_are_kept_apart_where_transformers_lets_them_leak(name: str) -> None:
    """Catches documents that no comparison would tell from one: a convolution's, each scan's.

    transformers is given positions, by which its attention alone knows of documents.
    """
    case = CheckCase(packed=True, recomputed=False)
    check = Check(Subject.of_config(tool.config_of(name)), [Layout(2, 1)], cases=[case])
    reference, plain = check.references[True], check.subject.plain()
    alone = reference.outputs["lm_head"]  # [R, S, V]
    batches = reference.rows.micro_batches(0, len(alone), packed=True)
    with torch.no_grad():
        joined = torch.cat([check.subject.logits(plain, b.tokens, b.positions)[0] for b in batches])
    apart = (joined.view_as(alone) - alone).abs().max() / alone.abs().max()
    assert apart > 1e-3 if name in LEAKING else apart < 1e-12
    assert check.run(Layout(2, 1)).agrees


def test_a_model_without_attention_is_split_over_heads_x_context() -> None:
    """Catches a limit of query heads for a model that has none, and tokens out of order."""
    layout, cases = Layout(4, 1, context=2), [CheckCase(False, False), CheckCase(True, False)]
    check = Check(Subject.of_config(tool.config_of("mamba2")), [layout], cases=cases)
    assert check.run(layout).agrees


def _in_16_bits(rank: int, model: nn.Module, ids: Tensor) -> float:
    return isp.parallelize(model, models.job(dtype="bfloat16")).loss(ids).item()


@pytest.mark.skipif("inkling2_text" not in tool.ARCHITECTURES, reason="an older transformers")
def test_weights_of_16_bits_are_read_where_transformers_keeps_32() -> None:
    """Catches a router whose tokens are in float32, and whose weights are not."""
    from transformers import AutoModelForCausalLM

    config = tiny_config(tool.config_of("inkling2_text"))
    model, ids = AutoModelForCausalLM.from_config(config), torch.randint(3, 90, (1, 24))
    expected = model(input_ids=ids, labels=ids).loss.item()
    assert run_ranks(1, _in_16_bits, model, ids) == [pytest.approx(expected, rel=1e-3)]


def test_the_chosen_steps_cover_all() -> None:
    """Catches a combination of sizes and packing that nothing runs."""
    chosen = [step for name in SELECTED for step in _chosen(name)]
    assert {(layout, case.packed) for layout, case in chosen} == set(COMBINATIONS)
    assert {case for _, case in chosen} == {*CASES}


def test_the_table_is_up_to_date() -> None:
    """Catches a type that is not in the table, or of which it says other than a trace does.

    A few are traced: all take a minute. Another version of transformers than the table's knows
    other types, and refuses none that the table supports.
    """
    table, names = tool.facts_before(), sorted(tool.ARCHITECTURES)
    found = tool.changes([name for name in table if name in names][::25])
    if transformers.__version__ == tool.version_before():
        assert [*table] == names
        assert found == []
    assert [str(change) for change in found if change.lost] == []


@pytest.mark.skipif("deepseek_v32" not in tool.ARCHITECTURES, reason="an older transformers")
def test_a_release_that_renames_an_argument_is_caught(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Catches a comparison with the table that misses what transformers 5.24 did: an argument of
    every forward got another name, here in a copy of one modeling file."""
    name = "transformers.models.deepseek_v32.modeling_deepseek_v32"
    source = inspect.getsource(importlib.import_module(name))
    renamed = re.sub(r"\b(cache|past_key_values)\b", "kept", source)
    models.instead_of(monkeypatch, tmp_path, name, "DeepseekV32ForCausalLM", renamed)
    (change,) = tool.changes(["deepseek_v32"])
    assert change.lost
    assert "gave no index keys to a cache" in str(change)


def test_all_code_that_is_replaced_is_known() -> None:
    """Catches code of this transformers that was not compared, and another hash than a run's."""
    package = Path(transformers.__file__).parent
    assert tool.sources([package]) == tool.KNOWN.read_text()
