"""The engine for verl without verl installed; `tools/check_with_verl.py` runs it with verl."""

from __future__ import annotations

import dataclasses
import importlib
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from isp.loop.parallel_run import ParallelRun
from tests.models.folders import write_folder
from tests.ranks import run_ranks

ENGINE = Path(__file__).parents[2] / "isp/integrations/verl.py"


def test_the_engine_only_uses_methods_that_a_run_has() -> None:
    """Catches a method that the engine calls but a run lacks; no other test imports the engine."""
    asked = set(re.findall(r"self\.(?:engine\.)?run\.(\w+)", ENGINE.read_text()))
    known = {*dir(ParallelRun), "mesh", "device"}  # the latter two are set by its making
    assert {"log_probs", "backward", "step", "named_weights", "save", "load"} <= asked <= known


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the engine's module, with empty modules for the names that it imports from verl."""

    @dataclasses.dataclass
    class EngineConfig:
        forward_only: bool = False

    base = {"BaseEngine": object, "BaseEngineCtx": object, "EngineRegistry": mock.MagicMock()}
    base["EngineRegistry"].register.return_value = lambda kind: kind
    functions = {"postprocess_batch_func": None, "prepare_micro_batches": None}
    names: dict[str, dict[str, Any]] = {
        "verl": {},
        "verl.utils": {"tensordict_utils": None},
        "verl.workers": {},
        "verl.workers.config": {"EngineConfig": EngineConfig},
        "verl.workers.engine": {},
        "verl.workers.engine.base": base,
        "verl.workers.engine.utils": functions,
    }
    for name, members in names.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "isp.integrations.verl", raising=False)
    return importlib.import_module("isp.integrations.verl")


def _initialized(rank: int, module: Any, folder: str, config: str, forward_only: bool) -> Any:
    rule = SimpleNamespace(
        lr=0.1, betas=(0.9, 0.95), weight_decay=0.1, clip_grad=1.0, total_training_steps=9,
        lr_warmup_steps=0, lr_warmup_steps_ratio=0.0,
    )  # fmt: skip
    found = module.ISPEngine(
        SimpleNamespace(local_path=folder, path=None),
        module.ISPEngineConfig(isp_config=config, forward_only=forward_only),
        rule,
        None,
    )
    with mock.patch("transformers.PreTrainedModel.from_pretrained", side_effect=AssertionError):
        found.initialize()
    run: ParallelRun = found.run
    assert (run.optimizer is None) == forward_only
    parameters = dict(run.model.named_parameters())
    assert {p.requires_grad for p in parameters.values()} == {not forward_only}
    held = sum(p.numel() for p in parameters.values())
    return {name: x.clone() for name, x in run.named_weights()}, held


@pytest.mark.parametrize("forward_only", [False, True])
def test_each_rank_only_reads_its_shards(engine: Any, tmp_path: Path, forward_only: bool) -> None:
    """Catches a model that every rank loads whole, weights that are not those of the folder, and a
    frozen weight that trains.
    """
    from safetensors.torch import load_file

    folder = write_folder(tmp_path / "model", "llama")
    (tmp_path / "isp.yaml").write_text("parallel: {weight: {size: 2}}\ntraining: {dtype: float64}")
    given = str(folder), str(tmp_path / "isp.yaml"), forward_only
    expected: dict[str, Tensor] = load_file(folder / "model.safetensors")
    for weights, held in run_ranks(2, _initialized, engine, *given):
        assert weights.keys() == expected.keys()
        assert all(torch.equal(x, expected[name].double()) for name, x in weights.items())
        assert held < 0.6 * sum(x.numel() for x in expected.values())
