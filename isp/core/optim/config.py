"""The configuration sections `optimizer` and `lr_scheduler`, with parameter groups."""

from __future__ import annotations

import re
from dataclasses import field
from typing import Annotated, Literal, get_args

from pydantic import AfterValidator, Field

from isp.core.section import (
    Count,
    CountOrZero,
    Fraction,
    KeyRole,
    NotNegative,
    Positive,
    Text,
    section,
)

__all__ = [
    "GradScalerConfig",
    "LRSchedulerConfig",
    "MuonConfig",
    "OptimizerConfig",
    "ParamGroupConfig",
]


def _pattern(pattern: str) -> str:
    """Return `pattern`; raise ValueError if it is not a regular expression."""
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"is not a regular expression: {error}") from error
    return pattern


@section("optimizer.grad_scaler", KeyRole.METHOD)
class GradScalerConfig:
    """`optimizer.grad_scaler`: loss scaling in float16.  Names: InternEvo."""

    use: Literal["auto", "always"] = "auto"
    """auto: scale the loss only with `training.dtype: float16`, in which small gradients would
    become 0; always: with any dtype."""
    initial_scale: Positive = 2.0**16
    """Loss scale of the first step. A step whose gradients overflow is skipped, and lowers the
    scale."""
    min_scale: Positive = 1.0
    """Lower limit of the loss scale."""
    max_scale: Positive = 2.0**24
    """Upper limit of the loss scale."""
    growth_factor: Annotated[float, Field(gt=1, le=1e30)] = 2.0
    """Factor by which the loss scale is raised; powers of two do not round gradients."""
    backoff_factor: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Factor by which the loss scale is lowered."""
    growth_interval: Count = 1000
    """Consecutive steps without an overflow after which the loss scale is raised."""
    hysteresis: Count = 2
    """Number of overflows, counted since the loss scale was last raised, from which on each
    overflow lowers it."""

    def __post_init__(self) -> None:
        initial, least, most = self.initial_scale, self.min_scale, self.max_scale
        if not least <= initial <= most:
            key = "optimizer.grad_scaler"
            raise ValueError(
                f"{key}.initial_scale={initial} must be from {key}.min_scale={least} to"
                f" {key}.max_scale={most}"
            )


_Rule = Literal["adamw", "lion", "muon"]


def _rule_or_class(name: str) -> str:
    """Return `name`; raise ValueError if it is neither a rule of ISP nor module:Class."""
    if name not in get_args(_Rule) and not re.fullmatch(r"[\w.]+:\w+", name):
        raise ValueError(
            "must be adamw, lion, muon, or module:Class of an optimizer of torch, such as"
            " torch.optim:NAdam"
        )
    return name


_Decay = Annotated[float, Field(ge=0, lt=1)]


@section("optimizer.param_groups", KeyRole.METHOD)
class ParamGroupConfig:
    """An entry of `optimizer.param_groups`: parameters with their own rule or values."""

    pattern: Annotated[Text, AfterValidator(_pattern)]
    """Regular expression that is searched for in the parameter names of the whole model."""
    rule: _Rule | None = None
    """Update rule; null: `optimizer.name`. muon updates matrices, including embedding tables and
    heads; one-dimensional and tied parameters use adamw, or `optimizer.name` if that is not
    muon."""
    lr: Positive | None = None
    """Peak learning rate; null: the learning rate of the group's update rule."""
    lr_scale: NotNegative = 1.0
    """Multiplier of the learning rate."""
    weight_decay: NotNegative | None = None
    """Weight decay; null: the weight decay of the group's update rule, and none for norms, biases
    and one-dimensional parameters."""
    split: tuple[Count, ...] = ()
    """muon: relative sizes of the matrices fused in each weight, such as [4, 1, 1] for q, k and v,
    or [1, 1] for gate and up; empty: as the model's code splits them."""


