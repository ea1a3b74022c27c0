"""Local attention by every backend that can run here, against attention written out in full."""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from isp.attention import AttentionMask, CpuAttention, local, make_local_attention
from isp.attention.explicit import ExplicitAttention
from isp.attention.flash import FlashAttention, VarlenAttention
from isp.attention.local import _KINDS, LocalAttention, _choose_backend, _fault_on, _Place
from isp.attention.sdpa import SdpaAttention
from isp.comm import Channel, Pending
from isp.settings.attention_backend import AttentionBackend
from tests.attention.reference import attend, make_mask, random_inputs, with_gradients

CPU = torch.device("cpu")
TOLERANCE = 1e-12
BACKENDS: list[Callable[..., LocalAttention]] = [CpuAttention, SdpaAttention]
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def _error(attention: LocalAttention, inputs: list[Tensor], dout: Tensor, mask: Any) -> float:
    expected = with_gradients(attend(*inputs, mask), inputs, dout)
    result = with_gradients(attention(*inputs, mask=mask), inputs, dout)
    assert all(torch.isfinite(x).all() for x in result)
    return max(float((a - b).abs().max()) for a, b in zip(result, expected, strict=True))


@pytest.mark.parametrize("make", BACKENDS)
@pytest.mark.parametrize(
    "documents", [None, [7, 16, 1, 1, 1, 9, 5], [20, 20], [1] * 40, [13, 13, 13, 1], [0, 40, 0]]
)
@pytest.mark.parametrize(("causal", "window"), [(True, None), (False, None), (True, 5), (False, 5)])
def test_documents_and_windows(
    make: Callable[..., LocalAttention],
    documents: list[int] | None,
    causal: bool,
    window: int | None,
) -> None:
    """Catches documents that see each other, and a window that is ignored."""
    inputs, dout = random_inputs(2, 40, 4, 2)
    mask = make_mask(documents, causal, window, batch=2)
    assert _error(make(), inputs, dout, mask) < TOLERANCE


@pytest.mark.parametrize("make", BACKENDS)
@pytest.mark.parametrize("heads", [(4, 4), (3, 1)])
@pytest.mark.parametrize("documents", [None, [7, 16, 1, 1, 1, 9, 5]])
def test_groups_of_heads(
    make: Callable[..., LocalAttention], heads: tuple[int, int], documents: list[int] | None
) -> None:
    """Catches KV heads paired wrongly."""
    inputs, dout = random_inputs(2, 40, *heads)
    for window in (None, 5):
        assert _error(make(), inputs, dout, make_mask(documents, True, window, batch=2)) < TOLERANCE


@pytest.mark.parametrize("make", BACKENDS)
@pytest.mark.parametrize(("queries", "keys"), [(3, 7), (7, 3), (1, 5), (5, 1), (300, 700)])
@pytest.mark.parametrize(("causal", "window"), [(True, None), (False, None), (True, 2), (False, 2)])
def test_unequal_lengths_align_at_the_end(
    make: Callable[..., LocalAttention], queries: int, keys: int, causal: bool, window: int | None
) -> None:
    """Catches torch's own alignment, at the first query and key, and rows that see nothing."""
    inputs, dout = random_inputs(1, queries, 2, 1, keys=keys)
    mask = AttentionMask(causal=causal, window=window)
    assert _error(make(), inputs, dout, mask) < TOLERANCE


@pytest.mark.parametrize("make", [*BACKENDS, ExplicitAttention])
@pytest.mark.parametrize(("causal", "window"), [(True, None), (False, None), (True, 2), (True, 90)])
def test_packed_documents_with_keys_of_their_own(
    make: Callable[..., LocalAttention], causal: bool, window: int | None
) -> None:
    """Catches keys of the neighbour, an alignment at the first key, and what there are none of."""
    lengths, keys = [3, 0, 5, 4, 2, 2, 250, 70], [7, 4, 0, 2, 2, 2, 300, 670]
    inputs, dout = random_inputs(1, sum(lengths), 4, 2, keys=sum(keys))
    mask = AttentionMask.of_documents(lengths, keys, causal=causal, window=window)
    assert _error(make(), inputs, dout, mask) < TOLERANCE
    assert torch.equal(make()(*inputs, mask=mask)[:, 3:8], torch.zeros(1, 5, 4, 4).double())


