"""A runtime and trainer for long-context language models on PyTorch."""

__version__ = "0.1.0"
