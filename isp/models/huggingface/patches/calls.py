"""Replace the forwards and functions by which transformers models mix tokens by calls of isp.

Modules whose own forward mixes tokens get another forward, chosen by their class.

The modeling files also call free functions in their namespace: `causal_conv1d_fn`, scans, and fused
forms of both, which return None if no kernel is installed. Each is wrapped once in its namespace.
In a forward that isp runs, the wrapper calls `isp.core.mixers`; for all other models of the process
it calls the wrapped function.

B batch, S' tokens of this rank, T tokens, C channels, K taps, N numbers of a state
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from functools import partial, wraps
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from isp.core.mixers.api import causal_conv1d, current_mixers, gated_delta_rule, state_space_scan
from isp.models.forwards import set_forward
from isp.models.huggingface.patches.attention import OWN_FORWARDS, OWN_METHODS
from isp.models.huggingface.patches.indexers import (
    COMPRESSORS,
    INDEXERS,
    PLACE,
    causal_mask,
    class_names,
    has_indexers,
)
from isp.models.huggingface.patches.mixers import OWN_MIXERS
from isp.models.huggingface.tiny import as_wide

__all__ = [
    "FREE_FUNCTIONS",
    "REPLACED",
    "register_mixer",
    "replaced_code",
    "use_registered_mixers",
    "wrap_free_functions",
]


def _shared_expert_last(module: Any, hidden_states: Tensor) -> Tensor:
    """Compute Qwen2-MoE's MLP, but call the shared expert after the routed experts, not before.

    Only in this order isp can compute the shared expert while tokens are in flight. See
    [Note: Computed ahead] in docs/design/notes/experts.md.
    """
    x = hidden_states.flatten(0, -2)
    share = torch.sigmoid(module.shared_expert_gate(x))
    _, weights, numbers = module.gate(x)
    y = module.experts(x, numbers, weights)
    y = y + share * module.shared_expert(x)
    return cast(Tensor, y).view_as(hidden_states)


SHARED_EXPERT_LAST: dict[str, Callable[..., Any]] = dict.fromkeys(
    (
        "qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock",
        "qwen3_next.modeling_qwen3_next.Qwen3NextSparseMoeBlock",
        "qwen3_5_moe.modeling_qwen3_5_moe.Qwen3_5MoeSparseMoeBlock",
        "qwen4_exp.modeling_qwen4_exp.Qwen4ExpTextSparseMoeBlock",
    ),
    _shared_expert_last,
)
"""By name of a class in transformers.models, the function that replaces its forward so that the
shared expert overlaps with the tokens' all-to-all."""


REPLACED = OWN_FORWARDS | OWN_METHODS | OWN_MIXERS | INDEXERS | SHARED_EXPERT_LAST
"""By name of a class in transformers.models, ISP's own code, which must compute the same."""

_forwards: dict[str, Callable[..., Any]] = {
    PLACE + name: forward
    for name, forward in (REPLACED | COMPRESSORS).items()
    if name not in OWN_METHODS
}
"""By full name of a class, the function that replaces its forward. Keys are names, not classes, so
that no modeling file has to be imported."""

_methods = {PLACE + name: instead for name, instead in OWN_METHODS.items()}
"""By full name of a class, the function that replaces its method `_attn`."""


def register_mixer(module_class: type[nn.Module], forward: Callable[..., Any]) -> None:
    """Replace a class's forward by `forward(module, ...)` in models that isp parallelizes.

    It takes the arguments of the class's own forward, with this rank's tokens [B, S', ..], and must
    mix tokens only by `isp.attention`, `isp.causal_conv1d`, `isp.gated_delta_rule` and
    `isp.state_space_scan`. Subclasses are included. Other models keep their forward.
    """
    _forwards[f"{module_class.__module__}.{module_class.__qualname__}"] = forward


def use_registered_mixers(model: nn.Module) -> bool:
    """Set the registered forwards and methods on a model's modules, in place.

    Returns whether the model has any.
    """
    found = False
    for module in model.modules():
        for method, name in _registered(module):
            # The new forward replaces one that `kept_in_float64` may have wrapped, so that it runs
            # in float64: `as_wide` wraps the new one in the same way.
            if method == "forward":
                set_forward(module, as_wide(module, partial(_forwards[name], module)))
            else:
                setattr(module, method, as_wide(module, partial(_methods[name], module)))
            found = True
    return found


