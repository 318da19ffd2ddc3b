"""Table of how tensor parallelism shards each class of modules and what that sends, independent of their `tp_plan`.

After Korthikanti et al. 2022: once per sub-layer, the input of column-parallel weights is gathered and the output of
row-parallel weights is summed. A class that isn't listed, such as a plugin's, counts by its own `tp_plan`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal

from torch import nn

from megatfm.config import ParallelConfig
from megatfm.verify.plugin_styles import get_plugin_style


@dataclass(frozen=True)
class ModuleSharding:
    """How tensor parallelism shards the parameters and buffers of a module, and what its calls send.

    dim: sharded dim, None if tensors are replicated; dims: the same by name of the tensor. gradient: of replicated
    tensors: "partial" (each rank has a summand), "partial_with_sp" (partial only with sequence parallelism) or
    "replicated". communication: such as "input gathered"; None if a plugin doesn't declare them.
    """

    dim: int | None = None
    gradient: Literal["replicated", "partial_with_sp", "partial"] = "replicated"
    communication: tuple[str, ...] | None = ()
    dims: Mapping[str, int] | None = field(default=None, hash=False)
    are_experts: bool = False

    def find_shard_dim(self, key: str, n_dims: int) -> int | None:
        """Return the sharded dim of the tensor `key` with `n_dims` dims; None if it is replicated."""
        dim = self.dim if self.dims is None else self.dims.get(key)
        return None if dim is None or not -n_dims <= dim < n_dims else dim % n_dims


GATHERED, SUMMED, REPLICATED_OUTPUT = ("input gathered",), ("output summed",), ("output replicated",)
SPLIT_OUTPUT = ModuleSharding(gradient="partial_with_sp")
STYLE_SHARDINGS: Mapping[str, ModuleSharding] = {
    "colwise": ModuleSharding(dim=0),
    "rowwise": ModuleSharding(dim=1, gradient="partial_with_sp", communication=SUMMED),
    "shard_input_features": ModuleSharding(dim=1),
    "replicated_kv_heads": ModuleSharding(gradient="partial"),
    "shard_last_dim": ModuleSharding(dim=-1),
    "replicated_partial_grad": ModuleSharding(gradient="partial"),
    "gather_input": ModuleSharding(communication=GATHERED),
    "gather_input_shard_heads": ModuleSharding(dim=-2, communication=GATHERED),
    "gather_output": ModuleSharding(communication=("output gathered",)),
    "gather_output_for_tokens": ModuleSharding(communication=("output gathered for tokens",)),
    "sequence_parallel": ModuleSharding(gradient="partial_with_sp"),
    "split_output": SPLIT_OUTPUT,
    "gather_output_replicated": ModuleSharding(gradient="partial_with_sp", communication=REPLICATED_OUTPUT),
    "sum_output": ModuleSharding(communication=("loss summed",)),
    "sum_non_padding_tokens": ModuleSharding(communication=("loss summed",)),
    "sum_over_shards": ModuleSharding(communication=("shards summed",)),
    "sum_tokens_by_row": ModuleSharding(),
    "reduce_output": ModuleSharding(communication=SUMMED),
    "replicated": ModuleSharding(),
    "gather_input_replicated": ModuleSharding(communication=("input replicated",)),
    "vocab_parallel_embedding": ModuleSharding(dim=0, communication=SUMMED),
    "vocab_parallel_head": ModuleSharding(dim=0, communication=("input gathered", "loss over the vocabulary")),
    "local_token_dropout": ModuleSharding(),
    "local_shard_dropout": ModuleSharding(),
    "local_channels": ModuleSharding(),
    "expert_parallel": ModuleSharding(dim=0, are_experts=True),
    "gather_expert_input": ModuleSharding(communication=GATHERED),
    "reduce_expert_output": ModuleSharding(communication=SUMMED),
    "split_kept_choices": SPLIT_OUTPUT,
    "gather_choices": ModuleSharding(),
    "split_choices": ModuleSharding(),
}
"""Style name in a `tp_plan` → sharding."""

BY_CHANNELS = {
    **{"w_gate": 1, "w_up": 1, "b_gate": 1, "b_up": 1, "w_down": 2},
    **{"w_gate_lora_b": 1, "w_up_lora_b": 1, "w_down_lora_a": 2},
}
EXPERT_TP_SHARDINGS: Mapping[tuple[str, str], ModuleSharding] = {
    ("expert_parallel", "by_channel"): ModuleSharding(dims=BY_CHANNELS, gradient="partial", are_experts=True),
    ("expert_parallel", "folded"): ModuleSharding(are_experts=True),
    ("gather_expert_input", "folded"): ModuleSharding(),
    ("reduce_expert_output", "folded"): ModuleSharding(),
    ("split_kept_choices", "folded"): ModuleSharding(),
    ("gather_choices", "folded"): ModuleSharding(gradient="partial_with_sp", communication=REPLICATED_OUTPUT),
    ("split_choices", "folded"): SPLIT_OUTPUT,
}
"""(style, `parallel.expert_tp`) → sharding, where it differs from that of "by_expert"."""

StylePlan = tuple[tuple[str, str], ...]

QKV_STYLES: StylePlan = (("", "gather_input"), ("w[qkv]", "colwise"), ("wo", "rowwise"))
NORM_STYLES: StylePlan = (("norm", "sequence_parallel"),)
PER_HEAD_STYLES: StylePlan = (("", "shard_last_dim"),)
SHARED_STYLES: StylePlan = (("", "replicated_partial_grad"),)
REPLICATED_STYLES: StylePlan = (("", "gather_input_replicated"), ("*", "replicated"))
CLASS_STYLES: Mapping[str, StylePlan] = {
    "GroupedQueryAttention": (*QKV_STYLES, ("[qk]_norm", "replicated_partial_grad")),
    "LatentAttention": (*QKV_STYLES, *((name, "replicated_partial_grad") for name in ("w*_down", "*_norm", "wk_rope"))),
    "LinformerAttention": QKV_STYLES,
    "CompressedAttention": QKV_STYLES,
    "DisentangledAttention": (*QKV_STYLES, ("w[qk]_position", "colwise")),
    "DisentangledSharedAttention": QKV_STYLES,
    "LongformerAttention": (*QKV_STYLES, ("w[qkv]_global", "colwise")),
    "TwoStreamAttention": (
        ("", "gather_input_shard_heads"),
        ("content", "gather_output"),
        ("w[qkv]", "colwise"),
        ("wk_position", "colwise"),
        ("wo", "rowwise"),
    ),
    "WindowedAttention": QKV_STYLES,
    "RelativeBias2d": PER_HEAD_STYLES,
    "PooledAttention": QKV_STYLES,
    "MapPool": (("", "replicated_partial_grad"), ("norm", "replicated_partial_grad")),
    "AxisBias": SHARED_STYLES,
    "PooledBlock": (("attn_skip", "sequence_parallel"), ("ffn_skip", "sequence_parallel")),
    "MaxPool": (("before", "gather_output_for_tokens"), ("after", "split_output")),
    "OverlappingPatches": (("", "split_output"),),
    "LogRelativeBias2d": (("hidden", "replicated_partial_grad"), ("out", "colwise")),
    "CosineScale": PER_HEAD_STYLES,
    "Sinks": PER_HEAD_STYLES,
    "FFN": (("", "gather_input"), ("w_gate", "colwise"), ("w_up", "colwise"), ("w_down", "rowwise")),
    "MoE": (
        ("", "sequence_parallel"),
        ("router", "sequence_parallel"),
        ("non_padding_mask", "split_output"),
        ("reduce_counts", "sum_output"),
        ("reduce_losses", "sum_output"),
    ),
    "Experts": (
        ("", "expert_parallel"),
        ("gather_input", "gather_expert_input"),
        ("gather_row", "gather_choices"),
        ("split_row", "split_choices"),
        ("split_kept", "split_kept_choices"),
        ("reduce_output", "reduce_expert_output"),
    ),
    "ExpertChoiceRouter": (("gather_tokens", "gather_output_replicated"), ("split_tokens", "split_output")),
    "TokenSum": (("", "sum_non_padding_tokens"),),
    "Convolution": PER_HEAD_STYLES,
    "SequenceProjection": SHARED_STYLES,
    "PerHeadSequenceProjection": PER_HEAD_STYLES,
    "Alibi": PER_HEAD_STYLES,
    "RelativeBias": PER_HEAD_STYLES,
    "ShawCore": SHARED_STYLES,
    "RelativePositionTable": (("table", "replicated_partial_grad"),),
    "BucketedPositionTable": (("table", "replicated_partial_grad"), ("norm", "replicated_partial_grad")),
    "ShardedRMSNorm": (*PER_HEAD_STYLES, ("reduce_squares", "sum_over_shards")),
    "PreNorm": NORM_STYLES,
    "PostNorm": NORM_STYLES,
    "SandwichNorm": (*NORM_STYLES, ("norm_out", "sequence_parallel")),
    "ResidualDropout": (("layer_scale", "sequence_parallel"),),
    "LMHead": (("", "vocab_parallel_head"),),
    "SpanBoundaryHead": (
        ("", "vocab_parallel_head"),
        ("positions", "replicated_partial_grad"),
        ("dense[12]", "replicated_partial_grad"),
        ("norm[12]", "replicated_partial_grad"),
    ),
    "InputEmbedding": (
        ("tokens", "vocab_parallel_embedding"),
        ("positions", "split_output"),
        ("segments", "split_output"),
        ("mask_tokens", "split_output"),
        ("inserted_vectors", "split_output"),
        ("embedded_tokens", "split_output"),
        ("norm", "sequence_parallel"),
        ("projection", "sequence_parallel"),
    ),
    "PredictionHeadTransform": (("dense", "replicated_partial_grad"), ("norm", "replicated_partial_grad")),
    "SentenceHead": REPLICATED_STYLES,
    "TextClassifier": REPLICATED_STYLES,
    "SpanExtractionHead": REPLICATED_STYLES,
    "MultipleChoiceHead": REPLICATED_STYLES,
    "PixelsHead": REPLICATED_STYLES,
    "ClassifierHead": (*REPLICATED_STYLES, ("pool.*", "replicated")),
    "PatchEmbedding": (("", "split_output"), ("projection", "sequence_parallel")),
    "Discriminator": (("dense", "sequence_parallel"), ("verdict", "gather_output_replicated")),
    "FutureHead": (("final_norm", "sequence_parallel"),),
    "Stack": NORM_STYLES,
    "PyramidStack": NORM_STYLES,
    "PatchMerging": (
        ("", "gather_input"),
        ("norm", "replicated_partial_grad"),
        ("reduction", "rowwise"),
        ("norm_out", "sequence_parallel"),
    ),
    "TwoStreamStack": (*NORM_STYLES, ("query", "split_output")),
    "EncoderDecoder": (("memory", "gather_output"),),
    "FeatureHead": (*REPLICATED_STYLES, ("pool.*", "replicated")),
    "Temperature": (("", "replicated"),),
    "MaskedAutoencoder": (("memory", "gather_output_for_tokens"),),
    "VisibleTokens": (("", "split_output"), ("projection", "sequence_parallel"), ("positions", "sequence_parallel")),
    "Connector": (("w_in", "sequence_parallel"), ("w_out", "sequence_parallel")),
    "VisionLanguage": (("image_vectors", "gather_output_for_tokens"),),
    "PixelDecoderHead": REPLICATED_STYLES,
}
"""Class → pattern of submodule names ("" for itself) and style."""


def find_module_shardings(model: nn.Module, parallel: ParallelConfig) -> dict[str, ModuleSharding]:
    """Return module path → sharding, for each module that has a style or owns tensors."""
    style_of: dict[nn.Module, str] = {}
    for owner in model.modules():
        for pattern, style in _get_style_plan(type(owner)):
            for name, module in owner.named_modules():
                if _matches(name.split(".") if name else [], pattern.split(".") if pattern else []):
                    style_of.setdefault(module, style)
    shardings = {}
    for path, module in model.named_modules():
        adapter = path.rpartition(".lora.")
        if adapter[1] and (adapted := model.get_submodule(adapter[0])) in style_of:
            shardings[path] = _resolve_sharding(_get_adapter_style(style_of[adapted], adapter[2]), module, parallel)
        elif module in style_of:
            shardings[path] = _resolve_sharding(style_of[module], module, parallel)
        elif next(_iter_tensors(module), None) is not None:
            shardings[path] = ModuleSharding()
    return shardings


def _matches(names: list[str], patterns: list[str]) -> bool:
    """Return whether the segments of a name match patterns one by one; `**` matches any number of segments."""
    if "**" in patterns:
        index = patterns.index("**")
        return any(
            _matches(names, [*patterns[:index], *["*"] * times, *patterns[index + 1 :]])
            for times in range(len(names) + 1)
        )
    return len(names) == len(patterns) and all(map(fnmatchcase, names, patterns))


def _get_adapter_style(style: str, matrix: str) -> str:
    """Return the style of a LoRA matrix: B is sharded beside a column-parallel weight, A beside a row-parallel one."""
    styles = {
        ("colwise", "a"): "replicated_partial_grad",
        ("rowwise", "a"): "shard_input_features",
        ("rowwise", "b"): "replicated_partial_grad",
    }
    is_on_tokens = style in ("split_output", "gather_output_replicated")
    return styles.get((style, matrix), "sequence_parallel" if is_on_tokens else style)


def find_undeclared_style(model: nn.Module) -> str | None:
    """Return the first style of a plugin that doesn't declare its communication; None if all do."""
    for owner in model.modules():
        for _, style in _get_style_plan(type(owner)):
            if style not in STYLE_SHARDINGS and get_plugin_style(style).communication is None:
                return style
    return None


