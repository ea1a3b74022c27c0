"""The plain decoder beside transformers' models."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from isp.settings.json_file import read_json
from model.huggingface import model_values
from model.plain import Decoder
from tests.model.folders import FAMILIES, make_folder
from tests.model.test_huggingface import _model


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