def _registered(module: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the names of a module's replaced methods, each with the class it is registered for.

    The class is the first one in the module's resolution order that is registered.
    """
    for method, registered in (("forward", _forwards), ("_attn", _methods)):
        names = [name for name in class_names(module) if name in registered]
        yield from ((method, name) for name in names[:1])


def replaced_code(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the classes and functions of transformers that ISP's own code replaces in a model.

    Each is a pair: the name of a Python module, and the name in it. If a subclass overrides methods
    of a registered class, the subclass is yielded. Forwards that the user registered are left out.
    """
    for module in model.modules():
        bases = dict(zip(class_names(module), type(module).__mro__, strict=True))
        for method, name in _registered(module):
            of_isp = REPLACED.get(name.removeprefix(PLACE))
            # If the user has registered another forward for the class, it is not one of isp: skip
            # it.
            if of_isp is (_forwards if method == "forward" else _methods)[name]:
                own = next(b for b in bases.values() if _overrides(b, bases[name]))
                yield own.__module__, own.__qualname__
    for space, names in _spaces(model):
        yield from ((space, name) for name in sorted(FREE_FUNCTIONS & names.keys()))


def _overrides(kind: type, base: type) -> bool:
    """Return whether `kind` is `base`, or overrides a method of `base` other than `__init__`."""
    own = (b for b in base.__mro__ if b not in nn.Module.__mro__)
    names = (name for b in own for name in vars(b) if name != "__init__")
    return kind is base or any(inspect.isfunction(vars(kind).get(name)) for name in names)


def _spaces(model: nn.Module) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name and the namespace of each modeling file that defines a class of the model."""
    spaces = {cls.__module__ for module in model.modules() for cls in type(module).__mro__}
    yield from (
        (space, vars(sys.modules[space])) for space in sorted(spaces) if space.startswith(PLACE)
    )


_STATES = (
    "initial_state",
    "initial_states",
    "conv_states",
    "output_final_state",
    "return_final_states",
    "return_last_state",
    "cu_seqlens",
    "seq_idx",
)
"""The arguments for where a scan begins and ends, and its states; isp uses the documents."""


def wrap_free_functions(model: nn.Module) -> None:
    """Wrap the free functions that a model's modeling files call, in the files' namespaces.

    A wrapper calls isp's own function if `mix_by` has set mixers, else the wrapped function.
    """
    for space, names in _spaces(model):
        # isp gives indexers their masks, so a model with indexers need not make its own mask of S x
        # S.
        masks = {"create_causal_mask": causal_mask} if has_indexers(space) else {}
        for name, ours in (_OURS | masks).items():
            function = names.get(name)
            # The function is wrapped already if an earlier model of this process has the same
            # modeling file.
            if function is not None and not isinstance(function, _Wrapped):
                names[name] = _Wrapped(name, function, ours)


class _Wrapped:
    """Wraps a free function of a modeling file; calls isp's own in forwards that isp runs."""

    def __init__(self, name: str, function: Callable[..., Any], ours: Callable[..., Any]) -> None:
        self._name = name
        self._function = function
        self._ours = ours
        wraps(function)(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if current_mixers() is None:
            # isp does not run this model: call the wrapped function.
            return self._function(*args, **kwargs)
        # Refuse states at the ends of the sequence: this rank has only a part of it, and isp itself
        # passes states from rank to rank.
        for given in _STATES:
            if kwargs.pop(given, None) not in (None, False):
                raise ValueError(
                    f"{self._name} is called with {given}, which isp sets itself from the"
                    f" documents: leave it out"
                )
        return self._ours(*args, **kwargs)


def _convolution(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> Tensor:
    """Compute `causal_conv1d_fn`: hidden_states [B, C, T], weight [C, K] -> [B, C, T]."""
    x = hidden_states.transpose(1, 2)
    return causal_conv1d(x, weight, bias, activation=activation).transpose(1, 2)


def _delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[Tensor, None]:
    """Compute `torch_chunk_gated_delta_rule` and similar functions; return (output, no state)."""
    out = gated_delta_rule(query, key, value, g, beta, normalise=use_qk_l2norm_in_kernel)
    return out, None


def _mamba2(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    **_: Any,
) -> Tensor:
    """Compute `mamba2_chunk_scan`; raise ValueError for a gate z, which is not supported."""
    if z is not None:
        raise ValueError("mamba2_chunk_scan with a gate (z) is not supported")
    options: dict[str, Any] = {"dt_bias": dt_bias, "dt_softplus": dt_softplus, "dt_limit": dt_limit}
    return state_space_scan(hidden_states, dt, A, B, C, D=D, **options)


def _selective(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    **_: Any,
) -> Tensor:
    """Compute `mamba_selective_scan`: hidden_states, dt, z [B, C, T]; B, C [B, N, T] -> [B, C, T].

    z is a gate: the result is multiplied by silu(z).
    """
    x, dt, B, C = (t.transpose(1, 2) for t in (hidden_states, dt, B, C))
    out = state_space_scan(x, dt, A, B, C, D=D, dt_bias=delta_bias, dt_softplus=delta_softplus)
    out = out.transpose(1, 2)
    return out if z is None else out * F.silu(z)


def _fused(*_: Any, **__: Any) -> None:
    """Return None, as if no fused kernel were installed.

    The model then calls convolution and scan separately, which are replaced.
    """


_OURS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _convolution,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    "mamba2_chunk_scan": _mamba2,
    "mamba_selective_scan": _selective,
    "mamba2_split_conv1d_scan_combined": _fused,
    "mamba_inner_fn": _fused,
}
"""By name of a free function in transformers' modeling files, isp's own function."""

FREE_FUNCTIONS = frozenset(_OURS)
"""Names of the functions outside of classes whose calls ISP replaces, such as causal_conv1d_fn."""
