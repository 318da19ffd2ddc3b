"""Table of how tensor parallelism cuts modules and of what that sends, by class, independent of the classes' plans.

After Korthikanti et al. 2022: the input of column-cut weights is gathered, the output of row-cut ones is summed, once
each a sub-layer. A class that isn't listed, as a plugin's, counts by the rows of its own `plan`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Literal

from torch import nn

from megatfm.config import ParallelConfig
from megatfm.verify.plugin_styles import promised


@dataclass(frozen=True)
class ModuleCut:
    """dim: of the module's own tensors that is cut, None: they are whole; dims: the same by a tensor's name.

    gradient: of whole tensors. "partial_with_sp": a partial one with sequence parallelism; "partial": always a
    partial one.
    sends: words such as "input gathered", from which bytes follow; None: not known.
    """

    dim: int | None = None
    gradient: Literal["replicated", "partial_with_sp", "partial"] = "replicated"
    sends: tuple[str, ...] | None = ()
    dims: Mapping[str, int] | None = field(default=None, hash=False)
    are_experts: bool = False

    def cut_dim(self, key: str, dims: int) -> int | None:
        """Dim that is cut of a tensor with so many dims; None where it is whole."""
        dim = self.dim if self.dims is None else self.dims.get(key)
        return None if dim is None or not -dims <= dim < dims else dim % dims


GATHERED, SUMMED, WHOLE_OUTPUT = ("input gathered",), ("output summed",), ("output whole",)
OWN_OUTPUT = ModuleCut(gradient="partial_with_sp")
KINDS: Mapping[str, ModuleCut] = {
    "colwise": ModuleCut(dim=0),
    "rowwise": ModuleCut(dim=1, gradient="partial_with_sp", sends=SUMMED),
    "input_features": ModuleCut(dim=1),
    "replicated_kv_heads": ModuleCut(gradient="partial"),
    "shard_last_dim": ModuleCut(dim=-1),
    "replicated_partial_grad": ModuleCut(gradient="partial"),
    "gather_input": ModuleCut(sends=GATHERED),
    "gather_input_shard_heads": ModuleCut(dim=-2, sends=GATHERED),
    "gather_output": ModuleCut(sends=("output gathered",)),
    "gather_output_for_tokens": ModuleCut(sends=("output gathered for tokens",)),
    "sequence_parallel": ModuleCut(gradient="partial_with_sp"),
    "split_output": OWN_OUTPUT,
    "gather_output_replicated": ModuleCut(gradient="partial_with_sp", sends=WHOLE_OUTPUT),
    "sum_output": ModuleCut(sends=("loss summed",)),
    "sum_real_tokens": ModuleCut(sends=("loss summed",)),
    "sum_over_shards": ModuleCut(sends=("parts summed",)),
    "sum_tokens_by_row": ModuleCut(),
    "reduce_output": ModuleCut(sends=SUMMED),
    "replicated": ModuleCut(),
    "gather_input_replicated": ModuleCut(sends=("input whole",)),
    "vocab_parallel_embedding": ModuleCut(dim=0, sends=SUMMED),
    "vocab_parallel_head": ModuleCut(dim=0, sends=("input gathered", "loss over the vocabulary")),
    "local_token_dropout": ModuleCut(),
    "local_shard_dropout": ModuleCut(),
    "local_channels": ModuleCut(),
    "expert_parallel": ModuleCut(dim=0, are_experts=True),
    "gather_expert_input": ModuleCut(sends=GATHERED),
    "reduce_expert_output": ModuleCut(sends=SUMMED),
    "split_kept_choices": OWN_OUTPUT,
    "gather_choices": ModuleCut(),
    "split_choices": ModuleCut(),
}
"""Ways to cut a module, by the words that plans use."""

BY_CHANNELS = {"w_gate": 1, "w_up": 1, "b_gate": 1, "b_up": 1, "w_down": 2}
OTHERWISE: Mapping[tuple[str, str], ModuleCut] = {
    ("expert_parallel", "by_channel"): ModuleCut(dims=BY_CHANNELS, gradient="partial", are_experts=True),
    ("expert_parallel", "folded"): ModuleCut(are_experts=True),
    ("gather_expert_input", "folded"): ModuleCut(),
    ("reduce_expert_output", "folded"): ModuleCut(),
    ("split_kept_choices", "folded"): ModuleCut(),
    ("gather_choices", "folded"): ModuleCut(gradient="partial_with_sp", sends=WHOLE_OUTPUT),
    ("split_choices", "folded"): OWN_OUTPUT,
}
"""Cuts under other values of `parallel.expert_tp` than "by_expert"."""

Rows = tuple[tuple[str, str], ...]

QKV: Rows = (("", "gather_input"), ("w[qkv]", "colwise"), ("wo", "rowwise"))
NORM: Rows = (("norm", "sequence_parallel"),)
PER_HEAD: Rows = (("", "shard_last_dim"),)
SHARED: Rows = (("", "replicated_partial_grad"),)
ROWS: Mapping[str, Rows] = {
    "GroupedQueryAttention": (*QKV, ("[qk]_norm", "replicated_partial_grad")),
    "LatentAttention": (
        *QKV,
        *(
            (name, "replicated_partial_grad")
            for name in ("wq_down", "q_norm", "wkv_down", "kv_norm", "wk_rope")
        ),
    ),
    "LinformerAttention": QKV,
    "CompressedAttention": QKV,
    "DisentangledAttention": (*QKV, ("w[qk]_position", "colwise")),
    "DisentangledSharedAttention": QKV,
    "LongformerAttention": (*QKV, ("w[qkv]_global", "colwise")),
    "TwoStreamAttention": (
        ("", "gather_input_shard_heads"),
        ("content", "gather_output"),
        ("w[qkv]", "colwise"),
        ("wk_position", "colwise"),
        ("wo", "rowwise"),
    ),
    "WindowedAttention": QKV,
    "RelativeBias2d": PER_HEAD,
    "PooledAttention": QKV,
    "MapPool": (("", "replicated_partial_grad"), ("norm", "replicated_partial_grad")),
    "AxisBias": SHARED,
    "PooledBlock": (("attn_skip", "sequence_parallel"), ("ffn_skip", "sequence_parallel")),
    "MaxPool": (("before", "gather_output_for_tokens"), ("after", "split_output")),
    "OverlappingPatches": (("", "split_output"),),
    "LogRelativeBias2d": (("hidden", "replicated_partial_grad"), ("out", "colwise")),
    "CosineScale": PER_HEAD,
    "Sinks": PER_HEAD,
    "FFN": (
        ("", "gather_input"),
        ("w_gate", "colwise"),
        ("w_up", "colwise"),
        ("w_down", "rowwise"),
    ),
    "MoE": (
        ("", "sequence_parallel"),
        ("router", "sequence_parallel"),
        ("real", "split_output"),
        ("counted", "sum_output"),
        ("total", "sum_output"),
    ),
    "Experts": (
        ("", "expert_parallel"),
        ("gathered", "gather_expert_input"),
        ("gather_row", "gather_choices"),
        ("split_row", "split_choices"),
        ("taken", "split_kept_choices"),
        ("summed", "reduce_expert_output"),
    ),
    "ExpertChoiceRouter": (("gather_tokens", "gather_output_replicated"), ("split_tokens", "split_output")),
    "TokenSum": (("", "sum_real_tokens"),),
    "Convolution": PER_HEAD,
    "SequenceProjection": SHARED,
    "PerHeadSequenceProjection": PER_HEAD,
    "Alibi": PER_HEAD,
    "RelativeBias": PER_HEAD,
    "ShawCore": SHARED,
    "RelativePositionTable": (("table", "replicated_partial_grad"),),
    "BucketedPositionTable": (("table", "replicated_partial_grad"), ("norm", "replicated_partial_grad")),
    "ShardedRMSNorm": (*PER_HEAD, ("total", "sum_over_shards")),
    "PreNorm": NORM,
    "PostNorm": NORM,
    "SandwichNorm": (*NORM, ("norm_out", "sequence_parallel")),
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
    "SentenceHead": (("", "gather_input_replicated"), ("*", "replicated")),
    "TextClassifier": (("", "gather_input_replicated"), ("*", "replicated")),
    "SpanExtractionHead": (("", "gather_input_replicated"), ("*", "replicated")),
    "MultipleChoiceHead": (("", "gather_input_replicated"), ("*", "replicated")),
    "PixelsHead": (("", "gather_input_replicated"), ("*", "replicated")),
    "ClassifierHead": (("", "gather_input_replicated"), ("*", "replicated"), ("pool.*", "replicated")),
    "PatchEmbedding": (("", "split_output"), ("projection", "sequence_parallel")),
    "Discriminator": (("dense", "sequence_parallel"), ("verdict", "gather_output_replicated")),
    "FutureHead": (("final_norm", "sequence_parallel"),),
    "Stack": NORM,
    "PyramidStack": NORM,
    "PatchMerging": (
        ("", "gather_input"),
        ("norm", "replicated_partial_grad"),
        ("reduction", "rowwise"),
        ("norm_out", "sequence_parallel"),
    ),
    "TwoStreamStack": (*NORM, ("query", "split_output")),
    "EncoderDecoder": (("memory", "gather_output"),),
    "FeatureHead": (("", "gather_input_replicated"), ("*", "replicated"), ("pool.*", "replicated")),
    "Temperature": (("", "replicated"),),
    "MaskedAutoencoder": (("memory", "gather_output_for_tokens"),),
    "VisibleTokens": (
        ("", "split_output"),
        ("projection", "sequence_parallel"),
        ("positions", "sequence_parallel"),
    ),
    "Connector": (("w_in", "sequence_parallel"), ("w_out", "sequence_parallel")),
    "VisionLanguage": (("image_vectors", "gather_output_for_tokens"),),
    "PixelHead": (("", "gather_input_replicated"), ("*", "replicated")),
}
"""Class → modules in it ("" for itself) and how they are cut."""


def module_cuts(model: nn.Module, parallel: ParallelConfig) -> dict[str, ModuleCut]:
    """Module path → how its tensors are cut, for each that a row speaks of or that owns tensors."""
    spoken: dict[nn.Module, str] = {}
    for owner in model.modules():
        for pattern, kind in _rows(type(owner)):
            for inner, module in owner.named_modules():
                if _matches(inner.split(".") if inner else [], pattern.split(".") if pattern else []):
                    spoken.setdefault(module, kind)
    cuts = {}
    for path, module in model.named_modules():
        adapted = path.rpartition(".lora.")
        if adapted[1] and model.get_submodule(adapted[0]) in spoken:
            cuts[path] = _fitted(
                _of_adapter(spoken[model.get_submodule(adapted[0])], adapted[2]), module, parallel
            )
        elif module in spoken:
            cuts[path] = _fitted(spoken[module], module, parallel)
        elif next(_own_tensors(module), None) is not None:
            cuts[path] = ModuleCut()
    return cuts


def _matches(names: list[str], patterns: list[str]) -> bool:
    """Whether segments match one by one, `**` written out as any number of `*`."""
    if "**" in patterns:
        at = patterns.index("**")
        return any(
            _matches(names, [*patterns[:at], *["*"] * times, *patterns[at + 1 :]])
            for times in range(len(names) + 1)
        )
    return len(names) == len(patterns) and all(map(fnmatchcase, names, patterns))


def _of_adapter(kind: str, part: str) -> str:
    """How a part of a low-rank adapter is cut: beside a column-cut matrix B is, beside a row-cut one A is."""
    kinds = {
        ("colwise", "a"): "replicated_partial_grad",
        ("rowwise", "a"): "input_features",
        ("rowwise", "b"): "replicated_partial_grad",
    }
    on_tokens = kind in ("split_output", "gather_output_replicated")
    return kinds.get((kind, part), "sequence_parallel" if on_tokens else kind)


def silent(model: nn.Module) -> str | None:
    """Name of a plugin's style that doesn't say what it sends."""
    for owner in model.modules():
        for _, kind in _rows(type(owner)):
            if kind not in KINDS and promised(kind).communication is None:
                return kind
    return None


def _rows(kind: type) -> Rows:
    for base in kind.__mro__:
        if base.__module__.startswith("megatfm.") and base.__name__ in ROWS:
            return ROWS[base.__name__]
        if "tp_plan" in vars(base):
            rows: Rows = vars(base)["tp_plan"]
            return rows
    return ()


def _own_tensors(module: nn.Module) -> Iterator[object]:
    yield from module.parameters(recurse=False)
    yield from module.buffers(recurse=False)


def _fitted(kind: str, module: nn.Module, parallel: ParallelConfig) -> ModuleCut:
    """Fewer key heads than ranks are whole on each; experts are cut as `parallel.expert_tp` says."""
    parts = parallel.tp
    if kind not in KINDS:
        style = promised(kind)
        return ModuleCut(style.dim, style.gradient, style.communication, style.dims)
    if parts > 1 and (kind, parallel.expert_tp) in OTHERWISE:
        return OTHERWISE[kind, parallel.expert_tp]
    heads = getattr(module, "heads", None)
    if kind == "colwise" and heads and heads % parts and parts % heads == 0:
        return KINDS["replicated_kv_heads"]
    return replace(KINDS[kind])


def is_a(module: nn.Module, name: str) -> bool:
    """Whether a module's class, or one that it is derived from, is megatfm's and has this name."""
    return any(
        kind.__name__ == name and kind.__module__.startswith("megatfm.") for kind in type(module).__mro__
    )


def block_paths(model: nn.Module) -> list[str]:
    """Paths of the layers of all stacks, which are gathered and recomputed one at a time."""
    return [
        path for path, _ in model.named_modules() if path.rpartition(".")[0].rpartition(".")[2] == "layers"
    ]
