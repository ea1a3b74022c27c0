"""`trace_model`: run one forward on meta tensors, to record a model's calls in order.

Nothing is found by name: a linear is an `nn.Linear` that is called, a block is an entry of an
`nn.ModuleList` in which some entry calls attention or another mixer.

B batch, S sequence, V vocabulary
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from isp.core.mixers.api import mix_by
from isp.core.torch_private import compiled_call
from isp.models.roles import (
    ParameterRole,
    holds_experts,
    is_transposed,
    roles_of,
)
from isp.models.tracing.calls import AttentionSizes, BlockOutput, Call, Kind, TokenOutput
from isp.models.tracing.linear_outputs import LinearOutputs
from isp.models.tracing.recorder import TOKENS, CallRecorder, list_entries, list_of
from isp.models.tracing.weight_reads import (
    Reads,
    check_reads,
    experts_cut,
    small_linears_read,
    unused,
)

__all__ = [
    "AFTER_BLOCKS",
    "AttentionSizes",
    "Call",
    "Kind",
    "ModelTrace",
    "check_not_compiled",
    "check_supported",
    "own_line",
    "trace_model",
]


AFTER_BLOCKS = ""
"""The place after all blocks. Any other place in a forward is named after the block that it is in,
or else after the next block."""


class ModelTrace(NamedTuple):
    """The trace of a model: the calls of a forward in order, and facts about parameters."""

    calls: tuple[Call, ...]
    roles: dict[str, ParameterRole]
    """The role of each parameter by name; a shared parameter has its first name."""
    sizes: dict[str, int]
    """The number of elements of each parameter by name."""

    def parts(self) -> Iterator[tuple[str, tuple[Call, ...]]]:
        """Yield, in order of the forward, each block and each call outside of blocks.

        Each is a pair: the name of the block and its calls, or the name of the module and its call.
        """
        # The calls of a block follow each other, because no block is called twice.
        for block, calls in groupby(self.calls, key=lambda call: call.block):
            if block is None:
                yield from ((call.module, (call,)) for call in calls)
            else:
                yield block, tuple(calls)

    @property
    def calls_in(self) -> dict[str, tuple[Call, ...]]:
        """The calls of each block, in order."""
        return {name: calls for name, calls in self.parts() if calls[0].block is not None}

    @property
    def blocks(self) -> tuple[str, ...]:
        """The names of the blocks, in order."""
        return tuple(self.calls_in)

    @property
    def attentions(self) -> list[AttentionSizes]:
        """Number of heads, head size and options of each call of attention, in order."""
        return [call.sizes for call in self.calls if call.sizes is not None]

    @property
    def tables(self) -> list[str]:
        """The names of the embedding tables that are called, in order."""
        return [call.module for call in self.calls if call.kind is Kind.TABLE]

    multiplied_in: dict[str | None, int]
    """By block, and None for outside of blocks, the number of weight elements that a token is
    multiplied by. Only the experts that the token is routed to count."""
    outputs: dict[str, BlockOutput]
    """By block, the structure of its output; blocks that return no hidden state are left out."""
    read_at: dict[str, set[str]]
    """By parameter, the places where it is read, except by the code of experts, which a trace does
    not run."""
    called: tuple[str, ...]
    """The modules whose forward is called, in order of the first calls. A module that is not called
    may hold parameters that the code of other modules reads."""
    unused: tuple[str, ...]
    """The parameters that get no gradient: a forward of tokens does not read them (a vision tower),
    or reads them only to choose keys for attention."""
    vocab_size: int
    """The number of logits of a token."""
    reads_positions: bool
    """True if the model reads the positions that it is given."""
    by_token: dict[str, TokenOutput]
    """By module that can run in tiles of tokens, the structure of its output. Such modules are the
    outermost ones in blocks that contain several linears, or experts, and no call that mixes
    tokens."""
    head: str | None
    """The last linear, after all blocks, if the logits are made from its output alone; else
    None."""
    changes_logits: bool
    """True if the model's code does anything with the output of its last linear, such as a soft
    cap."""
    splits: dict[str, tuple[int, ...]]
    """By linear whose output the model's code splits, the sizes of the parts in features."""

    @property
    def called_at(self) -> dict[str, set[str]]:
        """The places where linears and tables are called outside of the blocks, by name."""
        # Go through the calls from the end, so that `place` is the block after each call.
        found, place = dict[str, set[str]](), AFTER_BLOCKS
        for call in reversed(self.calls):
            if call.block is None:
                found.setdefault(call.module, set()).add(place)
            else:
                place = call.block
        return found

    @property
    def multiplied(self) -> int:
        """The number of all weight elements that a token is multiplied by."""
        return sum(self.multiplied_in.values())

    def elements(self, role: ParameterRole) -> int:
        """Return the number of elements of all parameters with this role."""
        return sum(self.sizes[name] for name, found in self.roles.items() if found is role)


