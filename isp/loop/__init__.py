"""`isp.parallelize` and what it returns: sharded models in a training loop of the caller's own."""
