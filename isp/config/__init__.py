"""The configuration of a run: one frozen `JobConfig`, made from YAML and overrides."""

from isp.config.job import (
    ConfigError,
    JobConfig,
    LoopConfig,
    json_schema,
    load_config,
    load_loop_config,
    sections_from,
    to_plain,
    to_yaml,
)

__all__ = [
    "ConfigError",
    "JobConfig",
    "LoopConfig",
    "json_schema",
    "load_config",
    "load_loop_config",
    "sections_from",
    "to_plain",
    "to_yaml",
]
