"""A few forwards and backwards on a few tokens, which show whether a model mixes or counts tokens.

[Note: Locality] A rank has a part of a sequence, and a packed sequence has several documents. What
one token sees of others is known of attention alone; everything else must be a function of a token
and its position. So attention is replaced by a function of a token, and the model runs on 64 tokens
in another order, one of them changed, on every second of them, and on the others. Each token must
have the same logits, and the gradient of its logits by its own embedding must be the same:

* the values of other tokens, their order and their number must not count;
* an extreme (maximum, minimum, median) of all tokens lies in one of the halves alone, so that the
  other half differs even where the changed token is not the extreme;
* in backward, too, where hooks and autograd functions may do what forward does not.

Where something differs, the same is done step by step, to say what, and in which module.

The model runs as in training, without dropout; as in evaluation where it draws random numbers of
its own. What begins beyond these tokens is found in other ways (`isp.models.tracing.long_rows`).
Not seen are: code that depends on the values of weights or tokens (random here) and mixes for a few
of them alone; code that mixes inside of experts that isp knows, in the gradients of weights, or
between the rows of a batch, of which there is one here; differences below 1e-5 of the largest
logit, or 1e-3 of the largest gradient; gradients that do not come back to the embedding.
`isp.check` compares whole steps, with the model's weights.

[Note: Weights without memory] Weights that are cut are read by linears and by lookups of rows alone
(`isp.models.tracing.weight_reads`), and any other function of a token's features shows as much. So
they get no memory, and a model of any size is run as a whole.

S sequence, H heads, K KV heads, d and e sizes of heads, V vocabulary, N tokens of experts
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
from isp.models.meta import copied
from isp.models.roles import ParameterRole, holds_experts
from isp.models.tracing.recorder import replaced_forward
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
"""Tokens that the probe runs; of longer rows see `isp.models.tracing.long_rows`."""

_FEWER = 16
"""Tokens of a model that does not run on so many: some have tables of short sequences."""

_CHANGED = 8
"""The number of the token that is changed."""

_LARGEST = 1e-5
"""Largest difference that is none, as a part of the largest logit: float32 sums in other orders."""

_LARGEST_GRADIENT = 1e-3
"""As `_LARGEST`, of a token's gradient: in float32 single features may cross the kink of a ReLU."""

_SEEN = {
    "changed": "changing one token changes its output for other tokens",
    "permuted": "permuting tokens together with their positions changes its output",
    "part": "its output for a part of the tokens differs from that for all tokens",
}

_SEEN_IN_BACKWARD = {
    "changed": "changing one token changes the gradients of other tokens",
    "permuted": "permuting tokens together with their positions changes their gradients",
    "part": "the gradients of a part of the tokens differ from those with all tokens",
}

_KNOWN = "transformers.", "model.decoder"
"""Modules whose experts are local to a token."""

Forward = Callable[[nn.Module, Tensor, Tensor], Tensor]


class ProbeRun(NamedTuple):
    """A way in which a model ran on random weights."""

    tokens: int
    training: bool


