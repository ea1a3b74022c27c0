"""The plain decoder on one device against the models of transformers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import isp
from isp.config import JobConfig
from isp.core.optim.config import MuonConfig
from model.decoder import Decoder, Experts
from tests.model.decoders import CONFIG, MADE, S, filled
from tests.model.folders import of_decoder
from tests.models.models import Rows, Trained, assert_trained_as, job, packed_rows, trained
from tests.ranks import run_each

POSITIONS = torch.arange(S).expand(2, -1)


@pytest.mark.parametrize("name", MADE)
def test_the_decoder_equals_its_family_in_transformers(name: str) -> None:
    """Catches an option that is ignored, in logits or in a gradient, and other names of weights."""
    pytest.importorskip("transformers", minversion="5")
    theirs = of_decoder(MADE[name], S)
    decoder = Decoder(MADE[name]).double()
    decoder.load_state_dict(theirs.model.state_dict())
    tokens = torch.randint(50, (2, S), generator=torch.Generator().manual_seed(0))
    found, expected = decoder(tokens, POSITIONS), theirs(tokens)
    assert _far(found, expected) < 1e-12
    for logits in (found, expected):
        F.cross_entropy(logits.flatten(0, 1), tokens.roll(-1, 1).flatten()).backward()
    gradients = {name: p.grad for name, p in theirs.model.named_parameters()}
    for name, parameter in decoder.named_parameters():
        assert _far(parameter.grad, gradients.pop(name)) < 1e-12, name
    assert not gradients


def _trained(rank: int, case: tuple[nn.Module, JobConfig, list[Rows]]) -> Trained:
    model, config, data = case
    return trained(isp.parallelize(model, config), data)


def test_muon_updates_experts_as_those_of_transformers() -> None:
    """Catches gate and up as one matrix in one model and two in the other."""
    pytest.importorskip("transformers", minversion="5")
    data = [packed_rows(4, S, [[S], [5, 19], [S], [S]], seed) for seed in range(2)]
    config = job(1, 2, name="muon", muon=MuonConfig(lr=2e-2))
    cases: dict[str, tuple[nn.Module, JobConfig, list[Rows]]] = {}
    for family in ("mixtral", "qwen2_moe", "qwen3_moe"):
        keys = replace(MADE[family], vocab_size=160)
        theirs = of_decoder(keys, S).model.train()
        decoder = Decoder(keys).double()
        decoder.load_state_dict(theirs.state_dict())
        cases |= {family: (decoder, config, data), f"{family}, theirs": (theirs, config, data)}
    found = run_each(2, _trained, cases)
    for family in [name for name in cases if "theirs" not in name]:
        assert_trained_as(found[f"{family}, theirs"][0], found[family], family)


def _far(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).abs().max() / expected.abs().max()).item()


def test_compiled_functions_compute_the_same() -> None:
    """Catches a lost gradient; core/layers/test_compiled.py checks the kernels."""
    tokens, found = torch.arange(2 * S).view(2, S) % 50, []
    with torch.compiler.set_stance("force_eager"):
        for compiled in (False, True):
            model = filled(replace(CONFIG, qk_norm=True, compile=compiled))
            logits = model(tokens, POSITIONS)
            gradients = torch.autograd.grad(logits.square().sum(), [*model.parameters()])
            found.append([logits, *gradients])
    for plain, of_kernels in zip(*found, strict=True):
        torch.testing.assert_close(of_kernels, plain, rtol=1e-11, atol=1e-11)


def test_grouped_products_equal_one_product_per_expert() -> None:
    """Catches a weight that is not transposed, and tokens of one expert in the group of another."""
    torch.manual_seed(0)
    experts = Experts(replace(CONFIG, num_experts=5, moe_intermediate_size=24))
    for parameter in experts.parameters():
        nn.init.normal_(parameter)
    x, weights = torch.randn(7, CONFIG.hidden_size), torch.rand(7, 2)
    numbers = torch.tensor([[4, 0], [0, 2], [2, 4], [0, 4], [4, 2], [0, 2], [2, 0]])  # not 1 and 3
    found = []
    for dtype in (torch.float32, torch.float64):
        given = [x.to(dtype).requires_grad_(), weights.to(dtype).requires_grad_()]
        out = experts.to(dtype)(given[0], numbers, given[1])
        gradients = torch.autograd.grad(out.square().sum(), [*given, *experts.parameters()])
        found.append([out, *gradients])
    for grouped, plain in zip(*found, strict=True):
        assert _far(grouped.double(), plain) < 1e-5
