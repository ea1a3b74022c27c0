"""What every test of traced models runs under."""

from tests.attention.conftest import one_thread

__all__ = ["one_thread"]
