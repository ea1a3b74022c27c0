"""Treatment of weights by an update: which are decayed, and which matrices they contain."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import isp
from isp.checkpoint import checkpointer
from isp.config import JobConfig
from isp.core.mesh.layout import Matrices
from isp.core.optim.config import OptimizerConfig, ParamGroupConfig
from isp.core.optim.update_rules import values_of
from isp.loop.parallel_run import ParallelRun
from isp.models.build import trained_layouts
from isp.models.sharding import matrices
from isp.models.traced_model import TracedModel
from tests.models.models import decayed, job, packed_rows, tiny, trained
from tests.models.own import VOCAB
from tests.ranks import run_each

DATA, ADAM = [packed_rows(2, 24, [[24], [10, 14]])], {"exp_avg", "exp_avg_sq"}

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
    # q, k and v of each head are adjacent: one cut per head instead of three
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
def test_weights_of_models_have_the_right_matrices(name: str) -> None:
    """Catches fused weights taken for one matrix, and tables, routers and tied weights taken for
    matrices of blocks.
    """
    found = trained_layouts(TracedModel(tiny(name, **SIZES.get(name, {}))))
    assert {key: found[key].matrices for key in CASES[name]} == CASES[name]


@pytest.mark.parametrize("name", ["cohere", "gpt_oss", "ernie4_5_moe", "gpt2"])
def test_transformers_decays_the_same_weights(name: str) -> None:
    """Catches decay of head norms [H, d], of expert biases [E, N], or of router biases [1, E]."""
    found = trained_layouts(TracedModel(model := tiny(name, **SIZES.get(name, {}))))
    assert {key for key, layout in found.items() if layout.decays} == decayed(model)


class HeadNorm(nn.Module):
    """A scale for each head, [H, d], without a name or place that suggests a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4, 8))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:]) * self.scale


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.q_scale, self.ln_k = nn.Linear(32, 96), HeadNorm(), nn.RMSNorm((4, 8))
        self.position_bias = nn.Embedding(64, 32)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        q, k, v = self.qkv(x + self.position_bias(positions)).unflatten(-1, (3, 4, 8)).unbind(2)
        return x + isp.attention(self.q_scale(q), self.ln_k(k), v).flatten(2)


class OwnNorms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(VOCAB, 32), nn.Linear(32, VOCAB)
        self.blocks = nn.ModuleList([Block()])

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x, positions)
        return self.head(x)


def test_norms_and_biases_of_users_modules_are_not_decayed() -> None:
    """Catches norms that only their class shows, a table of biases that muon takes for a matrix,
    and a param group that cannot override this.
    """
    group = ParamGroupConfig(pattern="ln_k|position_bias", rule="muon", weight_decay=0.7)
    plain = OptimizerConfig(name="muon", weight_decay=0.2)
    asked = OptimizerConfig(name="muon", param_groups=(group,))
    found = {}
    for name, layout in trained_layouts(TracedModel(OwnNorms())).items():
        (_, decay, rule), (_, other, same) = (values_of(name, layout, x) for x in (plain, asked))
        assert rule == same
        found[name] = (rule, decay > 0, other == 0.7)
    assert found == {
        "tokens.weight": ("adamw", True, False),
        "head.weight": ("adamw", True, False),
        "head.bias": ("adamw", False, False),
        "blocks.0.qkv.weight": ("muon", True, False),
        "blocks.0.qkv.bias": ("adamw", False, False),
        "blocks.0.q_scale.scale": ("adamw", False, False),
        "blocks.0.ln_k.weight": ("adamw", False, True),
        "blocks.0.position_bias.weight": ("adamw", False, True),
    }


def _states(run: ParallelRun) -> dict[str, dict[str, Tensor]]:
    return {
        name: {kind: x.clone() for kind, x in of["tensors"].items() if kind != "master"}
        for name, of in run.train_step.optimizer.state_dict()["parameters"].items()
    }


def _resumed(rank: int, case: tuple[JobConfig, Path]) -> None:
    config, folder = case
    with mock.patch.object(matrices, "is_table_of_biases", return_value=False):  # as it was
        earlier = isp.parallelize(OwnNorms(), config)
    trained(earlier, DATA)
    earlier.save(folder)
    run = isp.parallelize(OwnNorms(), config)
    trained(run, DATA)  # states that are not zero
    with mock.patch.object(checkpointer.logger, "warning") as warned:
        run.load(folder)
    saved, found = _states(earlier), _states(run)
    name = "blocks.0.position_bias.weight"
    assert (saved.pop(name).keys(), found[name].keys()) == ({"momentum_buffer"}, ADAM)
    assert not any(x.any() for x in found.pop(name).values())
    assert all(torch.equal(x, found[key][kind]) for key in saved for kind, x in saved[key].items())
    assert [call.args[-1] for call in warned.call_args_list] == [name] * (rank == 0)
    assert trained(run, DATA).norms[0] > 0


def test_states_of_a_weight_with_another_rule_begin_anew(tmp_path: Path) -> None:
    """Catches a run that cannot resume because a table of biases is no longer a matrix."""
    muon = {"name": "muon", "weight_decay": 0.1}
    group = (ParamGroupConfig(pattern="position_bias", rule="muon"),)
    cases = {
        "muon": (job(2, 2, **muon), tmp_path / "muon"),
        "adamw, and muon of the table alone": (job(1, 2, param_groups=group), tmp_path / "adamw"),
    }
    run_each(2, _resumed, cases)
