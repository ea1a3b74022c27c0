"""The matrices that a model's weights consist of, as an update of whole ones takes them."""

from __future__ import annotations

from typing import Any

import pytest

from isp.models.build import trained_layouts
from isp.models.model import TracedModel
from isp.parallel.layout import Matrices
from tests.models.models import tiny

OUTSIDE, LINEAR = Matrices(of_block=False), Matrices()
SIZES: dict[str, dict[str, Any]] = {
    "phi3": {"num_key_value_heads": 1},
    "gpt_oss": {"num_local_experts": 4},
}
CASES = {
    "phi3": {
        "model.embed_tokens.weight": OUTSIDE,
        "lm_head.weight": OUTSIDE,
        "model.norm.weight": None,
        "model.layers.1.self_attn.qkv_proj.weight": Matrices(sizes=(32, 8, 8), heads=6),
        "model.layers.1.self_attn.o_proj.weight": LINEAR,
        "model.layers.1.mlp.gate_up_proj.weight": Matrices(sizes=(48, 48)),
    },
    "gpt2": {
        "transformer.wte.weight": None,  # tied
        "transformer.h.0.attn.c_attn.weight": Matrices(dim=-1, sizes=(32, 32, 32), heads=12),
        "transformer.h.0.attn.c_attn.bias": None,
    },
    # q, k and v of each head lie together: no cut in three, but one per head
    "gpt_neox": {"gpt_neox.layers.1.attention.query_key_value.weight": Matrices(heads=12)},
    "gpt_oss": {
        "model.layers.1.self_attn.k_proj.weight": Matrices(heads=2),
        "model.layers.1.mlp.router.weight": None,
        "model.layers.1.mlp.experts.gate_up_proj": Matrices(dim=-1),  # every other feature
    },
    "deepseek_v3": {
        "model.layers.1.self_attn.kv_a_proj_with_mqa.weight": Matrices(sizes=(16, 4)),
        "model.layers.1.self_attn.q_b_proj.weight": Matrices(heads=4),
        "model.layers.1.mlp.experts.gate_up_proj": Matrices(sizes=(16, 16)),
        "model.layers.1.mlp.experts.down_proj": LINEAR,
        "model.layers.1.mlp.gate.weight": None,
    },
}


@pytest.mark.parametrize("name", CASES)
def test_matrices_of_models(name: str) -> None:
    """Catches fused weights that are taken for one matrix, and tables, routers and tied weights
    that are taken for matrices of blocks."""
    found = trained_layouts(TracedModel(tiny(name, **SIZES.get(name, {}))))
    assert {key: found[key].matrices for key in CASES[name]} == CASES[name]
