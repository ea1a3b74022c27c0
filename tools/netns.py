"""A slow network on one machine: network namespaces joined by links of a chosen speed.

    with Wires(2) as wires:              # root only
        ...                              # in the process of rank r:
        wires.enter(r)                   # from here on it has one interface, and no other network
        wires.limit(r, 125_000_000)      # bytes/s that it sends, by a token bucket (`tc ... tbf`)

Each rank gets a namespace with one end of a veth pair. The other ends are ports of a bridge, which
has a namespace of its own: the network of the machine is not changed, and nothing leaves it.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from types import TracebackType

__all__ = ["INTERFACE", "Wires", "why_not"]

INTERFACE = "wire0"
"""The rank's only interface, for GLOO_SOCKET_IFNAME."""

_CLONE_NEWNET = 0x40000000
_BURST_BYTES = 1 << 20
"""Bytes that pass the token bucket at once after a pause."""
_LATENCY = "50ms"
"""The longest time that a packet waits in the token bucket's queue before it is dropped."""


def why_not() -> str | None:
    """Return why this process cannot make network namespaces; None if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not found: install iproute2"
    return None


class Wires:
    """A context manager of `num_ranks` network namespaces on one bridge.

    Raises RuntimeError if this process cannot make them.
    """

    def __init__(self, num_ranks: int) -> None:
        if reason := why_not():
            raise RuntimeError(reason)
        self._hub = f"isp-{os.getpid()}-hub"
        self._ranks = [f"isp-{os.getpid()}-{rank}" for rank in range(num_ranks)]
        self._janitor: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Wires:
        names = [self._hub, *self._ranks]
        delete = "; ".join(f"ip netns del {name} 2>/dev/null" for name in names)
        # A killed process could not delete its namespaces. So a shell, in a session of its own,
        # reads a pipe of which only this process has the writing end; when the pipe closes, for
        # whatever reason, the shell deletes them.
        self._janitor = subprocess.Popen(
            ["sh", "-c", f"trap '' HUP INT TERM; cat >/dev/null; {delete}"],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        for name in names:
            _run("ip", "netns", "add", name)
            _run("ip", "-n", name, "link", "set", "lo", "up")
        _run("ip", "-n", self._hub, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", self._hub, "link", "set", "bridge", "up")
        for rank, name in enumerate(self._ranks):
            port = ("name", f"port{rank}", "netns", self._hub)
            ends = ("link", "add", INTERFACE, "netns", name, "type", "veth", "peer", *port)
            _run("ip", *ends)
            address = f"10.77.0.{rank + 1}/24"
            _run("ip", "-n", self._hub, "link", "set", f"port{rank}", "master", "bridge", "up")
            _run("ip", "-n", name, "addr", "add", address, "dev", INTERFACE)
            _run("ip", "-n", name, "link", "set", INTERFACE, "up")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._janitor is not None
        assert self._janitor.stdin is not None
        self._janitor.stdin.close()
        self._janitor.wait()

    def enter(self, rank: int) -> None:
        """Move the calling process, which must have one thread, into the namespace of `rank`."""
        assert self._janitor is not None
        assert self._janitor.stdin is not None
        # A forked rank has a copy of the pipe's writing end. Close the copy, or the shell would
        # also wait for this rank to end.
        self._janitor.stdin.close()
        libc = ctypes.CDLL(None, use_errno=True)
        with open(f"/run/netns/{self._ranks[rank]}") as namespace:
            if libc.setns(namespace.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns failed")
        os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE

    def limit(self, rank: int, bytes_per_second: float) -> None:
        """Limit the speed at which `rank` sends."""
        bucket = ("rate", f"{bytes_per_second * 8:.0f}bit", "burst", str(_BURST_BYTES))
        name = self._ranks[rank]
        place = ("-n", name, "qdisc", "replace", "dev", INTERFACE, "root")
        _run("tc", *place, "tbf", *bucket, "latency", _LATENCY)

    def unlimit(self, rank: int) -> None:
        """Remove the limit of `rank`: it sends as fast as the machine copies."""
        name = self._ranks[rank]
        _run("tc", "-n", name, "qdisc", "replace", "dev", INTERFACE, "root", "pfifo")


def _run(*command: str) -> None:
    """Run a command; raise RuntimeError with its errors if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
