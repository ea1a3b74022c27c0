"""One training step: micro-batches in, updated weights and figures out."""