def check_supported(model: nn.Module) -> None:
    """Raise ValueError for a model that cannot be copied and sharded.

    Refuses modules whose forward is not their class's (in a copy of the model it would still run
    the original module), compiled modules, scalar parameters, weights that hooks compute,
    parametrized tables and DoRA.
    """
    for name, module in model.named_modules():
        if "forward" in vars(module):
            raise ValueError(
                f"{name or 'the model'} ({type(module).__name__}) has a forward that is not its"
                f" class's: it was parallelized before, or another library has wrapped it. Pass"
                f" the original model"
            )
        _check_computed(name, module)
    check_not_compiled(model.named_modules())
    for name, parameter in model.named_parameters():
        if not parameter.dim():
            raise ValueError(f"{name} is a scalar, which cannot be sharded: give it shape [1]")
    for name, adapter in getattr(model, "peft_config", {}).items():
        if getattr(adapter, "use_dora", False):
            raise ValueError(
                f"the adapter {name!r} uses DoRA, which needs the norm of each whole weight, but"
                f" each rank holds only a part: use use_dora=False (LoRA)"
            )


def _check_computed(name: str, module: nn.Module) -> None:
    """Raise ValueError if a weight of the module is computed, so that no shard can replace it."""
    parameters = {parameter for parameter, _ in module.named_parameters(recurse=False)}
    for local, value in vars(module).items():
        # Hooks of torch.nn.utils rename the parameter, and set an attribute under its old name.
        computed = {f"{local}_orig", f"{local}_g"} & parameters
        if isinstance(value, Tensor) and (computed or not value.is_leaf):
            raise ValueError(
                f"{name}.{local} is no parameter: a hook computes it from others before each"
                f" forward, as torch.nn.utils.weight_norm, spectral_norm and prune do, but isp"
                f" shards the weights that modules have. Make it a parameter again by"
                f" remove_weight_norm, remove_spectral_norm or prune.remove of torch.nn.utils, or"
                f" use torch.nn.utils.parametrizations.weight_norm"
            )
    if isinstance(module, nn.Embedding) and is_parametrized(module, "weight"):
        raise ValueError(
            f"{name}.weight is computed by a parametrization, but each rank holds only a part of"
            f" the table: remove it by torch.nn.utils.parametrize.remove_parametrizations"
        )


def check_not_compiled(modules: Iterable[tuple[str, nn.Module]]) -> None:
    """Raise ValueError if one of a model's `modules` was compiled in place; each with its name."""
    for name, module in modules:
        if compiled_call(module) is not None:
            raise ValueError(
                f"{name or 'the model'} ({type(module).__name__}) is compiled, but isp runs"
                f" modules one by one: do not call compile() before or after isp.parallelize"
            )


def trace_model(
    model: nn.Module, forward: Callable[[nn.Module, Tensor, Tensor], Tensor]
) -> ModelTrace:
    """Return the trace of `model`, whose parameters and buffers are all on the meta device.

    `forward` runs the model on tokens and positions [B, S] and returns its logits. Raises
    ValueError, naming the place, for a model that is not supported: a block is called twice, tokens
    are mixed outside of blocks, or a weight is read where it is not gathered.
    """
    ids = torch.zeros(1, TOKENS, dtype=torch.int64, device="meta")
    positions = torch.arange(TOKENS, device="meta").unsqueeze(0)
    recorder = CallRecorder(model)
    reads = Reads(model, positions, recorder.place)
    try:
        with recorder.listening(reads), mix_by(recorder), torch.no_grad():
            logits = forward(model, ids, positions)
    except ValueError:
        # isp's own code raised this, and the message names the place.
        raise
    except Exception as error:  # the model's own code may raise anything
        # Modules whose forward did not return are still in the list.
        inside = reads.open[-1] if reads.open else None
        raise ValueError(_untraced(model, inside, error)) from error
    _check_logits(model, logits)
    every = tuple(recorder.calls_in_blocks())
    # Linears and experts that stay whole on each rank need no gathering, so their calls are left
    # out of the trace. `_multiplied`, for FLOPs, counts all calls.
    cut = experts_cut(model, every, reads.foreign)
    whole = small_linears_read(model, reads.foreign)
    calls = tuple(
        c
        for c in every
        if c.module not in whole and (c.kind is not Kind.EXPERTS or c.module in cut)
    )
    calls = tuple(_with_ahead(calls))
    _check_blocks(model, calls, recorder.entered)
    parameters = dict(model.named_parameters())
    roles = roles_of(model, {call.module for call in calls}, whole, reads.foreign)
    check_reads(model, reads.foreign, roles)
    return ModelTrace(
        calls,
        roles,
        {name: parameter.numel() for name, parameter in parameters.items()},
        _multiplied(model, every, roles),
        recorder.outputs,
        _read_at(reads, [*recorder.entered], {call.block for call in calls}),
        tuple(recorder.called),
        unused(model, recorder.called, reads.foreign),
        logits.shape[-1],
        reads.reads_positions,
        _by_token(model, calls, recorder),
        _head(model, calls, recorder.linear_outputs, logits),
        recorder.linear_outputs.used,
        recorder.linear_outputs.splits(),
    )


