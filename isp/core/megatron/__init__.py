"""Tensor-parallel layers and functions with Megatron-LM's names, for `isp.tensor_parallel`."""
