"""Which code reads the weights of a model: what is cut is gathered for linears and lookups."""

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
"""What asks a tensor for its size, which differs for a rank's part of it."""


class Reads(TorchFunctionMode):
    """Notes where parameters are read, and how, unless by their own module as isp knows it."""

    def __init__(
        self, model: nn.Module, positions: Tensor, place: Callable[[], tuple[str | None, int]]
    ) -> None:
        """`place`: of what is called, in the recorder's terms."""
        super().__init__()
        self._place = place
        self._names = {id(p): name for name, p in model.named_parameters()}
        self._positions = positions
        self.open: list[nn.Module] = []
        """The modules whose forward runs, the innermost last."""
        self.foreign: dict[str, str] = {}
        """The parameters that are read in another way, and by what."""
        self.places: dict[str, set[tuple[str | None, int]]] = {}
        """The parameters that are read, and where."""
        self.reads_positions = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out, name = func(*args, **(kwargs or {})), name_of(func)
        makes_tensor = bool(tensors_in(out))
        if not makes_tensor and name not in _SIZES:  # its dtype
            return out
        for leaf in tensors_in(args, kwargs):
            if leaf is self._positions:
                self.reads_positions |= makes_tensor
            known = self._names.get(id(leaf))
            if known is not None and makes_tensor:
                self.places.setdefault(known, set()).add(self._place())
            if known is not None and not self._expected(leaf, func, args, kwargs):
                self.foreign[known] = name
        return out

    def _expected(self, parameter: Tensor, func: Any, args: Any, kwargs: Any) -> bool:
        """Whether it is a module's own, read as isp knows how to."""
        inside = self.open[-1] if self.open else None
        if inside is None or all(parameter is not own for own in inside.parameters(recurse=False)):
            return False
        if isinstance(inside, nn.Embedding):
            return looked_up(inside, func, args, kwargs) is not None
        return not is_linear(inside) or func in (F.linear, torch.addmm)


def name_of(func: Any) -> str:
    """Return the name of an operation, or of the attribute that is read."""
    name = getattr(func, "__name__", str(func))
    return str(func.__self__.__name__ if name == "__get__" else name)


_SMALL = 1 << 20
"""Elements up to which a linear whose weight others read, too, is whole on every rank."""


def small_linears_read(model: nn.Module, reads: dict[str, str]) -> set[str]:
    """Names of small linears whose weights other code reads: whole on every rank, not refused."""
    owners = {name.rpartition(".")[0] for name in reads if name.endswith(".weight")}
    linears = ((name, model.get_submodule(name)) for name in owners)
    return {
        name
        for name, module in linears
        if is_linear(module) and sum(p.numel() for p in module.parameters()) <= _SMALL
    }


def check_reads(model: nn.Module, reads: dict[str, str], roles: dict[str, ParameterRole]) -> None:
    """Raise ValueError for a weight that is cut, and read where it is not gathered."""
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
    """Raise ValueError for an `nn.Embedding` with an option that a rank's part cannot have."""
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
"""Options of `nn.Embedding`: value of tables that are supported, and what any other does."""


def unused(model: nn.Module, called: Iterable[str], read: Iterable[str]) -> tuple[str, ...]:
    """The parameters of modules that are not `called`, and that nobody else has `read`.

    The code of experts is not run: all of theirs count as read; those of indexers do not.
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
        whole = (parameters for name, parameters in own.items() if name not in cut)
        held = set[int]().union(*whole)
        left = {name for name in cut if not own[name] & held}
        if left == cut:
            return cut
        cut = left


_EMBEDDING = inspect.signature(F.embedding)


def looked_up(
    table: Any, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None
) -> Tensor | None:
    """The ids whose rows of an `nn.Embedding` a call of torch gives; None for any other call.

    That is `F.embedding` with the options of the table, of which `max_norm`, `scale_grad_by_freq`
    and `sparse` are not supported, or `weight[ids]` of a table whose rows all take a gradient.
    """
    if func is F.embedding:
        given = _EMBEDDING.bind(*args, **(kwargs or {})).arguments
        alike = given.get("padding_idx") == table.padding_idx and given.get("max_norm") is None
        plain = not given.get("scale_grad_by_freq") and not given.get("sparse")
        ids = given["input"] if given["weight"] is table.weight and alike and plain else None
    elif func is Tensor.__getitem__ and args[0] is table.weight and table.padding_idx is None:
        ids = args[1]
    else:
        return None
    return ids if isinstance(ids, Tensor) and ids.dtype in (torch.int32, torch.int64) else None
