"""Recompute activations in backward instead of keeping them."""