@pytest.mark.parametrize("make", BACKENDS)
@pytest.mark.parametrize(
    ("length", "window"),
    [(191, None), (192, None), (193, None), (193, 100), (1024, 100), (1025, None), (1025, 700)],
)
def test_blocks_of_long_documents(
    make: Callable[..., LocalAttention], length: int, window: int | None
) -> None:
    """Catches the seams between blocks, on both sides of the sizes where the cut changes."""
    inputs, dout = random_inputs(1, length, 2, 1)
    assert _error(make(), inputs, dout, AttentionMask(window=window)) < TOLERANCE


@pytest.mark.parametrize("make", BACKENDS)
@pytest.mark.parametrize("magnitude", [1e3, 1e-3])
def test_large_logits(make: Callable[..., LocalAttention], magnitude: float) -> None:
    """Catches an exponential that overflows, and a mask that is not far enough below."""
    inputs, dout = random_inputs(1, 600, 2, 1)
    with torch.no_grad():
        inputs[0] *= magnitude
    for mask in (AttentionMask(), AttentionMask(window=70), make_mask([1, 299, 300])):
        # A logit of 1e3 is known to 1e-13, and so are the weights; k's gradient has a factor q.
        assert _error(make(), inputs, dout, mask) < TOLERANCE * max(1.0, magnitude)


@pytest.mark.parametrize("make", BACKENDS)
def test_large_logits_of_one_sign_in_float32(make: Callable[..., LocalAttention]) -> None:
    """Catches a hidden key of logit +1e3 that outweighs visible ones of -1e3 despite the mask."""
    inputs, dout = random_inputs(1, 700, 1, 1, dtype=torch.float32)
    with torch.no_grad():
        inputs[0].fill_(1.0)
        inputs[1][:, :350].fill_(-500.0)  # logit -1e3
        inputs[1][:, 350:].fill_(500.0)  # +1e3, hidden from the first half
    for mask in (AttentionMask(), AttentionMask(window=9)):
        wide = [x.detach().double().requires_grad_() for x in inputs]
        expected = attend(*wide, mask)
        out = make()(*inputs, mask=mask)
        torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-5)
        assert all(g.isfinite().all() for g in torch.autograd.grad(out, inputs, dout))


