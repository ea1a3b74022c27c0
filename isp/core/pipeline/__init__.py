"""Pipelines: the split of layers, each rank's order of work, and the execution of its stages."""