@section("optimizer.muon", KeyRole.METHOD)
class MuonConfig:
    """`optimizer.muon`: keys of muon, which makes momentum matrices orthogonal.  Names: torch."""

    lr: Positive = 1e-3
    """Peak learning rate of the weights that muon updates."""
    momentum: _Decay = 0.95
    """Decay of the momentum."""
    nesterov: bool = True
    """Use Nesterov momentum."""
    ns_steps: Annotated[int, Field(ge=1, lt=100)] = 5
    """Number of Newton-Schulz iterations."""
    ns_coefficients: tuple[float, float, float] = (3.4445, -4.775, 2.0315)
    """Coefficients of the Newton-Schulz polynomial."""
    adjust_lr_fn: Literal["original", "match_rms_adamw"] = "original"
    """Multiplier of lr for a matrix [A, B]; original: sqrt(max(1, A / B)); match_rms_adamw: 0.2
    sqrt(max(A, B)), for the lr and weight_decay of adamw."""
    weight_decay: NotNegative = 0.1
    """Decoupled weight decay, multiplied by lr."""
    eps: Positive = 1e-7
    """Smallest norm by which a matrix is divided."""
    per_head: bool = False
    """Treat the rows of each attention head of q, k and v as a separate matrix."""


_RULE_KEYS = {
    "adamw": {"beta1", "beta2", "eps"},
    "lion": {"beta1", "beta2"},
    "muon": {"muon"},
}
"""For each update rule, the keys of `optimizer` that it uses and not all rules do."""
_SLOWEST_NARROW = 1 - 2**-8
"""Largest decay of a bfloat16 moment. With a decay nearer to 1, the product may be rounded back to
the same number, so that the moment never decays."""