def _read_at(
    reads: Reads, entered: Sequence[str], blocks: Collection[str | None]
) -> dict[str, set[str]]:
    """Return the places where each parameter is read, for `ModelTrace.read_at`.

    `entered`: the entries of lists of modules in order of their calls; `blocks`: the entries among
    them that are blocks.
    """

    def place(inside: str | None, count: int) -> str:
        """Return the block that a read is in, or else the next block.

        `inside` and `count`: the result of `CallRecorder.place` at the read.
        """
        if inside in blocks and inside is not None:
            return inside
        return next((entry for entry in entered[count:] if entry in blocks), AFTER_BLOCKS)

    return {name: {place(*at) for at in places} for name, places in reads.places.items()}


def _check_logits(model: nn.Module, logits: object) -> None:
    """Raise ValueError for anything but logits [B, S, V]."""
    if isinstance(logits, Tensor) and logits.dim() == 3 and logits.shape[:2] == (1, TOKENS):
        return
    found = list(logits.shape) if isinstance(logits, Tensor) else f"a {type(logits).__name__}"
    raise ValueError(
        f"{type(model).__name__} returns {found} for tokens [1, {TOKENS}]: isp.parallelize needs a"
        f" model whose forward returns its logits as one tensor [B, S, V]"
    )


def _head(
    model: nn.Module, calls: tuple[Call, ...], outputs: LinearOutputs, logits: Tensor
) -> str | None:
    """Return the linear from whose output alone `logits` are made, for `ModelTrace.head`."""
    last = calls[-1]
    blocks = tuple(call.block for call in calls if call.block is not None)
    if last.kind is not Kind.LINEAR or last.block is not None:
        return None
    found = outputs.head(logits, blocks)
    if found != last.module or sum(call.module == found for call in calls) > 1:
        return None
    # The head has a weight [V, D], not the transposed one of a `Conv1D`.
    return None if is_transposed(model.get_submodule(found)) else found


def _by_token(
    model: nn.Module, calls: tuple[Call, ...], recorder: CallRecorder
) -> dict[str, TokenOutput]:
    """Return the modules that can run in tiles of tokens, for `ModelTrace.by_token`."""
    blocks = tuple({f"{call.block}." for call in calls if call.block is not None})
    found: dict[str, TokenOutput] = {}
    # Outer modules come first, so a module inside of one that was found can be left out.
    for name in recorder.called:
        inside_another = name.startswith(tuple(f"{outer}." for outer in found))
        if not name.startswith(blocks) or inside_another:
            continue
        inside = [c for c in calls if c.module.startswith(f"{name}.")]
        # A single linear is not worth tiles: its output has to exist as a whole anyway.
        several = len(inside) > 1 or any(c.kind is Kind.EXPERTS for c in inside)
        once = len({c.module for c in inside}) == len(inside)
        outputs = recorder.by_token.get(name, [])
        # The module is called once, and its output for a token depends on no other token.
        by_token = len(outputs) == 1 and model.get_submodule(name) not in recorder.mixing
        if several and once and by_token:
            found[name] = outputs[0]
    return found


def _with_ahead(calls: tuple[Call, ...]) -> Iterator[Call]:
    """Yield the calls, and clear `ahead` of experts if that module cannot be computed ahead.

    A module can be computed ahead if it contains only linears, and these are the next calls after
    the experts, and each is called once.
    """
    times = Counter(call.module for call in calls)
    for number, call in enumerate(calls, 1):
        if call.ahead is not None:
            inside = [c for c in calls if c.module.startswith(f"{call.ahead.module}.")]
            # `number` counts from 1, so it is the index of the next call.
            follow = calls[number : number + len(inside)] == tuple(inside)
            linears = all(c.kind is Kind.LINEAR and c.block == call.block for c in inside)
            once = all(times[c.module] == 1 for c in (call, *inside))
            if not (inside and follow and linears and once):
                call = call._replace(ahead=None)
        yield call


