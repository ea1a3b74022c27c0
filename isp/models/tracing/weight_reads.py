"""Detect code that reads weights directly: isp gathers weights only for linears and lookups."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from isp.core.tensors import tensors_in
from isp.models.huggingface.patches.indexers import indexer_parameters
from isp.models.roles import ParameterRole, holds_experts, is_linear
from isp.models.tracing.calls import Call, Kind

__all__ = [
    "Reads",
    "check_reads",
    "experts_cut",
    "looked_up",
    "name_of",
    "small_linears_read",
    "unused",
]

_SIZES = {"shape", "size", "numel", "nelement", "__len__"}
"""Names of operations that return a tensor's size, which differs for a rank's part of it."""


class Reads(TorchFunctionMode):
    """A torch function mode that records which parameters are read, where, and by what.

    `foreign` has the parameters that are read in another way than by their linear, by a lookup in
    their table, or by the code of their own module.
    """

    def __init__(
        self, model: nn.Module, positions: Tensor, place: Callable[[], tuple[str | None, int]]
    ) -> None:
        """`positions`: the tensor that the model is called with; `place`: `CallRecorder.place`."""
        super().__init__()
        self._place = place
        self._names = {id(p): name for name, p in model.named_parameters()}
        self._positions = positions
        self.open: list[nn.Module] = []
        """The modules whose forward runs, the innermost last."""
        self.foreign: dict[str, str] = {}
        """By name of a parameter that is read outside of its own module, or in a linear or table
        other than by its product or lookup: the operation that reads it."""
        self.places: dict[str, set[tuple[str | None, int]]] = {}
        """By name of a parameter that is read, the places where it is read."""
        self.reads_positions = False
        """True if the model computes something from the positions."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out, name = func(*args, **(kwargs or {})), name_of(func)
        makes_tensor = bool(tensors_in(out))
        # Reading an attribute such as dtype or device does not count as a read, because a rank's
        # part of the parameter has the same.
        if not makes_tensor and name not in _SIZES:
            return out
        for leaf in tensors_in(args, kwargs):
            # It suffices to look for the positions tensor itself: whatever the model computes from
            # it begins with an operation on that tensor.
            if leaf is self._positions:
                self.reads_positions |= makes_tensor
            known = self._names.get(id(leaf))
            if known is not None and makes_tensor:
                self.places.setdefault(known, set()).add(self._place())
            if known is not None and not self._expected(leaf, func, args, kwargs):
                self.foreign[known] = name
        return out

    def _expected(self, parameter: Tensor, func: Any, args: Any, kwargs: Any) -> bool:
        """Return whether the running module reads its own parameter in a way that isp supports."""
        inside = self.open[-1] if self.open else None
        if inside is None or all(parameter is not own for own in inside.parameters(recurse=False)):
            return False
        if isinstance(inside, nn.Embedding):
            return looked_up(inside, func, args, kwargs) is not None
        # A Conv1D multiplies by addmm. A module other than a linear may read its own parameters in
        # any way.
        return not is_linear(inside) or func in (F.linear, torch.addmm)


def name_of(func: Any) -> str:
    """Return the name of an operation of torch, or of the attribute that it reads."""
    # Reading an attribute, as x.shape, calls the `__get__` of a descriptor.
    name = getattr(func, "__name__", str(func))
    return str(func.__self__.__name__ if name == "__get__" else name)


_SMALL = 1 << 20
"""The most elements of a linear that is kept whole on each rank if other code reads its weight."""


def small_linears_read(model: nn.Module, reads: dict[str, str]) -> set[str]:
    """Return the names of small linears whose weights other code reads.

    They are kept whole on each rank; larger ones are refused. `reads`: see `Reads.foreign`.
    """
    owners = {name.rpartition(".")[0] for name in reads if name.endswith(".weight")}
    linears = ((name, model.get_submodule(name)) for name in owners)
    return {
        name
        for name, module in linears
        if is_linear(module) and sum(p.numel() for p in module.parameters()) <= _SMALL
    }


