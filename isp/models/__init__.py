"""Parallel runs of plain PyTorch models: traced once, then run as they are on each rank."""
