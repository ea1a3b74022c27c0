"""The one place that replaces forwards, and the order of wrappers."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import isp
from isp.core.mixers.api import Mixers
from isp.core.weights.wp_communicator import LocalWeights
from isp.models.forwards import Forwards, ModuleForward, Wrap
from isp.models.tracing.calls import Call, Kind
from isp.models.tracing.position import ForwardPass, Masks, Position, mixing_key

ISP = Path(isp.__file__).parent
CALLERS = {
    "models/positions.py": "tables that count tokens, before the trace",
    "models/huggingface/patches/calls.py": "modules of transformers that mix tokens, before it",
    "models/sharding/pipeline_split.py": "copies that are compared before ranks start",
    "planner/dry.py": "norms of a rehearsal, which have no wrappers",
    "loop/parallelize.py": "a model that was left half sharded, which refuses to run",
}
"""The other files that call `set_forward`, and their purpose."""


def test_no_other_file_replaces_a_forward() -> None:
    """Catches a forward whose final version depends on the order in which files replaced it."""
    assigned, callers = set[str](), set[str]()
    for file in ISP.rglob("*.py"):
        name = str(file.relative_to(ISP))
        for node in ast.walk(ast.parse(file.read_text())):
            targets = node.targets if isinstance(node, ast.Assign) else []
            if any(isinstance(t, ast.Attribute) and t.attr == "forward" for t in targets):
                assigned.add(name)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                if node.func.id == "setattr" and ast.unparse(node.args[1]) == "'forward'":
                    assigned.add(name)
                if node.func.id == "set_forward" and name != "models/forwards.py":
                    callers.add(name)
    assert assigned == {"models/forwards.py"}
    assert callers == CALLERS.keys()


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


def test_a_wrapper_is_added_once() -> None:
    """Catches one call that is counted twice, and a wrapper that is added too late."""
    module, forwards = _Own(), Forwards()
    forwards.add(module, Wrap.CALL, _note("", []))
    with pytest.raises(AssertionError, match="two wrappers CALL"):
        forwards.add(module, Wrap.CALL, _note("", []))
    forwards.install()
    with pytest.raises(AssertionError, match="installed already"):
        forwards.add(module, Wrap.AHEAD, _note("", []))


def test_recorders_see_calls_that_mix_tokens() -> None:
    """Catches a recorder's hook that is not called, or is called after its removal."""
    communicator, noted = LocalWeights(), list[Tensor]()
    position = Position(communicator)
    position.mixers = mock.create_autospec(Mixers)
    calls = (Call(Kind.LINEAR, "a.q", "a"), Call(Kind.ATTENTION, "a", "a"))
    key, x = mixing_key("a", 1), torch.ones(1)
    handle = position.register_mixing_hook(key, noted.append)
    for planned, count in ((True, 1), (False, 1), (True, 2)):  # without a plan nothing is passed
        with position.passing(ForwardPass("a", calls, Masks(None), planned=planned)):
            position.current("a.q").arrive(Kind.LINEAR, "a.q")
            position.mix(Kind.ATTENTION, x)
        assert len(noted) == count
    handle.remove()
    with position.passing(ForwardPass("a", calls[1:], Masks(None))):
        position.mix(Kind.ATTENTION, x)
    assert len(noted) == 2
