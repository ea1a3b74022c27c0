"""`isp.parallelize` and the run it returns: sharded models in a user's own training loop."""
