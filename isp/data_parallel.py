"""Data parallelism around any module."""

from isp.core.data_parallel import DataParallelBucket, DataParallelNaive
from isp.core.optim.buckets import BucketManager

__all__ = ["BucketManager", "DataParallelBucket", "DataParallelNaive"]
