"""Pipeline stages of a traced model: each runs the model's own forward without the others' blocks.

B batch, S sequence, D hidden size, V vocabulary

On a later stage, tables and linears before the blocks give zeros, and each block of an earlier
stage gives the hidden state that the stage has received. A stage that is not the last ends its
forward behind its last block. This is right if a block needs nothing else of earlier blocks and of
the tables, so `check_stages` compares the stages, one after the other, with the whole model on a
few tokens before ranks start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from isp.pipeline import split_layers
from isp.traced.calls import ForwardEnd
from isp.traced.probe import Forward, local_calls, without_weights
from isp.traced.recorder import replaced_forward
from isp.traced.roles import Role
from isp.traced.trace import ModelTrace

__all__ = ["Stage", "check_stages", "stages_of", "tied_weight"]

_BEFORE, _BEHIND, _AROUND = "before the blocks", "behind the blocks", "around the blocks"


class Stage(NamedTuple):
    """A run of a model's blocks; the first stage has what lies before all, the last the rest."""

    blocks: tuple[str, ...]
    is_first: bool
    is_last: bool
    parameters: frozenset[str]
    """Names of what it reads."""

    def has(self, part: str, trace: ModelTrace) -> bool:
        """Whether a block, or a linear or table outside the blocks, is called on this stage."""
        if part in trace.blocks:
            return part in self.blocks
        return self.is_first if part in trace.before else self.is_last


def stages_of(model: nn.Module, trace: ModelTrace, num_stages: int) -> tuple[Stage, ...]:
    """The stages of a model, so that the one that multiplies most multiplies least.

    Raises ValueError for a model that cannot be cut into so many, naming what is in the way.
    """
    costs = [float(max(trace.multiplied_in.get(block, 0), 1)) for block in trace.blocks]
    cuts = split_layers(costs, num_stages, after=float(trace.multiplied_in.get(None, 0)))
    spans, last = [trace.blocks[a:b] for a, b in cuts], num_stages - 1
    for block in (span[-1] for span in spans[:-1]):
        form = trace.outputs.get(block)
        if form is None or form.num_tensors > 1:
            found = "no hidden state" if form is None else f"{form.num_tensors} tensors"
            raise ValueError(f"{block} gives {found} to the next, where one tensor may travel")
    stage_of = {block: number for number, span in enumerate(spans) for block in span}
    stage_of |= {_BEFORE: 0, _BEHIND: last, _AROUND: 0}
    parts = [set[str]() for _ in spans]
    for name, places in _readers(model, trace).items():
        stages = {stage_of[place] for place in places}
        if last and _AROUND in places:
            raise ValueError(f"{name} may be read by any stage: put it into a module")
        tied = places == {_BEFORE, _BEHIND} and trace.roles[name] is Role.SHARDED
        if len(stages) > 1 and not tied:
            raise ValueError(f"{name} is used by several stages: {', '.join(sorted(places))}")
        for number in stages:
            parts[number].add(name)
    return tuple(
        Stage(span, number == 0, number == last, frozenset(parts[number]))
        for number, span in enumerate(spans)
    )


def tied_weight(model: nn.Module, trace: ModelTrace) -> str | None:
    """The weight of a table before the blocks that is also the head's, by name."""
    found = (n for n, places in _readers(model, trace).items() if places == {_BEFORE, _BEHIND})
    return next(found, None)


def _readers(model: nn.Module, trace: ModelTrace) -> dict[str, set[str]]:
    """The blocks that read each parameter, or on which side of them it is read.

    What no forward reads, outside of them, counts as before them. A module around the blocks, or
    one that is not called, may read its parameters at any time.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    before = {*trace.called[: trace.called.index(trace.blocks[0])]}
    found: dict[str, set[str]] = {name: set() for name in trace.roles}
    for module_name, module in model.named_modules():
        block = next((b for b in trace.blocks if f"{module_name}.".startswith(f"{b}.")), None)
        around = not module_name or trace.blocks[0].startswith(f"{module_name}.")
        for parameter in module.parameters(recurse=False):
            name = names[parameter]
            outside = _BEFORE if module_name in before else _BEHIND
            if name in trace.unused:
                outside = _BEFORE
            elif around or module_name not in trace.called:
                outside = _AROUND
            found[name].add(block or outside)
    return found


# -- a comparison before ranks start -----------------------------------------------------------


def check_stages(
    shape: nn.Module,
    buffers: Iterable[Tensor],
    trace: ModelTrace,
    forward: Forward,
    stages: Iterable[Stage],
) -> None:
    """Raise ValueError if the stages of a model, one after the other, differ from the whole.

    shape, buffers, forward: as of `isp.traced.probe.check_local`. Parameters that a stage does not
    have are not a number.
    """
    model = without_weights(shape, buffers, trace.roles, training=False)
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(trace.vocab_size, (1, 9), generator=random)
    positions = torch.arange(9)[None]
    with local_calls(model):
        whole, received = forward(model, ids, positions), torch.empty(0)
        for stage in stages:
            with _cut(model, trace, stage, received):
                try:
                    received = forward(model, ids * stage.is_first, positions)
                except ForwardEnd as end:
                    received = end.hidden
                except Exception as error:  # somebody else's code, on other values than its own
                    raise ValueError(f"a stage fails without the others: {error}") from error
    if not torch.equal(received, whole):
        raise ValueError(
            "its blocks use more of the blocks and tables before them than the hidden state"
        )


@contextmanager
def _cut(model: nn.Module, trace: ModelTrace, stage: Stage, received: Tensor) -> Iterator[None]:
    """In this context the model is a stage."""
    parameters = dict(model.named_parameters())
    others = [parameters[name] for name in trace.roles if name not in stage.parameters]
    with ExitStack() as stack:
        for block in trace.blocks:
            module, form = model.get_submodule(block), trace.outputs.get(block)
            if block not in stage.blocks:
                assert form is not None
                instead = partial(_given, form.around, received)
                stack.enter_context(replaced_forward(module, instead))
            elif block == stage.blocks[-1] and not stage.is_last:
                assert form is not None
                ended = partial(_ended, module.forward, form.hidden_of)
                stack.enter_context(replaced_forward(module, ended))
        for parameter in others:
            if any(parameter.stride()):  # it has values
                stack.callback(parameter.data.copy_, parameter.data.clone())
                parameter.data.fill_(torch.nan)
        stack.enter_context(_Nothing(others))
        if stage.is_last and not stage.is_first and (tied := tied_weight(model, trace)):
            stack.enter_context(_Nothing([parameters[tied]], tables_alone=True))
        yield


def _given(around: Callable[[Tensor], Any], hidden: Tensor, *_: Any, **__: Any) -> Any:
    return around(hidden)


def _ended(
    forward: Callable[..., Any], hidden_of: Callable[[Any], Tensor], *args: Any, **kwargs: Any
) -> Any:
    raise ForwardEnd(hidden_of(forward(*args, **kwargs)))


class _Nothing(TorchFunctionMode):
    """Zeros in place of products with, and lookups in, weights that a stage does not have."""

    def __init__(self, weights: Iterable[Tensor], *, tables_alone: bool = False) -> None:
        super().__init__()
        self._weights = {id(weight) for weight in weights}
        self._linears = () if tables_alone else (F.linear, torch.addmm)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        lookups = F.embedding, Tensor.__getitem__
        if func in (*lookups, *self._linears) and any(id(x) in self._weights for x in args):
            return torch.zeros_like(out)
        return out
