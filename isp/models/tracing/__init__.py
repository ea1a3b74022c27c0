"""The trace of a model, from one forward on meta tensors, and checks of its code."""
