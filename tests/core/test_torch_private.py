"""Expectations of private names of torch: each test fails when a release of torch breaks it."""

from __future__ import annotations

import ast
import inspect
import pickle
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from isp.core import torch_private
from isp.core.torch_private import (
    AnyBatchNorm,
    AnyDropout,
    FileStore,
    HashStore,
    PrefixStore,
    Store,
    TCPStore,
    TorchDispatchMode,
    TreeSpec,
    all_gather_single,
    all_to_all_single,
    allocate_symmetric,
    argument_schemas,
    aten_grouped_mm,
    backend_of,
    call_after_backward,
    compiled_call,
    compiler_options,
    cpu_attention,
    cpu_attention_backward,
    default_store,
    disable_current_modes,
    flash_attention,
    flash_attention_backward,
    foreach_add_,
    foreach_copy_,
    foreach_lerp_,
    foreach_mul_,
    foreach_norm,
    foreach_sign_,
    function_apply,
    group_timeout,
    grouped_mm,
    has_full_backward_hooks,
    has_multicast,
    is_view,
    record_memory_history,
    reduce_scatter_single,
    reparametrized,
    saved_tensors_hooks_in_use,
    set_allocator,
    set_group_timeout,
    set_options_timeout,
    share_symmetric,
    storage_key,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_unflatten,
    version_of,
    will_run,
    write_memory_history,
)
from tests.ranks import run_ranks

ROOT = Path(__file__).parents[2]


class _Doubled(torch.autograd.Function):
    apply = function_apply

    @staticmethod
    def forward(ctx: Any, x: Tensor, other: Tensor | None) -> Tensor:
        ctx.save_for_backward(x)
        return 2 * x

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, None]:
        return 2 * d, None


def test_function_apply() -> None:
    """Catches an `apply` that makes no node of autograd, or that needs torch.func's checks."""
    x = torch.ones(3, requires_grad=True)
    y = _Doubled.apply(x, None)
    assert type(y.grad_fn).__name__ == "_DoubledBackward"
    y.sum().backward()
    assert x.grad.tolist() == [2] * 3


def test_call_after_backward() -> None:
    """Catches a callback that runs before the last gradient is computed, or after `backward`
    returns.
    """
    x, y = (torch.ones(2, requires_grad=True) for _ in range(2))
    seen = []
    x.register_post_accumulate_grad_hook(
        lambda _: call_after_backward(lambda: seen.append((x.grad is None, y.grad is None)))
    )
    (y * x.exp()).sum().backward()
    assert seen == [(False, False)]


class _Asking(torch.autograd.Function):
    found: list[Any] = []  # noqa: RUF012 - emptied by the test

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        return x + w

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, Tensor]:
        for node, _ in ctx.next_functions:
            try:
                _Asking.found.append(will_run(node))
            except RuntimeError:
                _Asking.found.append("returned")
        return d, d


def test_will_run() -> None:
    """Catches an engine that does not say which gradients a pass needs."""
    x, w = (torch.ones(2, requires_grad=True) for _ in range(2))
    y = _Asking.apply(x.exp(), w).sum()
    _Asking.found.clear()
    y.backward(retain_graph=True)
    y.backward(inputs=[x], retain_graph=True)
    y.backward(inputs=[w], retain_graph=True)
    torch.autograd.grad(y, [w])
    assert _Asking.found == [True, True, True, False, False, True, False, "returned"]


def test_saved_tensors_hooks_in_use() -> None:
    """Catches hooks other than those of the innermost context, and another value for no hooks."""
    assert saved_tensors_hooks_in_use() is None
    packs = [lambda x: x, lambda x: (x,)]
    unpacks = [lambda x: x, lambda x: x[0]]
    with saved_tensors_hooks(packs[0], unpacks[0]):
        with saved_tensors_hooks(packs[1], unpacks[1]):
            assert saved_tensors_hooks_in_use() == (packs[1], unpacks[1])
        assert saved_tensors_hooks_in_use() == (packs[0], unpacks[0])


