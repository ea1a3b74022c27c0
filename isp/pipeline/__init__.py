"""Pipelines: how layers are cut, in which order a rank works, and one rank's stages at work."""

from isp.pipeline.order import PipelineOrder, one_forward_one_backward, split_layers
from isp.pipeline.stage import Pipeline, StageWork

__all__ = ["Pipeline", "PipelineOrder", "StageWork", "one_forward_one_backward", "split_layers"]
