"""The choice of a backend for local attention, and the arguments that its package gets."""

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

from isp.core.attention import local
from isp.core.attention.backend import AttentionBackend
from isp.core.attention.backends.cpu import CpuAttention
from isp.core.attention.backends.flash import FlashAttention, VarlenAttention
from isp.core.attention.backends.sdpa import SdpaAttention
from isp.core.attention.local import (
    _KINDS,
    AttentionByRows,
    LocalAttention,
    Place,
    _ByRows,
    _choose_backend,
    _fault_on,
    fault_of,
    make_local_attention,
)
from isp.core.attention.mask import AttentionMask
from isp.core.comm import Channel, Pending
from tests.core.attention.reference import largest_error, make_mask, random_inputs

CPU = torch.device("cpu")
TOLERANCE = 1e-12


def test_the_choice_on_cpu_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """Catches a choice that is not logged."""
    with caplog.at_level(logging.INFO, logger="isp.core.attention.local"):
        attention = make_local_attention(device=torch.device("cpu"), dtype=torch.float32)
    assert isinstance(attention, CpuAttention)
    assert [r.message for r in caplog.records] == ["attention: sdpa (auto)"]


@pytest.mark.parametrize("backend", ["flash2", "flash3", "flash4", "varlen", "cudnn"])
def test_a_configured_gpu_backend_is_refused_on_cpu(backend: str) -> None:
    """Catches a configured backend that is silently replaced."""
    with pytest.raises(ValueError, match=f"attention_backend={backend} needs .* use .*sdpa"):
        make_local_attention(
            AttentionBackend(backend), device=torch.device("cpu"), dtype=torch.bfloat16
        )


def _half_installed(folder: Path, error: str) -> None:
    """Install a flash_attn whose compiled part does not load, as after an upgrade of torch."""
    package = folder / "flash_attn"
    package.mkdir()
    (package / "__init__.py").write_text(f"raise {error}('undefined symbol')\n")


