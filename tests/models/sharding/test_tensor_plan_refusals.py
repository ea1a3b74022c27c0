"""Models whose features cannot be split, and the refusals of mtp, msp and fsp; no ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import isp
from isp.core.mesh import Mode, ParallelConfig, PipelineConfig
from isp.core.recompute.config import Recomputation
from isp.models.traced_model import TracedModel
from tests.models.models import job, tiny
from tests.models.own import Own
from tests.models.sharding.test_pipeline_split import Plain, UsesFirst


def _router() -> nn.Module:
    """Return a Llama whose MLP reads its input other than by the linears of its plan."""
    model = tiny("llama")
    plain = type(model.model.layers[1].mlp)

    class _Looking(plain):  # type: ignore[valid-type, misc]
        def forward(self, x: Tensor) -> Any:
            return super().forward(x) * x.mean(-1, keepdim=True)

    model.model.layers[1].mlp.__class__ = _Looking
    return model


def _counted_heads() -> nn.Module:
    """Return a Llama that assumes all its heads, whatever its linears return."""
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
    """Return a Llama whose attention has a parameter of its own, which applies to a rank's part."""
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
    """Return a Llama whose MLP reads, between its linears, a tensor computed from its block's
    tokens.
    """
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
    """Return a Llama that returns fewer logits than its head computes."""
    model = tiny("llama")

    class _Fewer(type(model)):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            out = super().forward(*args, **kwargs)
            out.logits = out.logits[..., :-3]
            return out

    model.__class__ = _Fewer
    return model


def _planned(cuts: dict[str, str]) -> Callable[[], nn.Module]:
    """Return a model of convolution and attention blocks with this tensor-parallel plan."""

    def make() -> nn.Module:
        model = tiny("lfm2", layer_types=["conv", "full_attention", "conv"])
        model._tp_plan = {f"model.layers.*.{name}": style for name, style in cuts.items()}
        return model

    return make


_ATTENTION_CUTS = {f"self_attn.{name}_proj": "colwise" for name in "qkv"} | {
    "self_attn.out_proj": "rowwise"
}

SPLIT: dict[str, tuple[Callable[[], nn.Module], int, str]] = {
    "own": (Own, 2, "the attention projections of blocks.0"),
    "no plan": (lambda: tiny("stablelm"), 2, "the attention projections of model.layers.0"),
    "latent": (lambda: tiny("deepseek_v3"), 2, "the attention projections of model.layers.0"),
    "no cuts": (lambda: tiny("mamba"), 2, "it has no tensor-parallel plan, or none"),
    "cut convolution": (
        _planned({**_ATTENTION_CUTS, "conv.in_proj": "colwise", "conv.out_proj": "rowwise"}),
        2,
        "the plan shards model.layers.0.conv, which mixes tokens with a convolution",
    ),
    "no row": (
        _planned(dict.fromkeys(_ATTENTION_CUTS, "colwise_gather_output")),
        2,
        "the attention projections of model.layers.1",
    ),
    "column inside": (
        _planned({**_ATTENTION_CUTS, "self_attn.v_proj": "colwise_gather_output"}),
        2,
        "does not shard model.layers.1.self_attn.v_proj, which is inside",
    ),
    "heads": (lambda: tiny("llama"), 4, "size=4 must divide the 4 heads and 2 KV heads"),
    "features": (
        lambda: tiny("phi3", intermediate_size=49),
        2,
        "the 49 features along which model.layers.0.mlp.down_proj is",
    ),
    "reads": (_router, 2, "model.layers.1.mlp passes its input to mean"),
    "dropout": (lambda: tiny("phi", resid_pdrop=0.1), 2, "resid_dropout applies dropout 0.1"),
    "counted heads": (
        _counted_heads,
        2,
        "model.layers.1 calls attention with heads of other ranks",
    ),
    "own vector": (_own_vector, 2, "does not shard model.layers.1.self_attn.temperature"),
    "outside": (_outside, 2, "[1, 8, 1]"),
    "fewer logits": (_fewer_logits, 2, "its logits are not the whole output of lm_head"),
}


@pytest.mark.parametrize("name", SPLIT)
def test_features_that_cannot_be_split_are_refused(name: str) -> None:
    """Catches features split although the model's code, or its plan, needs all of them."""
    make, size, said = SPLIT[name]
    with pytest.raises(ValueError, match=r"parallel\.tensor\.") as raised:
        isp.parallelize(make(), job(size, mode=Mode.MTP))
    assert said in str(raised.value)
    assert not dist.is_initialized()


def test_a_passed_check_does_not_count_for_other_arguments() -> None:
    """Catches a share that runs whole but not in tiles, and stages of another trace."""
    model = tiny("llama")
    plain = type(model.model.layers[1].mlp)

    class _Long(plain):  # type: ignore[valid-type, misc]
        def forward(self, x: Tensor) -> Any:
            if x.shape[1] < 3:
                raise ValueError("a tile is too short")
            return super().forward(x)

    model.model.layers[1].mlp.__class__ = _Long
    config, whole = job(2, mode=Mode.MTP), TracedModel(model)
    whole.check_layout(config.parallel, 16)
    tiled = whole.with_options(recomputation=Recomputation(mlp_tile_tokens=1))
    with pytest.raises(ValueError, match="a tile is too short"):
        tiled.check_layout(config.parallel, 16)
    whole.check_layout(config.parallel, 16)

    stages = ParallelConfig(pipeline=PipelineConfig(size=2))
    cut, other = TracedModel(Plain()), TracedModel(UsesFirst())
    cut.check_layout(stages, 16)
    with pytest.raises(ValueError, match="use more from earlier blocks"):
        cut.with_options(shape=other.shape, trace=other.trace).check_layout(stages, 16)