def _multiplied(
    model: nn.Module, calls: Iterable[Call], roles: dict[str, ParameterRole]
) -> dict[str | None, int]:
    """Return the weight elements that a token is multiplied by, for `ModelTrace.multiplied_in`."""
    total = Counter[str | None]()
    blocks = {call.block for call in calls if call.block is not None}
    for call in calls:
        for parameter in model.get_submodule(call.module).parameters(recurse=False):
            if call.kind is Kind.LINEAR and parameter.dim() == 2:
                total[call.block] += parameter.numel()
            if call.kind is Kind.EXPERTS and parameter.dim() == 3:
                # Of a stack [E, .., ..], count only the k experts that a token is routed to.
                total[call.block] += parameter[: call.route].numel()
    # Some routers are bare parameters that the model's code multiplies by, without an nn.Linear.
    for name in (name for name, role in roles.items() if role is ParameterRole.ROUTER):
        if not holds_experts(model.get_submodule(name.rpartition(".")[0])):
            block = next((block for block in blocks if name.startswith(f"{block}.")), None)
            total[block] += model.get_parameter(name).numel()
    return total


def _check_blocks(model: nn.Module, calls: Iterable[Call], entered: Counter[str]) -> None:
    """Raise ValueError for blocks over which the sequence cannot be sharded.

    `entered`: the number of calls of each entry of a list of modules.
    """
    mixing = [call for call in calls if call.kind.mixes]
    if not mixing:
        raise ValueError(
            f"{type(model).__name__} never mixes tokens through a call that isp can trace: {_HOW}"
        )
    for call in mixing:
        if call.block is None:
            raise ValueError(
                f"{type(model).__name__} calls {call.kind} outside of an nn.ModuleList: put its"
                f" blocks into one"
            )
        # Attention pads values with zeros to the size of keys, but not keys to that of values.
        if call.sizes is not None and call.sizes.value_size > call.sizes.head_size:
            raise ValueError(
                f"{call.block} uses attention with values of {call.sizes.value_size} features and"
                f" keys of {call.sizes.head_size}: values larger than keys are not supported"
            )
    # An entry that mixes no tokens is also a block if another entry of its list mixes tokens.
    lists = {list_of(call.block) for call in mixing if call.block}
    for name, entry in list_entries(model):
        if list_of(name) in lists and entered[name] > 1:
            raise ValueError(
                f"{name} ({type(entry).__name__}) is called {entered[name]} times in one forward,"
                f" but isp gathers a block's weights for one call"
            )


_HOW = (
    "a layer must call transformers' attention interface, isp.attention, isp.causal_conv1d,"
    " isp.gated_delta_rule or isp.state_space_scan"
)
"""The advice in the error for a model in which no call mixes tokens."""


# -- why a model could not be traced ---------------------------------------------------------

_OUTSIDE = Path(torch.__file__).parent, Path(__file__).parents[2]
"""The folders of torch and isp, whose lines are not the model's own code."""


def _untraced(model: nn.Module, inside: nn.Module | None, error: Exception) -> str:
    """Return the message for an `error` that a model's code raised in the trace.

    `inside`: the innermost module whose forward ran; None: unknown.
    """
    names = {id(module): name for name, module in model.named_modules()}
    place = type(model).__name__
    if inside is not None and names.get(id(inside)):
        place = f"{names[id(inside)]} ({type(inside).__name__}) of {place}"
    code, line, text = own_line(traceback.extract_tb(error.__traceback__)), "", ""
    if code is not None:
        line = code.line or ""
        text = f" ({Path(code.filename).name}:{code.lineno}: {line})"
    return (
        f"{place} could not be traced: {_cause(error, line)}{text}. The model is called with"
        f" tokens and positions [1, {TOKENS}] on the meta device"
    )


def _cause(error: Exception, line: str) -> str:
    """Return the likely cause of an error in words, given the `line` of code that raised it."""
    if "NoneType" in str(error) and "mask" in line:
        return (
            "it reads an attention mask, but isp passes none: attention that chooses keys for"
            " each token (sparse attention) is supported only with indexers that isp knows"
        )
    if "meta tensor" in str(error) or "data-independent" in str(error):
        return "its shapes or control flow depend on tensor values, which a trace does not have"
    return f"{type(error).__name__}: {error}"


def own_line(frames: Sequence[traceback.FrameSummary]) -> traceback.FrameSummary | None:
    """Return the innermost line of the model's own code among `frames`, if there is one."""
    own = (f for f in reversed(frames) if not any(p in Path(f.filename).parents for p in _OUTSIDE))
    return next(own, None)