@pytest.mark.parametrize("error", ["ImportError", "OSError"])
def test_a_package_that_does_not_load_counts_as_missing(
    error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a check that only looks for the package and does not import it."""
    _half_installed(tmp_path, error)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=r"flash2 .*imported: undefined symbol\): pip install"):
        make_local_attention(
            AttentionBackend.FLASH2, device=torch.device("cuda"), dtype=torch.bfloat16
        )


_PACKAGE = """
import torch
from isp.core.attention.backends.cpu import CpuAttention
from isp.core.attention.mask import AttentionMask

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
    """Install a flash-attn whose functions evaluate the expressions `parts` on the CPU."""
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
def test_a_backend_is_tried_forward_and_backward(
    packed: str, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a package that can be imported but fails in its forward or backward."""
    _installed(tmp_path, "isp_test_flash", packed=packed)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(_KINDS, AttentionBackend.FLASH4, partial(FlashAttention, "isp_test_flash"))
    monkeypatch.delitem(sys.modules, "isp_test_flash", raising=False)
    found = _fault_on(AttentionBackend.FLASH4, Place(CPU, torch.float32, 8, 2))
    assert found.startswith(fault) if fault else found == ""


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_a_backend_is_tried_in_inference_mode(mode: Callable[[], Any]) -> None:
    """Catches backends that all count as missing because no backward runs in inference mode."""

    def attend(*qkv: Tensor, mask: AttentionMask) -> Tensor:
        assert not mask.cu_seqlens_on(CPU)[0].is_inference()  # kernels save it for backward
        return CpuAttention()(*qkv, mask=mask)

    with mode():
        assert fault_of(lambda: attend, Place(CPU, torch.float32, 8, 2)) == ""


@pytest.mark.parametrize("keywords", ["", ", deterministic=False"])
def test_deterministic_algorithms_reach_the_packages(
    keywords: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a run with training.deterministic whose attention sums in any order."""
    packed = f"{_PACKED} * (2 if deterministic else 1)" if keywords else _PACKED
    _installed(tmp_path, "isp_test_flash", keywords=keywords, packed=packed)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(_KINDS, AttentionBackend.FLASH2, partial(FlashAttention, "isp_test_flash"))
    monkeypatch.delitem(sys.modules, "isp_test_flash", raising=False)
    (q, k, v), _ = random_inputs(1, 9, 2, 2)
    plain = FlashAttention("isp_test_flash")(q, k, v, mask=make_mask([4, 5]))
    torch.use_deterministic_algorithms(True)
    try:
        fault = _fault_on(AttentionBackend.FLASH2, Place(CPU, torch.float32, 8, 2))
        assert ("unexpected keyword argument 'deterministic'" in fault) is not bool(keywords)
        if keywords:
            assert torch.equal(
                FlashAttention("isp_test_flash")(q, k, v, mask=make_mask([4, 5])), 2 * plain
            )
    finally:
        torch.use_deterministic_algorithms(False)


def _flash2(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
    softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
    deterministic=False, return_attn_probs=False, block_table=None,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """Install a stand-in for flash_attn 2.8."""
    return (q, causal, window_size, softcap, deterministic)


def _flash3(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None,
    seqused_k=None, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None,
    v_descale=None, window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1,
    pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """Install a stand-in for hopper/flash_attn_interface.py, deterministic only with
    num_splits=1.
    """
    return (q, causal, window_size, softcap, deterministic)


def _flash4(
    q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None,
    max_seqlen_q=None, max_seqlen_k=None, page_table=None, softmax_scale=None, causal=False,
    window_size=(None, None), learnable_sink=None, softcap=0.0, num_splits=1, pack_gqa=None,
    deterministic=False, score_mod=None, aux_tensors=None, return_lse=False,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """Install a stand-in for flash_attn/cute/interface.py."""
    return (q, causal, window_size, softcap, deterministic)


@pytest.mark.parametrize("function", [_flash2, _flash3, _flash4])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("deterministic", [False, True])
def test_calls_match_the_signatures_of_the_packages(
    function: Callable[..., Any], packed: bool, deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a keyword that a package lacks, and one that has another meaning there."""
    calls: list[tuple[Any, ...]] = []

    def attend(*args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        if not packed:  # the dense function of each has the same keywords, but for these
            kwargs |= dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"))
            kwargs |= dict.fromkeys(("max_seqlen_q", "max_seqlen_k"))
        q, *rest = function(*args, **kwargs)
        calls.append(tuple(rest))
        return q, None

    package = type(sys)("isp_test_signatures")
    package.flash_attn_func = package.flash_attn_varlen_func = attend  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, package.__name__, package)
    no_limit = inspect.signature(function).parameters["window_size"].default[0]
    flash = FlashAttention(package.__name__, softcap=3.0, no_limit=no_limit)
    (q, k, v), _ = random_inputs(1, 9, 2, 2)
    torch.use_deterministic_algorithms(deterministic)
    try:
        for window in (None, 4):
            flash(q, k, v, mask=make_mask([4, 5] if packed else None, True, window))
    finally:
        torch.use_deterministic_algorithms(False)
    assert calls == [
        (True, (no_limit, no_limit), 3.0, deterministic),
        (True, (3, 0), 3.0, deterministic),
    ]


def test_packages_receive_the_key_lengths_of_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches the lengths of queries, or the longest of them, passed as those of keys."""
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
    assert largest_error(flash, inputs, dout, mask) < TOLERANCE
    assert largest_error(varlen, inputs, dout, mask) < TOLERANCE


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that sets the milliseconds of each backend on a device of some capability.

    A backend has one number, or one for equal documents and one for packed rows.
    """

    def set_trials(capability: tuple[int, int], **times: float | tuple[float, float]) -> None:
        both = {name: x if isinstance(x, tuple) else (x, x) for name, x in times.items()}
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
        fault_of = lambda backend, _: "" if backend in times else "missing"  # noqa: E731
        monkeypatch.setattr(local, "_fault_on", fault_of)
        milliseconds = lambda backend, _: _ByRows(*both[backend])  # noqa: E731
        monkeypatch.setattr(local, "_milliseconds", milliseconds)

    return set_trials


HOPPER = Place(torch.device("cuda"), torch.bfloat16, 64, 4)


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
def test_the_fastest_backend_is_chosen(
    capability: tuple[int, int],
    times: dict[str, float],
    expected: str,
    fixed: str,
    trials: Callable[..., None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Catches the first backend that runs taken for the fastest, noise that decides between equal
    times, and a deterministic run in which timing decides which kernel computes.
    """
    trials(capability, **times)
    with caplog.at_level(logging.INFO, logger="isp.core.attention.local"):
        assert _choose_backend(HOPPER, Channel.solo()) == (expected, expected)
    said = caplog.records[0].message
    assert said.startswith(f"attention: {expected} (auto; milliseconds for 8,192 tokens")
    assert ("not flash2: missing" in said) is ("flash2" not in times)
    assert all(f"{b} {times[b]:.2f} / {times[b]:.2f}" in said for b in times.keys() - {"flash3"})
    assert _choose_backend(HOPPER._replace(dtype=torch.float32), Channel.solo()) == ("sdpa", "sdpa")
    torch.use_deterministic_algorithms(True)
    try:
        assert _choose_backend(HOPPER, Channel.solo()) == (fixed, fixed)
    finally:
        torch.use_deterministic_algorithms(False)


def test_packed_rows_and_single_documents_choose_separately(
    trials: Callable[..., None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Catches cuDNN that is slower on packed rows and is then not used for single documents
    either.
    """
    trials((9, 0), varlen=(4.0, 4.2), sdpa=(2.0, 90.0))
    with caplog.at_level(logging.INFO, logger="isp.core.attention.local"):
        found = make_local_attention(device=HOPPER.device, dtype=HOPPER.dtype, scale=0.5)
    assert isinstance(found, AttentionByRows)
    assert isinstance(found._packed, VarlenAttention)
    assert isinstance(found._equal, SdpaAttention)
    assert found.scale == found._packed.scale == found._equal.scale == 0.5
    (record,) = caplog.records
    assert "sdpa for rows of one document or equal ones, varlen for others" in record.message
    assert "varlen 4.00 / 4.20, sdpa 2.00 / 90.00" in record.message
    forced = make_local_attention(AttentionBackend.SDPA, device=HOPPER.device, dtype=HOPPER.dtype)
    assert isinstance(forced, SdpaAttention)
    # the difference is noise: one backend for both
    trials((9, 0), varlen=(4.0, 4.2), sdpa=(4.1, 90.0))
    alone = make_local_attention(device=HOPPER.device, dtype=HOPPER.dtype)
    assert isinstance(alone, VarlenAttention)


def _noting(kinds: list[str], kind: str) -> LocalAttention:
    def attend(q: Tensor, k: Tensor, v: Tensor, *, mask: AttentionMask) -> Tensor:
        kinds.append(f"{kind} {len(q)} x {q.shape[1]}")
        return CpuAttention()(q, k, v, mask=mask)

    return attend


@pytest.mark.parametrize(
    ("mask", "keys", "expected"),
    [
        (AttentionMask(), 24, "equal 2 x 24"),
        (AttentionMask(causal=False), 24, "equal 2 x 24"),
        (make_mask([24], batch=2), 24, "equal 2 x 24"),
        (make_mask([8, 8, 8], batch=2), 24, "equal 6 x 8"),
        (make_mask([8, 8, 8], causal=False, batch=2), 24, "equal 6 x 8"),
        (make_mask([8, 16], batch=2), 24, "packed 2 x 24"),
        (make_mask([24, 0], batch=2), 24, "packed 2 x 24"),
        (AttentionMask(window=5), 24, "packed 2 x 24"),
        (make_mask([12, 12], window=5, batch=2), 24, "packed 2 x 24"),
        (AttentionMask(), 30, "packed 2 x 24"),
        (AttentionMask.of_documents([12, 12], [15, 15]), 30, "packed 1 x 24"),
    ],
)
def test_rows_use_the_backend_chosen_for_their_kind(
    mask: AttentionMask, keys: int, expected: str
) -> None:
    """Catches documents that are joined or split on the way to a backend, and a lost mask."""
    kinds: list[str] = []
    attention = AttentionByRows(_noting(kinds, "equal"), _noting(kinds, "packed"), scale=None)
    inputs, dout = random_inputs(2 if mask.cu_seqlens_k is None else 1, 24, 4, 2, keys=keys)
    assert largest_error(attention, inputs, dout, mask) < TOLERANCE
    assert kinds == [expected]


def test_documents_of_other_rows_are_refused() -> None:
    """Catches rows that are split by the documents of another micro-batch."""
    attention = AttentionByRows(CpuAttention(), CpuAttention(), scale=None)
    (q, k, v), _ = random_inputs(1, 24, 2, 2)
    with pytest.raises(ValueError, match="must rise from 0 to the 24 tokens"):
        attention(q, k, v, mask=make_mask([6, 6]))


def test_a_backend_that_fails_at_the_length_of_a_run_is_not_chosen(
    trials: Callable[..., None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Catches an error that ends one rank while all others wait for it."""
    trials((8, 0), flash2=1.0, sdpa=2.0)

    def milliseconds(backend: AttentionBackend, place: Place) -> _ByRows[float]:
        if backend is AttentionBackend.FLASH2:
            raise RuntimeError("no kernel\nfor this length")
        return _ByRows(2.0, 2.0)

    monkeypatch.setattr(local, "_milliseconds", milliseconds)
    with caplog.at_level(logging.INFO, logger="isp.core.attention.local"):
        assert _choose_backend(HOPPER, Channel.solo()) == ("sdpa", "sdpa")
    assert "not flash2: RuntimeError: no kernel (pip install" in caplog.records[0].message


class _Slower(Channel):
    """All ranks, one of which lacks flash3 and runs flash4 slowly."""

    def __init__(self) -> None:
        super().__init__(None)

    def all_reduce(self, x: Tensor, **options: Any) -> Pending:
        assert options["op"] == "max"
        other = {AttentionBackend.FLASH3: torch.inf, AttentionBackend.FLASH4: 9.0}
        there = [other.get(backend, 0.0) for backend in AttentionBackend]
        return Pending.ready(x.maximum(torch.tensor(there, dtype=x.dtype).unsqueeze(1)))


def test_the_slowest_rank_decides(
    trials: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    """Catches ranks that each choose a backend of their own."""
    trials((9, 0), flash3=1.0, flash4=2.0, varlen=3.0, sdpa=4.0)
    with caplog.at_level(logging.INFO, logger="isp.core.attention.local"):
        assert _choose_backend(HOPPER, _Slower()) == ("varlen", "varlen")
    assert "flash4 9.00 / 9.00, varlen 3.00 / 3.00" in caplog.text
    assert "not flash3: it does not run on every rank" in caplog.text


@pytest.mark.parametrize("knows", [False, True])
def test_options_follow_the_signature_of_varlen_attention(knows: bool) -> None:
    """Catches a keyword that some version of torch lacks: `enable_gqa` came with 2.12."""
    gqa = {"enable_gqa": True} if knows else {}
    attention = VarlenAttention(scale=0.5)
    attention._parameters = frozenset(gqa)
    options = attention._options(AttentionMask(window=4), grouped=True)
    assert options == {"scale": 0.5, "window_size": (3, 0), **gqa}
    for causal, window in ((True, (-1, 0)), (False, (-1, -1))):
        found = attention._options(AttentionMask(causal=causal), grouped=False)
        assert found == {"scale": 0.5, "window_size": window}


def test_varlen_attention_uses_flash_attention() -> None:
    """Catches the cuDNN kernel, which torch 2.15 prefers and deterministic runs refuse."""
    attention, allowed = VarlenAttention(), list[tuple[bool, bool]]()

    def attend(q: Tensor, *_: Any, **__: Any) -> Tensor:
        kernels = torch.backends.cuda
        allowed.append((kernels.flash_sdp_enabled(), kernels.cudnn_sdp_enabled()))
        return q

    attention._attend = attend
    q = torch.ones(1, 4, 2, 8)
    attention(q, q, q, mask=AttentionMask())
    assert allowed == [(True, False)]


@pytest.mark.gpu
def test_a_backend_is_chosen_on_a_gpu() -> None:
    """Catches a backend that is timed on empty work, or by a clock that does not see the device."""
    place = Place(torch.device("cuda"), torch.bfloat16, 128, 4)
    there = [b for b in local.fastest_first(*place[:2]) if not _fault_on(b, place)]
    times = {backend: local._milliseconds(backend, place) for backend in there}
    assert all(0.01 < time < 1000 for both in times.values() for time in both)
    assert AttentionBackend.SDPA in times
    assert {*_choose_backend(place, Channel.solo())} <= times.keys()
