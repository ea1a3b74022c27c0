"""`isp.parallelize` and the run that it returns: sharded models in a user's own training loop."""