def test_is_view() -> None:
    """Catches an answer that is not autograd's."""
    x = torch.ones(4)
    assert [is_view(y) for y in (x, x[:2], x.view(2, 2), x.detach(), x + 1)] == [
        False,
        True,
        True,
        False,
        False,
    ]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_version_of(device: str) -> None:
    """Catches a write that is not counted, also through views and detached tensors."""
    x = torch.ones(4, device=device)
    before = version_of(x)
    x.mul_(2)
    x.detach()[:2].zero_()
    assert version_of(x) == before + 2 == version_of(x.view(2, 2))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_storage_key(device: str) -> None:
    """Catches keys that differ for one storage, and equal keys of two storages."""
    x, y = (torch.ones(4, device=device) for _ in range(2))
    assert storage_key(x.untyped_storage()) == storage_key(x.detach()[2:].untyped_storage())
    assert storage_key(x.untyped_storage()) != storage_key(y.untyped_storage())


class _Noting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_dispatch_modes() -> None:
    """Catches operations that a dispatch mode does not see, and modes that stay enabled."""
    x = torch.ones(2, 2, requires_grad=True)  # seen although autograd records them
    with _Noting() as outer, _Noting() as inner:
        torch.relu(x)
        with disable_current_modes():
            torch.tanh(x)
        torch.neg(x)
    assert outer.names == inner.names
    assert [name for name in outer.names if name != "detach"] == ["relu", "neg"]


def test_argument_schemas() -> None:
    """Catches a schema that does not say which arguments an operation writes to."""
    written = [a.name for a in argument_schemas(torch.ops.aten.add.out) if _is_written(a)]
    assert written == ["out"]
    of_copy = argument_schemas(torch.ops.aten.copy_.default)
    assert [(a.name, _is_written(a)) for a in of_copy][:2] == [("self", True), ("src", False)]


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def test_grouped_mm() -> None:
    """Catches a grouped matrix product that ISP's modes do not recognize."""

    class Functions(TorchFunctionMode):
        seen: list[Any] = []  # noqa: RUF012

        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.seen.append(func)
            return func(*args, **(kwargs or {}))

    x, w = torch.ones(4, 16, dtype=torch.bfloat16), torch.ones(2, 16, 8, dtype=torch.bfloat16)
    ends = torch.tensor([1, 4], dtype=torch.int32)
    with Functions() as functions, _Noting() as operations:
        y = F.grouped_mm(x, w, offs=ends)
    assert (y == 16).all()
    assert grouped_mm in functions.seen or F.grouped_mm in functions.seen
    assert aten_grouped_mm.__name__ in operations.names
    y = grouped_mm(x, w, offs=ends)
    assert y.shape == (4, 8)


