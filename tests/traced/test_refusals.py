"""Models that `isp.parallelize` does not take, and what it says of them; no ranks are started."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import isp
from isp.parallel import Mode
from isp.train import host_memory
from isp.train.host_memory import check_memory_of_states
from tests.traced.models import job, tiny
from tests.traced.own import Own, OwnBlock


def _parallelised() -> nn.Module:
    model = Own()
    isp.parallelize(model, job())
    return model


def _part_of_one() -> nn.Module:
    blocks: Any = _parallelised().get_submodule("blocks")
    return blocks


def _wrapped() -> nn.Module:
    model = Own()
    whole = model.norm.forward
    model.norm.forward = lambda x: whole(x)
    return model


def _compiled() -> nn.Module:
    model = Own()
    model.blocks[1].compile()
    return model


def _frozen() -> nn.Module:
    return Own().requires_grad_(False)


def _quantised() -> nn.Module:
    model = Own()
    weight = torch.zeros(32, 32, dtype=torch.int8)
    model.blocks[0].q.weight = nn.Parameter(weight, requires_grad=False)
    return model


class _TiedByHand(Own):
    def forward(self, ids: Tensor, positions: Tensor) -> Any:
        return F.linear(super().forward(ids, positions) @ self.tokens.weight, self.tokens.weight)


class _Matrix(Own):
    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.eye(32))


class _NoAttention(nn.Embedding):
    def __init__(self) -> None:
        super().__init__(4, 4)

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        return super().forward(ids)


class _AttendsTwice(OwnBlock):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(super().forward(x))


class _LargeValues(OwnBlock):
    def forward(self, x: Tensor) -> Tensor:
        y = x.unflatten(-1, (4, 8))
        return x + isp.attention(y[..., :4], y[..., :4], y).flatten(2)


def _with_block(kind: type[OwnBlock]) -> nn.Module:
    model = Own()
    model.blocks[1] = kind(32, 4, 2, 0.0)
    return model


def _checkpointing() -> nn.Module:
    model = tiny("llama")
    model.gradient_checkpointing_enable()
    return model


def _without_positions() -> nn.Module:
    from transformers import BartConfig, BartForCausalLM

    return BartForCausalLM(BartConfig(vocab_size=96, d_model=32, decoder_layers=1, dropout=0.0))


MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "twice": (_parallelised, "was parallelised before, or another library has wrapped it"),
    "part of one": (_part_of_one, "was parallelised before"),
    "copy": (lambda: copy.copy(_wrapped()), "norm (LayerNorm) has a forward of its own"),
    "compiled": (_compiled, "blocks.1 (OwnBlock) was compiled"),
    "frozen": (_frozen, "all parameters are frozen"),
    "quantised": (_quantised, "blocks.0.q.weight is of torch.int8"),
    "tied by hand": (_TiedByHand, "tokens.weight is read by"),
    "matrix": (_Matrix, "matrix [32, 32] of _Matrix is neither of"),
    "attends twice": (lambda: _with_block(_AttendsTwice), "attention 2 times, not once"),
    "large values": (lambda: _with_block(_LargeValues), "values of 8 features and keys of 4"),
    "no attention": (_NoAttention, "_NoAttention calls no attention"),
    "other call": (
        lambda: nn.Sequential(nn.Linear(4, 4)),
        "could not be traced: it is called with",
    ),
    "checkpointing": (_checkpointing, "model.gradient_checkpointing_disable()"),
    "dropout": (lambda: tiny("llama", attention_dropout=0.1), "asks for attention dropout 0.1"),
    "without positions": (_without_positions, "BartForCausalLM does not look at position_ids"),
    "chunks": (
        lambda: tiny("llama4_text", attention_chunk_size=16, num_local_experts=2),
        "attention_chunk_size=16 in config.json attends in chunks",
    ),
    "balance": (
        lambda: tiny("deepseek_v3", output_router_logits=True),
        "asks for a loss that balances experts",
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_that_cannot_be_driven_are_refused(name: str) -> None:
    """Catches a model that is driven wrongly, or fails without saying where and why."""
    make, said = MODELS[name]
    with pytest.raises(ValueError, match=r".") as raised:
        isp.parallelize(make(), job())
    assert said in str(raised.value)
    assert not dist.is_initialized()


def test_positions_that_depend_on_the_whole_row_are_refused() -> None:
    """Catches ranks that turn their part of a row by other angles than the whole would be."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    with pytest.raises(ValueError, match=r"dynamic .* of parallel\.tensor\.size=2 ranks"):
        isp.parallelize(tiny("llama", rope_parameters=rope), job(tensor=2))
    assert not dist.is_initialized()


def test_a_file_needs_no_other_sections(tmp_path: Path) -> None:
    """Catches a library that asks for text or sizes which its caller brings."""
    (tmp_path / "own.yaml").write_text("optimizer: {lr: 0.01}")
    run = isp.parallelize(Own(), tmp_path / "own.yaml")
    assert run.config.optimizer.lr == 0.01


