"""Fields of a batch: which of them a model reads, and the sequence metadata that they make."""

from collections.abc import Collection, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from megatfm.config import ModelConfig, PatchEmbeddingConfig
from megatfm.errors import MegatfmError
from megatfm.layers.attention.kv_cache import KVCache
from megatfm.layers.sequence import SequenceMetadata
from megatfm.layers.sequence_shard import SequenceShard
from megatfm.registry import did_you_mean

# B batch, T tokens, S tokens of full rows

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
