"""How tensor parallelism cuts modules and what that sends, by class: a table of its own, beside the classes' plans.

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

    gradient: of whole tensors. "sequence": a partial one with sequence parallelism; "partial": always a partial one.
    sends: words such as "input gathered", from which bytes follow; None: not known.
    """

    dim: int | None = None
    gradient: Literal["whole", "sequence", "partial"] = "whole"
    sends: tuple[str, ...] | None = ()
    dims: Mapping[str, int] | None = field(default=None, hash=False)
    are_experts: bool = False

    def cut_dim(self, key: str, dims: int) -> int | None:
        """Dim that is cut of a tensor with so many dims; None where it is whole."""
        dim = self.dim if self.dims is None else self.dims.get(key)
        return None if dim is None or not -dims <= dim < dims else dim % dims


GATHERED, SUMMED, WHOLE_OUTPUT = ("input gathered",), ("output summed",), ("output whole",)
OWN_OUTPUT = ModuleCut(gradient="sequence")
KINDS: Mapping[str, ModuleCut] = {
    "column": ModuleCut(dim=0),
    "row": ModuleCut(dim=1, gradient="sequence", sends=SUMMED),
    "sliced heads": ModuleCut(gradient="partial"),
    "last dim": ModuleCut(dim=-1),
    "shared by heads": ModuleCut(gradient="partial"),
    "enter": ModuleCut(sends=GATHERED),
    "enter, heads": ModuleCut(dim=-2, sends=GATHERED),
    "enter output": ModuleCut(sends=("output gathered",)),
    "sequence": ModuleCut(gradient="sequence"),
    "sequence output": OWN_OUTPUT,
    "sequence, gathered": ModuleCut(gradient="sequence", sends=WHOLE_OUTPUT),
    "sequence sum": ModuleCut(sends=("loss summed",)),
    "token sum": ModuleCut(sends=("loss summed",)),
    "summed over parts": ModuleCut(sends=("parts summed",)),
    "sums of rows": ModuleCut(),
    "partial output": ModuleCut(sends=SUMMED),
    "whole": ModuleCut(),
    "whole input": ModuleCut(sends=("input whole",)),
    "vocabulary embedding": ModuleCut(dim=0, sends=SUMMED),
    "vocabulary head": ModuleCut(dim=0, sends=("input gathered", "loss over the vocabulary")),
    "keys of own tokens": ModuleCut(),
    "keys of own part": ModuleCut(),
    "experts": ModuleCut(dim=0, are_experts=True),
    "enter experts": ModuleCut(sends=GATHERED),
    "leave experts": ModuleCut(sends=SUMMED),
    "taken choices": OWN_OUTPUT,
    "whole choices": ModuleCut(),
    "own choices": ModuleCut(),
}
"""Ways to cut a module, by the words that plans use."""

BY_CHANNELS = {"w_gate": 1, "w_up": 1, "b_gate": 1, "b_up": 1, "w_down": 2}
OTHERWISE: Mapping[tuple[str, str], ModuleCut] = {
    ("experts", "channels"): ModuleCut(dims=BY_CHANNELS, gradient="partial", are_experts=True),
    ("experts", "folded"): ModuleCut(are_experts=True),
    ("enter experts", "folded"): ModuleCut(),
    ("leave experts", "folded"): ModuleCut(),
    ("taken choices", "folded"): ModuleCut(),
    ("whole choices", "folded"): ModuleCut(gradient="sequence", sends=WHOLE_OUTPUT),
    ("own choices", "folded"): OWN_OUTPUT,
}
"""The same under other values of `parallel.expert_tp` than "by_expert"."""

Rows = tuple[tuple[str, str], ...]

