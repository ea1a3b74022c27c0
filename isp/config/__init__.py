"""The configuration of a run: YAML and overrides in, one frozen `JobConfig` out."""

from isp.config.job import (
    ConfigError,
    JobConfig,
    json_schema,
    load_config,
    sections_from,
    to_plain,
    to_yaml,
)

__all__ = [
    "ConfigError",
    "JobConfig",
    "json_schema",
    "load_config",
    "sections_from",
    "to_plain",
    "to_yaml",
]
