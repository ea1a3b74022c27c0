"""`tiny_model`: make a small model with the structure of a large one, for checks on a CPU."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial, wraps
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from isp.core.torch_private import grouped_mm
from isp.models.huggingface.make import is_vision_language, new_model, take_out_tower
from isp.models.meta import parameters_on_meta

__all__ = ["as_wide", "fewer_heads", "kept_in_float64", "tiny_config", "tiny_model"]

_HEAD = 8
"""The head size of small models."""

_LONG = 20
"""The row length in tokens beyond which small models use longrope's long factors."""

_SIZES = {
    1024: "max_position_embeddings",
    160: "vocab_size vocab_size_per_layer_input unpadded_vocab_size",
    64: "lru_width",
    48: "intermediate_size ffn_hidden_size encoder_ffn_dim decoder_ffn_dim ffn_dim",
    24: """shared_intermediate_size moe_shared_expert_intermediate_size moe_intermediate_size
        shared_expert_intermediate_size q_lora_rank kv_lora_rank""",
    13: "attention_chunk_size",
    12: "qk_head_dim",
    9: "sliding_window window_size attention_window_size",
    8: """qk_nope_head_dim linear_head_dim linear_key_head_dim linear_value_head_dim chunk_size
        mamba_chunk_size hidden_size_per_layer_input index_head_dim""",
    7: "index_topk rel_extent",
    6: "v_head_dim state_size ssm_state_size mamba_d_state",
    5: "time_step_rank mamba_dt_rank log_scaling_n_floor",
    4: """num_experts num_local_experts n_routed_experts qk_rope_head_dim linear_num_heads
        linear_num_value_heads adapter_rank index_block_size d_rel rotary_dim moe_num_experts""",
    3: "index_n_heads index_topk_blocks",
    2: """num_experts_per_tok moe_k zero_expert_num n_group linear_num_key_heads n_groups
        mamba_n_groups mamba_ngroups eos_token_id""",
    1: "topk_group bos_token_id",
    0: "pad_token_id",
}
_AT_MOST = {name: most for most, names in _SIZES.items() for name in names.split()}
"""By key of config.json, the upper limit of a size that may change without changing a model's
structure."""


_RANDOM = "dropout", "pdrop", "dropout_prob", "jitter_noise"
"""Endings of the names of options that draw random numbers; comparisons need them off."""


def tiny_model(config: Any, layers: int = 2) -> nn.Module:
    """Make the language model of `tiny_config(config, layers)`, for comparisons to 1e-9.

    It computes everything in float64, also where its code casts to float32. Its random weights are
    so large, and its vectors so uneven, that no gradient vanishes. Raises ValueError if
    transformers cannot build it.
    """
    try:
        model = _with_weights(tiny_config(config, layers))
    except Exception as error:  # a model's own code may raise anything
        raise ValueError(
            f"transformers cannot build a small model of type {config.model_type}:"
            f" {' '.join(str(error).split())[:300]}"
        ) from error
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() < 2:
                # The weights of norms are all ones: make them uneven.
                parameter += 0.1 * torch.randn_like(parameter)
            else:
                parameter *= 3
    return kept_in_float64(model).train()


def _with_weights(config: Any) -> Any:
    """Make the model of a configuration with random weights, without a vision tower."""
    if not is_vision_language(config):
        # Made in float64, so that buffers are computed in float64 and not converted afterwards.
        return new_model(config, torch.float64)
    with parameters_on_meta():
        model = new_model(config)
    take_out_tower(model)
    _fill(model, model)
    model.tie_weights()
    return model


def _fill(module: nn.Module, model: Any) -> None:
    """Initialize the parameters of a module and its submodules as transformers does.

    `model`: the innermost transformers model around the module, whose `_init_weights` is called.
    """
    model = module if hasattr(module, "_init_weights") else model
    for name, parameter in module.named_parameters(recurse=False):
        setattr(module, name, nn.Parameter(0.02 * torch.randn_like(parameter, device="cpu")))
    model._init_weights(module)
    for child in module.children():
        _fill(child, model)