class _Tokens(NamedTuple):
    """The input of a run."""

    ids: Tensor
    """[1, S]"""
    positions: Tensor
    """[1, S]"""
    rows: Tensor
    """The number of each of these tokens among all tokens of the probe, [S]."""

    @classmethod
    def all_of(cls, num_tokens: int, number: int) -> _Tokens:
        """Return so many random tokens of `num_tokens`, in order."""
        ids = torch.randint(num_tokens, (1, number), generator=torch.Generator().manual_seed(0))
        return cls(ids, torch.arange(number)[None], torch.arange(number))

    def part(self, places: Tensor | slice) -> _Tokens:
        """Return the tokens at these places, each with its position."""
        return _Tokens(self.ids[:, places], self.positions[:, places], self.rows[places])

    def changed(self, num_tokens: int) -> _Tokens:
        """Return the same with one token replaced by another."""
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
    """Raise ValueError, naming the module, if tokens are mixed other than by attention.

    Also if the model does not run on random weights, so that this is not known; if
    `allow_unchecked`, that is a warning, and the result is None.

    `shape`: the traced model, on meta, whose calls of attention go where `mix_by` says;
    `buffers`: the model's own, in the order of its. See [Note: Locality].
    """
    model, num_tokens = without_weights(shape, buffers, trace.roles), _num_tokens(shape, trace)
    with local_calls(model, gradients=True) as calls:
        probe = _Probe(model, forward, calls, trace.called)
        why: Exception | None = None
        # In evaluation, too: attention with dropout, say, is refused in training alone.
        for number, training in product((PROBE_TOKENS, _FEWER), (True, False)):
            _put_in(model, training=training)
            try:
                whole, order, expected = probe.run_mixed(number, num_tokens)
                break
            except Exception as error:  # the model's own code, on random weights
                why = why or error
        else:
            assert why is not None
            refuse_unchecked(model, why, allow_unchecked)
            return None
        for half in (whole.part(slice(0, None, 2)), whole.part(slice(1, None, 2))):
            found = probe.run_part(half)
            if _differ(expected, found) or _gradients_differ(expected, found):
                probe.check_same_again(whole.changed(num_tokens).part(order), expected)
                cases = {
                    "changed": [whole.changed(num_tokens)],
                    "permuted": [whole.part(order)],
                    "part": [whole.part(slice(start, None, 2)) for start in (0, 1)],
                }
                raise ValueError(probe.difference(whole, cases))
    return ProbeRun(number // 2, model.training)


def refuse_unchecked(model: nn.Module, why: Exception | str, allow_unchecked: bool) -> None:
    """Raise ValueError for a model that cannot be checked; if that is allowed, warn."""
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
    """Return whether a few of so many tokens have the logits that they have without the others.

    Arguments as of `check_local`; forward alone is run.
    """
    model = without_weights(shape, buffers, trace.roles)
    whole = _Tokens.all_of(_num_tokens(shape, trace), tokens)
    with local_calls(model) as calls:
        probe = _Probe(model, forward, calls, trace.called)
        few = whole.part(slice(tokens // 128, None, -(-tokens // 32)))
        if probe.run(few).is_random:
            _put_in(model, training=False)
        return not _differ(probe.run(whole), probe.run(few))


def _num_tokens(shape: nn.Module, trace: ModelTrace) -> int:
    """Tokens that the model knows: rows of its first table. A classifier has fewer logits."""
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
    """A copy of `shape` on the CPU; of each weight that is cut, all elements are one in memory."""
    values: dict[int, Any] = {}
    random = torch.Generator().manual_seed(0)
    for name, parameter in shape.named_parameters():
        cut = roles[name] in (ParameterRole.SHARDED, ParameterRole.IDLE)
        value = _nothing(parameter) if cut else _random(parameter, random)
        values[id(parameter)] = nn.Parameter(value, requires_grad=False)
    for own, buffer in zip(shape.buffers(), buffers, strict=True):
        value = _counted(buffer, random) if buffer.is_meta else _wide(buffer.cpu().clone())
        values[id(own)] = value
    model = copied(shape, values)
    _put_in(model, training=training)
    return model


def _put_in(model: nn.Module, *, training: bool) -> None:
    """Put all modules but batch norms into training mode, without dropout, or into evaluation."""
    for module in model.modules():
        if not isinstance(module, AnyBatchNorm):
            module.training = training and not isinstance(module, AnyDropout)


def _wide(x: Tensor) -> Tensor:
    """At least in float32, if it is a floating-point tensor."""
    return x.float() if x.is_floating_point() and x.itemsize < 4 else x


def _nothing(x: Tensor) -> Tensor:
    return _wide(torch.zeros((), dtype=x.dtype)).expand(x.shape)


def _random(x: Tensor, random: torch.Generator) -> Tensor:
    """Numbers in [0.5, 1.5], of which a matrix has the same in several places."""
    strides = [(index and 3) + 2**index for index in reversed(range(x.dim()))]
    length = 1 + sum(s * (n - 1) for s, n in zip(strides, x.shape, strict=True)) * (x.numel() > 0)
    dtype = torch.float32 if x.itemsize < 4 else x.dtype
    values = torch.rand(length, generator=random, dtype=dtype)
    return values.add_(0.5).as_strided(x.shape, strides)


def _counted(x: Tensor, random: torch.Generator) -> Tensor:
    """Of a buffer on meta: random numbers, or integers that count, as those of positions do."""
    if x.is_floating_point():
        return _random(x, random).contiguous()
    return torch.arange(x.shape[-1] if x.dim() else 1).expand(x.shape).to(x.dtype)


# -- local calls -------------------------------------------------------------------------------


@contextmanager
def local_calls(model: nn.Module, *, gradients: bool = False) -> Iterator[_WithoutWeights]:
    """In this context attention, products with weights, lookups and experts are local to a token.

    What else is known to mix tokens, and how to spread over ranks, gets its local form here.
    Without `gradients`, none are computed.
    """
    ran = set()
    with ExitStack() as stack:
        for module in model.modules():
            if holds_experts(module):  # some are known, of others one runs
                key = type(module), *(p.shape for p in module.parameters(recurse=False))
                if key in ran or type(module).__module__.startswith(_KNOWN):
                    stack.enter_context(replaced_forward(module, _experts))
                ran.add(key)
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(torch.set_grad_enabled(gradients))
        if torch.get_default_device().type != "cpu":  # else each operation would pay for it
            stack.enter_context(torch.device("cpu"))
        calls = stack.enter_context(_WithoutWeights(model))
        stack.enter_context(mix_by(_LocalMixers()))
        yield calls


class _LocalMixers:
    """Each token is a document of its own; a `Mixers`."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
        """A token attends to itself, and all of q and k count."""
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
        out = x * weight.sum(1)
        return out if bias is None else out + bias

    def scan(self, recurrence: Recurrence, inputs: Inputs) -> Tensor:
        """All that the scan reads counts, as in a state, and no state is made: it may be large."""
        flat, mixed = inputs.flat(), inputs.of_heads[0]
        x, *others = flat.of_heads
        parts = [*others, *flat.of_groups, *(t[None] for t in flat.constants if t is not None)]
        numbers = [_number(t.to(x.dtype).reshape(*t.shape[:2], -1)) for t in parts]  # [.., H or G]
        of_heads = (n.repeat_interleave(flat.num_heads // n.shape[1], 1) for n in numbers)
        own = sum(of_heads, x.new_zeros(()))  # [T, H]
        return (x + own.tanh().view(*own.shape, *(1,) * (x.dim() - 2))).view(mixed.shape)

    def choose(self, indexer: Indexer) -> Tensor:
        """In place of numbers what the token's own key makes."""
        return _number(indexer.keys)[..., None, None]


def _number(x: Tensor) -> Tensor:
    """[.., F] -> [..]: a sum in which all features count, about as large as one of them."""
    weights = torch.arange(x.shape[-1], dtype=x.dtype).cos_()
    return x @ weights / math.sqrt(max(1, len(weights)))


def _experts(x: Tensor, *others: Any, **more: Any) -> Tensor:
    """Of experts, x [N, D]: a function of a token, its experts' numbers and weights [N, k]."""
    for other in tree_leaves((others, more)):
        if isinstance(other, Tensor) and x.dim() == other.dim() == 2 and len(other) == len(x):
            x = x + other.to(x.dtype).cos().sum(-1, keepdim=True)
    return x


class _WithoutWeights(TorchFunctionMode):
    """Functions of a token in place of products with, and lookups in, weights that lie nowhere.

    Random numbers are drawn once for a kind of weight: of so many features in and out, and of
    `_KINDS` of the same sizes, so that neighbors differ.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._numbers = {
            id(p): number for number, p in enumerate(model.parameters()) if not any(p.stride())
        }
        self._products: dict[tuple[Any, ...], tuple[int, Tensor, Tensor]] = {}
        self._tables: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self.looked_up: list[Tensor] = []
        """What tables gave, each without a history of its own, where gradients are computed."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        place = _WEIGHT_AT.get(func)
        if place is None:
            if func is F.dropout or func is torch.dropout:
                return args[0] if args else (kwargs or {})["input"]
            return func(*args, **kwargs) if kwargs else func(*args)
        number = self._numbers.get(id(args[place]))
        if number is None:
            out = func(*args, **(kwargs or {}))
            return self._leaf(out) if func is F.embedding else out
        if func is F.linear:
            return self._product(args[0], len(args[1]), number)
        if func is torch.addmm:
            return self._product(args[1], args[2].shape[1], number)
        weight, ids = (args[0], args[1]) if func is Tensor.__getitem__ else (args[1], args[0])
        return self._leaf(self._rows(ids, weight, number))

    def _leaf(self, rows: Tensor) -> Tensor:
        """Let gradients end at rows of a table; a copy, as a model may change them in place."""
        if not (torch.is_grad_enabled() and rows.is_floating_point()):
            return rows
        self.looked_up.append(rows.detach().requires_grad_())
        return self.looked_up[-1].clone()

    def _product(self, x: Tensor, size: int, number: int) -> Tensor:
        """[.., I] -> [.., O]: each output a sum of a few features, in which all occur."""
        key = number % _KINDS, x.shape[-1], size, x.dtype
        if (drawn := self._products.get(key)) is None:
            drawn = self._products[key] = _drawn(*key)
        start, scales, shift = drawn
        # Runs of features, as picking single ones out of a row takes ten times as long.
        times, rest = divmod(len(scales) - x.shape[-1] + start, x.shape[-1])
        # Features start, start + 1, .., modulo their number: as many as there are factors.
        taken = torch.cat([x[..., start:], *[x] * times, x[..., :rest]], -1)
        if len(scales) == size:
            return torch.addcmul(shift, taken, scales)
        sums: Tensor = (taken * scales).unflatten(-1, (-1, size)).sum(-2)
        return sums + shift

    def _rows(self, ids: Tensor, table: Tensor, number: int) -> Tensor:
        """[..] -> [.., D], others for other ids, whatever the table's number of rows."""
        key = number, table.shape[1]
        if (drawn := self._tables.get(key)) is None:
            random = torch.Generator().manual_seed(number)
            pace, shift = torch.rand(2, table.shape[1], generator=random) * 3
            drawn = self._tables[key] = pace, shift
        rows: Tensor = torch.addcmul(drawn[1], ids.unsqueeze(-1), drawn[0]).cos_()
        return rows.to(table.dtype)


_KINDS = 8
"""Weights of the same sizes with numbers of their own; more would take memory for large models."""

_WEIGHT_AT = {F.linear: 1, F.embedding: 1, torch.addmm: 2, Tensor.__getitem__: 0}
"""Which argument of what reads a weight that is cut is the weight."""


def _drawn(
    number: int, num_in: int, num_out: int, dtype: torch.dtype
) -> tuple[int, Tensor, Tensor]:
    """Draw the first input feature of a product, its factors, and its shift."""
    random = torch.Generator().manual_seed(number)
    terms = -(-num_in // num_out)
    scales = torch.randn(terms * num_out, generator=random).to(dtype) / math.sqrt(terms)
    shift = torch.randn(num_out, generator=random).to(dtype)
    return int(torch.randint(num_in, (), generator=random)), scales, shift


# -- runs, and how they differ -----------------------------------------------------------------


class _Found(NamedTuple):
    """What a run gives."""

    rows: Tensor
    """As of `_Tokens`."""
    logits: Tensor
    """[S, V] in float64."""
    gradients: list[Tensor]
    """The gradients of what each table gives for each token, [S, D]."""
    is_random: bool
    """Whether random numbers were drawn."""


class _Probe(NamedTuple):
    """A model that runs on tokens."""

    model: nn.Module
    forward: Forward
    calls: _WithoutWeights
    called: Iterable[str]
    """The names of the modules that a forward calls."""

    def run(self, tokens: _Tokens) -> _Found:
        """Run a forward, and the backward of a fixed combination of each token's logits."""
        before = torch.default_generator.manual_seed(0).get_state()
        self.calls.looked_up.clear()
        logits, size = self.forward(self.model, tokens.ids, tokens.positions), len(tokens.rows)
        gradients = list[Tensor]()
        leaves = [x for x in self.calls.looked_up if _is_of_tokens(x, size)]
        if leaves and logits.requires_grad:
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
        """Return so many tokens of `num_tokens`, an order, and a run in it, with one changed.

        The model is put into evaluation if it draws random numbers.
        """
        whole = _Tokens.all_of(num_tokens, number)
        order = torch.randperm(number, generator=torch.Generator().manual_seed(1))
        tokens = whole.changed(num_tokens).part(order)
        found = self.run(tokens)
        if found.is_random:
            _put_in(self.model, training=False)
            found = self.run(tokens)
        if found.logits.isnan().any():
            raise ArithmeticError("its logits are not numbers")
        return whole, order, found

    def run_part(self, tokens: _Tokens) -> _Found:
        """Run the same; raise ValueError for a model that does not run on fewer tokens."""
        try:
            return self.run(tokens)
        except Exception as error:
            raise ValueError(
                f"{type(self.model).__name__} runs on {2 * len(tokens.rows)} tokens but not on"
                f" {len(tokens.rows)}: {error}"
            ) from error

    def difference(self, whole: _Tokens, cases: dict[str, list[_Tokens]]) -> str:
        """Return the message for a model that differs in one of the `cases` from the whole."""
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
        """Raise ValueError, naming buffers, if `tokens` no longer give what they gave `before`."""
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
        kind = type(self.model.get_submodule(place)).__name__
        backward = " in its backward pass" * (seen in _SEEN_IN_BACKWARD.values())
        return (
            f"{f'{place} ({kind})' if place else kind} mixes or counts tokens outside of"
            f" attention{backward}, so its sequence cannot be sharded: {seen}. Use the positions"
            f" that the model is called with, and mix tokens only through attention"
        )

    def _events(self, tokens: _Tokens, *, backward: bool) -> list[_Event]:
        """Note what goes in and out of each module in a forward, or in the `backward` after it."""
        events: list[_Event] = []
        size = len(tokens.rows)

        def note(name: str, entered: bool, tensors: Any) -> Any:
            event = _Event(entered != backward, name, [])
            events.append(event)
            if not backward:
                per_token = (_per_token(x, size) for x in tree_leaves(tensors))
                event.tokens.extend(x for x in per_token if x is not None)
                return tensors

            def passed(x: Any) -> Any:
                # A view: the gradient of the tensor itself has what other modules add to it.
                if not (isinstance(x, Tensor) and x.requires_grad and _is_of_tokens(x, size)):
                    return x
                own, number = x.view_as(x), len(event.tokens)
                event.tokens.append(torch.zeros(size, _SUMS, dtype=torch.float64))

                def keep(gradient: Tensor) -> None:
                    if (kept := _per_token(gradient, size)) is not None:
                        event.tokens[number] = kept

                own.register_hook(keep)
                return own

            return tree_map(passed, tensors)

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
        return events[::-1] if backward else events


def _differ(expected: _Found, found: _Found) -> bool:
    """Return whether a token has other logits; the changed one does not count."""
    other, own = _same_tokens(expected.rows, found.rows)
    was, now = expected.logits[other], found.logits[own]
    largest = was.masked_fill(was.isinf(), 0).abs().max()
    apart = torch.where(was == now, 0, was - now).abs()  # of equal infinities, too
    return not bool(apart.max() <= _LARGEST * largest)


def _gradients_differ(expected: _Found, found: _Found) -> bool:
    """Return the same for gradients, as a part of the largest of a token."""
    other, own = _same_tokens(expected.rows, found.rows)
    for was, now in zip(expected.gradients, found.gradients, strict=False):
        if was.shape[1] == now.shape[1] and was.shape[1]:
            largest = was[other].norm(dim=1).max()
            if not bool((was[other] - now[own]).norm(dim=1).max() <= _LARGEST_GRADIENT * largest):
                return True
    return False


def _same_tokens(rows: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
    """Return the places in `rows` and in `others` of their common tokens, but for the changed."""
    same = rows.unsqueeze(1) == others
    same &= others != _CHANGED
    places, of_others = same.nonzero(as_tuple=True)
    return places, of_others


# -- what goes in and out of modules -----------------------------------------------------------


class _Event(NamedTuple):
    """A module is entered, or left; in backward, where its gradients come in, or leave."""

    entered: bool
    name: str
    tokens: list[Tensor]
    """A few sums for each token, [S, `_SUMS`], of each tensor that is given or comes back."""


_SUMS = 4
"""Sums of a token's features: in a single one a small difference may cancel."""


def _is_of_tokens(x: Tensor, size: int) -> bool:
    """Return whether a tensor is [1, S, ..] or [S, ..]."""
    if x.is_complex() or not x.dim():
        return False
    return x.shape[:2] == (1, size) or x.shape[0] == size


def _per_token(x: Any, size: int) -> Tensor | None:
    """Return sums of features, [S, `_SUMS`], if a tensor is [1, S, ..] or [S, ..]; else None."""
    if not isinstance(x, Tensor) or not _is_of_tokens(x, size):
        return None
    features = x.detach().reshape(size, -1).to(torch.float64)
    weights = torch.arange(features.shape[1], dtype=torch.float64)[:, None]
    return features @ (weights * torch.arange(1, _SUMS + 1)).cos_()


def _first_apart(events: list[list[_Event]], rows: Tensor) -> str:
    """The innermost module whose own code first gives other values; empty: the model's own.

    If its output is the first that differs, it is that module; if it is what a module is given, the
    one around that. The changed token's own values do not count. `events`: those of all tokens, and
    those of the tokens `rows`.
    """
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
