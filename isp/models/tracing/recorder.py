"""`CallRecorder`: record the calls of a model while it runs on meta tensors.

B batch, S sequence, H heads, d head size, D hidden size, N tokens, k experts of each token
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from isp.core.attention.api import AttentionOptions
from isp.core.mixers.key_choice import Indexer
from isp.core.mixers.recurrence import Inputs, Recurrence
from isp.core.torch_private import tree_leaves, version_of
from isp.models.forwards import replaced_forward
from isp.models.roles import holds_experts, is_linear
from isp.models.tracing.calls import (
    Ahead,
    AttentionSizes,
    BlockOutput,
    Call,
    Kind,
    TokenOutput,
    same_rows,
    weights_among,
)
from isp.models.tracing.linear_outputs import LinearOutputs
from isp.models.tracing.weight_reads import Reads

__all__ = [
    "TOKENS",
    "CallRecorder",
    "identity_experts",
    "list_entries",
    "list_of",
]

TOKENS = 17
"""The number of tokens in the row of a trace, on which no result of the trace depends.

A prime that is rarely a number of heads, so that a tensor [B, H, S, d] in place of [B, S, H, d] is
noticed."""


class CallRecorder:
    """Records the calls of one forward, by module hooks, torch function modes and as the mixers.

    As `Mixers` it gets the calls that mix tokens, and returns results of the right shape on meta.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._calls: list[Call] = []
        self._results: dict[int, tuple[Tensor, int]] = {}
        """By index of a call of attention, its result, and that tensor's version at the call."""
        self._block: str | None = None
        """The name of the element of a list of modules, such as `layers.3`, that runs now."""
        self._given: tuple[Tensor, int] | None = None
        """The input of the last linear, and that tensor's version at the call."""
        self._num_given = 0
        """The number of different inputs of linears so far."""
        self._routed: tuple[int, Tensor, int] | None = None
        """The index of the last call of experts, its tokens and their version at the call; None if
        another module was called since."""
        self._ahead: dict[str, int] = {}
        """By running module that was called directly after experts with the same tokens, the index
        of the experts' call."""
        self.entered = Counter[str]()
        """How often each element of a list of modules, such as `layers.3`, was called; in order of
        the first calls."""
        self.called: dict[str, None] = {}
        """The modules that were called, in order of their first calls."""
        self._open: list[nn.Module] = []
        """The modules whose forward runs, the innermost last; the list of `Reads.open`."""
        self.mixing: set[nn.Module] = set()
        """The modules during whose forward a mixer was called."""
        self.by_token: dict[str, list[TokenOutput]] = {}
        """By module that is called with one tensor [B, S, D], the structure of the output of each
        call whose output has values for each token."""
        self.linear_outputs = LinearOutputs()
        self.outputs: dict[str, BlockOutput] = {}
        """By block, the structure of its output; blocks that return no hidden state are left
        out."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
        """Record a call of attention; return zeros in the result's shape [B, S, H, d].

        Raises ValueError if q, k or v do not have S as their second dim.
        """
        # In transformers heads come before tokens, [B, H, S, d]. A model that calls isp.attention
        # may do so by mistake: the error then says what to change.
        if any(x.dim() != 4 or x.shape[1] != TOKENS for x in (q, k, v)):
            shapes = ", ".join(str(list(x.shape)) for x in (q, k, v))
            turned = q.dim() == 4 and q.shape[2] == TOKENS
            raise ValueError(
                f"{self._block or type(self._model).__name__} calls attention with q, k, v of"
                f" {shapes} for {TOKENS} tokens: attention takes [B, S, H,"
                f" d]{', so transpose(1, 2) tensors of [B, H, S, d]' if turned else ''}"
            )
        _read(options.profiles)
        self.mixing.update(self._open)
        heads, size = q.shape[2:]
        chosen = options.chosen and options.chosen.numbers.shape[-1] * options.chosen.run
        reach = options.window, options.chunk, options.causal, chosen, options.profiles is not None
        logits = options.scale, options.softcap, options.sinks is not None
        sizes = AttentionSizes(heads, k.shape[2], size, v.shape[3], *reach, *logits)
        result = q.new_zeros(*q.shape[:3], v.shape[3])
        # Keep the result until the end, to see whether the model writes into it; see
        # `calls_in_blocks`.
        self._results[len(self._calls)] = result, version_of(result)
        self._calls.append(Call(Kind.ATTENTION, self._block or "", self._block, sizes))
        return result

    def convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None, dilation: int) -> Tensor:
        """Record a convolution, and return zeros; implements `Mixers.convolve`."""
        return self._mixed(Kind.CONVOLUTION, x, 2 * weight.numel(), weight, bias)

    def scan(self, recurrence: Recurrence, inputs: Inputs) -> Tensor:
        """Record a scan, and return zeros; implements `Mixers.scan`."""
        flops = recurrence.flops(inputs.flat())
        return self._mixed(Kind.SCAN, inputs.of_heads[0], flops, *inputs.constants)

    def _mixed(self, kind: Kind, x: Tensor, flops: int, *constants: Tensor | None) -> Tensor:
        """Record a call that mixes x and reads `constants`; return zeros in the shape of x."""
        _read(*constants)
        self.mixing.update(self._open)
        self._calls.append(Call(kind, self._block or "", self._block, flops=flops))
        return torch.zeros_like(x)

    def place(self) -> tuple[str | None, int]:
        """Return where the forward is: the module of an `nn.ModuleList` that runs, and a count.

        Between these modules the first value is None. The count is how many of them were called so
        far, so it says between which of them the forward is.
        """
        return self._block, len(self.entered)

    def choose(self, indexer: Indexer) -> Tensor:
        """Return indices of keys, all 0, as many as an indexer chooses in a long document."""
        self.mixing.update(self._open)
        # Ask for a document longer than any, because with the few tokens of the trace the indexer
        # would choose fewer keys.
        shape = *indexer.keys.shape[:2], indexer.num_choices, indexer.most(1 << 40)
        return indexer.keys.new_zeros(shape, dtype=torch.int32)

    @contextmanager
    def listening(self, reads: Reads) -> Iterator[None]:
        """Record the calls of forwards in this context, and let `reads` record parameter reads."""
        # `blocks` are candidates: which entries are blocks is known only at the end, see
        # `calls_in_blocks`.
        blocks = {entry: name for name, entry in list_entries(self._model)}
        # Both use one list of running modules, because `Reads` needs the innermost one.
        self._open = reads.open
        with ExitStack() as stack:
            for name, module in self._model.named_modules():
                begins = partial(self._begins, name, blocks.get(module))
                ends = partial(self._ends, name, blocks.get(module))
                stack.callback(module.register_forward_pre_hook(begins, with_kwargs=True).remove)
                stack.callback(module.register_forward_hook(ends, with_kwargs=True).remove)
            stack.enter_context(reads)
            stack.enter_context(self.linear_outputs)
            stack.enter_context(identity_experts(self._model))
            yield

    def calls_in_blocks(self) -> Iterator[Call]:
        """Yield the recorded calls in order.

        Only entries of a list of modules in which some entry mixes tokens are blocks: calls in
        other lists get no block.
        """
        lists = {list_of(c.block) for c in self._calls if c.block and c.kind.mixes}
        for number, call in enumerate(self._calls):
            if number in self._results:
                result, version = self._results[number]
                call = call._replace(written=version_of(result) > version)
            inside = call.block is not None and list_of(call.block) in lists
            yield call if inside else call._replace(block=None)

    def _begins(
        self,
        name: str,
        block: str | None,
        module: nn.Module,
        given: tuple[Any, ...],
        more: dict[str, Any],
    ) -> None:
        """Record that `module` is called; a forward pre-hook with kwargs.

        `block`: the module's name if it is an entry of a list of modules, else None.
        """
        # A module called directly after experts may be computed before them, if it gets the same
        # tokens and nothing wrote into these in between.
        routed, self._routed = self._routed, None
        if routed is not None and len(given) == 1 and not more and isinstance(given[0], Tensor):
            number, tokens, version = routed
            if given[0].dim() > 1 and same_rows(given[0], tokens) and version_of(tokens) == version:
                self._ahead[name] = number
        if block is not None:
            self._block = block
            self.entered[block] += 1
        self.called[name] = None
        self._open.append(module)
        if is_linear(module):
            number = self._number(given)
            self._calls.append(Call(Kind.LINEAR, name, self._block, given=number))
        elif isinstance(module, nn.Embedding):
            self._calls.append(Call(Kind.TABLE, name, self._block))
        elif holds_experts(module):
            route = _route(given)
            weighs = route is not None and weights_among(tree_leaves((given, more)), given[1])
            width = 0 if route is None else given[0].shape[1]
            call = Call(Kind.EXPERTS, name, self._block, route=route, width=width)
            # `weighs` is the index of the routing weights, which is 2 or more, or else false.
            self._calls.append(call._replace(weighs=bool(weighs)))
            if route is not None:
                self._routed = len(self._calls) - 1, given[0], version_of(given[0])

    def _ends(
        self,
        name: str,
        block: str | None,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
    ) -> None:
        """Record that `module` has returned `output`; a forward hook with kwargs."""
        self._open.pop()
        # `ComputedAhead` gives the output the leading dims of the input, so both must have the
        # same.
        number = self._ahead.pop(name, None)
        if (
            number is not None
            and isinstance(output, Tensor)
            and output.shape[:-1] == args[0].shape[:-1]
        ):
            ahead = Ahead(name, args[0].dim())
            self._calls[number] = self._calls[number]._replace(ahead=ahead)
        # A module runs in tiles only if x is all that it is called with.
        alone = len(args) == 1 and not kwargs and isinstance(args[0], Tensor) and args[0].dim() == 3
        if alone and (given := TokenOutput.of(output, (1, TOKENS))) is not None:
            self.by_token.setdefault(name, []).append(given)
        if is_linear(module):
            self.linear_outputs.linear_returned(name, output)
        if block is not None:
            self._block = None
            self.linear_outputs.block_returned(block, args, output)
            if (form := BlockOutput.of(output, (1, TOKENS))) is not None:
                self.outputs[block] = form

    def _number(self, given: tuple[Any, ...]) -> int:
        """Return a number for the arguments of a linear, for `Call.given`.

        It is the number of the previous linear if both are called with the same tensor, and nothing
        was written into the tensor in between.
        """
        now = (given[0], version_of(given[0])) if given else None
        last, self._given = self._given, now
        if now is None or last is None or now[0] is not last[0] or now[1] != last[1]:
            self._num_given += 1
        return self._num_given


def _read(*tensors: Tensor | None) -> None:
    """Let `Reads` record that these tensors are read, by calling an operation on them.

    The tensors are arguments of mixers, which a trace replaces, so no other operation reads them.
    """
    for tensor in tensors:
        if tensor is not None:
            # `Reads` records any operation on the tensor, so a sum will do.
            tensor.sum()


def _route(given: tuple[Any, ...]) -> int | None:
    """Return k, the number of experts of each token, from the arguments `given` of experts.

    Returns None unless the arguments begin with tokens [N, D] and expert indices [N, k], as in
    transformers.
    """
    if len(given) < 2 or not all(isinstance(x, Tensor) and x.dim() == 2 for x in given[:2]):
        return None
    tokens, numbers = given[:2]
    if len(tokens) != len(numbers) or numbers.dtype not in _NUMBERS:
        return None
    return int(numbers.shape[1])


_NUMBERS = (torch.int32, torch.int64)
"""The dtypes of expert indices."""


@contextmanager
def identity_experts(model: nn.Module) -> Iterator[None]:
    """Replace the forward of experts, in this context, by one that returns a copy of its tokens.

    The experts' own code reads values of expert indices, which meta tensors do not have.
    """
    with ExitStack() as stack:
        for module in model.modules():
            if holds_experts(module):
                stack.enter_context(replaced_forward(module, lambda x, *_, **__: x.clone()))
        yield


def list_entries(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield name and module of each module in the outermost `nn.ModuleList`s.

    A module that is in several lists comes once, with its first name.
    """
    outermost: list[str] = []
    seen: set[nn.Module] = set()
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and not name.startswith(tuple(outermost)):
            outermost.append(f"{name}.")
            for index, entry in enumerate(module):
                if entry not in seen:
                    yield f"{name}.{index}", entry
                seen.add(entry)


def list_of(block: str) -> str:
    """Return the name of the list that contains a block."""
    return block.rpartition(".")[0]
