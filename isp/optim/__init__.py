"""From gradients to weights: main gradients, their reduction, the sharded optimizer."""

from isp.optim.buckets import DEFAULT_BUCKET_BYTES, BucketManager, Channels
from isp.optim.grad_scaler import GradScaler, GradScalerState
from isp.optim.groups import GroupValues, check_groups, group_values
from isp.optim.lr_scheduler import learning_rate
from isp.optim.main_grads import MainGradients
from isp.optim.update_rules import UpdateRule, update_rule
from isp.optim.zero1 import (
    OptimizerState,
    ShardState,
    StepResult,
    Zero1Optimizer,
)

__all__ = [
    "DEFAULT_BUCKET_BYTES",
    "BucketManager",
    "Channels",
    "GradScaler",
    "GradScalerState",
    "GroupValues",
    "MainGradients",
    "OptimizerState",
    "ShardState",
    "StepResult",
    "UpdateRule",
    "Zero1Optimizer",
    "check_groups",
    "group_values",
    "learning_rate",
    "update_rule",
]
