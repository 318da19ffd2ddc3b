"""Typed, frozen configs: TOML in, one clear line for each mistake, resolved TOML out. No torch here."""

from megatfm.config.load import find_config, load, load_config, preset_names, to_toml
from megatfm.config.model import GeneratorConfig, LatentConfig, ModelConfig, MuPConfig, RopeScaling
from megatfm.config.optimizer import AdamWConfig, MuonConfig, OptimizerConfig
from megatfm.config.resilience import ResilienceConfig
from megatfm.config.root import Config
from megatfm.config.schedule import ScheduleConfig
from megatfm.config.sections import (
    CheckpointConfig,
    DataConfig,
    EvaluateConfig,
    LogConfig,
    ObjectiveConfig,
    ParallelConfig,
    ResumeConfig,
    TrainConfig,
)

__all__ = [
    "AdamWConfig",
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "EvaluateConfig",
    "GeneratorConfig",
    "LatentConfig",
    "LogConfig",
    "ModelConfig",
    "MuPConfig",
    "MuonConfig",
    "ObjectiveConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "ResilienceConfig",
    "ResumeConfig",
    "RopeScaling",
    "ScheduleConfig",
    "TrainConfig",
    "find_config",
    "load",
    "load_config",
    "preset_names",
    "to_toml",
]
