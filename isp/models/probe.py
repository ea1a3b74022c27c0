"""A few forwards on a few tokens, which show whether a model mixes or counts tokens by itself.

[Note: Locality] A rank has a part of a sequence, and a packed sequence has several documents. What
one token sees of others is known of attention alone; everything else must be a function of a token
and its position. So attention is replaced by a function of a token, and then:

* a changed token changes its own logits alone,
* tokens in another order, each with its position, have their logits in that order,
* a part of the tokens, with their positions, has its part of the logits.

The model runs as in training, without dropout; as in evaluation where it draws random numbers of
its own. What begins beyond these tokens is not seen: `isp.check` compares longer sequences.

[Note: Weights without memory] Weights that are cut are read by linears and by lookups of rows alone
(`isp.models.reads`), and any other function of a token's features shows as much. So they get no
memory, and a model of any size is run as a whole.

S sequence, H heads, K KV heads, d and e sizes of heads, V vocabulary, N tokens of experts
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from isp.attention.call import AttentionOptions
from isp.mixers.call import mix_by
from isp.mixers.choice import Indexer
from isp.mixers.recurrence import Inputs, Recurrence
from isp.models.recorder import replaced_forward
from isp.models.roles import ParameterRole, holds_experts
from isp.models.trace import ModelTrace

__all__ = ["Forward", "check_local", "local_calls", "without_weights"]

logger = logging.getLogger(__name__)

_TOKENS = 33
_CHANGED = _TOKENS // 2

_LARGEST = 1e-5
"""Largest difference that is none, as a part of the largest logit: float32 sums in other orders."""

_SEEN = {
    "changed": "changing one token changes its output for other tokens",
    "permuted": "permuting tokens together with their positions changes its output",
    "part": "its output for a part of the tokens differs from that for all tokens",
}

_KNOWN = "transformers.", "model.decoder"
"""Modules whose experts are local to a token."""

Forward = Callable[[nn.Module, Tensor, Tensor], Tensor]


def check_local(
    shape: nn.Module, buffers: Iterable[Tensor], trace: ModelTrace, forward: Forward
) -> bool:
    """Raise ValueError, naming the module, if tokens are mixed other than by attention.

    Returns whether the model ran on random weights; if it did not, this is not known.

    `shape`: the traced model, on meta, whose calls of attention go where `mix_by` says;
    `buffers`: the model's own, in the order of its. See [Note: Locality].
    """
    model = without_weights(shape, buffers, trace.roles)
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(trace.vocab_size, (1, _TOKENS), generator=random)
    positions, order = torch.arange(_TOKENS)[None], torch.randperm(_TOKENS, generator=random)
    other = ids.clone()
    other[:, _CHANGED] = (ids[:, _CHANGED] + 1) % trace.vocab_size
    every = torch.arange(_TOKENS)
    part = every[_TOKENS // 4 : -_TOKENS // 4]  # without the first and the last position
    calls = {
        "changed": (other, positions, every),
        "permuted": (ids[:, order], positions[:, order], order),
        "part": (ids[:, part], positions[:, part], part),
    }
    with local_calls(model):
        try:
            whole, is_random = _run(model, forward, ids, positions)
            if is_random:
                _put_in(model, training=False)
                whole, _ = _run(model, forward, ids, positions)
        except Exception as error:  # the model's own code, on random weights
            logger.warning(
                "%s was not checked for code that mixes tokens outside of attention, because the"
                " check failed on random weights (isp.check compares layouts on a small model):"
                " %s",
                type(model).__name__,
                next(iter(str(error).splitlines()), type(error).__name__),
            )
            return False
        for case, (tokens, their_positions, rows) in calls.items():
            try:
                found, _ = _run(model, forward, tokens, their_positions)
            except Exception as error:
                raise ValueError(
                    f"{type(model).__name__} runs on {_TOKENS} tokens but not on {len(rows)}:"
                    f" {error}"
                ) from error
            apart = (found - whole[:, rows]).abs() / whole.abs().max()
            if case == "changed":
                apart[:, _CHANGED] = 0
            if apart.max() > _LARGEST:
                before = _events(model, forward, ids, positions, trace.called)
                now = _events(model, forward, tokens, their_positions, trace.called)
                place = _first_apart(before, now, rows, unlike=case == "changed")
                kind = type(model.get_submodule(place)).__name__
                raise ValueError(
                    f"{f'{place} ({kind})' if place else kind} mixes or counts tokens outside of"
                    f" attention, so its sequence cannot be sharded: {_SEEN[case]}. Use the"
                    f" positions that the model is called with, and mix tokens only through"
                    f" attention"
                )
    return True


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
    model = copy.deepcopy(shape, values)
    _put_in(model, training=training)
    return model


def _put_in(model: nn.Module, *, training: bool) -> None:
    """Put all modules but batch norms into training mode, without dropout, or into evaluation."""
    for module in model.modules():
        if not isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.training = training and not isinstance(module, nn.modules.dropout._DropoutNd)


def _wide(x: Tensor) -> Tensor:
    """At least in float32, if it is a floating-point tensor."""
    return x.float() if x.is_floating_point() and x.itemsize < 4 else x


def _nothing(x: Tensor) -> Tensor:
    return _wide(torch.zeros((), dtype=x.dtype)).expand(x.shape)


def _random(x: Tensor, random: torch.Generator) -> Tensor:
    """Numbers in [0.5, 1.5], of which a matrix has the same in several places."""
    strides = [(index and 3) + 2**index for index in reversed(range(x.dim()))]
    length = 1 + sum(s * (n - 1) for s, n in zip(strides, x.shape, strict=True)) * (x.numel() > 0)
    values = torch.rand(length, generator=random, dtype=_wide(torch.zeros((), dtype=x.dtype)).dtype)
    return (values + 0.5).as_strided(x.shape, strides)


def _counted(x: Tensor, random: torch.Generator) -> Tensor:
    """Of a buffer on meta: random numbers, or integers that count, as those of positions do."""
    if x.is_floating_point():
        return _random(x, random).contiguous()
    return torch.arange(x.shape[-1] if x.dim() else 1).expand(x.shape).to(x.dtype)


# -- local calls -------------------------------------------------------------------------------


@contextmanager
def local_calls(model: nn.Module) -> Iterator[None]:
    """In this context attention, products with weights, lookups and experts are local to a token.

    What else is known to mix tokens, and how to spread over ranks, gets its local form here.
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
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.device("cpu"))
        stack.enter_context(_WithoutWeights(model))
        stack.enter_context(mix_by(_LocalMixers()))
        yield


