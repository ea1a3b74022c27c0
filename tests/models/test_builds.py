"""Several models built in one process from one trace, or one after another."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from isp.models.huggingface.interface import interface_of
from isp.models.huggingface.tiny import tiny_model
from isp.models.roles import ParameterRole
from isp.models.runtime.stage_module import StageModule
from isp.models.traced_model import TracedModel
from tests.models.models import alone, tiny
from tests.models.own import Own

MODELS: dict[str, Callable[[], nn.Module]] = {
    "own": lambda: Own().double(),
    "llama": lambda: tiny("llama"),
}


@torch.no_grad()
def _logits(chunk: StageModule) -> Tensor:
    ids = torch.arange(20)[None]
    return chunk.logits(chunk(ids, ids, None))


@pytest.mark.parametrize("name", MODELS)
def test_a_second_build_does_not_change_the_first(name: str) -> None:
    """Catches attention of the first model that is computed by the second."""
    traced = TracedModel(MODELS[name](), in_place=False)
    first = alone(traced)
    expected = _logits(first)
    second = alone(traced)
    assert torch.equal(_logits(first), expected)
    assert torch.equal(_logits(second), expected)


def test_models_leave_nothing_in_transformers_registry() -> None:
    """Catches an entry for each model that lives as long as the process."""
    traced = TracedModel(tiny("llama"), in_place=False)
    names = set(ALL_ATTENTION_FUNCTIONS.keys())
    for _ in range(3):
        alone(traced)
    assert set(ALL_ATTENTION_FUNCTIONS.keys()) == names


@pytest.mark.parametrize("name", ["mamba", "falcon_mamba", "jamba"])
def test_a_weight_read_outside_of_its_linear_is_sharded(name: str) -> None:
    """Catches Mamba's `dt_proj.weight @ x` with a weight that is replicated on every rank."""
    roles = TracedModel(tiny(name), in_place=False).trace.roles
    found = {role for key, role in roles.items() if key.endswith("dt_proj.weight")}
    biases = {role for key, role in roles.items() if key.endswith("dt_proj.bias")}
    assert (found, biases) == ({ParameterRole.SHARDED}, {ParameterRole.VECTOR})


transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize("name", ["roberta", "opt", "bart"])
def test_positions_start_as_in_the_unmodified_model(name: str) -> None:
    """Catches trained position rows that are read for other tokens."""
    config = transformers.AutoConfig.for_model(name, is_decoder=True)
    model = tiny_model(config).eval()
    ids = torch.randint(20, 60, (1, 13), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        alone = model(input_ids=ids, use_cache=False).logits
        ours = interface_of(model).forward(model, ids, torch.arange(13)[None])
    torch.testing.assert_close(ours, alone, rtol=0, atol=1e-12)


def test_rows_before_the_first_position_are_not_counted() -> None:
    """Catches a maximum length that counts the table's rows for padding."""
    small = tiny_model(transformers.AutoConfig.for_model("roberta", is_decoder=True))
    rows, padding = small.config.max_position_embeddings, small.config.pad_token_id
    assert TracedModel(small).learned_positions == rows - padding - 1