def _router() -> nn.Module:
    """A Llama whose MLP looks at its input beside the linears of its plan."""
    model = tiny("llama")
    plain = type(model.model.layers[1].mlp)

    class _Looking(plain):  # type: ignore[valid-type, misc]
        def forward(self, x: Tensor) -> Any:
            return super().forward(x) * x.mean()

    model.model.layers[1].mlp.__class__ = _Looking
    return model


def _counted_heads() -> nn.Module:
    """A Llama that attends with all its heads, whatever its linears give."""
    model = tiny("llama")
    attention = model.model.layers[1].self_attn

    class _Counting(type(attention)):  # type: ignore[misc]
        def forward(self, hidden_states: Tensor, **_: Any) -> Any:
            from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

            attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
            q, k, v = (
                linear(hidden_states).reshape(1, -1, heads, self.head_dim).transpose(1, 2)
                for linear, heads in ((self.q_proj, 4), (self.k_proj, 2), (self.v_proj, 2))
            )
            out, _ = attend(self, q, k, v, None, scaling=self.scaling)
            return self.o_proj(out.reshape(*hidden_states.shape[:-1], -1)), None

    attention.__class__ = _Counting
    return model


def _own_vector() -> nn.Module:
    """A Llama whose attention has a vector of its own, which a rank sees a part of."""
    model = tiny("llama")
    attention = model.model.layers[1].self_attn

    class _Scaling(type(attention)):  # type: ignore[misc]
        def forward(self, hidden_states: Tensor, **rest: Any) -> Any:
            out, weights = super().forward(hidden_states, **rest)
            return out * self.temperature, weights

    attention.temperature = nn.Parameter(torch.ones(1, dtype=torch.float64))
    attention.__class__ = _Scaling
    return model


def _outside() -> nn.Module:
    """A Llama whose MLP reads, between its linears, what was made of its block's tokens."""
    model = tiny("llama")
    block = model.model.layers[1]

    class _Block(type(block)):  # type: ignore[misc]
        def forward(self, hidden_states: Tensor, **rest: Any) -> Any:
            self.mlp.gate = hidden_states.mean(-1, keepdim=True)
            return super().forward(hidden_states, **rest)

    class _Gated(type(block.mlp)):  # type: ignore[misc]
        def forward(self, x: Tensor) -> Any:
            return self.down_proj(self.up_proj(x) * self.gate_proj(x).sigmoid() * self.gate)

    block.__class__, block.mlp.__class__ = _Block, _Gated
    return model


def _fewer_logits() -> nn.Module:
    """A Llama that gives fewer logits than its head has."""
    model = tiny("llama")

    class _Fewer(type(model)):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            out = super().forward(*args, **kwargs)
            out.logits = out.logits[..., :-3]
            return out

    model.__class__ = _Fewer
    return model


SPLIT: dict[str, tuple[Callable[[], nn.Module], int, str]] = {
    "own": (Own, 2, "its plan does not cut what blocks.0 attends with"),
    "no plan": (lambda: tiny("stablelm"), 2, "its plan does not cut what model.layers.0 attends"),
    "latent": (lambda: tiny("deepseek_v3"), 2, "its plan does not cut what model.layers.0 attends"),
    "heads": (lambda: tiny("llama"), 4, "size=4 must divide the 4 heads and 2 KV heads"),
    "features": (
        lambda: tiny("phi3", intermediate_size=49),
        2,
        "must divide the 49 features by which model.layers.0.mlp.down_proj is cut",
    ),
    "reads": (_router, 2, "model.layers.1.mlp gives its input to mean"),
    "dropout": (lambda: tiny("phi", resid_pdrop=0.1), 2, "resid_dropout drops 0.1"),
    "counted heads": (_counted_heads, 2, "model.layers.1 attends with other heads than its rank's"),
    "own vector": (_own_vector, 2, "model.layers.1.self_attn.temperature lies in model.layers.1."),
    "outside": (_outside, 2, "[1, 8, 1]"),
    "fewer logits": (_fewer_logits, 2, "its logits are not all that lm_head gives"),
}


@pytest.mark.parametrize("name", SPLIT)
def test_features_that_cannot_be_split_are_refused(name: str) -> None:
    """Catches features split where a model's code, or its plan, has them whole."""
    make, size, said = SPLIT[name]
    with pytest.raises(ValueError, match=r"parallel\.tensor\.") as raised:
        isp.parallelize(make(), job(size, mode=Mode.MTP))
    assert said in str(raised.value)
    assert not dist.is_initialized()


def test_states_that_a_host_has_no_room_for_are_told_beforehand(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Catches a pool that fails once ranks have met; frozen weights have no states."""
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 2**10)
    config = job(offload_states=True)
    with pytest.raises(ValueError, match=r"ranks keep .* of optimizer states in this machine"):
        isp.parallelize(Own(), config)
    assert not dist.is_initialized()
    check_memory_of_states(config, config.topology(1), 1, num_trained=0)
