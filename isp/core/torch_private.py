"""Private names of torch that ISP depends on, all in one place.

A new release of torch may change these without notice. Each entry says why ISP needs it, which
public name would replace it, and what breaks if torch changes it. A test for each, which fails
first when that happens, is in tests/core/test_torch_private.py.

Entries that run for every layer or operation are torch's own objects or getters written in C: a
Python function around them would be one more call in the hot path.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, UntypedStorage, nn
from torch._C._autograd import DeviceType

# Meet other ranks and exchange bytes by key. Public name: the same names in `torch.distributed`,
# but torch's type hints do not export these, so mypy refuses them. If torch moves them, imports
# fail.
from torch._C._distributed_c10d import (
    FileStore,
    HashStore,
    PrefixStore,
    Store,
    TCPStore,
    _SymmetricMemory,
)
from torch.autograd import Variable
from torch.distributed import distributed_c10d

# Recognize batch norms and dropouts of all dimensions, including a user's own classes. Public name:
# only the classes for each dimension. If torch changes them, the probe of a model with batch norm
# or dropout reports that tokens are mixed, or that outputs are random.
from torch.nn.modules.batchnorm import _BatchNorm as AnyBatchNorm
from torch.nn.modules.dropout import _DropoutNd as AnyDropout

# Replace parameters of a module, by name, in a context. Needed where something other than the
# module's forward reads them. Public name: `torch.func.functional_call`, for one call of the
# forward. If torch changes it, ranks compute with wrong weights.
from torch.nn.utils.stateless import _reparametrize_module as reparametrized

# See each operation below autograd, with its tensors. Public name: none; torch documents the class,
# its module is private. If torch moves it, imports of recomputation, loading and planner fail.
from torch.utils._python_dispatch import TorchDispatchMode

# Leave all dispatch modes in a context, to run a real scan on small tensors while the planner
# rehearses a model under its own modes. Public name: none. If torch changes it, the operations of
# that scan are counted, too.
from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes

# Take nested containers apart and build them again, including those that users registered with
# torch. Public name: none in torch 2.11 to 2.13; the package `optree` knows other containers. If
# torch changes them, outputs of modules that are not plain tensors are rebuilt wrongly.
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten

__all__ = [
    "AnyBatchNorm",
    "AnyDropout",
    "FileStore",
    "HashStore",
    "PrefixStore",
    "Store",
    "TCPStore",
    "TorchDispatchMode",
    "TreeSpec",
    "all_gather_single",
    "all_to_all_single",
    "allocate_symmetric",
    "argument_schemas",
    "aten_grouped_mm",
    "backend_of",
    "call_after_backward",
    "compiled_call",
    "compiler_options",
    "cpu_attention",
    "cpu_attention_backward",
    "default_store",
    "disable_current_modes",
    "flash_attention",
    "flash_attention_backward",
    "foreach_add_",
    "foreach_copy_",
    "foreach_lerp_",
    "foreach_mul_",
    "foreach_norm",
    "foreach_sign_",
    "function_apply",
    "group_timeout",
    "grouped_mm",
    "has_full_backward_hooks",
    "has_multicast",
    "is_view",
    "record_memory_history",
    "reduce_scatter_single",
    "reparametrized",
    "saved_tensors_hooks_in_use",
    "set_allocator",
    "set_group_timeout",
    "set_options_timeout",
    "share_symmetric",
    "storage_key",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_unflatten",
    "version_of",
    "will_run",
    "write_memory_history",
]

# Autograd.

function_apply: Any = vars(torch._C._FunctionBase)["apply"]
"""Call an autograd function without looking for the transforms of `torch.func`.

Needed because `torch.autograd.Function.apply` looks for them in every call, which takes as long as
a small function. Public name: `Function.apply`. If torch moves it, importing `isp.core.autograd`
fails.
"""

call_after_backward: Callable[[Callable[[], None]], None] = (
    Variable._execution_engine.queue_callback
)
"""Call a function once the backward pass that runs now is over, before `backward` returns.

Needed to wait for reductions that the last hook has just launched; FSDP2 and DDP do the same.
Public name: none. If torch calls it too early, gradients are read before they are summed over the
ranks.
"""

will_run: Callable[[Any], bool] = torch._C._will_engine_execute_node
"""Return whether the backward pass that runs now will execute an autograd node.

Raises RuntimeError for a leaf whose gradient `torch.autograd.grad` returns. Needed because
`ctx.needs_input_grad` says only what could have a gradient, and computing one that no node reads
costs a product and a transfer. Public name: none. If torch changes it, gradients are left out, or
computed and dropped.
"""

saved_tensors_hooks_in_use: Callable[[], Any] = partial(
    torch._C._autograd._top_saved_tensors_default_hooks, False
)
"""Return the innermost pair (pack, unpack) of `saved_tensors_hooks` in effect, or None.

Needed because new hooks replace the outer ones, which ours have to call for other tensors (offload
to the host, recomputation). Public name: none. If torch changes it, tensors that a user's hooks
would have packed stay in device memory.
"""

is_view: Callable[[Tensor], bool] = Tensor._is_view
"""Return whether autograd treats a tensor as a view of another.

