"""The indexers of transformers: modules by which sparse attention chooses keys for each token.

They run as they are: once on all tokens of a rank, with a cache that hands them a single key, so
that their linears are called once, and the index keys reach us; then, by
`isp.core.mixers.key_choice`, on tiles of tokens, with what their linears gave, and a cache that has
the keys of a document.

B batch, S' and T = B S' the tokens of this rank, R queries and C keys of a tile, D size of a key,
G choices of a query, n numbers of a choice
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from isp.core.attention.mask import Chosen
from isp.core.mixers.api import current_mixers
from isp.core.torch_private import tree_map
from isp.models.huggingface.versions import NEWEST_TRANSFORMERS, OLDEST_TRANSFORMERS

__all__ = [
    "COMPRESSORS",
    "INDEXERS",
    "PLACE",
    "causal_mask",
    "chosen_by",
    "class_names",
    "has_indexers",
    "indexer_parameters",
]


_CACHE = "past_key_values", "cache"
"""Names of the argument for a cache: before transformers 5.24, and since."""


class _Keys:
    """A cache of index keys: returns those it was made with, and keeps those it is given."""

    def __init__(self, keys: Tensor | None = None) -> None:
        self.keys = keys
        """[1, C, D]; none: [B, S', D], once they have come."""
        self._given = keys

    def update_indexer(self, keys: Tensor, _: int) -> Tensor:
        """Of DeepSeek's indexers: [B, R, D] -> [B, C, D]."""
        self.keys = keys
        return keys[:, :1] if self._given is None else self._given

    def update_index(self, keys: Tensor) -> Tensor:
        """Of MiniMax': [B, 1, R, D] -> [B, 1, C, D]."""
        return self.update_indexer(keys.squeeze(1), 0).unsqueeze(1)

    @property
    def layers(self) -> _Keys:
        return self

    def __getitem__(self, _: int) -> _Keys:
        return self


class _StandIn:
    """A module whose submodules are called by `call`, given their names."""

    def __init__(self, module: nn.Module, call: Callable[..., Any], name: str = "") -> None:
        self._module, self._call, self._name = module, call, name

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._module, name)
        return _StandIn(found, self._call, name) if isinstance(found, nn.Module) else found

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(self._name, *args, **kwargs)


class _Sizes(NamedTuple):
    num_heads: int
    num_choices: int
    most: int
    """Numbers that a query chooses."""
    run: int
    """Keys for which a number stands."""