QKV: Rows = (("", "enter"), ("w[qkv]", "column"), ("wo", "row"))
NORM: Rows = (("norm", "sequence"),)
PER_HEAD: Rows = (("", "last dim"),)
SHARED: Rows = (("", "shared by heads"),)
ROWS: Mapping[str, Rows] = {
    "HeadsAttention": (*QKV, ("[qk]_norm", "shared by heads")),
    "LatentAttention": (
        *QKV,
        *((name, "shared by heads") for name in ("wq_down", "q_norm", "wkv_down", "kv_norm", "wk_rope")),
    ),
    "LinformerAttention": QKV,
    "CompressedAttention": QKV,
    "DisentangledAttention": (*QKV, ("w[qk]_position", "column")),
    "DisentangledSharedAttention": QKV,
    "LongformerAttention": (*QKV, ("w[qkv]_global", "column")),
    "TwoStreamAttention": (
        ("", "enter, heads"),
        ("content", "enter output"),
        ("w[qkv]", "column"),
        ("wk_position", "column"),
        ("wo", "row"),
    ),
    "Sinks": PER_HEAD,
    "FFN": (
        ("", "enter"),
        ("w_gate", "column"),
        ("w_up", "column"),
        ("w_down", "row"),
    ),
    "MoE": (
        ("", "sequence"),
        ("router", "sequence"),
        ("real", "sequence output"),
        ("counted", "sequence sum"),
        ("total", "sequence sum"),
    ),
    "Experts": (
        ("", "experts"),
        ("gathered", "enter experts"),
        ("whole", "whole choices"),
        ("own", "own choices"),
        ("taken", "taken choices"),
        ("summed", "leave experts"),
    ),
    "ExpertChoiceRouter": (("whole", "sequence, gathered"), ("own", "sequence output")),
    "TokenSum": (("", "token sum"),),
    "Convolution": PER_HEAD,
    "SequenceProjection": SHARED,
    "PerHeadSequenceProjection": PER_HEAD,
    "Alibi": PER_HEAD,
    "RelativeBias": PER_HEAD,
    "ShawCore": SHARED,
    "RelativePositionTable": (("table", "shared by heads"),),
    "BucketedPositionTable": (("table", "shared by heads"), ("norm", "shared by heads")),
    "ShardedRMSNorm": (*PER_HEAD, ("total", "summed over parts")),
    "PreNorm": NORM,
    "PostNorm": NORM,
    "DeepNorm": NORM,
    "SandwichNorm": (*NORM, ("norm_out", "sequence")),
    "LMHead": (("", "vocabulary head"),),
    "SpanBoundaryHead": (
        ("", "vocabulary head"),
        ("positions", "shared by heads"),
        ("dense[12]", "shared by heads"),
        ("norm[12]", "shared by heads"),
    ),
    "InputEmbedding": (
        ("tokens", "vocabulary embedding"),
        ("positions", "sequence output"),
        ("segments", "sequence output"),
        ("norm", "sequence"),
        ("projection", "sequence"),
    ),
    "PredictionHeadTransform": (("dense", "shared by heads"), ("norm", "shared by heads")),
    "SentenceHead": (("", "whole input"), ("*", "whole")),
    "Discriminator": (("dense", "sequence"), ("verdict", "sequence, gathered")),
    "FutureHead": (("final_norm", "sequence"),),
    "Stack": NORM,
    "TwoStreamStack": (*NORM, ("query", "sequence output")),
    "EncoderDecoder": (("memory", "enter output"),),
}
"""Class → modules in it ("" for itself) and how they are cut."""


def module_cuts(model: nn.Module, parallel: ParallelConfig) -> dict[str, ModuleCut]:
    """Module path → how its tensors are cut, for each that a row speaks of or that owns tensors."""
    spoken: dict[nn.Module, str] = {}
    for owner in model.modules():
        for pattern, kind in _rows(type(owner)):
            for inner, module in owner.named_modules():
                if bool(inner) == bool(pattern) and fnmatchcase(inner, pattern):
                    spoken.setdefault(module, kind)
    found = {}
    for path, module in model.named_modules():
        if module in spoken:
            found[path] = _fitted(spoken[module], module, parallel)
        elif next(_own_tensors(module), None) is not None:
            found[path] = ModuleCut()
    return found


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
    if kind == "column" and heads and heads % parts and parts % heads == 0:
        return KINDS["sliced heads"]
    return replace(KINDS[kind])