class _LocalMixers:
    """Each token is a document of its own; a `Mixers`."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
        """A token attends to itself, and all of q and k count."""
        k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))  # [B, S, H, ..]
        of_q, of_k = (torch.arange(x.shape[3], dtype=q.dtype) for x in (q, k))
        own = q @ of_q.cos() + k @ of_k.sin()  # [B, S, H]
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
    weights = torch.arange(x.shape[-1], dtype=x.dtype).cos()
    return x @ weights / math.sqrt(max(1, len(weights)))


def _experts(x: Tensor, *others: Any, **more: Any) -> Tensor:
    """Of experts, x [N, D]: a function of a token, its experts' numbers and weights [N, k]."""
    for other in tree_leaves((others, more)):
        if isinstance(other, Tensor) and x.dim() == other.dim() == 2 and len(other) == len(x):
            x = x + other.to(x.dtype).cos().sum(-1, keepdim=True)
    return x


class _WithoutWeights(TorchFunctionMode):
    """Functions of a token in place of products with, and lookups in, weights that lie nowhere."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._numbers = {
            id(p): number for number, p in enumerate(model.parameters()) if not any(p.stride())
        }

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        number = None
        if func is F.dropout or func is torch.dropout:
            return args[0] if args else (kwargs or {})["input"]
        if func in _WEIGHT_AT:
            number = self._numbers.get(id(args[_WEIGHT_AT[func]]))
        if number is None:
            return func(*args, **(kwargs or {}))
        random = torch.Generator().manual_seed(number)
        if func is F.linear:
            return _product(args[0], len(args[1]), random)
        if func is torch.addmm:
            return _product(args[1], args[2].shape[1], random)
        weight, ids = (args[0], args[1]) if func is Tensor.__getitem__ else (args[1], args[0])
        return _rows(ids, weight, random)


_WEIGHT_AT = {F.linear: 1, F.embedding: 1, torch.addmm: 2, Tensor.__getitem__: 0}
"""Which argument of what reads a weight that is cut is the weight."""


def _product(x: Tensor, size: int, random: torch.Generator) -> Tensor:
    """[.., I] -> [.., O]: each output a sum of a few features, in which all occur."""
    terms = -(-x.shape[-1] // size)
    chosen = torch.randperm(x.shape[-1], generator=random).repeat(-(-terms * size // x.shape[-1]))
    scales = torch.randn(terms * size, generator=random).to(x.dtype) / math.sqrt(terms)
    products = x[..., chosen[: terms * size]] * scales
    sums: Tensor = products.unflatten(-1, (terms, size)).sum(-2)
    return sums + torch.randn(size, generator=random).to(x.dtype)


def _rows(ids: Tensor, table: Tensor, random: torch.Generator) -> Tensor:
    """[..] -> [.., D], others for other ids, whatever the table's number of rows."""
    pace, shift = torch.rand(2, table.shape[1], generator=random) * 3
    rows: Tensor = (ids.unsqueeze(-1) * pace + shift).cos()
    return rows.to(table.dtype)


