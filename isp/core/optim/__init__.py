"""From gradients to weights: main gradients, their reduction, the sharded optimizer."""