class _Indexer:
    """A call of an indexer; an `isp.core.mixers.key_choice.Indexer`."""

    def __init__(self, module: Any, arguments: dict[str, Any], sizes: _Sizes) -> None:
        self.num_heads, self.num_choices, self._most, self._run_size = sizes
        self._module = module
        self._arguments = arguments
        self._shape = arguments["hidden_states"].shape[:2]
        self._given: dict[str, Tensor] = {}
        cache, positions = _Keys(), arguments["position_ids"]
        if self._run_size > 1:  # blocks are counted by positions, and there is one key
            positions = torch.zeros_like(positions)
        seen = torch.ones(1, 1, 1, dtype=torch.bool, device=arguments["hidden_states"].device)
        self._run(self._keep, cache, seen, arguments | {"position_ids": positions})
        if cache.keys is None:
            raise ValueError(
                f"{type(module).__name__} takes {', '.join(arguments)}, and gave no index keys to a"
                f" cache: isp knows the cache as {' or '.join(_CACHE)}. Use"
                f" transformers {OLDEST_TRANSFORMERS} to {NEWEST_TRANSFORMERS}"
            )
        self.keys = cache.keys

    def most(self, length: int) -> int:
        """As `isp.core.mixers.key_choice.Indexer.most`."""
        return min(self._most, -(-length // self._run_size))

    def choose(self, tokens: slice, keys: Tensor, seen: Tensor) -> Tensor:
        """As `isp.core.mixers.key_choice.Indexer.choose`."""

        def part(x: Any) -> Any:
            """[B or 1, S', ..] -> [1, R, ..]."""
            if not isinstance(x, Tensor):
                return x
            return x.expand(*self._shape, *x.shape[2:]).flatten(0, 1)[tokens].unsqueeze(0)

        arguments = tree_map(part, self._arguments)
        given = {name: part(x) for name, x in self._given.items()}
        cache = _Keys(keys[None])
        found = self._run(lambda name, *_, **__: given[name], cache, seen[None], arguments)
        return found.flatten(0, -3).transpose(0, 1)  # of [1, R, n] or [1, G, R, n]

    def _keep(self, name: str, *args: Any, **kwargs: Any) -> Tensor:
        assert name not in self._given, f"{name} is called twice"
        self._given[name] = getattr(self._module, name)(*args, **kwargs)
        return self._given[name]

    def _run(
        self, call: Callable[..., Any], cache: _Keys, seen: Tensor, arguments: dict[str, Any]
    ) -> Tensor:
        known = {**dict.fromkeys(_CACHE, cache), "attention_mask": seen}
        asked = {name: known.get(name, x) for name, x in arguments.items()}
        found: Tensor = type(self._module).forward(_StandIn(self._module, call), **asked)
        return found


def _of_tokens(module: Any, arguments: dict[str, Any]) -> _Indexer:
    """DeepSeek-V3.2's, and those made of it: keys one by one, the same for all heads."""
    positions = arguments["position_ids"]
    if positions is not None and positions.dim() == 3:  # time, height, width: the same in text
        arguments = arguments | {"position_ids": positions[0]}
    sizes = _Sizes(module.n_heads, num_choices=1, most=module.index_topk, run=1)
    return _Indexer(module, arguments, sizes)


def _of_blocks(module: Any, arguments: dict[str, Any]) -> _Indexer:
    """MiniMax-M3's: blocks of keys, for each KV head."""
    heads, kv_heads = module.num_heads, module.config.num_key_value_heads
    if heads not in (1, kv_heads):
        raise ValueError(
            f"index_n_heads={heads} in the model's configuration does not match the {kv_heads} KV"
            f" heads: use 1 or {kv_heads}"
        )
    sizes = _Sizes(heads, num_choices=heads, most=module.topk_blocks, run=module.block_size)
    return _Indexer(module, arguments, sizes)


def _forward_of(make: Callable[[Any, dict[str, Any]], _Indexer]) -> Callable[..., Any]:
    """A forward of an indexer that asks `current_mixers` for its choice."""

    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        own, mixers = type(module).forward, current_mixers()
        if mixers is None:
            return own(module, *args, **kwargs)
        bound = inspect.signature(own).bind(module, *args, **kwargs)
        bound.apply_defaults()
        _, *arguments = bound.arguments.items()
        with torch.no_grad():
            return mixers.choose(make(module, dict(arguments)))

    return forward


_KINDS = {
    ("deepseek_v32", "DeepseekV32Indexer"): _of_tokens,
    ("glm_moe_dsa", "GlmMoeDsaIndexer"): _of_tokens,
    ("axk2", "AXK2Indexer"): _of_tokens,
    ("hy_v4", "HYV4Indexer"): _of_tokens,
    ("hy_v4_vl", "HYV4VLIndexer"): _of_tokens,
    ("dots3_note", "Dots3NoteTextIndexer"): _of_tokens,
    ("mistral_large4", "MistralLarge4TextIndexer"): _of_tokens,
    ("minimax_m3_vl", "MiniMaxM3VLIndexer"): _of_blocks,
}


def _refuse(module: nn.Module, *_: Any, **__: Any) -> None:
    """Of DeepSeek-V4: a trace of fewer tokens than a window would not show its keys of windows."""
    raise ValueError(
        f"{type(module).__name__} adds a key for each window of tokens: attention to compressed"
        f" windows is not supported"
    )


COMPRESSORS = {
    f"deepseek_v4.modeling_deepseek_v4.DeepseekV4{kind}Compressor": _refuse
    for kind in ("HCA", "CSA")
}

INDEXERS = {
    f"{space}.modeling_{space}.{cls}": _forward_of(make) for (space, cls), make in _KINDS.items()
}
"""What takes the place of a forward, by the name of the class in `transformers.models`."""

PLACE = "transformers.models."
_SPACES = {f"{PLACE}{name.rpartition('.')[0]}" for name in INDEXERS}


def class_names(module: nn.Module) -> list[str]:
    """The full names of a module's class and of those that it is made of."""
    return [f"{cls.__module__}.{cls.__qualname__}" for cls in type(module).__mro__]


def has_indexers(space: str) -> bool:
    """Whether a module of Python defines a class of `INDEXERS`."""
    return space in _SPACES


def indexer_parameters(model: nn.Module) -> Iterator[str]:
    """The parameters by which keys are chosen: no gradient reaches them."""
    for name, module in model.named_modules():
        if any(own.removeprefix(PLACE) in INDEXERS for own in class_names(module)):
            yield from (f"{name}.{local}" for local, _ in module.named_parameters())


def chosen_by(module: Any, others: dict[str, Any]) -> Chosen | None:
    """The keys that an indexer has chosen, among an attention module's other arguments.

    The indexer is its own, or that of an earlier layer. None: all keys are attended.
    """
    if type(module).__module__ not in _SPACES:
        return None
    if others.get("block_indices") is not None:
        return Chosen(others["block_indices"], module.indexer.block_size)
    return None if others.get("indices") is None else Chosen(others["indices"])


def causal_mask(inputs_embeds: Tensor, *, allow_is_causal_skip: bool = True, **_: Any) -> Any:
    """In place of `create_causal_mask` beside indexers: a mask that nobody reads, or none."""
    shape = 1, 1, 1, 1
    return None if allow_is_causal_skip else inputs_embeds.new_ones(shape, dtype=torch.bool)
