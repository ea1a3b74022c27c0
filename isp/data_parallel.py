"""Public names for data parallelism: replicas of any module, with summed gradients."""

from isp.core.data_parallel import DataParallelBucket, DataParallelNaive
from isp.core.optim.buckets import BucketManager

__all__ = ["BucketManager", "DataParallelBucket", "DataParallelNaive"]
