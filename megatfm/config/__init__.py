"""Typed, frozen configs: TOML in, one clear line for each mistake, resolved TOML out. No torch here."""

from megatfm.config.load import find_config, load, load_config, preset_names, to_toml
from megatfm.config.model import GeneratorConfig, LatentConfig, ModelConfig, MuPConfig, RopeScaling
from megatfm.config.objective import (
    CausalObjective,
    DenoisersObjective,
    MaskedObjective,
    NextSentenceObjective,
    ObjectiveConfig,
    PluginObjective,
    PrefixObjective,
    ReplacedTokenObjective,
    SentenceOrderObjective,
    SpanBoundaryObjective,
    SpanCorruptionObjective,
)
from megatfm.config.optimizer import AdamWConfig, MuonConfig, OptimizerConfig
from megatfm.config.resilience import ResilienceConfig
from megatfm.config.root import Config
from megatfm.config.schedule import ScheduleConfig
from megatfm.config.sections import (
    CheckpointConfig,
    DataConfig,
    EvaluateConfig,
    LogConfig,
    ParallelConfig,
    ResumeConfig,
    TrainConfig,
)

__all__ = [
    "AdamWConfig",
    "CausalObjective",
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "DenoisersObjective",
    "EvaluateConfig",
    "GeneratorConfig",
    "LatentConfig",
    "LogConfig",
    "MaskedObjective",
    "ModelConfig",
    "MuPConfig",
    "MuonConfig",
    "NextSentenceObjective",
    "ObjectiveConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "PluginObjective",
    "PrefixObjective",
    "ReplacedTokenObjective",
    "ResilienceConfig",
    "ResumeConfig",
    "RopeScaling",
    "ScheduleConfig",
    "SentenceOrderObjective",
    "SpanBoundaryObjective",
    "SpanCorruptionObjective",
    "TrainConfig",
    "find_config",
    "load",
    "load_config",
    "preset_names",
    "to_toml",
]