@section("optimizer", KeyRole.METHOD)
class OptimizerConfig:
    """`optimizer`: the update rule and its hyperparameters."""

    name: Annotated[str, AfterValidator(_rule_or_class)] = "adamw"
    """adamw; lion: one state instead of two, and larger updates, so use a third to a tenth
    of adamw's lr and as many times its weight_decay; muon: for the matrices of blocks
    (`optimizer.muon`), with adamw for all other parameters; `module:Class`: an elementwise
    torch.optim.Optimizer, which gets those of lr, weight_decay, betas and eps that it
    accepts."""
    lr: Positive = 3e-4
    """Peak learning rate, reached at the end of warm-up."""
    beta1: _Decay = 0.9
    """Decay of the first moment; lion: weight of the momentum in an update."""
    beta2: _Decay = 0.95
    """Decay of the second moment; lion: of the momentum."""
    eps: Positive = 1e-8
    """adamw: added to the square root of the second moment."""
    weight_decay: NotNegative = 0.1
    """Decoupled weight decay, multiplied by lr; norms, biases and one-dimensional parameters are
    not decayed."""
    muon: MuonConfig = field(default_factory=MuonConfig)
    """The keys of muon."""
    adamw_lr: Positive | None = None
    """Peak learning rate of the parameters that adamw updates if `name` is another rule; null:
    `lr`."""
    adamw_beta1: _Decay | None = None
    """beta1 of the parameters that adamw updates if `name` is another rule; null: `beta1`."""
    adamw_beta2: _Decay | None = None
    """beta2 of the parameters that adamw updates if `name` is another rule; null: `beta2`."""
    adamw_eps: Positive | None = None
    """eps of the parameters that adamw updates if `name` is another rule; null: `eps`."""
    adamw_weight_decay: NotNegative | None = None
    """Weight decay of the parameters that adamw updates if `name` is another rule; null:
    `weight_decay`."""
    moment_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype in which moments are stored between updates; updates compute in float32 or more.
    bfloat16 halves the memory, rounds once per update, and needs betas of at most 0.996."""
    offload_states: bool = False
    """Keep master weights and moments in host memory and copy them to the GPU bucket by
    bucket for the update, with bit-identical results. Each step copies all of them to the GPU and
    back once."""
    param_groups: tuple[ParamGroupConfig, ...] = ()
    """Parameters with their own rule, learning rate or weight decay; the first entry whose pattern
    matches a parameter applies."""
    grad_scaler: GradScalerConfig = field(default_factory=GradScalerConfig)
    """Scaling of the loss in float16."""
    max_skipped_steps: CountOrZero = 10
    """End the run after this many consecutive steps with non-finite gradients, not counting steps
    after which the loss scale can still be lowered; 0: never."""

    def __post_init__(self) -> None:
        if self.is_torchs:
            self.check_torchs(f"optimizer.name={self.name}")
        if self.moment_dtype != "bfloat16":
            return
        for key, decay in self._moment_decays():
            if decay > _SLOWEST_NARROW:
                raise ValueError(
                    f"optimizer.{key}={decay} is too close to 1 for"
                    f" optimizer.moment_dtype=bfloat16: with 8 bits such a moment does not decay;"
                    f" use at most 0.996, or moment_dtype=float32"
                )

    def check_torchs(self, optimizer: str) -> None:
        """Raise ValueError if a key is set that torch's optimizers do not use.

        `optimizer`: name of the torch optimizer, for the message.
        """
        plain = {"offload_states": False, "moment_dtype": "float32", "param_groups": ()}
        for key, value in plain.items():
            if (own := getattr(self, key)) != value:
                raise ValueError(
                    f"optimizer.{key}={own} applies only to isp's own update rules: leave the key"
                    f" out with {optimizer}"
                )

    @property
    def is_torchs(self) -> bool:
        """True if a torch optimizer updates the weights, False if a rule of ISP does."""
        return ":" in self.name

    @property
    def rules(self) -> set[str]:
        """The update rules that weights may have."""
        asked = {self.name, *(group.rule for group in self.param_groups if group.rule)}
        return asked | ({"adamw"} if self.name == "muon" else set())

    def of_rule(self, rule: str, key: str) -> float:
        """Return the value of `key` (`lr`, `eps`, ..) for the parameters that `rule` updates."""
        own = getattr(self, f"adamw_{key}") if rule == "adamw" != self.name else None
        found: float = getattr(self.muon if rule == "muon" else self, key) if own is None else own
        return found

    def of_adamw(self, key: str) -> float:
        """Return the value of `key` (`lr`, `beta1`, ..) for the parameters that adamw updates."""
        return self.of_rule("adamw", key)

    @property
    def unused(self) -> list[str]:
        """Keys that are set, to another value than the default, but used by no rule of this run."""
        own = _RULE_KEYS["adamw"]
        second = {f"adamw_{key}" for key in ("lr", "weight_decay", *own)}
        used = set().union(*(_RULE_KEYS.get(rule, own) for rule in self.rules))
        if "adamw" in self.rules and self.name != "adamw":
            used |= second
        plain, left = OptimizerConfig(), (own | second | {"muon"}) - used
        return sorted(key for key in left if getattr(self, key) != getattr(plain, key))

    def _moment_decays(self) -> list[tuple[str, float]]:
        """Return the key and value of the decay of each moment that this run's rules keep."""
        found = [("beta2", self.beta2)] if "lion" in self.rules else []
        if "adamw" in self.rules:
            found += [(key, self.of_adamw(key)) for key in ("beta1", "beta2")]
        return found + ([("muon.momentum", self.muon.momentum)] if "muon" in self.rules else [])


@section("lr_scheduler", KeyRole.METHOD)
class LRSchedulerConfig:
    """`lr_scheduler`: warm-up, an optional stable phase, decay.  Names: torchtitan."""

    warmup_steps: CountOrZero = 0
    """Steps in which the learning rate rises linearly to `optimizer.lr`."""
    decay_type: Literal["cosine", "linear", "sqrt"] = "cosine"
    """Shape of the decay."""
    decay_ratio: Fraction | None = None
    """Fraction of the steps, at the end, in which the learning rate decays, after a stable phase
    (WSD); null: decay from the end of warm-up."""
    min_lr_factor: Fraction = 0.1
    """Learning rate at the end of the decay, as a fraction of `optimizer.lr`."""

    def num_decay_steps(self, total_steps: int) -> int:
        """Return the number of decay steps: all after warm-up, or the last `decay_ratio` of all."""
        if self.decay_ratio is None:
            return total_steps - self.warmup_steps
        return round(total_steps * self.decay_ratio)
