"""The cuts of a traced model: pipeline stages, tensor-parallel plan and matrices."""
