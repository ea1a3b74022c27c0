"""One forward on meta tensors, and what it shows of a model."""