def test_cpu_attention() -> None:
    """Catches another order of arguments or results, and another base of the log-sum-exp."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 8, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    scores = (q @ k.mT * 0.3).masked_fill(torch.ones(8, 8).triu(1).bool(), -torch.inf)
    expected = scores.softmax(-1) @ v
    with torch.no_grad():
        out, lse = cpu_attention(q, k, v, is_causal=True, scale=0.3)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(lse, scores.logsumexp(-1), rtol=0, atol=1e-12)
    dout = torch.randn_like(expected)
    gradients = torch.autograd.grad(expected, [q, k, v], dout)
    with torch.no_grad():
        found = cpu_attention_backward(dout, q, k, v, out, lse, 0.0, True, scale=0.3)
    for one, other in zip(found, gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("device", ["meta", pytest.param("cuda", marks=pytest.mark.gpu)], ids=str)
def test_flash_attention(device: str) -> None:
    """Catches another order of arguments or results, or another shape of the log-sum-exp."""
    q, k, v = (torch.ones(6, 2, 64, dtype=torch.bfloat16, device=device) for _ in range(3))
    ends = torch.tensor([0, 2, 6], dtype=torch.int32, device=device)
    call = (ends, ends, 4, 4, 0.0, True)
    options = {"scale": 0.1, "window_size_left": 3, "window_size_right": 0}
    out, lse, *_ = flash_attention(q, k, v, *call, False, **options)
    assert (out.shape, lse.shape, lse.dtype) == ((6, 2, 64), (2, 6), torch.float32)
    unused = q.new_zeros(2, dtype=torch.uint64), q.new_empty(0)
    gradients = flash_attention_backward(out, q, k, v, out, lse, *call, *unused, **options)
    assert [x.shape for x in gradients] == [(6, 2, 64)] * 3
    if device == "cuda":  # equal values: out is v, and lse the log of the number of keys seen
        keys = torch.tensor([1, 2, 1, 2, 3, 4], device=device)
        torch.testing.assert_close(out, v)
        torch.testing.assert_close(lse, (keys.log() + 6.4).expand(2, 6), rtol=0, atol=1e-2)


def test_foreach() -> None:
    """Catches a result that differs in a bit from the operation on each tensor."""
    torch.manual_seed(0)
    xs, ys = ([torch.randn(n) for n in (3, 5)] for _ in range(2))

    def each(function: Any, *args: Any, **kwargs: Any) -> list[Tensor]:
        own = [x.clone() for x in xs]
        function(own, *args, **kwargs)
        return own

    pairs = [
        (
            each(foreach_add_, ys, alpha=-0.1),
            [x.clone().add_(y, alpha=-0.1) for x, y in zip(xs, ys, strict=True)],
        ),
        (each(foreach_copy_, ys), ys),
        (
            each(foreach_lerp_, ys, 0.3),
            [x.clone().lerp_(y, 0.3) for x, y in zip(xs, ys, strict=True)],
        ),
        (each(foreach_mul_, 0.7), [x.clone().mul_(0.7) for x in xs]),
        (each(foreach_sign_), [x.sign() for x in xs]),
    ]
    for found, expected in pairs:
        assert all(map(torch.equal, found, expected))
    norms = foreach_norm(xs, 2, dtype=torch.float64)
    expected = [torch.linalg.vector_norm(x, 2, dtype=torch.float64) for x in xs]
    assert all(map(torch.equal, norms, expected))
    wide = [torch.empty(n, dtype=torch.float64) for n in (3, 5)]
    foreach_copy_(wide, xs)  # the dtype of a master may differ from that of a weight
    assert all(torch.equal(a, b.double()) for a, b in zip(wide, xs, strict=True))


def test_compiler_options() -> None:
    """Catches options of the compiler that were renamed, or that stay after the context."""
    import torch._dynamo.config as compiler

    before = compiler.specialize_float, compiler.recompile_limit
    with compiler_options(specialize_float=True, recompile_limit=64):
        assert (compiler.specialize_float, compiler.recompile_limit) == (True, 64)
    assert (compiler.specialize_float, compiler.recompile_limit) == before != (True, 64)


def test_reparametrized() -> None:
    """Catches parameters other than those given, also in submodules, or still set after the
    context.
    """
    model = nn.Sequential(nn.Linear(2, 2, bias=False))
    own = model[0].weight
    with reparametrized(model, {"0.weight": torch.full((2, 2), 3.0)}):
        assert model(torch.ones(2)).tolist() == [6, 6]
    assert model[0].weight is own
    assert "weight" in dict(model[0].named_parameters())


def test_base_classes_of_modules() -> None:
    """Catches batch norms and dropouts that do not inherit from the base classes."""
    norms = nn.BatchNorm1d(2), nn.BatchNorm2d(2), nn.BatchNorm3d(2), nn.SyncBatchNorm(2)
    dropouts = nn.Dropout(), nn.Dropout1d(), nn.Dropout2d(), nn.Dropout3d(), nn.AlphaDropout()
    assert all(isinstance(norm, AnyBatchNorm) for norm in norms)
    assert all(isinstance(dropout, AnyDropout) for dropout in dropouts)
    assert not isinstance(nn.LayerNorm(2), AnyBatchNorm | AnyDropout)


def test_has_full_backward_hooks() -> None:
    """Catches hooks that are not found, and hooks of another kind that are."""
    module = nn.Linear(2, 2)
    module.register_full_backward_pre_hook(lambda *_: None)
    module.register_forward_hook(lambda *_: None)
    assert not has_full_backward_hooks(module)
    handle = module.register_full_backward_hook(lambda *_: None)
    assert has_full_backward_hooks(module)
    handle.remove()
    assert not has_full_backward_hooks(module)


def test_compiled_call() -> None:
    """Catches a module compiled in place that is not recognized."""
    module = nn.Linear(2, 2)
    assert compiled_call(module) is None
    module.compile(backend="eager")
    assert compiled_call(module) is not None


def test_trees() -> None:
    """Catches containers that are not flattened, or not rebuilt as they were."""
    x, y = torch.ones(1), torch.zeros(1)
    tree = {"a": (x, [y, None]), "b": OrderedDict(c=3)}
    leaves, spec = tree_flatten(tree)
    assert isinstance(spec, TreeSpec)
    assert len(leaves) == 4
    assert (
        [*map(id, leaves)] == [*map(id, tree_leaves(tree))] == [*map(id, (x, y, None, leaves[3]))]
    )
    again = tree_unflatten([1, 2, None, 4], spec)
    assert again == {"a": (1, [2, None]), "b": OrderedDict(c=4)}
    assert type(again["b"]) is OrderedDict
    assert tree_map(lambda a, b: (a, b), [1, (2,)], [3, (4,)]) == [(1, 3), ((2, 4),)]


def _groups(rank: int, size: int) -> dict[str, Any]:
    group = dist.new_group(list(range(size)), timeout=timedelta(seconds=7))
    found: dict[str, Any] = {"made": group_timeout(group)}
    set_group_timeout(timedelta(seconds=3), group)
    found["set"] = group_timeout(group)
    found["backend"] = backend_of(group, torch.device("cpu")).options._timeout
    x = torch.arange(size) + 10.0 * rank
    joined, parts, summed = torch.empty(size * size), torch.empty(size), torch.empty(1)
    all_gather_single(group, joined, x).wait()
    all_to_all_single(group, parts, x, [], []).wait()
    all_to_all_single(group, cut := torch.empty(2), x, [1, 1], [1, 1]).wait()
    reduce_scatter_single(group, summed, x).wait()
    found.update(joined=joined.tolist(), parts=parts.tolist(), summed=summed.tolist())
    found["cut"] = cut.tolist()
    PrefixStore("of", default_store()).set(str(rank), "here")
    dist.barrier()
    found["others"] = PrefixStore("of", default_store()).get(str(1 - rank))
    return found


def test_groups() -> None:
    """Catches another order of arguments, a timeout that is not set, and another store."""
    found = run_ranks(2, _groups, 2)
    for rank, of_rank in enumerate(found):
        assert of_rank["made"] == timedelta(seconds=7)
        assert of_rank["set"] == of_rank["backend"] == timedelta(seconds=3)
        assert of_rank["joined"] == [0, 1, 10, 11]
        assert of_rank["parts"] == of_rank["cut"] == [rank, 10 + rank]
        assert of_rank["summed"] == [10 + 2 * rank]
        assert of_rank["others"] == b"here"


def test_stores(tmp_path: Path) -> None:
    """Catches stores that are not the public classes, or have other arguments."""
    for kind in (Store, FileStore, HashStore, PrefixStore, TCPStore):
        assert kind is getattr(dist, kind.__name__)
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for store in (server, HashStore(), FileStore(str(tmp_path / "store"), 1)):
        assert isinstance(store, Store)
        PrefixStore("of", store).set("key", "value")
        assert PrefixStore("of", store).get("key") == b"value"
    client = TCPStore("127.0.0.1", server.port, is_master=False)
    client.set("key", "other")
    assert server.get("key") == b"other"


def test_symmetric_memory_of_a_cpu() -> None:
    """Catches another order of arguments, as far as it shows without a GPU."""
    assert not has_multicast(torch.cuda.device_count())
    message = "does not support device type cpu"
    with pytest.raises(RuntimeError, match=message):
        allocate_symmetric(2, 8, dtype=torch.float32, device=torch.device("cpu"))

    class Group:
        group_name = "one"

    with pytest.raises(RuntimeError, match=message):
        share_symmetric(torch.ones(2), Group())  # type: ignore[arg-type]


def _one_gpu(folder: str) -> list[str]:
    """Check, in a process of its own, the functions that change the allocator or start NCCL."""
    set_allocator("expandable_segments:True")
    record_memory_history(100)
    device = torch.device("cuda", 0)
    x = torch.ones(2**20, device=device)
    write_memory_history(f"{folder}/history.pickle")
    wrong = [] if torch.cuda.memory_snapshot()[0]["is_expandable"] else ["set_allocator"]
    kept = pickle.loads(Path(folder, "history.pickle").read_bytes())
    entries = [entry for trace in kept["device_traces"] for entry in trace]
    if not any(e["action"] == "alloc" and e["size"] >= x.nbytes for e in entries):
        wrong.append("memory_history")
    return wrong


@pytest.mark.gpu
def test_allocator_and_its_history(tmp_path: Path) -> None:
    """Catches settings without effect, and a history without allocations."""
    context = torch.multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        assert pool.apply(_one_gpu, (str(tmp_path),)) == []


def test_allocator_without_a_gpu() -> None:
    """Catches entries that moved or have other arguments, as far as they exist without CUDA."""
    # in a child process, since the setting is global
    run_ranks(1, lambda _: set_allocator("expandable_segments:True"))
    assert "max_entries" in inspect.signature(torch.cuda.memory._record_memory_history).parameters
    assert next(iter(inspect.signature(torch.cuda.memory._dump_snapshot).parameters)) == "filename"


@pytest.mark.gpu
@pytest.mark.nccl
def test_options_of_nccl() -> None:
    """Catches torch's warning that its timeout overrides that of the options."""
    options = dist.ProcessGroupNCCL.Options()
    set_options_timeout(options, timedelta(seconds=5))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dist.init_process_group(
            "nccl",
            store=HashStore(),
            rank=0,
            world_size=1,
            timeout=timedelta(seconds=5),
            device_id=torch.device("cuda", 0),
            pg_options=options,
        )
    dist.destroy_process_group()


