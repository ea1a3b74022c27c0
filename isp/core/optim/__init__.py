"""Main gradients, their reduction over replicas, and the optimizer with sharded states."""
