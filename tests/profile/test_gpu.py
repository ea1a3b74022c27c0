"""Times of the recorder on a GPU are those of the device, ahead of which the host runs."""

from __future__ import annotations

import pytest
import torch

from isp.core.comm import Channel, streams
from isp.core.comm.tag import Purpose, Tag
from isp.core.mesh.phase import Phase
from isp.profile.recorder import Recorder

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() == 0, reason="no CUDA device"),
]

LONG_CYCLES = 200_000_000
"""About a tenth of a second at 2 GHz."""


class _Copy:
    """A stand-in for NCCL's work handle, for which streams wait on the device."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(LONG_CYCLES)
            self.done = torch.cuda.Event()
            self.done.record()

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self.done)


def test_times_are_those_of_the_device():
    """Catches a wait measured as short because the host did not block, and marks of the host."""
    device = torch.device("cuda")
    channel, stream = Channel.solo("weight"), torch.cuda.Stream()
    recorder = Recorder(channel.log, device, {})
    torch.cuda._sleep(1)  # loads the kernel
    torch.cuda.synchronize()
    with recorder:
        recorder.begin_step()
        channel.log.enter(Phase.FORWARD, "a")
        torch.cuda._sleep(LONG_CYCLES)
        channel.log.enter(Phase.FORWARD, "b")
        tag = Tag(Purpose.WEIGHT, "b", "weight")
        transfer = channel.log.start("all_gather", "weight", tag, 1)
        wait = channel.log.timed_on_device(transfer, lambda: _Copy(stream), streams.new(device))
        torch.cuda._sleep(LONG_CYCLES // 4)
        wait()
        recorder.begin_step()
    record = recorder.record()
    first, second = record.marks
    begin, end = record.begins
    length = second.at - first.at
    assert length > 0.01
    assert begin <= first.at < second.at <= transfer.launched <= transfer.wait_began < end
    assert transfer.duration == pytest.approx(length, rel=0.2)
    assert transfer.exposed == pytest.approx(0.75 * length, rel=0.25)
    assert transfer.wait_began + transfer.exposed == pytest.approx(transfer.ended, abs=0.1 * length)
    assert end >= transfer.ended
