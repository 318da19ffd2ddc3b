"""Base class of model families: the batch fields that one reads, the sequence metadata that they make, its additional
heads, and its pipeline stages."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, Self, TypeVar

import torch
from torch import Tensor, nn

from megatfm.config import ModelConfig, PatchEmbeddingConfig
from megatfm.errors import MegatfmError
from megatfm.layers.attention.kv_cache import KVCache
from megatfm.layers.linear import Embedding
from megatfm.layers.loss_terms import add_by_name
from megatfm.layers.output_head import HEADS
from megatfm.layers.sequence import SequenceMetadata
from megatfm.layers.sequence_views import SequenceShard
from megatfm.registry import Registry, did_you_mean
from megatfm.split_points import SplitPoint

# B batch, T tokens, S tokens of full rows, or of the encoder, D model width, V vocabulary, C classes

OTHER_NAMES = {
    "input_ids": "tokens", "decoder_input_ids": "tokens", "labels": "targets", "position_ids": "positions",
    "token_type_ids": "segments", "attention_mask": "documents", "past_key_values": "cache",
}  # fmt: skip
"""transformers' names of batch fields → megatfm's."""


def require_field(batch: Mapping[str, Tensor], name: str) -> Tensor:
    """Return a field of the batch. Raises TypeError if it is missing."""
    if name not in batch:
        raise TypeError(f"the model needs {name}")
    return batch[name]


def list_target_fields(config: ModelConfig) -> tuple[str, ...]:
    """Return the target fields of the language model head."""
    return () if config.lm_head.name == "none" else ("targets",)


def list_sequence_fields(config: ModelConfig) -> tuple[str, ...]:
    """Return the metadata fields of a sequence: positions, documents, cu_seqlens, and, if the embedding uses them,
    segments, grid and masked."""
    segments = ["segments"] if config.embedding.n_segments else []
    grid = ["grid"] if isinstance(config.embedding, PatchEmbeddingConfig) else []
    masked = ["masked"] if getattr(config.embedding, "mask_token", False) else []
    return ("positions", "documents", "cu_seqlens", *segments, *grid, *masked)


def get_side_prefix(field: str) -> str:
    """Return the prefix of a field's name: "encoder_" for the encoder's fields in two-sided models, else ""."""
    return "encoder_" if field.startswith("encoder_") else ""


def list_accepted_fields(known_fields: Collection[str]) -> frozenset[str]:
    """Return the fields that a model accepts that reads the known ones: these, random keys, and context parallelism's
    (full rows and token indices)."""
    sides = {get_side_prefix(name) for name in known_fields}
    full = {f"{get_side_prefix(name)}full_row_{name.removeprefix(get_side_prefix(name))}" for name in known_fields}
    return frozenset({*known_fields, *full, *(f"{side}token_indices" for side in sides), "keys"})


def explain_unknown_field(name: str, accepted: Collection[str], family: str) -> str:
    """Return the error message for a field that a model of this family does not accept."""
    internal = ("full_row_", "token_indices")  # context parallelism's
    names = [field for field in sorted(accepted) if not any(word in field for word in internal)]
    hint = did_you_mean(name, names)
    if (suggestion := OTHER_NAMES.get(name, "")) in accepted:
        hint = f" (did you mean {suggestion!r}?)"
    return (
        f"a model of model.family = {family!r} does not read {name!r}{hint}; this one reads {', '.join(names)}: leave "
        f"{name!r} out"
    )


class FullRow(NamedTuple):
    """Metadata of full rows, for a rank that holds a shard of their tokens (context parallelism).

    token_indices: int64 [T], this rank's tokens. The other fields cover all tokens of the rows, [B, S] or [B, S, 4].
    """

    token_indices: Tensor
    positions: Tensor
    documents: Tensor | None
    prefix: Tensor | None
    grid: Tensor | None

    @classmethod
    def from_batch(cls, batch: Mapping[str, Tensor], side: str = "") -> "FullRow | None":
        """Return the full rows of one side of a batch; None if the batch has all tokens of its rows."""
        if f"{side}token_indices" not in batch:
            return None
        optional = (batch.get(f"{side}full_row_{name}") for name in ("documents", "prefix", "grid"))
        return cls(batch[f"{side}token_indices"], require_field(batch, f"{side}full_row_positions"), *optional)


def make_sequence(
    batch: Mapping[str, Tensor],
    input_field: str,
    side: str = "",
    *,
    keys: Tensor | None = None,
    cache: KVCache | None = None,
    memory: SequenceMetadata | None = None,
) -> SequenceMetadata:
    """Make the sequence metadata of one side of a batch.

    input_field: the field that the embedding takes, [B, T, …]. side: prefix of the side's fields. Without the field
    `positions`, each row is one document that continues after the cache's tokens. keys: random keys of the rows.
    """
    if side and keys is not None:
        keys = ~keys  # the stacks of both sides count layers from 0, so they need different ones
    inputs_BT = require_field(batch, side + input_field)
    full_row = FullRow.from_batch(batch, side)
    positions_BT, documents_BT = batch.get(f"{side}positions"), batch.get(f"{side}documents")
    if full_row is not None:
        full = SequenceMetadata(
            full_row.positions, full_row.documents, prefix=full_row.prefix, rng_keys=keys, grid=full_row.grid
        )
        shard = SequenceShard(full, full_row.token_indices, memory)
        shard.masked = batch.get(f"{side}masked")
        return _with_tokens(shard, inputs_BT)
    past = _get_length(cache) if cache else 0
    if positions_BT is None:
        rows, length = inputs_BT.shape[:2]
        positions_BT = torch.arange(past, past + length, device=inputs_BT.device).expand(rows, length)
    past_documents = None if cache is None else cache.documents
    if past_documents is not None and documents_BT is None:
        documents_BT = torch.zeros_like(positions_BT)
    sequence = SequenceMetadata(
        positions_BT,
        documents_BT,
        prefix=batch.get(f"{side}prefix"),
        rng_keys=keys,
        past=past,
        past_documents=past_documents,
        memory=memory,
        cu_seqlens=batch.get(f"{side}cu_seqlens"),
        grid=batch.get(f"{side}grid"),
    )
    sequence.masked = batch.get(f"{side}masked")
    return _with_tokens(sequence, inputs_BT)


def _get_length(cache: KVCache) -> int:
    """Return the number of tokens in a cache. Raises MegatfmError if an earlier forward pass failed midway."""
    lengths = {layer.length for layer in cache.layers}
    if len(lengths) > 1:
        raise MegatfmError(
            f"an earlier forward pass with this KVCache failed midway: some layers have {min(lengths)} tokens, "
            f"others {max(lengths)}. Make a new KVCache, and pass all tokens again"
        )
    return cache.length


def _with_tokens(sequence: SequenceMetadata, inputs_BT: Tensor) -> SequenceMetadata:
    if inputs_BT.dim() == 2 and not inputs_BT.dtype.is_floating_point:
        sequence.tokens = inputs_BT
    return sequence


M = TypeVar("M", bound=nn.Module)

MODELS: Registry[Callable[[ModelConfig], nn.Module]] = Registry("model family (model.family)")


class Output(NamedTuple):
    """The result of a forward pass; a tuple, because FSDP looks for tensors in tuples and in no other class."""

    hidden: Tensor
    """After the last norm, [B, T, D]; of the decoder in an encoder-decoder, of the discriminator in ELECTRA."""
    logits: Tensor | None = None
    """[B, T, V], if the batch has no targets of any head; of ELECTRA [B, T], the log-odds that a token was replaced."""
    losses: dict[str, Tensor] | None = None
    """Summed loss in nats of each term, if the batch has targets of a head."""
    predictions: dict[str, Tensor] | None = None
    """Predictions of `model.extra_heads` by name, if the batch has no targets of any head: of "sentence" logits [B, C],
    or [B, T, C] with `token = "all"`; of "span" [B, T, 2]; of "classifier" [images, C], in the order of rows."""
    carry: dict[str, Tensor] | None = None
    """Further hidden vectors that later pipeline stages read, by name, e.g. "encoder_hidden" [B, S, D]."""

    def carried(self) -> dict[str, Tensor]:
        """Return the tensors for later pipeline stages, by the keyword of their forward."""
        return {"hidden": self.hidden, **(self.carry or {})}


class Model(nn.Module):
    """Base class of model families. Subclasses define the modules, `split_points` and `forward`.

    Call `add_heads` and `accept` in the constructor, and `read` at the start of `forward`.
    """

    cp_plan = "local"

    split_points: Sequence[SplitPoint]
    stacks: Sequence[str] = ("encoder", "decoder")
    """Attributes that hold the model's stacks, which pipeline stages divide; a family may lack some."""
    head_split_point = "head"
    """Name of the split point that runs the model's own head."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.runs_head = True
        self.extra_heads: list[str] = []
        self.accepted: frozenset[str] = frozenset()
        self.target_fields: tuple[tuple[str, ...], ...] = (("targets",),)

    def add_heads(self, table: Embedding | None, config: ModelConfig | None = None) -> None:
        """Add the heads of `model.extra_heads` as submodules. table: the token embedding. config: that of the hidden
        vectors that heads read; None: the model's."""
        for name, section in self.config.extra_heads.items():
            self.add_module(name, HEADS.get(section.name)(config or self.config, section, table))
        self.extra_heads = list(self.config.extra_heads)

    def list_head_points(self, reads: str = "hidden") -> list[SplitPoint]:
        """Return the split points of the additional heads. reads: name of the carried vectors that heads read."""
        return [SplitPoint(name, (name,), (reads,)) for name in self.extra_heads]

    def accept(self, *fields: str, targets: Sequence[str] = ("targets",)) -> None:
        """Declare the batch fields that `forward` reads, besides those of additional heads and random keys.

        targets: fields of the model's own head. Each field is also accepted with the prefix "full_row_", which context
        parallelism uses.
        """
        head_fields = [tuple(getattr(self, name).input_fields) for name in self.extra_heads]
        self.target_fields = (*((name,) for name in targets), *head_fields)
        known_fields = {*fields, *(name for names in self.target_fields for name in names)}
        for name in self.extra_heads:
            known_fields |= {*getattr(getattr(self, name), "optional_fields", ())}
        self.accepted = list_accepted_fields(known_fields)

    def read(self, **fields: Tensor | None) -> dict[str, Tensor]:
        """Return the fields that are not None. Raises TypeError for a field that the model does not read."""
        batch = {name: field for name, field in fields.items() if field is not None}
        for name in batch.keys() - self.accepted:
            raise TypeError(explain_unknown_field(name, self.accepted, self.config.family))
        return batch

    def make_layer_list(self) -> list[Tensor] | None:
        """Return an empty list to collect the layers' outputs if a head reads several layers, else None."""
        return [] if any(getattr(getattr(self, name), "layers", ()) for name in self.extra_heads) else None

    def stage(self, names: Collection[str]) -> Self:
        """Return a view that runs these split points only, for a pipeline stage."""
        view = make_view(self)
        for path in self.stacks:
            stack: Any = getattr(self, path, None)
            if stack is not None:
                setattr(view, path, stack.stage(filter_names_below(path, names)))
        view.runs_head = self.head_split_point in names
        view.extra_heads = [name for name in self.extra_heads if name in names]
        return view

    def has_targets(self, batch: Mapping[str, Tensor]) -> bool:
        """Return whether the batch has targets of any head. If so, the model returns losses, otherwise predictions."""
        return any(all(name in batch for name in names) for names in self.target_fields)

    def output(
        self,
        batch: Mapping[str, Tensor],
        hidden_BTD: Any,
        losses: Mapping[str, Tensor],
        logits: Tensor | None = None,
        carry: Mapping[str, Tensor | None] | None = None,
        sequence: SequenceMetadata | None = None,
        layers: Sequence[Tensor] | None = None,
    ) -> Output:
        """Run the additional heads and return the output: losses if the batch has targets, else predictions.

        hidden_BTD: a tensor; None in a pipeline stage before it is computed. carry: see Output. sequence: for heads
        with `takes_sequence`. layers: see `make_layer_list`.
        """
        has_targets, predictions = self.has_targets(batch), dict[str, Tensor]()
        for name in self.extra_heads:
            head: Any = getattr(self, name)
            input_BTX = hidden_BTD
            if (depths := getattr(head, "layers", ())) and layers is not None:
                input_BTX = torch.cat([layers[depth] for depth in depths], -1)
            options: dict[str, Any] = {
                field: batch[field] for field in getattr(head, "optional_fields", ()) if field in batch
            }
            if getattr(head, "takes_sequence", False):
                options["sequence"] = sequence
            if all(field in batch for field in head.input_fields):
                fields = [batch[field] for field in head.input_fields]
                full_rows = [batch.get(f"full_row_{field}") for field in getattr(head, "full_row_fields", ())]
                result = head(input_BTX, *fields, *full_rows, **options)
                terms = result if isinstance(result, dict) else {str(getattr(head, "term", name)): result}
                losses = add_by_name(losses, terms)
            elif getattr(head, "predicts", False) and not has_targets:
                predictions[name] = head(input_BTX, **options)
        carry = {name: tensor for name, tensor in (carry or {}).items() if tensor is not None}
        losses_or_none = dict(losses) if losses and has_targets else None
        return Output(hidden_BTD, logits, losses_or_none, predictions or None, carry or None)  # type: ignore[arg-type]


def make_view(module: M) -> M:
    """Return a shallow copy of a module that shares parameters and submodules.

    Setting attributes of the view does not change the module. Call the view's `forward`: hooks stay with the module.
    """
    view = object.__new__(type(module))  # not copy.copy, which FSDP2's classes override
    vars(view).update(vars(module))
    vars(view)["_modules"] = dict(module._modules)
    vars(view).pop("forward", None)  # the pipeline may have replaced the model's
    return view


def make_stack_view(stack: M, names: Collection[str], modules: Sequence[str] = ("embedding", "norm")) -> M | None:
    """Return a view of a stack that runs these split points only (names relative to the stack); None without any.

    modules: attributes that the view lacks unless their split point is among the names.
    """
    view: Any = make_view(stack)
    view.depths = [depth for depth in view.depths if f"layers.{depth}" in names]
    for name in modules:
        if name not in names:
            setattr(view, name, None)
    return view if names else None


def filter_names_below(path: str, names: Collection[str]) -> set[str]:
    """Return the names below a module's path, relative to it."""
    return {name.removeprefix(f"{path}.") for name in names if name.startswith(f"{path}.")}