def _get_style_plan(module_class: type) -> StylePlan:
    for base in module_class.__mro__:
        if base.__module__.startswith("megatfm.") and base.__name__ in CLASS_STYLES:
            return CLASS_STYLES[base.__name__]
        if "tp_plan" in vars(base):
            plan: StylePlan = vars(base)["tp_plan"]
            return plan
    return ()


def _iter_tensors(module: nn.Module) -> Iterator[object]:
    yield from module.parameters(recurse=False)
    yield from module.buffers(recurse=False)


def _resolve_sharding(style: str, module: nn.Module, parallel: ParallelConfig) -> ModuleSharding:
    """Return the sharding of a style under a layout. Key heads fewer than ranks are replicated."""
    tp = parallel.tp
    if style not in STYLE_SHARDINGS:
        declared = get_plugin_style(style).resolve(module, tp, parallel.expert_tp)
        return ModuleSharding(declared.dim, declared.gradient, declared.communication, declared.dims)
    if tp > 1 and (style, parallel.expert_tp) in EXPERT_TP_SHARDINGS:
        return EXPERT_TP_SHARDINGS[style, parallel.expert_tp]
    heads = getattr(module, "heads", None)
    if style == "colwise" and heads and heads % tp and tp % heads == 0:
        return STYLE_SHARDINGS["replicated_kv_heads"]
    return STYLE_SHARDINGS[style]


def is_a(module: nn.Module, name: str) -> bool:
    """Return whether a module is an instance of megatfm's class of this name, without importing the class."""
    return any(base.__name__ == name and base.__module__.startswith("megatfm.") for base in type(module).__mro__)


def list_block_paths(model: nn.Module) -> list[str]:
    """Return the paths of all stacks' blocks, the units of FSDP and recomputation."""
    return [path for path, _ in model.named_modules() if path.rpartition(".")[0].rpartition(".")[2] == "layers"]
