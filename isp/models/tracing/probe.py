"""The probe: run a model on a few tokens, to detect code that mixes tokens outside of attention.

Attention is replaced by a function of one token. Then each token's logits and gradients must not
depend on the other tokens. See [Note: Locality] in docs/design/notes/models.md. The model needs no
memory for its sharded weights. See [Note: Weights without memory] in docs/design/notes/models.md.

B batch, S sequence, H heads, G groups of a scan, D hidden size, V vocabulary, I in and O out
features, N tokens of experts, k experts of each token, T tokens of joined rows, F features
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from isp.core.attention.api import AttentionOptions
from isp.core.mixers.api import mix_by
from isp.core.mixers.key_choice import Indexer
from isp.core.mixers.recurrence import Inputs, Recurrence
from isp.core.torch_private import AnyBatchNorm, AnyDropout, tree_leaves, tree_map, version_of
from isp.models.forwards import replaced_forward
from isp.models.meta import copied
from isp.models.roles import ParameterRole, holds_experts
from isp.models.tracing.trace import ModelTrace

__all__ = [
    "PROBE_TOKENS",
    "Forward",
    "ProbeRun",
    "check_local",
    "local_calls",
    "refuse_unchecked",
    "same_at_length",
    "without_weights",
]

logger = logging.getLogger(__name__)

PROBE_TOKENS = 64
"""The number of tokens of the probe; for longer rows see `isp.models.tracing.long_rows`."""

_FEWER = 16
"""The number of tokens of the probe for a model that fails on `PROBE_TOKENS`: some models have
short tables of positions."""

_CHANGED = 8
"""The index, among all tokens of the probe, of the token that is replaced by another one."""

_LARGEST = 1e-5
"""The tolerance of logits, relative to the largest one: the order of float32 sums may differ."""

_LARGEST_GRADIENT = 1e-3
"""The tolerance of a token's gradient, relative to the largest one. Larger than that of logits: by
float32 rounding a feature may be on the other side of the kink of a ReLU."""

_SEEN = {
    "changed": "changing one token changes its output for other tokens",
    "permuted": "permuting tokens together with their positions changes its output",
    "part": "its output for a part of the tokens differs from that for all tokens",
}
"""By case that the probe compares, what it shows, for the message: differences in a forward."""

_SEEN_IN_BACKWARD = {
    "changed": "changing one token changes the gradients of other tokens",
    "permuted": "permuting tokens together with their positions changes their gradients",
    "part": "the gradients of a part of the tokens differ from those with all tokens",
}
"""By case that the probe compares, what it shows, for the message: differences in a backward."""

_KNOWN = "transformers.", "model.decoder"
"""Beginnings of the names of Python modules whose experts are known to mix no tokens."""

Forward = Callable[[nn.Module, Tensor, Tensor], Tensor]
"""A function that runs a model on token ids and positions [B, S] and returns its logits."""


class ProbeRun(NamedTuple):
    """The number of tokens and the mode in which the probe could run a model on random weights."""

    tokens: int
    """A number of tokens on which the model runs."""
    training: bool
    """True for training mode, False for evaluation mode."""


class _Tokens(NamedTuple):
    """The tokens of one forward of the probe."""

    ids: Tensor
    """Token ids, [1, S]."""
    positions: Tensor
    """The position of each token, [1, S]."""
    rows: Tensor
    """The index of each token among all tokens of the probe, [S]."""

    @classmethod
    def all_of(cls, num_tokens: int, number: int) -> _Tokens:
        """Return `number` tokens in order, each with a random id below `num_tokens`."""
        ids = torch.randint(num_tokens, (1, number), generator=torch.Generator().manual_seed(0))
        return cls(ids, torch.arange(number)[None], torch.arange(number))

    def part(self, places: Tensor | slice) -> _Tokens:
        """Return the tokens at some of the places, each with its original position."""
        return _Tokens(self.ids[:, places], self.positions[:, places], self.rows[places])

    def changed(self, num_tokens: int) -> _Tokens:
        """Return the same tokens, with another id for the token `_CHANGED` if it is among them."""
        ids = torch.where(self.rows == _CHANGED, (self.ids + 1) % num_tokens, self.ids)
        return self._replace(ids=ids)


def check_local(
    shape: nn.Module,
    buffers: Iterable[Tensor],
    trace: ModelTrace,
    forward: Forward,
    *,
    allow_unchecked: bool = False,
) -> ProbeRun | None:
    """Raise ValueError, naming the module, if the model mixes tokens other than by attention.

    Returns how the model ran. If it fails on random weights, so that nothing can be checked, raises
    ValueError, or with `allow_unchecked` warns and returns None.

    `shape`: the traced model on the meta device, whose mixers are those of `mix_by`; `buffers`: the
    buffers of the real model, in the same order. See [Note: Locality].
    """
    model, num_tokens = without_weights(shape, buffers, trace.roles), _num_tokens(shape, trace)
    with local_calls(model, gradients=True) as calls:
        probe = _Probe(model, forward, calls, trace.called)
        why: Exception | None = None
        # Try fewer tokens and evaluation mode, too: attention with dropout, for example, raises an
        # error in training mode only.
        for number, training in product((PROBE_TOKENS, _FEWER), (True, False)):
            _set_mode(model, training=training)
            try:
                whole, order, expected = probe.run_mixed(number, num_tokens)
                break
            except Exception as error:  # the model's own code may raise anything
                # Report the first error, which is that of the usual way to run the model.
                why = why or error
        else:
            assert why is not None
            refuse_unchecked(model, why, allow_unchecked)
            return None
        for half in (whole.part(slice(0, None, 2)), whole.part(slice(1, None, 2))):
            found = probe.run_part(half)
            if _differ(expected, found) or _gradients_differ(expected, found):
                # To name the cause, run the same tokens again, then change one thing at a time.
                probe.check_same_again(whole.changed(num_tokens).part(order), expected)
                cases = {
                    "changed": [whole.changed(num_tokens)],
                    "permuted": [whole.part(order)],
                    "part": [whole.part(slice(start, None, 2)) for start in (0, 1)],
                }
                raise ValueError(probe.difference(whole, cases))
    # The model has run on all tokens and on half of them. Return the smaller number, for callers
    # that run it again.
    return ProbeRun(number // 2, model.training)


def refuse_unchecked(model: nn.Module, why: Exception | str, allow_unchecked: bool) -> None:
    """Raise ValueError for a model that cannot be checked, or warn if `allow_unchecked`."""
    reason = next(iter(str(why).splitlines()), type(why).__name__)
    said = (
        f"{type(model).__name__} was not checked for code that mixes tokens outside of attention,"
        f" because the check failed (it runs the model on the CPU with random weights): {reason}"
    )
    if not allow_unchecked:
        raise ValueError(
            f"{said}. Let its code run there, or set model.allow_unchecked: true if each token's"
            f" result depends on others through attention alone"
        )
    logger.warning("%s (isp.check compares layouts on a small model)", said)


def same_at_length(
    shape: nn.Module, buffers: Iterable[Tensor], trace: ModelTrace, forward: Forward, tokens: int
) -> bool:
    """Return whether a few tokens have the same logits alone as in a row of `tokens` tokens.

    The other arguments are those of `check_local`. Only forwards run.
    """
    model = without_weights(shape, buffers, trace.roles)
    whole = _Tokens.all_of(_num_tokens(shape, trace), tokens)
    with local_calls(model) as calls:
        probe = _Probe(model, forward, calls, trace.called)
        # Take about 32 tokens from all over the row.
        few = whole.part(slice(tokens // 128, None, -(-tokens // 32)))
        if probe.run(few).is_random:
            # With dropout, the results of the two runs would differ: turn it off.
            _set_mode(model, training=False)
        return not _differ(probe.run(whole), probe.run(few))


def _num_tokens(shape: nn.Module, trace: ModelTrace) -> int:
    """Return the number of token ids: the rows of the first embedding table.

    In a model without tables it is the number of logits of a token. The table comes first, because
    a classifier has fewer logits than token ids.
    """
    table = shape.get_submodule(trace.tables[0]) if trace.tables else None
    return table.num_embeddings if isinstance(table, nn.Embedding) else trace.vocab_size


# -- a model without memory --------------------------------------------------------------------


def without_weights(
    shape: nn.Module,
    buffers: Iterable[Tensor],
    roles: dict[str, ParameterRole],
    *,
    training: bool = True,
) -> nn.Module:
    """Return a copy of `shape` on the CPU, in which each sharded weight is one element in memory.

    Other parameters get random values. Buffers get the values of `buffers`, or made-up values if
    these are on the meta device. See [Note: Weights without memory].
    """
    values: dict[int, Any] = {}
    random = torch.Generator().manual_seed(0)
    for name, parameter in shape.named_parameters():
        cut = roles[name] in (ParameterRole.SHARDED, ParameterRole.IDLE)
        value = _one_element(parameter) if cut else _random(parameter, random)
        values[id(parameter)] = nn.Parameter(value, requires_grad=False)
    for own, buffer in zip(shape.buffers(), buffers, strict=True):
        value = _made_up(buffer, random) if buffer.is_meta else _wide(buffer.cpu().clone())
        values[id(own)] = value
    model = copied(shape, values)
    _set_mode(model, training=training)
    return model


def _set_mode(model: nn.Module, *, training: bool) -> None:
    """Set training or evaluation mode, with dropout always off; batch norms keep their mode."""
    for module in model.modules():
        if not isinstance(module, AnyBatchNorm):
            module.training = training and not isinstance(module, AnyDropout)


def _wide(x: Tensor) -> Tensor:
    """Return x in float32 if it has a narrower floating-point dtype."""
    return x.float() if x.is_floating_point() and x.itemsize < 4 else x


def _one_element(x: Tensor) -> Tensor:
    """Return zeros in the shape of x that share one element in memory."""
    return _wide(torch.zeros((), dtype=x.dtype)).expand(x.shape)


def _random(x: Tensor, random: torch.Generator) -> Tensor:
    """Return numbers in [0.5, 1.5] in the shape of x, with some elements in the same memory."""
    # With these small strides elements overlap, so that even a large parameter takes little memory,
    # but rows and columns differ.
    strides = [(index and 3) + 2**index for index in reversed(range(x.dim()))]
    length = 1 + sum(s * (n - 1) for s, n in zip(strides, x.shape, strict=True)) * (x.numel() > 0)
    dtype = torch.float32 if x.itemsize < 4 else x.dtype
    values = torch.rand(length, generator=random, dtype=dtype)
    return values.add_(0.5).as_strided(x.shape, strides)


def _made_up(x: Tensor, random: torch.Generator) -> Tensor:
    """Return values for a buffer on meta: random numbers, or 0, 1, 2, .. for a buffer of integers.

    These integers fit a buffer of positions.
    """
    if x.is_floating_point():
        return _random(x, random).contiguous()
    return torch.arange(x.shape[-1] if x.dim() else 1).expand(x.shape).to(x.dtype)


# -- local calls -------------------------------------------------------------------------------


@contextmanager
def local_calls(model: nn.Module, *, gradients: bool = False) -> Iterator[_WithoutWeights]:
    """Replace mixers, products with weights, lookups and experts by functions of single tokens.

    In this context every call that isp can distribute over ranks is a function of one token. So if
    a token's result depends on others, the model's own code mixes tokens. `gradients`: True to
    compute gradients.
    """
    ran = set()
    with ExitStack() as stack:
        for module in model.modules():
            # The code of known experts is replaced. Other experts run their own code, but only one
            # module of each class and sizes, to save time.
            if holds_experts(module):
                key = type(module), *(p.shape for p in module.parameters(recurse=False))
                if key in ran or type(module).__module__.startswith(_KNOWN):
                    stack.enter_context(replaced_forward(module, _experts))
                ran.add(key)
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(torch.set_grad_enabled(gradients))
        # The device context is a torch function mode, which slows down each operation: enter it
        # only if the caller has set another default device.
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        calls = stack.enter_context(_WithoutWeights(model))
        stack.enter_context(mix_by(_LocalMixers()))
        yield calls


class _LocalMixers:
    """Mixers that compute each token alone, as if it were a document of its own."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
        """Return a function of each token's own q, k and v, in which all features matter.

        Attention of a token to itself alone would be v, and ignore q and k.
        """
        if k.shape[2] != q.shape[2]:
            k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
        of_q, of_k = (torch.arange(x.shape[3], dtype=q.dtype) for x in (q, k))
        own = q @ of_q.cos_() + k @ of_k.sin_()  # [B, S, H]
        if options.profiles is not None:
            own = own + options.profiles.to(q.dtype).cos().sum()
        if options.chosen is not None:
            own = own + options.chosen.numbers.sum((2, 3)).unsqueeze(2)
        return v + own.tanh().unsqueeze(-1)

    def convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None, dilation: int) -> Tensor:
        """Return for each token the convolution of a sequence that repeats this token."""
        out = x * weight.sum(1)
        return out if bias is None else out + bias

    def scan(self, recurrence: Recurrence, inputs: Inputs) -> Tensor:
        """Return a function of each token's own inputs, in which all features matter.

        No state is computed, because it may be large.
        """
        flat, mixed = inputs.flat(), inputs.of_heads[0]
        x, *others = flat.of_heads
        parts = [*others, *flat.of_groups, *(t[None] for t in flat.constants if t is not None)]
        # Each input becomes [T, H] or [T, G], a constant [1, H] or [1, G].
        numbers = [_weighted_sum(t.to(x.dtype).reshape(*t.shape[:2], -1)) for t in parts]
        of_heads = (n.repeat_interleave(flat.num_heads // n.shape[1], 1) for n in numbers)
        own = sum(of_heads, x.new_zeros(()))  # [T, H]
        return (x + own.tanh().view(*own.shape, *(1,) * (x.dim() - 2))).view(mixed.shape)

    def choose(self, indexer: Indexer) -> Tensor:
        """Return, in place of indices of keys, numbers that depend only on each token's own key."""
        return _weighted_sum(indexer.keys)[..., None, None]


def _weighted_sum(x: Tensor) -> Tensor:
    """Return a weighted sum of the features, about as large as one of them: [.., F] -> [..]."""
    weights = torch.arange(x.shape[-1], dtype=x.dtype).cos_()
    return x @ weights / math.sqrt(max(1, len(weights)))


def _experts(x: Tensor, *others: Any, **more: Any) -> Tensor:
    """Return, in place of experts, a function of each token of x [N, D] and of its other arguments.

    Other arguments are expert indices and routing weights, [N, k] each.
    """
    for other in tree_leaves((others, more)):
        if isinstance(other, Tensor) and x.dim() == other.dim() == 2 and len(other) == len(x):
            x = x + other.to(x.dtype).cos().sum(-1, keepdim=True)
    return x


class _WithoutWeights(TorchFunctionMode):
    """A mode that replaces products with, and lookups in, weights that have no memory.

    The replacements are random functions of a token. For products `_KINDS` functions are drawn for
    each size of weights, so that neighboring linears differ; for lookups, one for each table.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        # Recognize weights without memory by their strides, which are all 0 (see `_one_element`).
        self._numbers = {
            id(p): number for number, p in enumerate(model.parameters()) if not any(p.stride())
        }
        self._products: dict[tuple[Any, ...], tuple[int, Tensor, Tensor]] = {}
        self._tables: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self.looked_up: list[Tensor] = []
        """The results of lookups, as leaves of the graph, if gradients are computed."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        place = _WEIGHT_AT.get(func)
        if place is None:
            # This operation reads no weight.
            if func is F.dropout or func is torch.dropout:
                # The model's code calls dropout as a function, which `_set_mode` cannot turn off.
                return args[0] if args else (kwargs or {})["input"]
            return func(*args, **kwargs) if kwargs else func(*args)
        number = self._numbers.get(id(args[place]))
        if number is None:
            # This weight has values, so the operation can run.
            out = func(*args, **(kwargs or {}))
            return self._leaf(out) if func is F.embedding else out
        if func is F.linear:
            return self._product(args[0], len(args[1]), number)
        if func is torch.addmm:
            return self._product(args[1], args[2].shape[1], number)
        weight, ids = (args[0], args[1]) if func is Tensor.__getitem__ else (args[1], args[0])
        return self._leaf(self._rows(ids, weight, number))

    def _leaf(self, rows: Tensor) -> Tensor:
        """Record the result of a lookup as a new leaf, at which gradients end; return a copy of it.

        It is a copy because the model may write into it.
        """
        if not (torch.is_grad_enabled() and rows.is_floating_point()):
            return rows
        self.looked_up.append(rows.detach().requires_grad_())
        return self.looked_up[-1].clone()

    def _product(self, x: Tensor, size: int, number: int) -> Tensor:
        """Return a random function of x [.., I] in place of a product: [.., O], with O = `size`.

        Each output is a weighted sum of a few features of x, and each feature is in some output.
        """
        key = number % _KINDS, x.shape[-1], size, x.dtype
        if (drawn := self._products.get(key)) is None:
            drawn = self._products[key] = _drawn(*key)
        start, scales, shift = drawn
        # `taken` has one feature for each factor: features start, start + 1, .., modulo I. It is
        # made of slices by `cat`, because an index tensor takes ten times as long.
        times, rest = divmod(len(scales) - x.shape[-1] + start, x.shape[-1])
        taken = torch.cat([x[..., start:], *[x] * times, x[..., :rest]], -1)
        if len(scales) == size:
            return torch.addcmul(shift, taken, scales)
        sums: Tensor = (taken * scales).unflatten(-1, (-1, size)).sum(-2)
        return sums + shift

    def _rows(self, ids: Tensor, table: Tensor, number: int) -> Tensor:
        """Return a vector for each id in place of a lookup, [..] -> [.., D]; each id has another
        one."""
        key = number, table.shape[1]
        if (drawn := self._tables.get(key)) is None:
            random = torch.Generator().manual_seed(number)
            pace, shift = torch.rand(2, table.shape[1], generator=random) * 3
            drawn = self._tables[key] = pace, shift
        rows: Tensor = torch.addcmul(drawn[1], ids.unsqueeze(-1), drawn[0]).cos_()
        return rows.to(table.dtype)


_KINDS = 8
"""The number of random functions for weights of the same size; each takes memory."""

_WEIGHT_AT = {F.linear: 1, F.embedding: 1, torch.addmm: 2, Tensor.__getitem__: 0}
"""By function that reads a sharded weight, the index of the weight among its arguments."""


def _drawn(
    number: int, num_in: int, num_out: int, dtype: torch.dtype
) -> tuple[int, Tensor, Tensor]:
    """Draw the random function of a product: its first input feature, its factors and its shift.

    Each of the `num_out` outputs is a sum of I / O terms, rounded up.
    """
    random = torch.Generator().manual_seed(number)
    terms = -(-num_in // num_out)
    scales = torch.randn(terms * num_out, generator=random).to(dtype) / math.sqrt(terms)
    shift = torch.randn(num_out, generator=random).to(dtype)
    return int(torch.randint(num_in, (), generator=random)), scales, shift


# -- runs, and how they differ -----------------------------------------------------------------


class _Found(NamedTuple):
    """The results of one forward of the probe, and of its backward."""

    rows: Tensor
    """The index of each token among all tokens of the probe, [S]."""
    logits: Tensor
    """The logits of each token in float64, [S, V]."""
    gradients: list[Tensor]
    """For each lookup in a table, the gradient of each token's vector, [S, D]."""
    is_random: bool
    """True if the model drew random numbers."""


class _Probe(NamedTuple):
    """Runs a model whose weights have no memory on tokens, inside of `local_calls`."""

    model: nn.Module
    forward: Forward
    calls: _WithoutWeights
    called: Iterable[str]
    """The names of the modules that a forward calls."""

    def run(self, tokens: _Tokens) -> _Found:
        """Run a forward, and the backward of a weighted sum of all logits."""
        # Save the generator's state: if the model draws random numbers, the state is another one
        # afterwards (`is_random`).
        before = torch.default_generator.manual_seed(0).get_state()
        self.calls.looked_up.clear()
        logits, size = self.forward(self.model, tokens.ids, tokens.positions), len(tokens.rows)
        gradients = list[Tensor]()
        leaves = [x for x in self.calls.looked_up if _is_of_tokens(x, size)]
        if leaves and logits.requires_grad:
            # The weights depend on the token's index among all tokens, so a token has the same ones
            # in each run, and its gradient must be the same.
            of_logits = torch.arange(logits.shape[-1], dtype=logits.dtype).cos_()
            weights = (tokens.rows + 1).to(logits.dtype).sin_().unsqueeze(-1) * of_logits
            found = torch.autograd.grad(logits, leaves, weights[None], allow_unused=True)
            gradients = [
                torch.zeros(size, 0) if x is None else x.reshape(size, -1).to(torch.float64)
                for x in found
            ]
        is_random = not torch.equal(torch.get_rng_state(), before)
        return _Found(tokens.rows, logits.detach()[0].to(torch.float64), gradients, is_random)

    def run_mixed(self, number: int, num_tokens: int) -> tuple[_Tokens, Tensor, _Found]:
        """Run random tokens in a random order, with one of them changed.

        Returns the tokens, the order, and the results of the run.

        `number`: how many tokens; `num_tokens`: the number of token ids. Sets evaluation mode if
        the model draws random numbers. Raises ArithmeticError if logits are NaN.
        """
        whole = _Tokens.all_of(num_tokens, number)
        order = torch.randperm(number, generator=torch.Generator().manual_seed(1))
        tokens = whole.changed(num_tokens).part(order)
        found = self.run(tokens)
        if found.is_random:
            _set_mode(self.model, training=False)
            found = self.run(tokens)
        if found.logits.isnan().any():
            raise ArithmeticError("its logits are not numbers")
        return whole, order, found

    def run_part(self, tokens: _Tokens) -> _Found:
        """Run a part of the tokens; raise ValueError if the model fails on fewer tokens."""
        try:
            return self.run(tokens)
        except Exception as error:
            raise ValueError(
                f"{type(self.model).__name__} runs on {2 * len(tokens.rows)} tokens but not on"
                f" {len(tokens.rows)}: {error}"
            ) from error

    def difference(self, whole: _Tokens, cases: dict[str, list[_Tokens]]) -> str:
        """Return the message for a model that mixes tokens, naming the module at fault.

        `cases`: by name in `_SEEN`, the tokens of runs that are compared with the run of `whole`.
        The first case with other results is reported, forwards before backwards.
        """
        expected = self.run(whole)
        found = [(name, x, self.run_part(x)) for name, several in cases.items() for x in several]
        for name, tokens, result in found:
            if _differ(expected, result):
                events = [self._events(x, backward=False) for x in (whole, tokens)]
                return self._mixes(_first_apart(events, tokens.rows), _SEEN[name])
        for name, tokens, result in found:
            if _gradients_differ(expected, result):
                events = [self._events(x, backward=True) for x in (whole, tokens)]
                return self._mixes(_first_apart(events, tokens.rows), _SEEN_IN_BACKWARD[name])
        return self._mixes("", _SEEN["changed"])

    def check_same_again(self, tokens: _Tokens, before: _Found) -> None:
        """Raise ValueError, naming buffers, if `tokens` have other logits than in the run `before`.

        Such a model changes its own state in a forward.
        """
        versions = {id(buffer): version_of(buffer) for buffer in self.model.buffers()}
        if not _differ(before, self.run(tokens)):
            return
        named = self.model.named_buffers()
        changed = [name for name, buffer in named if versions.get(id(buffer)) != version_of(buffer)]
        raise ValueError(
            f"{type(self.model).__name__} gives other outputs when it is called again with the same"
            f" tokens, as its forward changes {', '.join(changed[:3]) or 'what it has kept'}, but"
            f" isp calls blocks again to recompute them, and on each rank. Remove what changes it"
            f" (spectral_norm by torch.nn.utils.parametrize.remove_parametrizations)"
        )

    def _mixes(self, place: str, seen: str) -> str:
        """Return the message for a module `place` that mixes tokens; `seen`: from `_SEEN`."""
        kind = type(self.model.get_submodule(place)).__name__
        backward = " in its backward pass" * (seen in _SEEN_IN_BACKWARD.values())
        return (
            f"{f'{place} ({kind})' if place else kind} mixes or counts tokens outside of"
            f" attention{backward}, so its sequence cannot be sharded: {seen}. Use the positions"
            f" that the model is called with, and mix tokens only through attention"
        )

    def _events(self, tokens: _Tokens, *, backward: bool) -> list[_Event]:
        """Return what enters and leaves each module in a forward, or in the backward after it.

        Events are in order of the run. In backward, gradients enter a module at its outputs and
        leave it at its inputs.
        """
        events: list[_Event] = []
        size = len(tokens.rows)

        def note(name: str, entered: bool, tensors: Any) -> Any:
            """Record an event with `tensors`; return views of these tensors, which have hooks for
            backward."""
            # In backward, gradients enter a module where forward leaves it.
            event = _Event(entered != backward, name, [])
            events.append(event)
            if not backward:
                per_token = (_per_token(x, size) for x in tree_leaves(tensors))
                event.tokens.extend(x for x in per_token if x is not None)
                return tensors

            def hooked(x: Any) -> Any:
                # Hook into a view: the gradient of the tensor itself is the sum over all readers.
                if not (isinstance(x, Tensor) and x.requires_grad and _is_of_tokens(x, size)):
                    return x
                own, number = x.view_as(x), len(event.tokens)
                # Keep zeros for the tensor, in case no gradient comes.
                event.tokens.append(torch.zeros(size, _SUMS, dtype=torch.float64))

                def keep(gradient: Tensor) -> None:
                    if (kept := _per_token(gradient, size)) is not None:
                        event.tokens[number] = kept

                own.register_hook(keep)
                return own

            return tree_map(hooked, tensors)

        def begins(name: str, _: nn.Module, args: Any, kwargs: Any) -> Any:
            return note(name, True, (args, kwargs))

        def ends(name: str, _: nn.Module, __: Any, output: Any) -> Any:
            return note(name, False, output)

        with ExitStack() as stack:
            for name in self.called:
                module = self.model.get_submodule(name)
                pre = module.register_forward_pre_hook(partial(begins, name), with_kwargs=True)
                stack.callback(pre.remove)
                stack.callback(module.register_forward_hook(partial(ends, name)).remove)
            self.run(tokens)
        # Backward runs through the modules in the opposite order.
        return events[::-1] if backward else events


def _differ(expected: _Found, found: _Found) -> bool:
    """Return whether a token that two runs have in common has different logits in them.

    The changed token is left out.
    """
    other, own = _same_tokens(expected.rows, found.rows)
    was, now = expected.logits[other], found.logits[own]
    largest = was.masked_fill(was.isinf(), 0).abs().max()
    # Equal infinities differ by 0; their difference would be NaN.
    apart = torch.where(was == now, 0, was - now).abs()
    # With `not`, a comparison with NaN counts as a difference.
    return not bool(apart.max() <= _LARGEST * largest)


def _gradients_differ(expected: _Found, found: _Found) -> bool:
    """Return whether a token that two runs have in common has different gradients in them."""
    other, own = _same_tokens(expected.rows, found.rows)
    for was, now in zip(expected.gradients, found.gradients, strict=False):
        if was.shape[1] == now.shape[1] and was.shape[1]:
            largest = was[other].norm(dim=1).max()
            if not bool((was[other] - now[own]).norm(dim=1).max() <= _LARGEST_GRADIENT * largest):
                return True
    return False


def _same_tokens(rows: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
    """Return where `rows` and `others` have the same tokens, as indices into each.

    The changed token is left out.
    """
    same = rows.unsqueeze(1) == others
    same &= others != _CHANGED
    places, of_others = same.nonzero(as_tuple=True)
    return places, of_others


# -- what enters and leaves modules ------------------------------------------------------------


class _Event(NamedTuple):
    """The start or the end of a module's call, with sums of the tensors or gradients passed."""

    entered: bool
    """True for the start of the call, False for its end."""
    name: str
    """The name of the module."""
    tokens: list[Tensor]
    """For each tensor that the module gets or returns, a few sums for each token, [S, `_SUMS`]."""


_SUMS = 4
"""The number of weighted sums of a token's features: in a single sum differences may cancel."""


def _is_of_tokens(x: Tensor, size: int) -> bool:
    """Return whether x has values for each of S = `size` tokens: it is [1, S, ..] or [S, ..]."""
    if x.is_complex() or not x.dim():
        return False
    return x.shape[:2] == (1, size) or x.shape[0] == size


def _per_token(x: Any, size: int) -> Tensor | None:
    """Return weighted sums of each token's features, [S, `_SUMS`].

    Returns None unless x is a tensor with values for each of S = `size` tokens.
    """
    if not isinstance(x, Tensor) or not _is_of_tokens(x, size):
        return None
    features = x.detach().reshape(size, -1).to(torch.float64)
    weights = torch.arange(features.shape[1], dtype=torch.float64)[:, None]
    return features @ (weights * torch.arange(1, _SUMS + 1)).cos_()


def _first_apart(events: list[list[_Event]], rows: Tensor) -> str:
    """Return the name of the module whose own code first computes other values in the second run.

    The first run of the probe has all tokens; the second has only the tokens with the indices
    `rows`, and one of them may have another id: that token is not compared. `events` has what
    entered and left modules in both runs. If the values first differ in the output of a module,
    returns that module; if in the input of a module, the one that calls it ("" is the model).
    """
    # `inside`: the modules that are running, the innermost last.
    inside = [""]
    same = rows != _CHANGED
    for before, now in zip(*events, strict=False):
        if not now.entered:
            inside.pop()
        for one, other in zip(before.tokens, now.tokens, strict=False):
            apart = (other - one[rows]).abs()[same]
            if apart.max() > _LARGEST * one.abs().max():
                return inside[-1] if now.entered else now.name
        if now.entered:
            inside.append(now.name)
    return ""
