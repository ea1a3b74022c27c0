"""The configuration of a run: YAML and overrides in, one frozen `JobConfig` out."""

from isp.config.job import (
    ConfigError,
    JobConfig,
    load_config,
    sections_from,
    to_plain,
    to_yaml,
)

__all__ = ["ConfigError", "JobConfig", "load_config", "sections_from", "to_plain", "to_yaml"]
