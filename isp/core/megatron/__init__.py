"""The tensor-parallel toolkit, with the names of Megatron-LM; `isp.tensor_parallel` exports it."""
