"""The choice of an implementation for attention with sinks, caps or biases, and its log lines."""

from __future__ import annotations

import logging
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from isp.core.attention import kinds
from isp.core.attention.backend import AttentionBackend
from isp.core.attention.backends.cpu import CpuAttention
from isp.core.attention.backends.explicit import ExplicitAttention
from isp.core.attention.backends.flash import FlashAttention
from isp.core.attention.backends.lse import FlashKernel
from isp.core.attention.backends.sinks import SinkAttention
from isp.core.attention.kinds import AttentionKind, make_attention
from isp.core.attention.mask import AttentionMask
from isp.core.comm import Channel, Pending
from tests.core.attention.reference import attend, random_inputs

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
PLAIN = AttentionKind(0.5, None, False, False, False, 64, 4)
SINKS = PLAIN._replace(sinks=True)
OTHERS = {
    "sinks and chosen keys": SINKS._replace(chosen=True),
    "a soft cap and sinks": SINKS._replace(softcap=3.0),
    "chosen keys": PLAIN._replace(chosen=True),
    "a bias by distance": PLAIN._replace(relative=True),
}


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Return a dict of the faults, by class, on a device that is not here; other classes run."""
    found: dict[str, str] = {}
    monkeypatch.setattr(
        kinds, "fault_of", lambda make, *_, **__: found.get(type(make()).__name__, "")
    )
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: None)  # of sinks, on that device
    return found


def _made(kind: AttentionKind, device: torch.device = CUDA, **options: Any) -> Any:
    options = {"backend": AttentionBackend.AUTO, "everyone": Channel.solo(), **options}
    return make_attention(kind, device=device, dtype=torch.bfloat16, **options)


def _said(caplog: pytest.LogCaptureFixture) -> tuple[str, str]:
    (record,) = caplog.records
    caplog.clear()
    return record.levelname, record.message


def test_plain_attention_keeps_its_backend() -> None:
    """Catches attention without sinks, caps or biases that is moved to another implementation."""
    assert isinstance(_made(PLAIN, CPU), CpuAttention)


def test_sinks_use_a_kernel_that_returns_the_log_sum_exp(
    faults: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    """Catches a lost scale, a configured backend that is silently replaced, and a loop that is not
    logged.
    """
    caplog.set_level(logging.INFO, logger="isp.core.attention.kinds")
    assert isinstance(_made(SINKS, CPU).kernel, CpuAttention)
    assert _said(caplog) == ("INFO", "attention: layers with sinks use sdpa")
    for backend, level in (("auto", "INFO"), ("varlen", "INFO"), ("flash3", "WARNING")):
        made = _made(SINKS, backend=AttentionBackend(backend))
        assert isinstance(made, SinkAttention)
        assert isinstance(made.kernel, FlashKernel)
        assert made.kernel.scale == 0.5
        found, said = _said(caplog)
        assert found == level
        assert said.startswith("attention: layers with sinks use varlen")
        assert ("attention_backend=flash3 cannot compute it" in said) is (backend == "flash3")
    faults["SinkAttention"] = "RuntimeError: no kernel"
    assert isinstance(_made(SINKS), ExplicitAttention)
    level, said = _said(caplog)
    assert level == "WARNING"
    assert "layers with sinks use a loop over blocks" in said
    assert said.endswith("; not varlen: RuntimeError: no kernel")


@pytest.mark.parametrize("names", OTHERS)
@pytest.mark.parametrize(("device", "level"), [(CPU, "INFO"), (CUDA, "WARNING")])
def test_attention_by_a_loop_is_logged(
    names: str,
    device: torch.device,
    level: str,
    faults: dict[str, str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Catches a loop in float32 on CUDA without a warning."""
    caplog.set_level(logging.INFO, logger="isp.core.attention.kinds")
    made = _made(OTHERS[names], device)
    assert isinstance(made, ExplicitAttention)
    assert (made.scale, made.softcap) == (0.5, OTHERS[names].softcap)
    found, said = _said(caplog)
    assert found == level
    assert said.startswith(f"attention: layers with {names} use a loop over blocks, because no")
    assert "float32, up to 67,108,864 logits" in said


