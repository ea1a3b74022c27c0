"""The argument parser of a benchmark: its help has the whole docstring and the table's legend."""

import argparse

__all__ = ["table_parser"]


def table_parser(doc: str | None, columns: str) -> argparse.ArgumentParser:
    """Return a parser whose help prints `doc` and, at its end, `columns`, line by line."""
    return argparse.ArgumentParser(
        description=doc,
        epilog=columns,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
