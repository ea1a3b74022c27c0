"""Finds where the host would wait for its device in a step, on the CPU as on CUDA.

On CUDA torch itself reports it. On the CPU nothing waits, so it is derived from the operations on
tensors: all tensors are on the device except those known to be on the host, which are declared so,
created without a device, or computed only from host tensors. Recorded are (1) values of device
tensors that the host reads: by `item`, `tolist`, `numpy`, `cpu`, or a branch; (2) results whose
size the host must know: `nonzero`, a mask as an index; (3) copies to the device other than by
`pinned_memory.send`, and operations of a device tensor with a host tensor; copies to the host other
than by `HostCopy`, and one that is waited for too early.

Not seen are kernels inside an operation, of CUDA or of packages; waits for events, streams and
memory that the code requests explicitly; and copies to the host given by a `torch.device`, which
here is also that of the device.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from isp.core.comm import pinned_memory

__all__ = ["HostSyncs", "syncs_on_cuda"]

_ROOT = Path(__file__).parents[1]
_MADE_BY = (
    *("arange", "empty", "eye", "from_numpy", "full", "linspace", "ones", "rand", "randint"),
    *("randn", "randperm", "zeros"),
)
_OF_NUMBERS = ("as_tensor", "asarray", "scalar_tensor", "tensor")
"""Functions that copy numbers of the host to a given device."""
_VALUES = ("__array__", "cpu", "numpy", "tolist")
"""Methods that return a tensor's values, other than those that return one number."""
_SIZES = (
    *("_local_scalar_dense", "_unique2", "allclose", "bincount", "equal", "is_nonzero"),
    *("masked_select", "nonzero", "unique_consecutive", "unique_dim"),
)
"""Operations whose result, or its size, the host must know."""
_BY_INDEX = ("index", "index_put", "index_put_")