def tiny_config(config: Any, layers: int = 2) -> Any:
    """Return a copy of a model's configuration with few and narrow layers.

    At least one layer of each kind remains, and at least `layers` layers if the model has as many.
    The number of KV heads is at most 4, and divisible by 2 and by 4 if that of the model is. The
    number of query heads for each KV head stays, but is at most 8. Dropout and noise are off. In a
    model of several parts, only the text part is made small.
    """
    text = config.get_text_config(decoder=True)
    for name in config.sub_configs:
        if getattr(config, name) is text:
            whole = copy.deepcopy(config)
            setattr(whole, name, tiny_config(text, layers))
            return whole
    tiny = copy.deepcopy(config)
    tiny.per_layer_config = None
    _shrink(tiny)
    _narrow(tiny, config)
    _narrow_states(tiny)
    _shorten_rope(tiny, config)
    _keep_one_of_each_kind(tiny, config, layers)
    for name in config.sub_configs:
        part = vars(tiny)[name]
        if part is not None:
            _shrink(part)
            # A part without attention gets the width of the text model. A part with attention is a
            # tower, which has its own width.
            if _value(part, "num_attention_heads") is None:
                _set(part, "hidden_size", tiny.hidden_size)
    return tiny


def _shrink(tiny: Any) -> None:
    """Limit sizes in a configuration to `_AT_MOST` and turn off random options, in place."""
    # `usual`: by the name of a key in this configuration, the name that most configurations use.
    usual = {own: name for name, own in tiny.attribute_map.items()}
    for name, value in list(vars(tiny).items()):
        if name.endswith(_RANDOM) and value:
            setattr(tiny, name, 0.0)
        else:
            setattr(tiny, name, _at_most(value, name, usual.get(name, "")))


def _at_most(value: Any, *names: str) -> Any:
    """Return `value`, limited by the bound of the first of its `names` that is in `_AT_MOST`."""
    most = next((_AT_MOST[name] for name in names if name in _AT_MOST), None)
    if most is None or type(value) not in (int, list) or not value:
        return value
    if isinstance(value, list):
        # The list has several end-of-text tokens, or one size for each kind of expert.
        return [min(size, most) if type(size) is int else size for size in value]
    return min(value, most)


def _value(config: Any, name: str) -> Any:
    """Return a configuration's value for a key with the usual `name`; None if it has no value."""
    return vars(config).get(config.attribute_map.get(name, name))


def _set(tiny: Any, name: str, value: Any) -> None:
    """Set a configuration's key with the usual `name`, if it has a value already."""
    if _value(tiny, name) is not None:
        setattr(tiny, name, value)


_QUERY_HEADS = (
    "num_attention_heads",
    "decoder_attention_heads",
    "encoder_attention_heads",
    "num_decoder_attention_heads",
    "swa_num_attention_heads",
)
"""The configuration keys in which models have their number of query heads."""


def fewer_heads(heads: int) -> int:
    """Return the largest n up to 4 and `heads` with gcd(n, 4) = gcd(heads, 4).

    So 2 or 4 ranks can split the small model's n heads if and only if they can split `heads`.
    """
    return next(n for n in range(min(heads, 4), 0, -1) if math.gcd(n, 4) == math.gcd(heads, 4))