Needed because torch refuses in-place writes into a view that a custom function returned. Public
name: none. If torch changes it, a caller's in-place operation on the output of a linear raises.
"""

version_of: Callable[[Tensor], int] = attrgetter("_version")
"""Return how often a tensor's memory was written in place, as autograd counts.

Needed to find writes between two moments: weights that are gathered again, results a recompute may
reuse. Public name: none; the documentation of torch names `_version`. If torch stops counting, a
write is missed and stale weights are used.
"""

storage_key: Callable[[UntypedStorage], int] = attrgetter("_cdata")
"""Return the identity of a storage: one number for all Python objects of the same memory.

Needed because `untyped_storage()` makes a new object each time, and `data_ptr` is 0 on the meta
device. Public name: none. If torch changes it, tensors that share memory are not recognized: memory
is counted twice, and outputs that alias an input are dropped.
"""

# Operators.


def argument_schemas(func: Any) -> Any:
    """Return the arguments in the schema of an operator, with `name` and `alias_info`.

    Needed to know which arguments an operation writes into. Public name: none. If torch changes it,
    a recompute reuses a kept result that was overwritten since.
    """
    return func._schema.arguments


grouped_mm: Any = torch._grouped_mm
"""Multiply each group of rows by its own matrix, as experts do.

Needed to recognize calls of transformers, in function modes. Public name: `torch.nn.functional.
grouped_mm`, which calls it. If torch changes it, tests in float64 fail, which the kernel lacks.
"""

aten_grouped_mm: Any = torch.ops.aten._grouped_mm
"""Multiply each group of rows by its own matrix, as a dispatch mode sees the operation.

Needed by the planner, to count its work. Public name: none. If torch renames it, `isp plan` misses
the work of experts.
"""

cpu_attention: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
"""Attend by torch's flash kernel on CPU: q, k, v [B, H, S, d] -> out and log-sum-exp [B, H, S].

Needed because attention over blocks of a sequence is joined by the log-sum-exp. Public name:
`torch.nn.functional.scaled_dot_product_attention`, which does not return it. If torch changes it,
attention on CPU raises.
"""

cpu_attention_backward: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
"""Compute the gradients of `cpu_attention` from its output and log-sum-exp: dq, dk, dv.

Needed because one autograd node covers all blocks of a sequence. Public name: none. If torch
changes it, attention on CPU raises in backward.
"""

flash_attention: Any = torch.ops.aten._flash_attention_forward
"""Attend by torch's flash kernel on CUDA, packed: q [T, H, d] -> out [T, H, d], lse [H, T], ...

Needed for the log-sum-exp, as on CPU. Public name: `torch.nn.attention.varlen.varlen_attn`, whose
gradients cannot take an lse that was joined with other keys. If torch changes it, the ring and
attention sinks raise where flash-attn is not installed.
"""

flash_attention_backward: Any = torch.ops.aten._flash_attention_backward
"""Compute the gradients of `flash_attention`: dq, dk, dv.

Needed and replaced as `flash_attention`. If torch changes it, backward raises.
"""

foreach_add_: Any = torch._foreach_add_
"""Add, in place, to each tensor of a list, in few kernels.

Needed because an update of thousands of parameters by single operations costs more time in launches
than on the device; the optimizers of torch use the same functions. Public name: none. If torch
changes one of the `foreach_*`, updates raise or have other bits.
"""
foreach_copy_: Any = torch._foreach_copy_
"""Copy a list of tensors into another, as `foreach_add_`."""
foreach_lerp_: Any = torch._foreach_lerp_
"""Interpolate in place between two lists of tensors, as `foreach_add_`."""
foreach_mul_: Any = torch._foreach_mul_
"""Multiply, in place, each tensor of a list, as `foreach_add_`."""
foreach_norm: Any = torch._foreach_norm
"""Return the norm of each tensor of a list, as `foreach_add_`."""
foreach_sign_: Any = torch._foreach_sign_
"""Replace each tensor of a list by its signs, as `foreach_add_`."""


def compiler_options(**options: Any) -> AbstractContextManager[None]:
    """Set options of `torch.compile` in this context.

    Needed to allow more recompilations for attention alone. Public name: none. If torch renames
    one, attention with a logit soft cap raises on CUDA.
    """
    import torch._dynamo  # the compiler takes seconds to load: only where it is used

    patched: AbstractContextManager[None] = torch._dynamo.config.patch(**options)
    return patched


def has_full_backward_hooks(module: nn.Module) -> bool:
    """Return whether a module has a hook of `register_full_backward_hook` that was not removed.

    Needed where a module is computed before its call: its hooks then expect the gradient of another
    input. Public name: none. If torch changes it, such a hook gets wrong gradients, or none.
    """
    return bool(module._is_full_backward_hook and module._backward_hooks)


compiled_call: Callable[[nn.Module], Any] = attrgetter("_compiled_call_impl")
"""Return what `module.compile()` runs instead of the module's forward, None if it was not called.