class HostSyncs(TorchDispatchMode):
    """A context in which `found` collects the waits of the host: the function and the operation."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.followed = 0
        """Number of operations on device tensors."""
        self._waited = 0
        """The number of operations up to which the host has waited."""
        self._host: dict[int, Any] = {}
        """Storages on the host by address; kept alive, so that no address is reused."""
        self._locked: set[int] = set()
        """Addresses of storages that are page-locked."""
        self._patches = ExitStack()

    def take(self) -> list[str]:
        """Return the waits found since the last call."""
        found, self.found = self.found, []
        return found

    def of_host(self, *tensors: Tensor | None) -> None:
        """Declare that these tensors are in host memory."""
        for x in tensors:
            if x is not None:
                self._host[_address(x)] = x.untyped_storage()

    def __enter__(self) -> Self:
        with ExitStack() as patches:  # if a patch fails, the earlier ones are undone
            patch = patches.enter_context
            for name in (*_MADE_BY, *_OF_NUMBERS):
                patch(mock.patch.object(torch, name, self._made_by(name, getattr(torch, name))))
            for name in _VALUES:
                patch(mock.patch.object(Tensor, name, self._value_by(name, getattr(Tensor, name))))
            patch(mock.patch.object(Tensor, "new_tensor", self._new_tensor(Tensor.new_tensor)))
            patch(mock.patch.object(Tensor, "to", self._to(Tensor.to)))
            patch(mock.patch.multiple(pinned_memory, send=self._send, zeros=self._zeros))
            patch(mock.patch.object(pinned_memory, "HostCopy", self._host_copy()))
            self._patches = patches.pop_all()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patches.close()

    # -- calls of the project ----------------------------------------------------------------

    def _made_by(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def make(*args: Any, **kwargs: Any) -> Any:
            made = real(*args, **kwargs)
            if kwargs.get("device") is None:
                self.of_host(made)
            elif name in _OF_NUMBERS:
                self._note(name)
            return made

        return make

    def _value_by(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def value(x: Tensor, *args: Any, **kwargs: Any) -> Any:
            if not self._is_host(x):
                self._note(name)
            found = real(x, *args, **kwargs)
            if name == "cpu":
                self.of_host(found)
            return found

        return value

    def _new_tensor(self, real: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def make(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            made = real(x, *args, **kwargs)
            if self._is_host(x):
                self.of_host(made)
            else:
                self._note("new_tensor")
            return made

        return make

    def _to(self, real: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def to(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            found, target = real(x, *args, **kwargs), kwargs.get("device", *args[:1])
            is_host, home = self._is_host(x), target == "cpu"
            if not isinstance(target, str | torch.device) or is_host == home:
                return found
            self._note("to")
            if is_host:
                return self._moved(found)
            self.of_host(found := found.clone())
            return found

        return to

    def _send(self, x: Tensor, device: torch.device) -> Tensor:
        return self._moved(x) if self._is_host(x) else x

    def _moved(self, x: Tensor) -> Tensor:
        """Return x as a copy on the device: another tensor."""
        there = x.clone()
        self._host.pop(_address(there), None)
        return there

    def _zeros(self, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        memory = torch.zeros(size, dtype=dtype)
        self._locked.add(_address(memory))
        return memory

    def _host_copy(self) -> type:
        guard = self

        class HostCopy:
            """A stand-in for the project's class; records waits that no earlier wait covers."""

            is_there = False

            def __init__(self, x: Tensor) -> None:
                self._at = guard.followed
                self._value = x.clone()
                guard.of_host(self._value)

            def wait(self) -> Tensor:
                if guard._waited < self._at:
                    guard._note("HostCopy.wait")
                return self._value

        return HostCopy

    # -- calls of torch ----------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        if func.namespace != "aten":  # collectives only write to tensors they are given
            return found
        given = _tensors((*args, *kwargs.values()))
        if given and all(map(self._is_host, given)):
            self.of_host(*_tensors((found,)))
        elif given:
            self.followed += 1
            self._look_at(func.overloadpacket.__name__, args, kwargs, given)
        return found

    def _look_at(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], given: list[Tensor]
    ) -> None:
        if name in ("copy_", "_to_copy"):
            # Only a non-blocking copy from or to page-locked memory lets the host continue.
            no_wait = kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
            locked = any(_address(x) in self._locked for x in given)
            if len({self._is_host(x) for x in given}) > 1 and not (no_wait and locked):
                self._note(name)
        elif (
            name in _SIZES
            or (name in _BY_INDEX and _by_mask(args))
            or (name == "repeat_interleave" and kwargs.get("output_size") is None)
        ):
            self._note(name)
        # A scalar is passed by value; any other host tensor was never sent to the device.
        elif any(self._is_host(x) and x.dim() for x in given):
            self._note(f"{name} of a tensor that is not there")

    def _is_host(self, x: Tensor) -> bool:
        return _address(x) in self._host

    def _note(self, what: str) -> None:
        # The host waits for all operations so far: a later `HostCopy.wait` for them is no new wait.
        self._waited = self.followed
        self.found.append(f"{what} in {_place()}")


def _by_mask(args: tuple[Any, ...]) -> bool:
    """Return whether an index is a mask, whose elements have to be counted."""
    if len(args) > 2 and args[2].numel() == 1:
        return False  # one value is written where the mask is True, without a count
    return any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1])


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    found = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += _tensors(value)
    return found


def _address(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def _place() -> str:
    """Return the innermost function of this repository, `folder/file.py:function`."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(_ROOT) and path != Path(__file__) and ".venv" not in path.parts:
            return f"{path.relative_to(_ROOT)}:{frame.f_code.co_name}"
        frame = frame.f_back
    return "?"


@contextmanager
def syncs_on_cuda() -> Iterator[list[str]]:
    """Yield the waits of the host for CUDA in this context, where torch sees them."""
    found: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")
    found += [
        f"{w.filename}:{w.lineno}" for w in caught if "called a synchronizing" in str(w.message)
    ]