@pytest.mark.parametrize(
    ("backend", "there", "expected", "level"),
    [
        ("auto", {"flash2", "flash3", "flex_attention"}, "flash3", "INFO"),
        ("auto", {"flash2", "flex_attention"}, "flash2", "INFO"),
        ("auto", {"flex_attention"}, "flex_attention", "INFO"),
        ("auto", set(), "a loop over blocks", "WARNING"),
        ("flash2", {"flash2", "flash3", "flex_attention"}, "flash2", "INFO"),
        ("flash2", {"flash3", "flex_attention"}, "flex_attention", "WARNING"),
        ("cudnn", {"flash2", "flex_attention"}, "flex_attention", "WARNING"),
    ],
)
def test_soft_caps_use_packages_or_flex_attention(
    backend: str,
    there: set[str],
    expected: str,
    level: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Catches a lost cap or scale, a configured package that is not used, and a configured backend
    that is silently replaced.
    """
    caplog.set_level(logging.INFO, logger="isp.core.attention.kinds")

    def package(name: str) -> Any:
        return partial(SimpleNamespace, name=name)

    packages = {b: package(b) for b in kinds.FLASH_PACKAGES}
    monkeypatch.setattr(kinds, "FLASH_PACKAGES", packages)
    monkeypatch.setattr(kinds, "FlexAttention", package("flex_attention"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    fault_of = lambda make, *_: "" if make().name in there else "missing"  # noqa: E731
    monkeypatch.setattr(kinds, "fault_of", fault_of)
    made = _made(PLAIN._replace(softcap=3.0), backend=AttentionBackend(backend))
    assert (made.scale, made.softcap) == (0.5, 3.0)
    assert getattr(made, "name", "a loop over blocks") == expected
    found, said = _said(caplog)
    assert found == level
    assert said.startswith(f"attention: layers with a soft cap use {expected}")
    replaced = f"attention_backend={backend} cannot compute it" in said
    assert replaced is (backend not in ("auto", expected))


def test_packages_for_other_devices_are_not_tried(
    faults: dict[str, str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Catches a kernel for Hopper that is launched on another device."""
    caplog.set_level(logging.INFO, logger="isp.core.attention.kinds")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    monkeypatch.setattr("isp.core.attention.backends.flash._imported", lambda *_: None)
    made = _made(PLAIN._replace(softcap=3.0))
    assert isinstance(made, FlashAttention)
    assert made._no_limit == -1
    assert "use flash2; not flash3: not for this device; not flash4: not" in caplog.text


class _Lacking(Channel):
    """All ranks, one of which has no backend."""

    def __init__(self) -> None:
        super().__init__(None)

    def all_reduce(self, x: torch.Tensor, **options: Any) -> Pending:
        assert options["op"] == "max"
        return Pending.ready(torch.ones_like(x))


def test_all_ranks_use_the_same_implementation(
    faults: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    """Catches ranks that each choose an implementation of their own."""
    assert isinstance(_made(SINKS, everyone=_Lacking()), ExplicitAttention)
    assert "not varlen: it does not run on every rank" in caplog.text


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [SINKS, PLAIN._replace(softcap=3.0)])
def test_kernels_are_chosen_on_a_gpu(kind: AttentionKind) -> None:
    """Catches a kernel that is never used because its trial fails for an unrelated reason."""
    made = _made(kind)
    assert not isinstance(made, ExplicitAttention)
    (q, k, v), _ = random_inputs(1, 300, 8, 2, 64)
    sinks = {"sinks": torch.linspace(-1, 1, 8).double()} if kind.sinks else {}
    mask = AttentionMask.of_documents([100, 200])
    expected = attend(q, k, v, mask, scale=0.5, softcap=kind.softcap, **sinks)
    narrow = (x.detach().to("cuda", torch.bfloat16) for x in (q, k, v))
    found = made(*narrow, mask=mask, **{name: x.to("cuda") for name, x in sinks.items()})
    error = float((found.double().cpu() - expected).norm() / expected.norm())
    assert error < 0.02  # bfloat16 keeps 8 bits
