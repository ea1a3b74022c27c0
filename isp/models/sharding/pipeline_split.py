"""Cut a traced model into pipeline stages, and check before ranks start that the cut is right.

Each stage runs the model's own forward, in which tables and linears of other stages return zeros,
and blocks of earlier stages return the hidden states that the stage has received. All stages but
the last end the forward after their last block. This is right if a block needs only hidden states
from earlier blocks and tables: `check_stages` compares the stages, run one after the other, with
the whole model on a few tokens.

B batch, S sequence, D hidden size
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from isp.core.pipeline.order import split_layers
from isp.models.forwards import set_forward
from isp.models.meta import copied
from isp.models.roles import ParameterRole
from isp.models.tracing.calls import BlockOutput, ForwardEnd
from isp.models.tracing.probe import Forward, local_calls, without_weights
from isp.models.tracing.trace import AFTER_BLOCKS, ModelTrace

__all__ = ["Stage", "check_stages", "stages_of", "tied_weight", "with_blocks"]


class Stage(NamedTuple):
    """A pipeline stage: consecutive blocks, and on the first and last stage modules around them.

    The first stage also has the modules that are called before the blocks, and the last stage the
    modules that are called after them.
    """

    blocks: tuple[str, ...]
    is_first: bool
    is_last: bool
    parts: frozenset[str]
    """The names of the stage's blocks, and of the linears and tables that it calls outside of
    blocks."""
    parameters: frozenset[str]
    """The names of the parameters that the stage reads."""


def stages_of(model: nn.Module, trace: ModelTrace, num_stages: int) -> tuple[Stage, ...]:
    """Return the stages of a model, cut to minimize the cost of the most expensive stage.

    The cost is the number of weight elements that a token is multiplied by. Raises ValueError that
    says why if the model cannot be cut into this many stages.
    """
    # A block without linears costs 1, so that it counts; the head counts in the last stage.
    costs = [float(max(trace.multiplied_in.get(block, 0), 1)) for block in trace.blocks]
    cuts = split_layers(costs, num_stages, after=float(trace.multiplied_in.get(None, 0)))
    spans, last = [trace.blocks[a:b] for a, b in cuts], num_stages - 1
    _check_outputs(trace, spans)
    stage_of = {block: number for number, span in enumerate(spans) for block in span}
    stage_of[AFTER_BLOCKS] = last
    parts, parameters = [set(span) for span in spans], [set[str]() for _ in spans]
    for part, places in trace.called_at.items():
        for number in _one_stage(part, places, stage_of):
            parts[number].add(part)
    tied = tied_weight(model, trace)
    # Only the tied weight may be read by several stages: each of them has a copy.
    for name, places in _readers(model, trace).items():
        several = {stage_of[place] for place in places}
        for number in several if name == tied else _one_stage(name, places, stage_of):
            parameters[number].add(name)
    return tuple(
        Stage(span, number == 0, number == last, frozenset(own), frozenset(read))
        for number, (span, own, read) in enumerate(zip(spans, parts, parameters, strict=True))
    )


def tied_weight(model: nn.Module, trace: ModelTrace) -> str | None:
    """Return the name of the sharded weight that a table before the blocks shares with the head.

    Returns None if there is none.
    """
    ends = {trace.blocks[0], AFTER_BLOCKS}
    found = (n for n, places in _readers(model, trace).items() if places == ends)
    return next((name for name in found if trace.roles[name] is ParameterRole.SHARDED), None)


def _check_outputs(trace: ModelTrace, spans: Sequence[tuple[str, ...]]) -> None:
    """Raise ValueError if stages cannot send hidden states of one width to each other.

    Each block must return a hidden state, and those that are sent must have the same number of
    features. `spans`: the blocks of each stage.
    """
    for block in (block for span in spans[:-1] for block in span):
        if block not in trace.outputs:
            raise ValueError(f"{block} does not pass a hidden state [B, S, ..] to the next block")
    cut = trace.blocks[:1] + tuple(span[-1] for span in spans[:-1])
    widths = {trace.outputs[block].width for block in cut if len(spans) > 1}
    if len(widths) > 1:
        raise ValueError(f"its blocks return hidden states of different widths: {sorted(widths)}")


def _one_stage(name: str, places: Iterable[str], stage_of: dict[str, int]) -> set[int]:
    """Return a set of one: the number of the stage that contains all `places` of `name`.

    Raises ValueError if they are in several stages.
    """
    found = {stage_of[place] for place in places}
    if len(found) > 1:
        where = ", ".join(sorted(place or "the code after the blocks" for place in places))
        raise ValueError(
            f"{name} is used by several stages, which would each need a copy of it (the forward"
            f" uses it in, or directly before, {where})"
        )
    return found


def _readers(model: nn.Module, trace: ModelTrace) -> dict[str, set[str]]:
    """Return the places where each parameter is read, by name.

    The parameters of a block count as read in that block. Parameters that no forward reads count as
    read before the first block, so that the first stage has them.
    """
    found = {name: {*trace.read_at.get(name, ())} for name in trace.roles}
    names = {parameter: name for name, parameter in model.named_parameters()}
    for block in trace.blocks:
        for parameter in model.get_submodule(block).parameters():
            found[names[parameter]].add(block)
    return {name: places or {trace.blocks[0]} for name, places in found.items()}


def with_blocks(
    shape: nn.Module, trace: ModelTrace, blocks: Collection[str]
) -> tuple[nn.Module, ModelTrace]:
    """Return a copy of a model on meta, and its trace, in which all blocks but `blocks` are empty.

    An empty block returns its input and has no parameters.
    """
    others = {name: trace.outputs.get(name) for name in trace.blocks if name not in blocks}
    empty: dict[int, Any] = {id(p): p for p in shape.parameters()}
    for name, form in others.items():
        block = shape.get_submodule(name)
        # Replace the block by a copy of it, because code around it may read its class and
        # attributes.
        empty[id(block)] = instead = copy.copy(block)
        vars(instead).update(_modules={}, _parameters={}, _buffers={})
        set_forward(instead, _returning_input(form))
    inside = tuple(f"{name}." for name in others)
    return copied(shape, empty), trace._replace(
        calls=tuple(call for call in trace.calls if call.block not in others),
        roles={n: role for n, role in trace.roles.items() if not n.startswith(inside)},
        read_at={n: places - others.keys() for n, places in trace.read_at.items()},
        unused=tuple(n for n in trace.unused if not n.startswith(inside)),
        by_token={n: of for n, of in trace.by_token.items() if not n.startswith(inside)},
    )


def _returning_input(form: BlockOutput | None) -> Callable[..., Any]:
    """Return a forward that returns its first argument as the hidden states of the block's output.

    `form`: the structure of that output, such as a tuple; None: the hidden states alone.
    """

    # This is a function and no method, because a deep copy of the model keeps functions as they
    # are.
    def forward(*args: Any, **kwargs: Any) -> Any:
        x = next(iter((*args, *kwargs.values())))
        return x if form is None else form.around(x)

    return forward


# -- a comparison before ranks start -----------------------------------------------------------


def check_stages(
    shape: nn.Module,
    buffers: Iterable[Tensor],
    trace: ModelTrace,
    forward: Forward,
    stages: Iterable[Stage],
) -> None:
    """Raise ValueError if the stages, run one after the other, differ from the whole model.

    shape, buffers and forward are the arguments of `isp.models.tracing.probe.check_local`. Each
    stage runs in a new copy of the model, so that it does not see attributes that another stage
    set. The parameters of other stages are NaN, so that reading one shows in the result.
    """
    kept = list(buffers)
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(trace.vocab_size, (1, 9), generator=random)
    positions = torch.arange(9)[None]
    model = without_weights(shape, kept, trace.roles, training=False)
    with local_calls(model):
        whole, received = forward(model, ids, positions), torch.empty(0)
    for stage in stages:
        model = without_weights(shape, kept, trace.roles, training=False)
        _cut(model, trace, stage, received)
        with local_calls(model):
            try:
                # A later stage gets hidden states, so its token ids do not matter: they are all 0.
                received = forward(model, ids * stage.is_first, positions)
            except ForwardEnd as end:
                received = end.hidden
            except Exception as error:
                # The model's own code runs on random weights here, and may raise anything.
                raise ValueError(f"a stage fails when it runs alone: {error}") from error
    if not torch.equal(received, whole):
        raise ValueError("its blocks use more from earlier blocks and tables than the hidden state")


def _cut(model: nn.Module, trace: ModelTrace, stage: Stage, received: Tensor) -> None:
    """Turn a copy of the model without weights into one stage, in place."""
    for name in trace.roles:
        parameter = model.get_parameter(name)
        if name not in stage.parameters:
            # Fill the storage and not the parameter, whose elements overlap in memory.
            size = parameter.untyped_storage().nbytes() // parameter.itemsize
            parameter.data.as_strided((size,), (1,)).fill_(torch.nan)
    for part in (*trace.called_at, *trace.blocks):
        module = model.get_submodule(part)
        if part not in stage.parts:
            form = trace.outputs.get(part) if part in trace.blocks else None
            zeros = partial(_zeros, module.forward)
            instead = zeros if form is None else partial(_returning_received, form.around, received)
            set_forward(module, instead)
        elif part == stage.blocks[-1] and not stage.is_last:
            set_forward(
                module, partial(_ending_forward, module.forward, trace.outputs[part].hidden_of)
            )


def _zeros(forward: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """Return zeros in the shape of `forward`'s result."""
    return torch.zeros_like(forward(*args, **kwargs))


def _returning_received(around: Callable[[Tensor], Any], hidden: Tensor, *_: Any, **__: Any) -> Any:
    """Return the `hidden` states that the stage has received, as the output of a block.

    `around` puts them into the structure of that output, such as a tuple.
    """
    return around(hidden)


def _ending_forward(
    forward: Callable[..., Any], hidden_of: Callable[[Any], Tensor], *args: Any, **kwargs: Any
) -> Any:
    """Run the `forward` of a stage's last block, and end the model's forward by `ForwardEnd`."""
    raise ForwardEnd(hidden_of(forward(*args, **kwargs)))