class _Between(nn.Module):
    """A module that transforms the features between the column linears and the row linear of an
    MLP.
    """

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        return self.change(x)


def _changed(change: Callable[[Tensor], Tensor], *, inside: bool) -> Any:
    """Return a Llama whose second MLP applies `change` before its row linear, or `inside` a
    module.
    """
    model = tiny("llama", num_key_value_heads=4)
    mlp = model.model.layers[1].mlp

    class _Mlp(type(mlp)):  # type: ignore[misc]
        def forward(self, x: Tensor) -> Any:
            return self.down_proj(self.between(self.act_fn(self.gate_proj(x)) * self.up_proj(x)))

    mlp.__class__ = _Mlp
    mlp.between = _Between(change) if inside else change
    return model


class _MeanOfGradients(torch.autograd.Function):
    """Identity whose backward subtracts the mean of the gradients over features."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] - gradients[0].mean(-1, keepdim=True)


def _rms_norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:])


def _norm_of_heads(x: Tensor) -> Tensor:
    return _rms_norm(x.unflatten(-1, (-1, 6))).flatten(-2)


OVER_ALL: dict[str, Callable[[Tensor], Tensor]] = {
    "norm": _rms_norm,
    "mean": lambda x: x - x.mean(-1, keepdim=True),
    "softmax": lambda x: x.softmax(-1),
    "largest": lambda x: x * x.amax(-1, keepdim=True),
    "first": lambda x: x * x[..., :1],
    "halves": lambda x: torch.cat([*x.chunk(2, -1)][::-1], -1),
    "backward": _MeanOfGradients.apply,
}


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("name", OVER_ALL)
def test_code_that_needs_all_features_is_refused_by_name(name: str, inside: bool) -> None:
    """Catches code between column and row linears that runs on a rank's features but needs all."""
    traced = TracedModel(_changed(OVER_ALL[name], inside=inside))
    # The gradients of a region are compared as a whole.
    place = "mlp.between (_Between)" if inside and name != "backward" else "mlp (_Mlp)"
    for size, mode in product((2, 4), (Mode.MTP, Mode.MSP, Mode.FSP)):
        with pytest.raises(ValueError, match=r"tensor-parallel plan.* use mode isp") as raised:
            traced.check_layout(job(size, mode=mode).parallel, 16)
        assert f"needs: model.layers.1.{place} computes over all features" in str(raised.value)
        assert ("in its backward pass" in str(raised.value)) == (name == "backward")
        assert f"{48 // size} of the 48 features" in str(raised.value)
    traced.check_layout(job(2).parallel, 16)


def test_a_run_refuses_code_that_needs_all_features_before_ranks_start() -> None:
    """Catches a check that no run makes."""
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp \(_Mlp\) computes over all"):
        isp.parallelize(_changed(_rms_norm, inside=False), job(2, mode=Mode.FSP))
    assert not dist.is_initialized()


def _normed_heads() -> nn.Module:
    """Return a Llama that normalizes the outputs of all heads together."""
    model = tiny("llama", num_key_value_heads=4)
    attention = model.model.layers[1].self_attn
    attention.o_proj.register_forward_pre_hook(lambda _, given: _rms_norm(given[0]))
    return model


def _fused() -> nn.Module:
    """Return a Phi-3 whose plan cuts a fused linear as if it were a single one."""
    model = tiny("phi3")
    model._tp_plan = {
        **model.tp_plan,
        "model.layers.*.mlp.gate_up_proj": "colwise",
        "model.layers.*.mlp.down_proj": "rowwise",
    }
    return model


def _normed_logits(least: float = -torch.inf) -> nn.Module:
    """Return a Llama that subtracts the mean from its logits; those below `least` become -inf."""
    model = tiny("llama")

    class _Normed(type(model)):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            out = super().forward(*args, **kwargs)
            logits = out.logits - out.logits.mean(-1, keepdim=True)
            out.logits = logits.masked_fill(logits < least, -torch.inf)
            return out

    model.__class__ = _Normed
    return model


ELSEWHERE: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "attention": (_normed_heads, r"model\.layers\.1\.self_attn \(LlamaAttention\)"),
    "fused": (_fused, r"model\.layers\.0\.mlp \(Phi3MLP\)"),
    "logits": (_normed_logits, "code after lm_head"),
    "infinite logits": (partial(_normed_logits, -0.5), "code after lm_head"),
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_other_code_that_needs_all_features_is_refused(name: str) -> None:
    """Catches code that needs all heads or all logits, and a plan that cuts a fused linear."""
    make, said = ELSEWHERE[name]
    with pytest.raises(ValueError, match=f"tensor-parallel plan.*: {said}.* use mode isp"):
        TracedModel(make()).check_layout(job(2, mode=Mode.MTP).parallel, 16)


LOCAL: dict[str, Callable[[Tensor], Tensor]] = {
    "a norm of each head": _norm_of_heads,
    "in place": lambda x: x.mul_(2).tanh_(),
    "no gradient": lambda x: x.detach().sign(),
}


@pytest.mark.parametrize("name", LOCAL)
def test_code_that_treats_features_separately_is_accepted(name: str) -> None:
    """Catches a refusal of models that compute each share of features independently."""
    traced = TracedModel(_changed(LOCAL[name], inside=True))
    for size in (2, 4):
        traced.check_layout(job(size, mode=Mode.MTP).parallel, 16)
