"""One forward on meta tensors, which tells what a model is made of, and in which order.

Nothing is found by name: a linear is an `nn.Linear` that is called, a block is an entry of an
`nn.ModuleList` that calls attention.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from enum import StrEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from isp.attention.call import Attend, AttentionOptions
from isp.traced.head import HeadFinder
from isp.traced.roles import (
    Role,
    check_reads,
    holds_experts,
    is_linear,
    is_transposed,
    roles_of,
)

__all__ = [
    "AttentionSizes",
    "Call",
    "Kind",
    "ModelTrace",
    "check_drivable",
    "experts_passed",
    "trace_model",
]

_TOKENS = 16
"""Length of the row that a trace runs; no fact depends on it."""


class Kind(StrEnum):
    """The kinds of calls that are followed."""

    LINEAR = "linear"
    TABLE = "embedding"
    ATTENTION = "attention"
    EXPERTS = "experts"
    BLOCK = "block"
    """A whole block; a trace has its calls instead."""


class AttentionSizes(NamedTuple):
    """The sizes of one attention."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    """Of q and k."""
    value_size: int
    """Of v, and of the result."""
    window: int | None
    """In tokens; None: none."""


class Call(NamedTuple):
    """One call in a forward."""

    kind: Kind
    module: str
    """The linear, table or experts that are called; of attention, the block that calls it."""
    block: str | None
    """The block that the call lies in; None: outside the blocks."""
    sizes: AttentionSizes | None = None
    """Of attention."""
    route: int | None = None
    """To how many of the experts a token goes; None: the call does not tell."""


class ModelTrace(NamedTuple):
    """The calls of a forward, and the roles of the parameters."""

    calls: tuple[Call, ...]
    roles: dict[str, Role]
    """By name; of a shared parameter under its first."""
    sizes: dict[str, int]
    """Elements of each of them."""

    @property
    def blocks(self) -> tuple[str, ...]:
        """The blocks, in order."""
        return tuple(dict.fromkeys(call.block for call in self.calls if call.block is not None))

    multiplied: int
    """Elements of all weights that a token is multiplied by: of experts, those that it goes to."""
    called: tuple[str, ...]
    """The modules that are called, in order; others only hold what is read elsewhere."""
    vocab_size: int
    """Logits of a token."""
    reads_positions: bool
    """Whether the positions that it is given count."""
    head: str | None
    """The linear behind all blocks of whose output alone the logits are made, if there is one."""

    def elements(self, role: Role) -> int:
        """Elements of all parameters of this role."""
        return sum(self.sizes[name] for name, found in self.roles.items() if found is role)


def check_drivable(model: nn.Module) -> None:
    """Raise ValueError for a model whose calls do not go through its classes, before it is copied.

    A forward of an instance's own would go on calling that instance from a copy.
    """
    for name, module in model.named_modules():
        if "forward" in vars(module):
            raise ValueError(
                f"{name or 'the model'} ({type(module).__name__}) has a forward of its own beside"
                f" its class's: it was parallelised before, or another library has wrapped it. Give"
                f" the model as it was made"
            )
        if getattr(module, "_compiled_call_impl", None) is not None:
            raise ValueError(
                f"{name or 'the model'} ({type(module).__name__}) was compiled: isp drives modules"
                f" one by one. Give the model as it was before compile()"
            )


def trace_model(
    model: nn.Module,
    connect: Callable[[nn.Module, Attend], None],
    forward: Callable[[nn.Module, Tensor, Tensor], Tensor],
) -> ModelTrace:
    """The trace of `model`, all of whose parameters and buffers are on the meta device.

    `connect` makes the model's attention calls arrive at a function, `forward` runs the model on
    tokens and positions [B, S]. Raises ValueError, naming the place, for a model that cannot be
    driven: a parameter of a kind that nobody would cut or sum, a block without exactly one call of
    attention, calls of attention outside of blocks, weights that are read where they are not whole.
    """
    recorder = _Recorder(model)
    connect(model, recorder.attend)
    ids = torch.zeros(1, _TOKENS, dtype=torch.int64, device="meta")
    positions = torch.arange(_TOKENS, device="meta").unsqueeze(0)
    try:
        with recorder.listening(positions), torch.no_grad():
            logits = forward(model, ids, positions)
    except ValueError:
        raise
    except Exception as error:
        raise ValueError(
            f"{type(model).__name__} could not be traced: it is called with tokens and positions"
            f" [1, {_TOKENS}] on the meta device, and said: {error}"
        ) from error
    every = tuple(recorder.calls_in_blocks_of_attention())
    cut = _cut_experts(model, every, recorder.reads)
    calls = tuple(c for c in every if c.kind is not Kind.EXPERTS or c.module in cut)
    _check_blocks(model, calls)
    parameters = dict(model.named_parameters())
    roles = roles_of(model, {call.module for call in calls})
    check_reads(recorder.reads, roles)
    return ModelTrace(
        calls,
        roles,
        {name: parameter.numel() for name, parameter in parameters.items()},
        _multiplied(model, every, roles),
        tuple(recorder.called),
        logits.shape[-1],
        recorder.reads_positions,
        _head(model, calls, recorder.finder, logits),
    )


def _cut_experts(model: nn.Module, calls: Iterable[Call], reads: Iterable[str]) -> set[str]:
    """The modules of experts that may be cut, as what they do with their weights is known.

    They are called as transformers calls them, with tokens and numbers of experts, in blocks alone,
    and nobody else reads what is theirs.
    """
    experts = [call for call in calls if call.kind is Kind.EXPERTS]
    others = {call.module for call in experts if call.block is None or call.route is None}
    others |= {name.rpartition(".")[0] for name in reads}
    cut = {call.module for call in experts} - others
    own = {name: {id(p) for p in m.parameters(recurse=False)} for name, m in model.named_modules()}
    while True:
        held = set[int]().union(
            *(parameters for name, parameters in own.items() if name not in cut)
        )
        left = {name for name in cut if not own[name] & held}
        if left == cut:
            return cut
        cut = left


def _head(
    model: nn.Module, calls: tuple[Call, ...], finder: HeadFinder, logits: Tensor
) -> str | None:
    last = calls[-1]
    blocks = tuple(call.block for call in calls if call.block is not None)
    if last.kind is not Kind.LINEAR or last.block is not None:
        return None
    found = finder.head(logits, blocks)
    if found != last.module or sum(call.module == found for call in calls) > 1:
        return None
    return None if is_transposed(model.get_submodule(found)) else found


def _multiplied(model: nn.Module, calls: Iterable[Call], roles: dict[str, Role]) -> int:
    """Elements of all weights that a token is multiplied by."""
    total = 0
    for call in calls:
        for parameter in model.get_submodule(call.module).parameters(recurse=False):
            if call.kind is Kind.LINEAR and parameter.dim() == 2:
                total += parameter.numel()
            if call.kind is Kind.EXPERTS and parameter.dim() == 3:
                total += parameter[: call.route].numel()
    for name in (name for name, role in roles.items() if role is Role.ROUTER):
        if not holds_experts(model.get_submodule(name.rpartition(".")[0])):
            total += model.get_parameter(name).numel()
    return total


class _Recorder:
    """Notes the calls of a model while it listens."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._calls: list[Call] = []
        self._block: str | None = None
        self._names = {id(p): name for name, p in model.named_parameters()}
        self._open: list[nn.Module] = []
        self.called: dict[str, None] = {}
        """The modules that were called, in order."""
        self.reads: dict[str, str] = {}
        """The parameters that were read outside of their modules' forward, and by what."""
        self.reads_positions = False
        self.finder = HeadFinder()

    def attend(self, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
        """Note a call of attention; the result has the shape of the true one."""
        sizes = AttentionSizes(q.shape[2], k.shape[2], q.shape[3], v.shape[3], options.window)
        self._calls.append(Call(Kind.ATTENTION, self._block or "", self._block, sizes))
        return q.new_zeros(*q.shape[:3], v.shape[3])

    @contextmanager
    def listening(self, positions: Tensor) -> Iterator[None]:
        with ExitStack() as stack:

            def on(register: Callable[..., Any], fn: Callable[..., Any]) -> None:
                stack.callback(register(fn).remove)

            for name, entry in _list_entries(self._model):
                on(entry.register_forward_pre_hook, self._entering(name))
                on(entry.register_forward_hook, self._entering(None))
                on(entry.register_forward_hook, self._leaving(name))
            stack.enter_context(_Reads(self._read, positions))
            stack.enter_context(self.finder)
            for name, module in self._model.named_modules():
                on(module.register_forward_pre_hook, self._opening(name))
                on(module.register_forward_hook, lambda *_: self._open.pop() and None)
                if is_linear(module):
                    on(module.register_forward_pre_hook, self._calling(Kind.LINEAR, name))
                    on(module.register_forward_hook, self._called(name))
                elif isinstance(module, nn.Embedding):
                    on(module.register_forward_pre_hook, self._calling(Kind.TABLE, name))
                elif holds_experts(module):
                    on(module.register_forward_pre_hook, self._calling(Kind.EXPERTS, name))
            stack.enter_context(experts_passed(self._model))
            yield

    def calls_in_blocks_of_attention(self) -> Iterator[Call]:
        """The calls; those in lists of modules that call no attention lie in no block."""
        lists = {_list_of(c.block) for c in self._calls if c.block and c.kind is Kind.ATTENTION}
        for call in self._calls:
            inside = call.block is not None and _list_of(call.block) in lists
            yield call if inside else call._replace(block=None)

    def _entering(self, block: str | None) -> Callable[..., None]:
        def enter(*_: Any) -> None:
            self._block = block

        return enter

    def _leaving(self, block: str) -> Callable[..., None]:
        return lambda _, given, output: self.finder.passed(block, given, output)

    def _called(self, name: str) -> Callable[..., None]:
        return lambda _, __, output: self.finder.called(name, output)

    def _opening(self, name: str) -> Callable[..., None]:
        def opened(module: nn.Module, *_: Any) -> None:
            self.called[name] = None
            self._open.append(module)

        return opened

    def _read(self, tensor: Tensor, by: str) -> None:
        if not isinstance(tensor, nn.Parameter):
            self.reads_positions = True
            return
        own = self._open[-1].parameters(recurse=False) if self._open else ()
        name = self._names.get(id(tensor))
        if name is not None and not any(tensor is mine for mine in own):
            self.reads[name] = by

    def _calling(self, kind: Kind, name: str) -> Callable[..., None]:
        def called(_: nn.Module, given: tuple[Any, ...]) -> None:
            route = _route(given) if kind is Kind.EXPERTS else None
            self._calls.append(Call(kind, name, self._block, route=route))

        return called


def _route(given: tuple[Any, ...]) -> int | None:
    """To how many experts a token goes, if a call is like transformers': [N, D], then [N, k]."""
    if len(given) < 2 or not all(isinstance(x, Tensor) and x.dim() == 2 for x in given[:2]):
        return None
    tokens, numbers = given[:2]
    if len(tokens) != len(numbers) or numbers.dtype not in _NUMBERS:
        return None
    return int(numbers.shape[1])


_NUMBERS = (torch.int32, torch.int64)


class _Reads(TorchFunctionMode):
    """Tells of parameters, and of positions, of which an operation makes a tensor."""

    def __init__(self, read: Callable[[Tensor, str], None], positions: Tensor) -> None:
        super().__init__()
        self._read = read
        self._positions = positions

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if any(isinstance(leaf, Tensor) for leaf in tree_leaves(out)):  # not its dtype or shape
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, nn.Parameter) or leaf is self._positions:
                    self._read(leaf, getattr(func, "__name__", str(func)))
        return out