def check_reads(model: nn.Module, reads: dict[str, str], roles: dict[str, ParameterRole]) -> None:
    """Raise ValueError for a weight that is cut but read where it is not gathered.

    `reads`: see `Reads.foreign`.
    """
    for name, by in reads.items():
        if roles[name] is ParameterRole.SHARDED:
            _check_options(name, model.get_submodule(name.rpartition(".")[0]))
            raise ValueError(
                f"{name} is read by {by}, but each rank holds only a part of it, and isp gathers"
                f" it only where its nn.Linear is called or its nn.Embedding looks up ids"
                f" (F.embedding with the table's own options, or weight[ids]): call the module"
                f" instead (for a tied head, an nn.Linear with the table's weight)"
            )


def _check_options(name: str, table: nn.Module) -> None:
    """Raise ValueError for an `nn.Embedding` with an option that needs the whole table or batch."""
    for option, (usual, why) in _OPTIONS.items():
        if isinstance(table, nn.Embedding) and (given := getattr(table, option)) != usual:
            raise ValueError(
                f"{name} is a table with {option}={given}, which is not supported: it {why}, but"
                f" each rank holds only a part of the table and of the tokens. Use"
                f" {option}={usual}"
            )


_OPTIONS = {
    "max_norm": (None, "renormalizes rows in place when they are looked up"),
    "scale_grad_by_freq": (False, "divides gradients by how often an id occurs in all tokens"),
    "sparse": (False, "gives sparse gradients"),
}
"""By option of `nn.Embedding`, the only supported value, and the effect of any other one."""


def unused(model: nn.Module, called: Iterable[str], read: Iterable[str]) -> tuple[str, ...]:
    """Return the names of parameters that get no gradient, in the model's order.

    These are the parameters of modules that are not `called`, unless other code has `read` them,
    and all parameters of indexers, because choosing keys has no gradient. The code of experts does
    not run in a trace, so all of their parameters count as read.
    """
    modules = [model.get_submodule(name) for name in called]
    used = {p for module in modules for p in module.parameters(recurse=holds_experts(module))}
    chooses, read = {*indexer_parameters(model)}, {*read}
    return tuple(
        name
        for name, parameter in model.named_parameters()
        if name in chooses or (parameter not in used and name not in read)
    )


def experts_cut(model: nn.Module, calls: Iterable[Call], reads: Iterable[str]) -> set[str]:
    """Return the modules with experts whose stacks can be cut over ranks.

    Such a module is called only in blocks and as in transformers, with tokens and expert indices;
    no other code reads its parameters, and it shares none with a module that stays whole.
    """
    experts = [call for call in calls if call.kind is Kind.EXPERTS]
    others = {call.module for call in experts if call.block is None or call.route is None}
    others |= {name.rpartition(".")[0] for name in reads}
    cut = {call.module for call in experts} - others
    own = {name: {id(p) for p in m.parameters(recurse=False)} for name, m in model.named_modules()}
    # A module that shares a parameter with a module that stays whole must also stay whole: repeat
    # this until no further module is found.
    while True:
        whole = (parameters for name, parameters in own.items() if name not in cut)
        # `held`: the parameters of modules that stay whole.
        held = set[int]().union(*whole)
        left = {name for name in cut if not own[name] & held}
        if left == cut:
            return cut
        cut = left


_EMBEDDING = inspect.signature(F.embedding)


def looked_up(
    table: Any, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None
) -> Tensor | None:
    """Return the ids that a call of torch looks up in an `nn.Embedding`; None for any other call.

    A lookup is `F.embedding` with the table's own options, without `max_norm`, `scale_grad_by_freq`
    and `sparse`, or `weight[ids]` of a table without `padding_idx`.
    """
    if func is F.embedding:
        given = _EMBEDDING.bind(*args, **(kwargs or {})).arguments
        usual = given.get("padding_idx") == table.padding_idx and given.get("max_norm") is None
        usual = usual and not given.get("scale_grad_by_freq") and not given.get("sparse")
        ids = given["input"] if given["weight"] is table.weight and usual else None
    elif func is Tensor.__getitem__ and args[0] is table.weight and table.padding_idx is None:
        ids = args[1]
    else:
        return None
    return ids if isinstance(ids, Tensor) and ids.dtype in (torch.int32, torch.int64) else None
