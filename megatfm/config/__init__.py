"""Typed, frozen configs: TOML in, one-line errors, resolved TOML out. Nothing here imports torch."""

from megatfm.config.attention import (
    BigBirdPatternConfig,
    ChunkedPatternConfig,
    CompressedAttentionConfig,
    FixedPatternConfig,
    GQAAttentionConfig,
    LinformerAttentionConfig,
    LongformerAttentionConfig,
    LongformerPatternConfig,
    MLAAttentionConfig,
    PooledAttentionConfig,
    ScaledAttention,
    StridedPatternConfig,
    WindowedAttentionConfig,
    WindowPatternConfig,
    Windows2dPatternConfig,
)
from megatfm.config.data import DataConfig, ImagesConfig
from megatfm.config.heads import (
    ClassifierHeadConfig,
    MultipleChoiceHeadConfig,
    SentenceHeadConfig,
    SpanExtractionHeadConfig,
    TextClassifierHeadConfig,
)
from megatfm.config.image_text import ConnectorConfig, ContrastiveConfig, TextTowerConfig, VisionTowerConfig
from megatfm.config.load import load_config, load_section, to_toml
from megatfm.config.model import ModelConfig
from megatfm.config.model_parts import OverlappingPatchesConfig, PatchEmbeddingConfig, PixelDecoderConfig
from megatfm.config.objective import (
    AnswersObjective,
    CausalObjective,
    ContrastiveObjective,
    ImageClassificationObjective,
    ImageToTextObjective,
    MaskedImageObjective,
    MaskedObjective,
    MultipleChoiceObjective,
    NextSentenceObjective,
    PermutationObjective,
    PluginObjective,
    PreferenceObjective,
    PrefixObjective,
    ReplacedTokenObjective,
    SentenceOrderObjective,
    SimMIMObjective,
    SpanBoundaryObjective,
    SpanCorruptionObjective,
    SpanExtractionObjective,
    TextClassificationObjective,
    UL2Objective,
)
from megatfm.config.optimizer import (
    AdafactorConfig,
    AdamWConfig,
    ConstantSchedule,
    CosineSchedule,
    InverseSqrtSchedule,
    LambConfig,
    LinearSchedule,
    LionConfig,
    MuonConfig,
    OptimizerConfig,
    OptimizerSection,
    PluginOptimizer,
    PluginSchedule,
    ScheduleConfig,
    ScheduleFreeConfig,
    ScheduleSection,
    SoapConfig,
    WSDSchedule,
)
from megatfm.config.parallel import ParallelConfig
from megatfm.config.position import (
    DebertaPositionConfig,
    DebertaV2PositionConfig,
    LearnedPosition2dConfig,
    LearnedPositionConfig,
    LogRelative2dConfig,
    Rope2dConfig,
    RopeConfig,
    RopeScaling,
    ShawConfig,
    T5PositionConfig,
)
from megatfm.config.root import Config
from megatfm.config.section import make_usage_error, require_variant
from megatfm.config.sources import find_config, list_model_presets, list_presets
from megatfm.config.task import EvaluationTaskConfig, TaskConfig
from megatfm.config.training import ResilienceConfig, TrainConfig

__all__ = [
    "AdafactorConfig", "AdamWConfig", "AnswersObjective", "BigBirdPatternConfig", "CausalObjective",
    "ChunkedPatternConfig", "ClassifierHeadConfig", "CompressedAttentionConfig", "Config", "ConnectorConfig",
    "ConstantSchedule", "ContrastiveConfig", "ContrastiveObjective", "CosineSchedule", "DataConfig",
    "DebertaPositionConfig", "DebertaV2PositionConfig", "EvaluationTaskConfig", "FixedPatternConfig",
    "GQAAttentionConfig", "ImageClassificationObjective", "ImageToTextObjective", "ImagesConfig",
    "InverseSqrtSchedule", "LambConfig", "LearnedPosition2dConfig", "LearnedPositionConfig", "LinearSchedule",
    "LinformerAttentionConfig", "LionConfig", "LogRelative2dConfig", "LongformerAttentionConfig",
    "LongformerPatternConfig", "MLAAttentionConfig", "MaskedImageObjective", "MaskedObjective", "ModelConfig",
    "MultipleChoiceHeadConfig", "MultipleChoiceObjective", "MuonConfig", "NextSentenceObjective", "OptimizerConfig",
    "OptimizerSection", "OverlappingPatchesConfig", "ParallelConfig", "PatchEmbeddingConfig", "PermutationObjective",
    "PixelDecoderConfig", "PluginObjective", "PluginOptimizer", "PluginSchedule", "PooledAttentionConfig",
    "PreferenceObjective", "PrefixObjective", "ReplacedTokenObjective", "ResilienceConfig", "Rope2dConfig",
    "RopeConfig", "RopeScaling", "ScaledAttention", "ScheduleConfig", "ScheduleFreeConfig", "ScheduleSection",
    "SentenceHeadConfig", "SentenceOrderObjective", "ShawConfig", "SimMIMObjective", "SoapConfig",
    "SpanBoundaryObjective", "SpanCorruptionObjective", "SpanExtractionHeadConfig", "SpanExtractionObjective",
    "StridedPatternConfig", "T5PositionConfig", "TaskConfig", "TextClassificationObjective",
    "TextClassifierHeadConfig", "TextTowerConfig", "TrainConfig", "UL2Objective", "VisionTowerConfig", "WSDSchedule",
    "WindowPatternConfig", "WindowedAttentionConfig", "Windows2dPatternConfig", "find_config", "list_model_presets",
    "list_presets", "load_config", "load_section", "make_usage_error", "require_variant", "to_toml",
]  # fmt: skip