def test_options_timeout() -> None:
    """Catches process group options without a timeout."""
    options = dist.ProcessGroupGloo._Options()
    set_options_timeout(options, timedelta(seconds=5))
    assert options._timeout == timedelta(seconds=5)


def test_every_entry_is_tested_and_needed() -> None:
    """Catches an entry without a test in this file, and one that no module uses."""
    here = Path(__file__).read_text().partition("\nROOT =")[2]
    users = "".join(
        path.read_text()
        for path in sorted((ROOT / "isp").rglob("*.py"))
        if path.name != "torch_private.py"
    )
    names = set(torch_private.__all__)
    assert {name for name in names if name not in here} == set()
    assert {name for name in names if name not in users} == set()
    module = ast.parse(inspect.getsource(torch_private))
    imported = [n.module or "" for n in ast.walk(module) if isinstance(n, ast.ImportFrom)]
    assert not [name for name in imported if name.split(".")[0] in ("isp", "model")]


# The underscored attributes of the classes of torch that ISP deals with.
_PRIVATE = {
    name
    for kind in (
        torch.Tensor,
        torch.UntypedStorage,
        nn.Module(),
        torch.optim.SGD([torch.ones(1)]),
        torch.autograd.Function,
        torch._ops.OpOverload,
        dist.ProcessGroup,
        dist.ProcessGroupGloo._Options,
        torch.utils.data.DataLoader,
    )
    for name in dir(kind)
    if name.startswith("_") and not name.startswith("__")
}


