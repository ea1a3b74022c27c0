"""The trainer: from a configuration to a trained model."""

from isp.train.run import main

__all__ = ["main"]
