"""The command line: one program, `isp`, and its subcommands."""

from isp.cli.program import main

__all__ = ["main"]