Needed to refuse such a module: ISP runs its parts one by one. Public name: none. If torch changes
it, the refusal is an AttributeError, or is missing.
"""

# Process groups.


def default_store() -> Store:
    """Return the store through which the ranks of the default process group met.

    Needed to find out which rank is missing, by a store that works when collectives do not. Public
    name: none. If torch changes it, the error of a collective that timed out names no ranks.
    """
    return distributed_c10d._get_default_store()


set_group_timeout: Callable[[timedelta, dist.ProcessGroup], None]
set_group_timeout = getattr(dist, "set_timeout", None) or distributed_c10d._set_pg_timeout
"""Set the timeout of the collectives that a process group launches from now on.

Needed because the first step of a run is slower than all others. Public name: `torch.distributed.
set_timeout`, since torch 2.14, which warns of the old name. If torch changes it, a run does not
start.
"""


def group_timeout(group: dist.ProcessGroup) -> timedelta:
    """Return the timeout of the transfers of a gloo group.

    Needed because gloo counts the time of a send or receive from the wait, which needs the timeout
    as an argument. Public name: none. If torch changes it, pipelines on CPU raise, or wait for a
    missing rank.
    """
    found: timedelta = backend_of(group, torch.device("cpu")).options._timeout
    return found


def set_options_timeout(options: Any, timeout: timedelta) -> None:
    """Set the timeout in the options of a NCCL group that is not yet made.

    Needed because `init_process_group` overwrites it by its own `timeout`, and warns if the two
    differ. Public name: none. If torch changes it, each rank logs that warning.
    """
    options._timeout = timeout


def backend_of(group: dist.ProcessGroup, device: torch.device) -> Any:
    """Return the backend by which a group communicates tensors of a device.

    Needed for its options, and for memory registered with NCCL; FSDP2 uses it for the same. Public
    name: none. If torch changes it, `parallel.weight.nccl_ub` and waits for sends on gloo raise.
    """
    return group._get_backend(device)


_Group = dist.ProcessGroup
_Method = Callable[..., dist.Work]

all_gather_single: _Method = getattr(_Group, "all_gather_single", None) or _Group._allgather_base
"""Launch an all-gather into one tensor, by the process group itself.

Needed because the functions of `torch.distributed` add as much time as the launch takes.
See [Note: Straight to the group] in docs/design/notes/communication.md. Public name: the method
`all_gather_single` of torch 2.13; torch 2.11 has only the private one. If torch changes it, every
collective raises.
"""

reduce_scatter_single: _Method = (
    getattr(_Group, "reduce_scatter_single", None) or _Group._reduce_scatter_base
)
"""Launch a reduce-scatter of one tensor, as `all_gather_single`."""

all_to_all_single: _Method = getattr(_Group, "all_to_all_single", None) or _Group.alltoall_base
"""Launch an all-to-all of one tensor, as `all_gather_single`."""

# CUDA.


def has_multicast(index: int) -> bool:
    """Return whether a CUDA device can write to all ranks by one store (NVSwitch).

    Needed for symmetric memory, like `allocate_symmetric` and `share_symmetric`: to sum and gather
    a few tokens without NCCL. Public name: none in torch 2.11 to 2.13. If torch changes it, `isp
    generate` uses NCCL or raises.
    """
    return bool(_SymmetricMemory.has_multicast_support(DeviceType.CUDA, index))


def allocate_symmetric(
    rows: int, columns: int, *, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return a tensor [rows, columns] in memory that other GPUs can map.

    Needed because `torch.distributed._symmetric_memory.empty`, which is private as well, takes
    memory from a pool, which may be of another kind. Public name: none in torch 2.11 to 2.13. If
    torch changes it, `isp generate` uses NCCL or raises.
    """
    found: Tensor = _SymmetricMemory.empty_strided_p2p((rows, columns), (columns, 1), dtype, device)
    return found


def share_symmetric(x: Tensor, group: dist.ProcessGroup) -> Any:
    """Return a handle that maps the `allocate_symmetric` tensors of all ranks of a group; keep it.

    A collective over the group. Needed for symmetric memory, as `allocate_symmetric`. Public name:
    none in torch 2.11 to 2.13. If torch changes it, `isp generate` uses NCCL or raises.
    """
    return _SymmetricMemory.rendezvous(x, group.group_name)


def set_allocator(settings: str) -> None:
    """Change settings of the device allocator, written as in `PYTORCH_ALLOC_CONF`.

    Needed because torch has read the environment by the time a run knows its settings. Public name:
    none; only the environment variable is public. If torch changes it, ranks on CUDA do not start.
    """
    torch._C._accelerator_setAllocatorSettings(settings)


def record_memory_history(max_entries: int) -> None:
    """Record allocations on CUDA devices, the last `max_entries`, for `write_memory_history`.

    Needed for `profiler.enable_memory_snapshot`. Public name: none; torch documents this name. If
    torch changes it, a run with that key does not start.
    """
    torch.cuda.memory._record_memory_history(max_entries=max_entries)


def write_memory_history(path: str) -> None:
    """Write the recorded allocations to a file for https://pytorch.org/memory_viz.

    Needed for `profiler.enable_memory_snapshot`. Public name: none; torch documents this name. If
    torch changes it, the history is lost.
    """
    torch.cuda.memory._dump_snapshot(path)
