"""Run indexers of transformers, by which sparse attention chooses keys for each token, over ranks.

An indexer's own forward runs unchanged, several times. The first run gets all tokens of a rank and
a stand-in for the cache that returns a single key. It calls the linears, whose results are
recorded, and passes the index keys to the cache. In later runs, `isp.core.mixers.key_choice` gives
the forward a tile of tokens with the recorded results of the linears, and a cache with the keys of
a document.

B batch, S' and T = B S' tokens of this rank, R queries and C keys of a tile, D size of an index
key, G choices of a query (one for all heads, or one for each KV head), n numbers in a choice
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
"""The names of the argument for the cache, before transformers 5.24 and since then."""


class _Keys:
    """A stand-in for an indexer's cache: it records the keys it gets, and returns given keys."""

    def __init__(self, keys: Tensor | None = None) -> None:
        self.keys = keys
        """The index keys of the last update, [B, R, D]; before one, those of `__init__`."""
        self._given = keys
        """The index keys [1, C, D] of a document; None in the first run."""

    def update_indexer(self, keys: Tensor, _: int) -> Tensor:
        """Record keys [B, R, D] and return [B, C, D]; DeepSeek's indexers call this."""
        self.keys = keys
        # The first run only records keys and results of linears. Its choices are not used, so any
        # single key will do.
        return keys[:, :1] if self._given is None else self._given

    def update_index(self, keys: Tensor) -> Tensor:
        """Record keys [B, 1, R, D] and return [B, 1, C, D]; MiniMax's indexers call this."""
        return self.update_indexer(keys.squeeze(1), 0).unsqueeze(1)

    @property
    def layers(self) -> _Keys:
        """The object itself: an indexer takes its layer's cache from this list, and gets the same
        one."""
        return self

    def __getitem__(self, _: int) -> _Keys:
        return self


class _StandIn:
    """A stand-in for a module: a call of its submodule `name` becomes `call(name, ...)`."""

    def __init__(self, module: nn.Module, call: Callable[..., Any], name: str = "") -> None:
        self._module, self._call, self._name = module, call, name

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._module, name)
        return _StandIn(found, self._call, name) if isinstance(found, nn.Module) else found

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(self._name, *args, **kwargs)


class _Sizes(NamedTuple):
    """Number of keys or blocks of keys that an indexer chooses for a query, and of its heads."""

    num_heads: int
    num_choices: int
    most: int
    """The largest number of keys, or blocks of keys, that a query chooses."""
    run: int
    """The number of keys in a block; 1: single keys are chosen."""


