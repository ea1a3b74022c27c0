"""The one place that replaces forwards, and the order of what encloses them."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import nn

import isp
from isp.models.forwards import Forwards, ModuleForward, Wrap

ISP = Path(isp.__file__).parent
ELSEWHERE = {
    "models/forwards.py": "the one place",
    "loop/parallelize.py": "a model that was left half sharded refuses to run",
}


def test_no_other_file_replaces_a_forward() -> None:
    """Catches a forward whose owner depends on the order in which files replaced it."""
    found = set()
    for file in ISP.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            targets = node.targets if isinstance(node, ast.Assign) else []
            named = any(isinstance(t, ast.Attribute) and t.attr == "forward" for t in targets)
            by_name = (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id == "setattr"
                and getattr(node.args[1], "value", None) == "forward"
            )
            if named or by_name:
                found.add(str(file.relative_to(ISP)))
    assert found == ELSEWHERE.keys()


def _note(name: str, noted: list[str]) -> Callable[[ModuleForward], ModuleForward]:
    def wrap(inner: ModuleForward) -> ModuleForward:
        def forward(x: int) -> int:
            noted.append(name)
            y: int = inner(x)
            return y

        return forward

    return wrap


class _Own(nn.Module):
    def forward(self, x: int) -> int:
        return x + 1


def test_wrappers_nest_in_the_order_of_the_enum() -> None:
    """Catches wrappers that nest in the order in which they were added."""
    model, noted = nn.Sequential(_Own(), _Own()), list[str]()
    forwards = Forwards()
    for wrap in (Wrap.COMPUTE, Wrap.BLOCK, Wrap.CALL):
        forwards.add(model[0], wrap, _note(wrap.name, noted))
    assert model[0](1) == 2
    assert noted == []  # nothing is replaced before `install`
    forwards.install()
    assert model(1) == 3
    assert noted == ["BLOCK", "CALL", "COMPUTE"]
    assert forwards.describe(model) == "0: block > call > compute > own code"


def test_a_wrapper_is_added_once() -> None:
    """Catches two counts of one call, and a wrapper that comes too late."""
    module, forwards = _Own(), Forwards()
    forwards.add(module, Wrap.CALL, _note("", []))
    with pytest.raises(AssertionError, match="two wrappers CALL"):
        forwards.add(module, Wrap.CALL, _note("", []))
    forwards.install()
    with pytest.raises(AssertionError, match="installed already"):
        forwards.add(module, Wrap.AHEAD, _note("", []))