@pytest.mark.parametrize("make", BACKENDS)
def test_single_tokens_and_unseeing_rows(make: Callable[..., LocalAttention]) -> None:
    """Catches a softmax of nothing: zeros and no gradient are right, not NaN."""
    inputs, dout = random_inputs(1, 6, 2, 2, keys=2)
    out, *grads = with_gradients(make()(*inputs, mask=AttentionMask()), inputs, dout)
    assert torch.equal(out[:, :4], torch.zeros(1, 4, 2, 4, dtype=torch.float64))
    assert torch.equal(grads[0][:, :4], torch.zeros(1, 4, 2, 4, dtype=torch.float64))
    assert out[:, 4:].abs().min() > 0
    (q, k, v), _ = random_inputs(1, 1, 2, 1)
    expected = v.expand(1, 1, 2, 4)
    torch.testing.assert_close(make()(q, k, v, mask=AttentionMask()), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(dtype: torch.dtype) -> None:
    """Catches a CPU kernel that rounds between the two matrix products."""
    inputs, dout = random_inputs(1, 50, 4, 2)
    inputs = [x.detach().to(dtype).requires_grad_() for x in inputs]
    wide = [x.detach().float().requires_grad_() for x in inputs]
    mask = make_mask([20, 30])
    narrow = with_gradients(CpuAttention()(*inputs, mask=mask), inputs, dout.to(dtype))
    exact = with_gradients(CpuAttention()(*wide, mask=mask), wide, dout.to(dtype).float())
    assert all(torch.equal(a, b.to(dtype)) for a, b in zip(narrow, exact, strict=True))


def test_scale() -> None:
    """Catches a scale that is dropped: queries scaled by hand must give the same."""
    for make in BACKENDS:
        (q, k, v), _ = random_inputs(1, 9, 2, 2)
        scaled = make(scale=0.25)(q * 2, k, v, mask=AttentionMask())  # d = 4: 1 / sqrt(d) = 0.5
        torch.testing.assert_close(scaled, make()(q, k, v, mask=AttentionMask()))


class _Largest(TorchDispatchMode):
    """Records the elements of the largest tensor that any operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else [result]:
            if isinstance(x, Tensor):
                self.elements = max(self.elements, x.numel())
        return result


@pytest.mark.parametrize(
    "mask", [AttentionMask(), make_mask([1000, 3096]), AttentionMask(window=64)]
)
def test_no_mask_of_all_queries_by_all_keys(mask: AttentionMask) -> None:
    """Catches S x S scores or masks, forward or backward, packed or windowed or neither."""
    length, heads, head_dim = 4096, 2, 4
    inputs, dout = random_inputs(1, length, heads, 1, head_dim, dtype=torch.float32)
    with _Largest() as largest:
        torch.autograd.grad(CpuAttention()(*inputs, mask=mask), inputs, dout)
    assert length * heads * head_dim <= largest.elements < length * length / 16


def test_many_documents_make_one_node() -> None:
    """Catches a graph of one slice a document, whose gradients are each as long as the sequence."""
    inputs, dout = random_inputs(1, 512, 2, 1)
    mask = make_mask([5, 6] * 46 + [6])
    made = []

    class Count(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
        ) -> Any:
            result = func(*args, **(kwargs or {}))
            if str(func).startswith("aten.new_zeros"):
                made.append(result.numel())
            return result

    with Count():
        torch.autograd.grad(CpuAttention()(*inputs, mask=mask), inputs, dout)
    assert len(made) == 3  # the gradients of q, k and v


# -- the choice of a backend ---------------------------------------------------------------------


def test_choice_on_cpu_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """Catches a choice that the user never learns of."""
    with caplog.at_level(logging.INFO, logger="isp.attention.local"):
        attention = make_local_attention(device=torch.device("cpu"), dtype=torch.float32)
    assert isinstance(attention, CpuAttention)
    assert [r.message for r in caplog.records] == ["attention: sdpa (auto)"]


@pytest.mark.parametrize("backend", ["flash2", "flash3", "flash4", "varlen", "cudnn"])
def test_forced_gpu_backend_on_cpu_is_refused(backend: str) -> None:
    """Catches a forced backend that is replaced in silence."""
    with pytest.raises(ValueError, match=f"attention_backend={backend} needs .* use .*sdpa"):
        make_local_attention(
            AttentionBackend(backend), device=torch.device("cpu"), dtype=torch.bfloat16
        )


def _half_installed(folder: Path, error: str) -> None:
    """A flash_attn whose compiled part does not load, as after an upgrade of torch."""
    package = folder / "flash_attn"
    package.mkdir()
    (package / "__init__.py").write_text(f"raise {error}('undefined symbol')\n")


@pytest.mark.parametrize("error", ["ImportError", "OSError"])
def test_half_installed_package_counts_as_missing(
    error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a probe that only asks whether the package can be found."""
    _half_installed(tmp_path, error)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=r"flash2 .*not there: undefined symbol\): pip install"):
        make_local_attention(
            AttentionBackend.FLASH2, device=torch.device("cuda"), dtype=torch.bfloat16
        )


_PACKAGE = """
import torch
from isp.attention import AttentionMask, CpuAttention

def flash_attn_func(q, k, v, *, softmax_scale, causal, window_size{keywords}):
    return {dense}

def flash_attn_varlen_func(
    q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal,
    window_size{keywords}
):
    return {packed}
"""
_PACKED = """CpuAttention()(
        *(x[None] for x in (q, k, v)),
        mask=AttentionMask(cu_seqlens=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k),
    )[0]"""