@contextmanager
def experts_passed(model: nn.Module) -> Iterator[None]:
    """In this context experts hand on what they are given: routes depend on values."""
    with ExitStack() as stack:
        for module in model.modules():
            if holds_experts(module):
                stack.enter_context(_replaced_forward(module, lambda x, *_, **__: x))
        yield


@contextmanager
def _replaced_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    before = module.__dict__.get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if before is None:
            del module.forward
        else:
            module.forward = before


def _list_entries(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The entries of the outermost lists of modules, with their names."""
    outermost: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and not name.startswith(tuple(outermost)):
            outermost.append(f"{name}.")
            for index, entry in enumerate(module):
                yield f"{name}.{index}", entry


def _list_of(block: str) -> str:
    return block.rpartition(".")[0]


def _check_blocks(model: nn.Module, calls: Iterable[Call]) -> None:
    """Raise ValueError for blocks that the sequence cannot be split in."""
    found = Counter(call.block for call in calls if call.kind is Kind.ATTENTION)
    if not found:
        raise ValueError(f"{type(model).__name__} calls no attention that isp can see: {_HOW}")
    if None in found:
        raise ValueError(
            f"{type(model).__name__} calls attention outside of the entries of an nn.ModuleList:"
            f" put its blocks into one"
        )
    for call in calls:
        if call.sizes is not None and call.sizes.value_size > call.sizes.head_size:
            raise ValueError(
                f"{call.block} attends with values of {call.sizes.value_size} features and keys of"
                f" {call.sizes.head_size}: no attention of isp takes values larger than keys"
            )
    lists = {_list_of(block) for block in found if block}
    for name, entry in _list_entries(model):
        if _list_of(name) in lists and found[name] != 1:
            raise ValueError(
                f"{name} ({type(entry).__name__}) calls attention {found[name]} times, not once:"
                f" layers that mix tokens in another way (linear attention, state spaces,"
                f" convolutions) cannot be split by sequence. {_HOW}"
            )


_HOW = (
    "A layer has to call transformers' attention interface, or isp.attention(q, k, v), exactly once"
)
