"""Code of transformers that is replaced, so that it computes on sharded sequences."""
