"""Python's garbage collection, at given steps."""

from __future__ import annotations

import gc
import weakref

from isp.run.garbage import collected_every


class Cycle:
    """Garbage as soon as nobody has it."""

    def __init__(self) -> None:
        self.itself = self


def test_garbage_goes_at_its_steps_alone() -> None:
    """Catches a collection at any other step, and one that stays off after a run."""
    with collected_every(2) as collect:
        assert not gc.isenabled()
        cycle = weakref.ref(Cycle())
        collect(1)
        assert cycle() is not None
        collect(2)
        assert cycle() is None
    assert gc.isenabled()


def test_python_may_collect_as_it_likes() -> None:
    with collected_every(0) as collect:
        assert gc.isenabled()
        collect(0)
