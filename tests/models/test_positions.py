"""Where a model's documents begin to count."""

from __future__ import annotations

import pytest
import torch

from isp.models.hosts import host_of
from isp.models.model import TracedModel
from isp.models.tiny import tiny_model

transformers = pytest.importorskip("transformers", minversion="5.23")


@pytest.mark.parametrize("name", ["roberta", "opt", "bart"])
def test_positions_begin_as_in_the_model_alone(name: str) -> None:
    """Catches trained rows of a table of positions that are read at other tokens."""
    config = transformers.AutoConfig.for_model(name, is_decoder=True)
    model = tiny_model(config).eval()
    ids = torch.randint(20, 60, (1, 13), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        alone = model(input_ids=ids, use_cache=False).logits
        ours = host_of(model).forward(model, ids, torch.arange(13)[None])
    torch.testing.assert_close(ours, alone, rtol=0, atol=1e-12)


def test_rows_before_the_first_position_are_not_counted() -> None:
    small = tiny_model(transformers.AutoConfig.for_model("roberta", is_decoder=True))
    rows, padding = small.config.max_position_embeddings, small.config.pad_token_id
    assert TracedModel(small).learned_positions == rows - padding - 1
