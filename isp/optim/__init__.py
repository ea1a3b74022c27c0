"""From gradients to weights: main gradients, their reduction, the sharded optimizer."""

from isp.optim.buckets import DEFAULT_BUCKET_BYTES, BucketManager
from isp.optim.main_grads import MainGradients
from isp.optim.update_rules import check_groups, learning_rate, update_rule
from isp.optim.zero1 import StepResult, Zero1Optimizer

__all__ = [
    "DEFAULT_BUCKET_BYTES",
    "BucketManager",
    "MainGradients",
    "StepResult",
    "Zero1Optimizer",
    "check_groups",
    "learning_rate",
    "update_rule",
]
