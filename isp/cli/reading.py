"""What the commands that read a trained model share: their options, its ranks, its engine."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from isp.cli.output import say

if TYPE_CHECKING:
    from isp.evaluation.engine import Engine
    from isp.evaluation.layout import InferenceLayout
    from isp.evaluation.source import Source

__all__ = ["Reading"]


class Reading(NamedTuple):
    """A trained model, and how it is read."""

    source: Source
    layout: InferenceLayout
    device: str

    @classmethod
    def of(cls, args: argparse.Namespace) -> Reading:
        """As the command line says; raises ValueError, in a line, for what cannot be."""
        from isp.cli.launch import world_size
        from isp.evaluation.layout import choose_layout
        from isp.evaluation.source import open_source
        from isp.settings.counts import counted
        from isp.train.run import check_device

        ranks = world_size(args.nproc)
        source = open_source(Path(args.path), dtype=args.dtype, tokenizer=args.tokenizer)
        layout = choose_layout(source.model, ranks, args.overrides)
        if layout.ranks < ranks and args.nproc is None:
            raise ValueError(f"torchrun has set {counted(ranks, 'rank')}; {layout.note}")
        check_device(args.device, 1 if args.nproc is None else layout.ranks)
        return cls(source, layout, args.device)

    def describe(self, *notes: str) -> None:
        """Print what is read, and these notes, in one process."""
        from isp.cli.launch import speaks

        if not speaks():
            return
        for note in filter(None, (*notes, self.layout.note)):
            say(f"note: {note}", error=True)
        layout = self.layout.describe(self.source.model)
        say(f"{self.source.title}, {self.source.dtype}, {layout}", error=True)

    @contextmanager
    def engine(self) -> Iterator[tuple[Engine, int]]:
        """The model on this rank, and which it is; a collective."""
        from isp.comm import Mesh, World
        from isp.parallel import Topology
        from isp.train.run import device_of

        device, parallel = device_of(self.device), self.layout.parallel
        with World(device) as world:
            mesh = Mesh(Topology.create(self.layout.ranks, parallel), world.rank)
            yield self.source.engine(parallel, mesh, device), world.rank
