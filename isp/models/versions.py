"""The versions of transformers with which ISP was run; setup.py and the documentation read them."""

from __future__ import annotations

__all__ = ["NEWEST_TRANSFORMERS", "OLDEST_TRANSFORMERS"]

OLDEST_TRANSFORMERS = "5.17"
NEWEST_TRANSFORMERS = "5.24"