class _Indexer:
    """One call of an indexer of transformers; implements `isp.core.mixers.key_choice.Indexer`."""

    def __init__(self, module: Any, arguments: dict[str, Any], sizes: _Sizes) -> None:
        self.num_heads, self.num_choices, self._most, self._run_size = sizes
        self._module = module
        self._arguments = arguments
        self._shape = arguments["hidden_states"].shape[:2]
        self._given: dict[str, Tensor] = {}
        cache, positions = _Keys(), arguments["position_ids"]
        # An indexer that chooses blocks counts them by positions. The stand-in cache has one key,
        # so set all positions to 0: that makes one block.
        if self._run_size > 1:
            positions = torch.zeros_like(positions)
        # The mask lets every token see the single key of the stand-in cache.
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
        """Return how many keys or blocks a query chooses at most in a document of `length` keys."""
        return min(self._most, -(-length // self._run_size))

    def choose(self, tokens: slice, keys: Tensor, seen: Tensor) -> Tensor:
        """Return the choices of the queries `tokens` among `keys` [C, D], where `seen` is True.

        See `isp.core.mixers.key_choice.Indexer.choose`.
        """

        def part(x: Any) -> Any:
            """Return the part of a tensor for the queries, [B or 1, S', ..] -> [1, R, ..]; other x
            unchanged."""
            if not isinstance(x, Tensor):
                return x
            return x.expand(*self._shape, *x.shape[2:]).flatten(0, 1)[tokens].unsqueeze(0)

        arguments = tree_map(part, self._arguments)
        given = {name: part(x) for name, x in self._given.items()}
        cache = _Keys(keys[None])
        # Where the indexer calls a linear, return the recorded result's part for these queries.
        found = self._run(lambda name, *_, **__: given[name], cache, seen[None], arguments)
        return found.flatten(0, -3).transpose(0, 1)  # [1, R, n] or [1, G, R, n] -> [R, G, n]

    def _keep(self, name: str, *args: Any, **kwargs: Any) -> Tensor:
        """Call a submodule, and record its result for the later runs."""
        assert name not in self._given, f"{name} is called twice"
        self._given[name] = getattr(self._module, name)(*args, **kwargs)
        return self._given[name]

    def _run(
        self, call: Callable[..., Any], cache: _Keys, seen: Tensor, arguments: dict[str, Any]
    ) -> Tensor:
        """Run the indexer's own forward; return its choices.

        `call` replaces calls of its submodules; `cache` and the mask `seen` replace its arguments.
        """
        known = {**dict.fromkeys(_CACHE, cache), "attention_mask": seen}
        asked = {name: known.get(name, x) for name, x in arguments.items()}
        found: Tensor = type(self._module).forward(_StandIn(self._module, call), **asked)
        return found


def _of_tokens(module: Any, arguments: dict[str, Any]) -> _Indexer:
    """Make an indexer of DeepSeek-V3.2 or a derivative: single keys, the same for all heads."""
    positions = arguments["position_ids"]
    # [3, B, S']: positions by time, height and width, which are equal for text.
    if positions is not None and positions.dim() == 3:
        arguments = arguments | {"position_ids": positions[0]}
    sizes = _Sizes(module.n_heads, num_choices=1, most=module.index_topk, run=1)
    return _Indexer(module, arguments, sizes)


def _of_blocks(module: Any, arguments: dict[str, Any]) -> _Indexer:
    """Make an indexer of MiniMax-M3: blocks of keys, chosen for each KV head.

    Raises ValueError unless the indexer has one head, or as many as attention has KV heads.
    """
    heads, kv_heads = module.num_heads, module.config.num_key_value_heads
    if heads not in (1, kv_heads):
        raise ValueError(
            f"index_n_heads={heads} in the model's configuration does not match the {kv_heads} KV"
            f" heads: use 1 or {kv_heads}"
        )
    sizes = _Sizes(heads, num_choices=heads, most=module.topk_blocks, run=module.block_size)
    return _Indexer(module, arguments, sizes)


def _forward_of(make: Callable[[Any, dict[str, Any]], _Indexer]) -> Callable[..., Any]:
    """Return a forward for indexers in which the current mixers choose keys, without gradients.

    `make`: makes the indexer of a call. Outside of a forward that isp runs, the returned function
    calls the forward of the indexer's class.
    """

    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        own, mixers = type(module).forward, current_mixers()
        if mixers is None:
            return own(module, *args, **kwargs)
        bound = inspect.signature(own).bind(module, *args, **kwargs)
        bound.apply_defaults()
        # Leave out the first argument, which is the module.
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
"""By model type and class, the function that makes the indexer of a call."""


def _refuse(module: nn.Module, *_: Any, **__: Any) -> None:
    """Raise ValueError in place of the forward of DeepSeek-V4's compressors.

    They add a key for each window of tokens. A trace has fewer tokens than a window, so it would
    not show this.
    """
    raise ValueError(
        f"{type(module).__name__} adds a key for each window of tokens: attention to compressed"
        f" windows is not supported"
    )


COMPRESSORS = {
    f"deepseek_v4.modeling_deepseek_v4.DeepseekV4{kind}Compressor": _refuse
    for kind in ("HCA", "CSA")
}
"""By name of a class in transformers.models that isp does not support, a forward that raises."""

INDEXERS = {
    f"{space}.modeling_{space}.{cls}": _forward_of(make) for (space, cls), make in _KINDS.items()
}
"""By name of an indexer's class in transformers.models, the function that replaces its forward."""

PLACE = "transformers.models."
"""The package of all modeling files."""
_SPACES = {f"{PLACE}{name.rpartition('.')[0]}" for name in INDEXERS}


def class_names(module: nn.Module) -> list[str]:
    """Return the full names of a module's class and its base classes, in resolution order."""
    return [f"{cls.__module__}.{cls.__qualname__}" for cls in type(module).__mro__]


def has_indexers(space: str) -> bool:
    """Return whether the Python module `space` defines a class of `INDEXERS`."""
    return space in _SPACES


def indexer_parameters(model: nn.Module) -> Iterator[str]:
    """Yield the names of all parameters of indexers, which get no gradient."""
    for name, module in model.named_modules():
        if any(own.removeprefix(PLACE) in INDEXERS for own in class_names(module)):
            yield from (f"{name}.{local}" for local, _ in module.named_parameters())


def chosen_by(module: Any, others: dict[str, Any]) -> Chosen | None:
    """Return the keys that an indexer has chosen for a call of attention; None: all keys.

    `others`: the call's further arguments. An indexer of an earlier layer may have chosen.
    """
    if type(module).__module__ not in _SPACES:
        return None
    if others.get("block_indices") is not None:
        return Chosen(others["block_indices"], module.indexer.block_size)
    return None if others.get("indices") is None else Chosen(others["indices"])


def causal_mask(inputs_embeds: Tensor, *, allow_is_causal_skip: bool = True, **_: Any) -> Any:
    """Return a dummy mask, or None, in place of transformers' `create_causal_mask`.

    A model with indexers asks for a whole mask, but its indexers run with the masks of isp.
    """
    shape = 1, 1, 1, 1
    return None if allow_is_causal_skip else inputs_embeds.new_ones(shape, dtype=torch.bool)
