"""Recomputation of activations in backward, instead of keeping them."""
