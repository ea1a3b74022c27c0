"""Gathering experts or exchanging tokens: the rule, and the reports of plans."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from isp.cli import main
from isp.core.comm.tag import Purpose
from isp.planner.counts import _ANY
from isp.planner.experts import ExpertLayer, crossing_tokens, expert_traffic
from isp.planner.walk import walk
from tests.planner.test_counts import EXPERTS, case_of
from tests.train.runs import SEQ_LEN, Layout, Task


class Pair(NamedTuple):
    """Published speeds, in one unit, of a model trained both ways."""

    hidden: int
    num_experts: int
    used: int
    tokens: int
    """Tokens of a rank in a micro-batch."""
    gathered: float
    exchanged: float
    crossing: int


PAIRS = {
    "d768, 16 H100": Pair(768, 64, 2, 65536, 1_067_478, 712_104, 27_648),
    "d1024, 16 H100": Pair(1024, 64, 2, 65536, 752_313, 413_356, 36_864),
    "360B-A21B, 64 GB200": Pair(6144, 128, 4, 65536, 19.4, 26.3, 221_184),
}
"""Models whose experts have half of the model's hidden features."""


@pytest.mark.parametrize("name", PAIRS)
def test_the_rule_says_which_published_way_was_faster(name: str) -> None:
    """Catches a forgotten transfer of the weights or of the tokens."""
    pair = PAIRS[name]
    numbers = 3 * pair.hidden * pair.hidden // 2
    layer = ExpertLayer(pair.num_experts, pair.used, pair.hidden, numbers)
    crossing = crossing_tokens([layer] * 3)
    assert crossing == pair.crossing == 9 * pair.hidden // 2 * pair.num_experts / pair.used / 4
    assert (pair.tokens > crossing) is (pair.gathered > pair.exchanged)
    assert layer.gathered() == pytest.approx(layer.exchanged(pair.crossing))


@pytest.mark.parametrize("on_cpu", [True, False])
def test_the_reported_bytes_of_gathering_are_those_of_the_plan(on_cpu: bool) -> None:
    """Catches shapes of other weights, uneven shards, and gradients counted in the wrong dtype."""
    layout = Layout(tensor=2, weight=4, data=2)
    case = replace(case_of(layout, Task(model=EXPERTS), "bfloat16"), on_cpu=on_cpu)
    found = expert_traffic(case)
    assert found is not None
    transfers = walk(case, _ANY, 3, 1).sent.items()
    of_experts = [(t, n) for t, n in transfers if ".experts." in str(t.tag)]
    assert {t.tag.purpose for t, _ in of_experts} == {Purpose.WEIGHT, Purpose.WEIGHT_GRADIENT}
    passes = 3 if on_cpu else 4  # on CPU ranks sum gradients themselves, in their own dtype
    kept = 2 / (passes * 2 * len(found.layers))  # the last layer's weights stay for backward
    sent = sum(n * t.sent_bytes for t, n in of_experts)
    assert sent == pytest.approx(found.gathered * (1 - kept))
    assert (found.layers[0].num_experts, found.layers[0].used, found.tokens) == (5, 2, SEQ_LEN // 2)
    # 8 experts are sent, as ranks have at most 2 of 5; half of the blocks exchange tokens again
    assert found.crossing == pytest.approx(8 / 2 * passes * 3 * 16 / 5)


def test_plans_say_which_way_sends_less(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a break-even point of another layout, and a column for a model without experts."""
    path, words = tmp_path / "job.yaml", ["--data.seq_len=512", "--fabric=cpu"]
    model = "{preset: tiny, num_experts: 4, moe_intermediate_size: 64}"
    path.write_text(f"model: {model}\ndata: {{source: python-stdlib, micro_bsz: 1}}\n")
    layouts = ["layouts", str(path), "--world=2", "--top=50", *words]
    assert main([*layouts, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["layouts"]
    said = {(x["mode"], x["weight"], x["tensor"], x["expert"], x["experts"]["less"]) for x in found}
    of_isp = {case[1:] for case in said if case[0] == "isp"}  # 512 tokens, or 256
    assert of_isp >= {(2, 1, 1, "gather"), (2, 2, 1, "exchange"), (2, 2, 2, "exchange")}
    assert (2, 1, 2, "gather") not in of_isp
    assert {less for mode, *_, less in said if mode != "isp"} == {"-"}
    plan = ["plan", str(path), "--parallel.weight.size=2", *words]
    assert main(plan) == 0
    assert f"equal at {9 * 64 * 2 // 4} tokens" in capsys.readouterr().out
    assert main([*plan, "--model.num_experts=0"]) == 0
    assert not re.search(r"\bexperts\b", capsys.readouterr().out)
