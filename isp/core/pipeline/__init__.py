"""Pipeline parallelism: the split of blocks, each rank's order of work, and its execution."""