# -- what goes in and out of modules -----------------------------------------------------------


class _Event(NamedTuple):
    """A module is entered, or left."""

    entered: bool
    name: str
    tokens: list[Tensor]
    """A number for each token, [S], of each tensor that is given or comes back."""


def _run(model: nn.Module, forward: Forward, ids: Tensor, positions: Tensor) -> tuple[Tensor, bool]:
    """The logits [1, S, V] of a forward, and whether random numbers were drawn."""
    before = torch.default_generator.manual_seed(0).get_state()
    logits = forward(model, ids, positions)
    return logits.to(torch.float64), not torch.equal(torch.get_rng_state(), before)


def _events(
    model: nn.Module, forward: Forward, ids: Tensor, positions: Tensor, called: Iterable[str]
) -> list[_Event]:
    """What goes in and out of each module in a forward."""
    events: list[_Event] = []
    size = ids.shape[1]

    def note(name: str, entered: bool, _: nn.Module, *given: Any) -> None:
        leaves = tree_leaves(given if entered else given[-1])
        per_token = (_per_token(leaf, size) for leaf in leaves)
        events.append(_Event(entered, name, [x for x in per_token if x is not None]))

    with ExitStack() as stack:
        for name in called:
            module = model.get_submodule(name)
            begins, ends = partial(note, name, True), partial(note, name, False)
            stack.callback(module.register_forward_pre_hook(begins, with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(ends).remove)
        _run(model, forward, ids, positions)
    return events


def _per_token(x: Any, size: int) -> Tensor | None:
    """A number for each of `size` tokens that a tensor [1, S, ..] or [S, ..] has; else None."""
    if not isinstance(x, Tensor) or x.is_complex():
        return None
    if x.dim() > 1 and x.shape[:2] == (1, size):
        x = x[0]
    if not x.dim() or len(x) != size:
        return None
    return _number(x.reshape(size, -1).to(torch.float64))


def _first_apart(whole: list[_Event], found: list[_Event], rows: Tensor, *, unlike: bool) -> str:
    """The innermost module whose own code first gives other values; empty: the model's own.

    If its output is the first that differs, it is that module; if it is what a module is given, the
    one around that. `unlike`: the changed token's own values do not count.
    """
    inside = [""]
    for before, now in zip(whole, found, strict=False):
        if not now.entered:
            inside.pop()
        for one, other in zip(before.tokens, now.tokens, strict=False):
            apart = (other - one[rows]).abs()
            if unlike:
                apart[_CHANGED] = 0
            if apart.max() > _LARGEST * one.abs().max():
                return inside[-1] if now.entered else now.name
        if now.entered:
            inside.append(now.name)
    return ""
