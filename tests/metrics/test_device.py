"""Peak FLOPs by device name, memory, and the log line that explains both."""

from mmap import mmap

import pytest
import torch

from isp.metrics import MemoryMeter, describe_mfu, device_name, peak_memory_gib, peak_tflops


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H200", 989.4),
        ("NVIDIA H20", 148.0),
        ("NVIDIA GB200", 2500.0),
        ("NVIDIA GH200 480GB", 989.4),
        ("NVIDIA RTX 6000 Ada Generation", 364.2),
        ("AMD Instinct MI250X / MI250", 191.5),
        ("NVIDIA A10G", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("Some CPU 2000", None),
    ],
)
def test_the_peak_follows_the_device_name(name: str, peak: float | None) -> None:
    """Catches a name that is a prefix of another (H20, H200), and a guess for a MIG slice."""
    assert peak_tflops(name) == peak


def test_a_configured_peak_takes_precedence() -> None:
    """Catches `metrics.peak_tflops` ignored on a known or an unknown device."""
    assert peak_tflops("NVIDIA H200", 500.0) == 500.0
    assert peak_tflops("abacus", 0.5) == 0.5


def test_memory_is_a_peak_in_gib() -> None:
    """Catches a wrong unit, and current memory reported as the peak."""
    cpu = torch.device("cpu")
    before = peak_memory_gib(cpu)
    assert 0.01 < before < 64
    filled = b"x" * int((before + 0.1) * 2**30)
    del filled
    assert before + 0.1 <= peak_memory_gib(cpu) < 2 * before + 1  # in addition to the earlier peak


def test_the_mfu_is_explained_in_the_log() -> None:
    """Catches an MFU whose formula or peak the reader has to guess."""
    known = describe_mfu("NVIDIA H200", 989.4)
    assert known == "tflops / 989.4, the peak of NVIDIA H200 in dense bfloat16"
    assert "metrics.peak_tflops" in describe_mfu("abacus", None)


def test_cpu_has_a_name() -> None:
    """Catches an empty device in the record of a run."""
    assert device_name(torch.device("cpu")).strip()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_gpu_memory_is_that_of_tensors() -> None:
    """Catches the memory of the process reported as that of tensors."""
    device = torch.device("cuda", 0)
    torch.cuda.init()  # without it there is nothing to reset
    torch.cuda.reset_peak_memory_stats(device)
    before = peak_memory_gib(device)
    torch.zeros(2**28, device=device, dtype=torch.uint8)
    assert peak_memory_gib(device) == pytest.approx(before + 0.25, abs=0.01)
    assert device_name(device)


def test_memory_in_use_rises_and_falls():
    """Catches a meter that reads a peak, another process, or pages as bytes."""
    meter = MemoryMeter(torch.device("cpu"))
    before = meter.gib()
    taken = mmap(-1, 2**27)  # 128 MiB from the system; malloc might reuse freed memory
    torch.frombuffer(taken, dtype=torch.uint8).fill_(1)
    during = meter.gib()
    taken.close()
    after = meter.gib()
    meter.close()
    assert before + 0.1 < during < before + 0.15
    assert after < before + 0.05
    assert during <= peak_memory_gib(torch.device("cpu")) + 0.01
