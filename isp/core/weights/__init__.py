"""Sharded weights: the prefetch plan, and the communicator that gathers and frees by it."""