def _narrow(tiny: Any, config: Any) -> None:
    """Set how many query and KV heads `tiny` has, and the sizes that follow from that, in place.

    `config`: the model's own configuration.
    """
    heads = _value(config, "num_attention_heads") or 4
    kv_heads = _value(config, "num_key_value_heads") or heads
    # `shared`: query heads for each KV head; `kept`: KV heads of the small model.
    shared, kept = min(heads // kv_heads, 8), fewer_heads(kv_heads)
    for name in _QUERY_HEADS:
        _set(tiny, name, shared * kept)
    for name in ("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads"):
        _set(tiny, name, kept)
    if _value(config, "index_block_size") is not None:
        # The indexer chooses blocks for each KV head, so it needs as many heads.
        _set(tiny, "index_n_heads", kept)
    tiny.hidden_size = _HEAD * shared * kept
    attended = _value(config, "attention_hidden_size")
    # `wide`: how many times the hidden size attention is wide.
    wide = attended // config.hidden_size if attended else 1
    _set(tiny, "attention_hidden_size", wide * tiny.hidden_size)
    # With MLA (latent attention), head_dim is the size of the rotary part of a head.
    latent = _value(config, "kv_lora_rank") is not None
    for name in ("head_dim", "swa_head_dim"):
        _set(tiny, name, _AT_MOST["qk_rope_head_dim"] if latent else wide * _HEAD)


def _narrow_states(tiny: Any) -> None:
    """Set the sizes of state-space layers in place: `expand` times the width of the model."""
    expand = _value(tiny, "mamba_expand") or _value(tiny, "expand")
    if not expand:
        return
    inner = expand * tiny.hidden_size
    for name in ("mamba_n_heads", "mamba_num_heads", "n_mamba_heads", "num_heads"):
        _set(tiny, name, inner // _HEAD)
    for name in ("mamba_d_head", "mamba_head_dim", "mamba_headdim"):
        _set(tiny, name, _HEAD)
    _set(tiny, "mamba_d_ssm", inner)
    if _value(tiny, "num_attention_heads") is None:
        _set(tiny, "intermediate_size", inner)


def _shorten_rope(tiny: Any, config: Any) -> None:
    """Shorten rotary parameters to the angles of a small head, in place.

    Also shortens longrope's original context, so that rows of more than `_LONG` tokens use the long
    factors.
    """
    rope = getattr(tiny, "rope_parameters", None) or {}
    if sections := rope.get("mrope_section"):
        # The sections are the numbers of angles for time, height and width.
        angles = int(_HEAD * rope.get("partial_rotary_factor", 1.0)) // 2
        ends = [end * angles // sum(sections) for end in accumulate(sections, initial=0)]
        rope["mrope_section"] = [b - a for a, b in pairwise(ends)]
    if rope.get("rope_type") != "longrope":
        return
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    for name in ("short_factor", "long_factor"):
        rope[name] = rope[name][: len(rope[name]) * _HEAD // head]
    for owner in (rope, vars(tiny)):
        if "original_max_position_embeddings" in owner:
            owner["original_max_position_embeddings"] = _LONG


_LAYERS = (
    "num_hidden_layers",
    "decoder_layers",
    "encoder_layers",
    "num_decoder_layers",
    # LongCat has this key as well: each of its layers has two hidden layers.
    "num_layers",
)
"""The configuration keys in which models have their number of layers."""


def _keep_one_of_each_kind(tiny: Any, config: Any, least: int) -> None:
    """Keep in `tiny` the first layer of each kind, and more layers until there are `least`.

    `config`: the model's own configuration. Two layers are of one kind if they have the same
    entries in lists with one entry per layer, are in the same lists of layer numbers, have equal
    configurations of their own, both have a dense MLP or both have not, and both take keys from an
    earlier layer or both do not.
    """
    _shorten_periods(tiny)
    number = config.num_hidden_layers
    lists = {
        name: value
        for name, value in vars(config).items()
        if isinstance(value, list | tuple)
        and len(value) == number
        # Leave out a list that only numbers all layers: it has no values of layers.
        and list(value) != list(range(number))
        and name != "kv_source_layers"
    }
    numbers = {
        name: value
        for name, value in vars(config).items()
        if "layer" in name and name not in lists and _are_layers(value, number)
    }
    own = [_of_layer(config, index) for index in range(number)]
    dense = [_is_dense(config, index) for index in range(number)]
    sharing = _value(config, "num_kv_shared_layers") or 0
    # `sources`: by layer, the number of the layer whose keys it uses.
    sources = _value(config, "kv_source_layers") or range(number)

    def kind_of(layer: int) -> str:
        listed = [value[layer] for value in lists.values()]
        named = [layer in value for value in numbers.values()]
        shares = layer >= number - sharing or sources[layer] != layer
        return str([dense[layer], shares, own[layer], *listed, *named])

    kinds = [kind_of(layer) for layer in range(number)]
    first = [kinds.index(kind) for kind in dict.fromkeys(kinds)]
    hybrid = [index for index, kind in enumerate(kinds) if "'hybrid'" in kind]
    # Keep two hybrid layers, because they share a block.
    first += [index for index in hybrid[:2] if index not in first]
    rest = [index for index in range(number) if index not in first]
    chosen = first + rest[: max(0, least - len(first))]
    # Keep the layers that the chosen ones take keys from as well.
    layers = sorted({*chosen, *(sources[index] for index in chosen)})
    for name in _LAYERS:
        _set(tiny, name, len(layers))
    for name, value in lists.items():
        setattr(tiny, name, [value[index] for index in layers])
    for name, value in numbers.items():
        setattr(tiny, name, [place for place, index in enumerate(layers) if index in value])
    for name in _FIRST_DENSE:
        _set(tiny, name, sum(dense[index] for index in layers))
    _set(tiny, "num_kv_shared_layers", sum(index >= number - sharing for index in layers))
    _set(tiny, "kv_source_layers", [layers.index(sources[index]) for index in layers])
    if _value(config, "decoder_sparse_step") is not None:
        tiny.decoder_sparse_step = 1
        tiny.mlp_only_layers = [place for place, index in enumerate(layers) if dense[index]]
    if config.is_heterogeneous:
        tiny.per_layer_config = {place: own[index] for place, index in enumerate(layers)}


def _shorten_periods(tiny: Any) -> None:
    """Shorten periods in a configuration to 2, in place, such as 8 for "every eighth layer
    attends"."""
    for name, value in list(vars(tiny).items()):
        if name.endswith("_layer_period") and value > 2:
            setattr(tiny, name, 2)
            setattr(tiny, name.replace("period", "offset"), 1)


def _are_layers(value: Any, number: int) -> bool:
    """Return whether a value is a list of numbers of some, but not all, of `number` layers."""
    many = isinstance(value, list | tuple) and 0 < len(value) < number
    return many and all(type(index) is int and 0 <= index < number for index in value)


def _of_layer(config: Any, index: int) -> dict[str, Any]:
    """Return the values that a configuration has for one layer only, made small; often empty."""
    if not config.is_heterogeneous:
        return {}
    layer = config.per_layer_config[index]
    sizes = {name: getattr(layer, name) for name in sorted(config.per_layer_attributes)}
    usual = {"head_dim": 2 * _HEAD if sizes.get("head_dim") != vars(config)["head_dim"] else _HEAD}
    return {name: usual.get(name, _at_most(value, name)) for name, value in sizes.items()}


_FIRST_DENSE = "first_k_dense_replace", "num_dense_layers"
"""The keys with the number of layers, from the first, that have no experts."""


def _is_dense(config: Any, index: int) -> bool:
    """Return whether a layer has a dense MLP, by the rules of transformers' configurations."""
    before = max(_value(config, name) or 0 for name in _FIRST_DENSE)
    step = _value(config, "decoder_sparse_step") or 1
    named = _value(config, "mlp_only_layers") or ()
    return index < before or index in named or (index + 1) % step != 0


_widening: ContextVar[bool] = ContextVar("widening", default=False)
"""True while a forward runs in the mode `_Float64`; a nested mode would only take time."""


class _Float64(TorchFunctionMode):
    """A mode in which casts to float32 and constants in float32 become float64."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is Tensor.float:
            func = Tensor.double
        wide = {name: _wide(value) for name, value in (kwargs or {}).items()}
        # XGLM fills a tensor with the smallest number of its dtype. In float64 that number is too
        # large for torch's default dtype, float32.
        if func is torch.full and type(args[1]) is float:
            wide.setdefault("dtype", torch.float64)
        # torch's kernel does not take float64; its function for meta tensors does.
        if func is grouped_mm and args[0].dtype is torch.float64 and not args[0].is_meta:
            return _grouped_product(args[0], args[1], wide["offs"])
        return func(*map(_wide, args), **wide)


def _grouped_product(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Multiply each group of tokens by its own matrix: `torch._grouped_mm` for float64.

    x [N, I], weights [E, I, O] -> [N, O]. ends [E]: the index of the token after each group. Tokens
    after the last group give zeros.
    """
    *runs, rest = x.tensor_split(ends.tolist())
    products = [run @ weight for run, weight in zip(runs, weights, strict=True)]
    return torch.cat([*products, rest.new_zeros(len(rest), weights.shape[2])])


def _wide(value: Any) -> Any:
    """Return float64 in place of the dtype float32; any other value unchanged."""
    return torch.float64 if value is torch.float32 else value


def kept_in_float64(model: nn.Module) -> nn.Module:
    """Convert `model` to float64 in place, also where its code casts to float32.

    Code of norms, angles and softmax casts to float32. Gradients of two layouts would then differ
    by 1e-7, and comparisons could not be stricter.
    """
    # A recompute calls blocks and parts of blocks without the model's forward around them, so each
    # of these must also enter the mode.
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList)]
    entries = [entry for entries in lists for entry in entries]
    tiled = [child for entry in entries for child in entry.children() if any(child.children())]
    for module in (model, *entries, *(child for child in tiled if child not in entries)):
        module.__class__ = _widened(type(module))
    return model.double()


def _widened(kind: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of `kind` whose forward runs in the mode `_Float64`."""

    # `wraps` keeps the signature, which `generate` of transformers reads.
    @wraps(kind.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return _in_float64(partial(kind.forward, self), *args, **kwargs)

    # transformers looks up its own classes by `__module__`.
    members = {"forward": forward, "__module__": kind.__module__}
    return type(kind.__name__, (kind, _Wide), members)


class _Wide:
    """A base class that marks the classes made by `kept_in_float64`."""


def as_wide(module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `forward` for `module` that runs in float64 if `kept_in_float64` converted it."""
    return partial(_in_float64, forward) if isinstance(module, _Wide) else forward


def _in_float64(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `forward` in the mode `_Float64`, unless it is on already."""
    if _widening.get():
        # A converted module called this one, so the mode is on. A recompute calls it alone.
        return forward(*args, **kwargs)
    token = _widening.set(True)
    try:
        with _Float64():
            return forward(*args, **kwargs)
    finally:
        _widening.reset(token)
