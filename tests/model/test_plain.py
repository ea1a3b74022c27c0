"""The plain decoder beside transformers' models and beside the decoder that it is to replace."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from isp.comm import Mesh
from isp.config.models import language_model
from isp.models.build import BuiltModel, build_model
from isp.parallel import ParallelConfig
from isp.parallel.topology import Topology
from isp.settings.json_file import read_json
from model.config import ModelConfig
from model.huggingface import model_values
from model.plain import Decoder
from tests.model.folders import FAMILIES, make_folder
from tests.model.test_huggingface import _model

CONFIG = ModelConfig(
    vocab_size=50,
    hidden_size=160,  # more than a tile of random numbers
    num_layers=2,
    num_heads=8,
    num_kv_heads=4,
    intermediate_size=72,
    qkv_bias=True,
    qk_norm=True,
)


@pytest.mark.parametrize("family", FAMILIES)
def test_it_is_the_family_of_transformers(family: str, tmp_path) -> None:
    """An option that is not obeyed, in logits or in a gradient; another name of a weight."""
    pytest.importorskip("transformers", minversion="5")
    theirs = make_folder(family, tmp_path)
    decoder = Decoder(_model(model_values(read_json(tmp_path / "config.json")))).double()
    decoder.load_state_dict(theirs.model.state_dict())
    tokens = torch.randint(264, (2, 24), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(24).expand(2, -1)
    found, wanted = decoder(tokens, positions), theirs(tokens)
    assert _far(found, wanted) < 1e-12
    for logits in (found, wanted):
        F.cross_entropy(logits.flatten(0, 1), tokens.roll(-1, 1).flatten()).backward()
    gradients = {name: p.grad for name, p in theirs.model.named_parameters()}
    for name, parameter in decoder.named_parameters():
        assert _far(parameter.grad, gradients.pop(name)) < 1e-12, name
    assert not gradients


def _far(found: Tensor, wanted: Tensor) -> float:
    return ((found - wanted).abs().max() / wanted.abs().max()).item()


def test_it_begins_as_the_decoder_before_it(monkeypatch) -> None:
    """Runs that another version would begin otherwise: bits of the weights, and what they give."""
    before = _built(CONFIG)
    monkeypatch.setenv("ISP_PLAIN", "1")
    plain = _built(CONFIG)
    weights = {item.name: item.parameter for item in before.parameters}
    for item in plain.parameters:
        name, parameter = item.name, item.parameter
        earlier, first, _ = plain.model.earlier_names[name]
        assert torch.equal(parameter, weights[earlier][first : first + len(parameter)]), name
    assert plain.model.num_parameters == before.model.num_parameters
    tokens, positions = torch.arange(40)[None], torch.arange(40)[None]
    output, labels = plain.chunks[0](tokens, positions, None), tokens.roll(-1, 1)
    wanted = before.chunks[0](tokens, positions, None)
    expected = torch.ones((), dtype=torch.float64)
    loss = plain.chunks[0].loss(output, labels, expected)
    assert _far(loss, before.chunks[0].loss(wanted, labels, expected)) < 1e-14


def _built(config: ModelConfig) -> BuiltModel:
    parallel = ParallelConfig()
    return build_model(
        language_model(config, "float64"),
        parallel,
        Mesh(Topology.create(1, parallel), 0),
        seed=3,
        device=torch.device("cpu"),
        dtype=torch.float64,
    )