def _installed(folder: Path, module: str, **parts: str) -> None:
    """A flash-attn package whose functions return the expressions `parts`, computed on the CPU."""
    path = folder.joinpath(*module.split(".")).with_suffix(".py")
    path.parent.mkdir(parents=True, exist_ok=True)
    (path.parent / "__init__.py").touch()
    path.write_text(_PACKAGE.format(**{"keywords": "", "dense": "q", "packed": _PACKED, **parts}))


@pytest.mark.parametrize(
    ("packed", "fault"),
    [
        (_PACKED, ""),
        (f"{_PACKED}.detach()", "RuntimeError: element 0 of tensors does not require grad"),
        (f"{_PACKED}.no_kernel()", "AttributeError: 'Tensor' object has no attribute 'no_kernel'"),
    ],
)
def test_a_backend_is_tried_out(
    packed: str, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a package that can be imported, and then cannot go forward or backward."""
    _installed(tmp_path, "isp_test_flash", packed=packed)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(_KINDS, AttentionBackend.FLASH4, partial(FlashAttention, "isp_test_flash"))
    monkeypatch.delitem(sys.modules, "isp_test_flash", raising=False)
    found = _fault_on(AttentionBackend.FLASH4, _Place(CPU, torch.float32, 8, 2))
    assert found.startswith(fault) if fault else found == ""


@pytest.mark.parametrize("keywords", ["", ", deterministic=False"])
def test_deterministic_algorithms_reach_the_packages(
    keywords: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a run with training.deterministic whose attention adds up in any order."""
    packed = f"{_PACKED} * (2 if deterministic else 1)" if keywords else _PACKED
    _installed(tmp_path, "isp_test_flash", keywords=keywords, packed=packed)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(_KINDS, AttentionBackend.FLASH2, partial(FlashAttention, "isp_test_flash"))
    monkeypatch.delitem(sys.modules, "isp_test_flash", raising=False)
    (q, k, v), _ = random_inputs(1, 9, 2, 2)
    plain = FlashAttention("isp_test_flash")(q, k, v, mask=make_mask([4, 5]))
    torch.use_deterministic_algorithms(True)
    try:
        fault = _fault_on(AttentionBackend.FLASH2, _Place(CPU, torch.float32, 8, 2))
        assert ("unexpected keyword argument 'deterministic'" in fault) is not bool(keywords)
        if keywords:
            assert torch.equal(
                FlashAttention("isp_test_flash")(q, k, v, mask=make_mask([4, 5])), 2 * plain
            )
    finally:
        torch.use_deterministic_algorithms(False)


def test_packages_are_told_the_keys_of_each_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches the lengths of queries, or the longest of them, given for those of keys."""
    longest = "(1 if (max_seqlen_q, max_seqlen_k) == (5, 9) else 0)"
    _installed(tmp_path, "isp_test_flash_keys", packed=f"{_PACKED} * {longest}")
    monkeypatch.syspath_prepend(tmp_path)
    flash = FlashAttention("isp_test_flash_keys")
    varlen = VarlenAttention()
    varlen._attend = lambda q, k, v, cu_q, cu_k, max_q, max_k, **_: flash._packed(
        q,
        k,
        v,
        cu_seqlens_q=cu_q,
        cu_seqlens_k=cu_k,
        max_seqlen_q=max_q,
        max_seqlen_k=max_k,
        softmax_scale=None,
        causal=True,
        window_size=None,
    )
    inputs, dout = random_inputs(1, 9, 2, 2, keys=16)
    mask = AttentionMask.of_documents([4, 5], [9, 7])
    assert _error(flash, inputs, dout, mask) < TOLERANCE
    assert _error(varlen, inputs, dout, mask) < TOLERANCE


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets the milliseconds of each backend that runs on a device of some capability."""

    def set_trials(capability: tuple[int, int], **times: float) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
        fault_of = lambda backend, _: "" if backend in times else "missing"  # noqa: E731
        monkeypatch.setattr(local, "_fault_on", fault_of)
        monkeypatch.setattr(local, "_milliseconds", lambda backend, _: times[backend])

    return set_trials


HOPPER = _Place(torch.device("cuda"), torch.bfloat16, 64, 4)


@pytest.mark.parametrize(
    ("capability", "times", "expected", "fixed"),
    [
        ((9, 0), {"flash2": 3.0, "flash3": 1.0, "flash4": 2.0, "sdpa": 2.0}, "flash3", "flash3"),
        ((9, 0), {"flash2": 3.0, "flash3": 3.0, "flash4": 2.0, "sdpa": 4.0}, "flash4", "flash3"),
        ((9, 0), {"flash2": 3.0, "varlen": 3.0, "sdpa": 2.0}, "sdpa", "flash2"),
        ((9, 0), {"flash2": 2.04, "varlen": 2.0, "sdpa": 2.0}, "flash2", "flash2"),
        ((10, 0), {"flash3": 1.0, "flash4": 2.0, "sdpa": 3.0}, "flash4", "flash4"),
        ((8, 0), {"flash3": 1.0, "varlen": 2.0, "sdpa": 3.0}, "varlen", "varlen"),
        ((9, 0), {}, "sdpa", "sdpa"),
    ],
)
def test_automatic_choice(
    capability: tuple[int, int],
    times: dict[str, float],
    expected: str,
    fixed: str,
    trials: Callable[..., None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Catches the first that runs taken for the fastest, noise that decides between equals, and a
    run with deterministic kernels in which a clock decides what computes."""
    trials(capability, **times)
    with caplog.at_level(logging.INFO, logger="isp.attention.local"):
        assert _choose_backend(HOPPER, Channel.solo()) == expected
    said = caplog.records[0].message
    assert said.startswith(f"attention: {expected} (auto; milliseconds for 8,192 packed tokens")
    assert ("not flash2: missing" in said) is ("flash2" not in times)
    assert all(f"{b} {times[b]:.2f}" in said for b in times.keys() - {"flash3"})
    assert _choose_backend(HOPPER._replace(dtype=torch.float32), Channel.solo()) == "sdpa"
    torch.use_deterministic_algorithms(True)
    try:
        assert _choose_backend(HOPPER, Channel.solo()) == fixed
    finally:
        torch.use_deterministic_algorithms(False)


class _Slower(Channel):
    """All ranks, of which another finds flash3 missing and flash4 slow."""

    def __init__(self) -> None:
        super().__init__(None)

    def all_reduce(self, x: Tensor, **options: Any) -> Pending:
        assert options["op"] == "max"
        other = {AttentionBackend.FLASH3: torch.inf, AttentionBackend.FLASH4: 9.0}
        there = [other.get(backend, 0.0) for backend in AttentionBackend]
        return Pending.ready(x.maximum(torch.tensor(there, dtype=x.dtype)))


def test_the_slowest_rank_decides(
    trials: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    """Catches ranks that choose each for itself."""
    trials((9, 0), flash3=1.0, flash4=2.0, varlen=3.0, sdpa=4.0)
    with caplog.at_level(logging.INFO, logger="isp.attention.local"):
        assert _choose_backend(HOPPER, _Slower()) == "varlen"
    assert "flash4 9.00, varlen 3.00" in caplog.text
    assert "not flash3: it does not run on every rank" in caplog.text


@pytest.mark.parametrize(
    ("capability", "times", "warned"),
    [
        ((9, 0), {"flash2": 1.0}, True),
        ((9, 0), {"varlen": 1.0, "sdpa": 2.0}, True),
        ((9, 0), {"flash2": 2.0, "sdpa": 1.0}, False),
        ((9, 0), {"flash2": 1.0, "flash3": 2.0}, False),
        ((8, 0), {"flash2": 1.0}, False),
    ],
)
def test_what_flash2_loses_on_hopper_is_said(
    capability: tuple[int, int],
    times: dict[str, float],
    warned: bool,
    trials: Callable[..., None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Catches a run at half the speed of its device that never learns of it."""
    trials(capability, **times)
    _choose_backend(HOPPER, Channel.solo())
    warnings = [r.message for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == warned
    assert all("pip install flash-attn-4" in message for message in warnings)


def _varlen_2_11(
    query,
    key,
    value,
    cu_seq_q,
    cu_seq_k,
    max_q,
    max_k,
    *,
    return_aux=None,
    scale=None,
    window_size=(-1, -1),
):  # type: ignore[no-untyped-def]
    return query, scale, window_size


@pytest.mark.parametrize(
    ("signature", "scale", "window", "expected"),
    [
        (_varlen_2_11, 0.5, None, {"scale": 0.5, "window_size": (-1, 0)}),
        (_varlen_2_11, None, 4, {"scale": None, "window_size": (3, 0)}),
        (None, None, 4, {"scale": None, "window_size": (3, 0), "enable_gqa": True}),
    ],
)
def test_options_for_each_signature_of_varlen(
    signature: Callable[..., Any] | None,
    scale: float | None,
    window: int | None,
    expected: dict[str, Any],
) -> None:
    """Catches a keyword that some torch does not know; None is the signature of this torch."""
    attention = VarlenAttention(scale=scale)
    if signature is not None:
        attention._parameters = frozenset(inspect.signature(signature).parameters)
    options = attention._options(AttentionMask(window=window), grouped=True)
    if signature is None and "enable_gqa" not in attention._parameters:
        expected = {k: v for k, v in expected.items() if k != "enable_gqa"}
    assert options == expected
    full = attention._options(AttentionMask(causal=False), grouped=False)
    assert full["window_size"] == (-1, -1)


# -- on a GPU ------------------------------------------------------------------------------------

GPU_BACKENDS = [b for b in AttentionBackend if b is not AttentionBackend.AUTO]


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("backend", GPU_BACKENDS)
@pytest.mark.parametrize("heads", [(4, 4), (8, 2)])
@pytest.mark.parametrize(
    ("documents", "keys"),
    [
        (None, None),
        ([300, 1, 211, 512], None),
        (None, [1500]),
        ([300, 1, 211, 512], [300, 90, 800, 600]),
    ],
)
@pytest.mark.parametrize(("causal", "window"), [(True, None), (False, None), (True, 100)])
def test_gpu_backends(
    backend: AttentionBackend,
    heads: tuple[int, int],
    documents: list[int] | None,
    keys: list[int] | None,
    causal: bool,
    window: int | None,
) -> None:
    """Catches a kernel given the wrong alignment, window, scale or documents."""
    device = torch.device("cuda")
    try:
        attention = make_local_attention(backend, device=device, dtype=torch.bfloat16)
    except ValueError as error:
        pytest.skip(str(error))
    inputs, dout = random_inputs(1, 1024, *heads, 64, keys=keys and sum(keys))
    mask = make_mask(documents, causal, window)
    if documents is not None:
        mask = AttentionMask.of_documents(documents, keys, causal=causal, window=window)
    expected = with_gradients(attend(*inputs, mask), inputs, dout)
    narrow = [x.detach().to(device, torch.bfloat16).requires_grad_() for x in inputs]
    out = attention(*narrow, mask=mask)
    result = with_gradients(out, narrow, dout.to(device, torch.bfloat16))
    for a, b in zip(result, expected, strict=True):
        # bfloat16 keeps 8 bits; inputs, weights and outputs are each rounded once
        assert float((a.double().cpu() - b).norm() / b.norm()) < 0.02


@pytest.mark.gpu
@needs_gpu
def test_gpu_choice() -> None:
    """Catches a backend that is timed on nothing, or by a clock that the device does not see."""
    place = _Place(torch.device("cuda"), torch.bfloat16, 128, 4)
    there = [b for b in local._fastest_first(*place[:2]) if not _fault_on(b, place)]
    times = {backend: local._milliseconds(backend, place) for backend in there}
    assert all(0.01 < time < 1000 for time in times.values())
    assert AttentionBackend.SDPA in times
    assert _choose_backend(place, Channel.solo()) in times