def _private_names(tree: ast.AST) -> Iterator[str]:
    """Yield the private names of torch in a file; of `self` and `cls` only what torch defines."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names):
                modules = [alias.name for alias in names]
                yield from (m for m in modules if m.startswith("torch.") and "._" in m)
            case ast.ImportFrom(module=str(module), names=names) if _of_torch(module):
                words = [*module.split("."), *(alias.name for alias in names)]
                yield from (word for word in words if word.startswith("_"))
            case ast.Attribute(value=value, attr=attr) if _is_private(attr):
                words = ast.unparse(value)
                if _of_torch(words) or (attr in _PRIVATE and words not in ("self", "cls")):
                    yield attr


def _of_torch(words: str) -> bool:
    return words.split(".")[0] in ("torch", "dist", "nn", "F", "Variable", "distributed_c10d")


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def test_private_names_of_torch_are_used_in_one_module() -> None:
    """Catches a private name of torch used outside of `isp.core.torch_private`."""
    found = set()
    for path in (*sorted((ROOT / "isp").rglob("*.py")), *sorted((ROOT / "model").rglob("*.py"))):
        if path.name != "torch_private.py":
            names = _private_names(ast.parse(path.read_text()))
            found |= {(str(path.relative_to(ROOT)), name) for name in names}
    assert found == set()


@pytest.mark.parametrize(
    "line",
    [
        "import torch._dynamo",
        "from torch import _C",
        "from torch.utils._pytree import tree_map",
        "torch._foreach_add_(x, y)",
        "torch.ops.aten._grouped_mm(x)",
        "dist.distributed_c10d._get_default_store()",
        "x = y.weight._version",
        "node(x)._cdata",
        "group._get_backend(d).options._timeout",
        "module._forward_hooks",
    ],
)
def test_the_search_finds_private_names(line: str) -> None:
    """Catches a search that finds nothing."""
    assert [*_private_names(ast.parse(line))]
