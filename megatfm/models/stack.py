"""Embedding, blocks and final norm: what encoders and decoders have in common."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megatfm.config import ModelConfig
from megatfm.errors import UsageError
from megatfm.layers import initialisation
from megatfm.layers.attention import KVCache
from megatfm.layers.attention.linformer import layerwise_sketch, shares_sketch
from megatfm.layers.block import Block
from megatfm.layers.embedding import Embedding
from megatfm.layers.initialisation import initialiser
from megatfm.layers.norm import make_norm
from megatfm.layers.part import Part
from megatfm.layers.position import POSITIONS
from megatfm.layers.sequence import SequenceMetadata
from megatfm.models.steps import Field, ForwardPass, ModelStep, OfRow

# B batch, T tokens, S tokens of the memory, D model width


class Stack(nn.Module):
    """Tokens to hidden vectors. kind: whose depth and initial weights it has; embedding: one made by another stack."""

    plan = (("norm", "sequence"),)

    context = "alone"

    def __init__(
        self,
        config: ModelConfig,
        kind: initialisation.Stack,
        *,
        cross: bool = False,
        embedding: Embedding | None = None,
    ) -> None:
        super().__init__()
        self.d_model = config.d_model
        self.embedding = embedding or Embedding(config, kind)
        self.reads = self.embedding.reads
        n_layers = initialisation.depth(config, kind)
        distinct = config.distinct_layers or n_layers
        self.layers = nn.ModuleDict({str(i): Block(config, kind, i, cross=cross) for i in range(distinct)})
        self.order = [str(i * distinct // n_layers) for i in range(n_layers)]
        self.skip_rates = [config.drop_path * i / max(n_layers - 1, 1) for i in range(n_layers)]
        bias = POSITIONS.get(config.position.name).bias
        self.position = bias(config, initialiser(config, kind)) if bias else None
        self.biased = [_reads_bias(config, depth) for depth in range(n_layers)]
        self.sketched = [kind == "encoder" and shares_sketch(config.at(depth)) for depth in range(n_layers)]
        self.sketch = layerwise_sketch(config, self.sketched, initialiser(config, kind))
        self.norm = make_norm(config) if config.norm.ends_stack else None
        self.causal = kind == "decoder"

    def steps(self, path: str, reads: "StackInputs") -> Iterator[ModelStep]:
        """Embedding, blocks and final norm, one after another. path: the stack's own."""
        made = {reads.writes: Field(f"{reads.side}positions", self.d_model)}
        carried = () if reads.carried is None else (reads.carried,)
        tokens = f"{reads.side}tokens"
        position = () if self.position is None else (f"{path}.position",)
        yield ModelStep(
            f"{path}.embedding", self.embedding, partial(self._into_embedding, reads),
            (f"{path}.embedding",), carried, made, tokens,
        )  # fmt: skip
        for depth, name in enumerate(self.order):
            sketch = (f"{path}.sketch",) if self.sketched[depth] else ()
            yield ModelStep(
                f"{path}.layers.{depth}", self.layers[name], partial(self._into_block, reads, depth),
                (f"{path}.layers.{name}", *position, *sketch, *reads.carried_memory),
                (reads.writes, *reads.carried_memory), made, tokens,
            )  # fmt: skip
        if self.norm is not None:
            yield ModelStep(
                f"{path}.norm", self.norm, partial(self._into_norm, reads),
                (f"{path}.norm",), (reads.writes,), made, tokens,
            )  # fmt: skip

    def _into_embedding(self, reads: "StackInputs", batch: ForwardPass) -> Sequence[Any]:
        given = batch.carry[reads.carried] if reads.carried else batch[reads.side + self.reads]
        return given, reads.sequence(batch), batch.get("segments")

    def _into_block(self, reads: "StackInputs", depth: int, batch: ForwardPass) -> Sequence[Any]:
        sequence, block = reads.sequence(batch), self.layers[self.order[depth]]
        compiled = len(self.order) if block._compiled_call_impl is not None else 0
        position, causal = self.position if self.biased[depth] else None, self.causal
        shared = None if position is None else batch.once(position, lambda: position(sequence, causal))
        if self.sketch is not None and self.sketched[depth]:
            shared = self.sketch()
        return (
            batch.carry[reads.writes],
            sequence.at_layer(depth, self.skip_rates[depth], of_compiled=compiled),
            shared,
            None if reads.memory is None else reads.memory(batch),
            None if batch.cache is None else batch.cache.layers[depth],
        )

    def _into_norm(self, reads: "StackInputs", batch: ForwardPass) -> Sequence[Any]:
        return (batch.carry[reads.writes],)


def _reads_bias(config: ModelConfig, depth: int) -> bool:
    """Whether the block at a depth reads what the stack's position encoding shares.

    Raises UsageError for blocks that would need a stack's encoding of their own.
    """
    position = config.at(depth).position
    made = POSITIONS.get(position.name)
    if position != config.position and (made.embedding or made.bias):
        raise UsageError(
            f"model.block.{config.kind(depth)}.position: {position.name} is made once for all blocks of a stack: set "
            "it as model.position, and position.name = 'none' for blocks without it"
        )
    return made.bias is not None


@dataclass(frozen=True)
class StackInputs:
    """Where a stack finds what it reads, and where it leaves the hidden vectors.

    sequence, memory: methods of the model. side: prefix of the inputs. carried: the part of the carry that an earlier
    step made of what the embedding reads, instead of that. writes: a part of the carry. carried_memory: the name of the
    memory's part of the carry, which is that of the module that it goes through too.
    """

    sequence: Callable[[ForwardPass], SequenceMetadata]
    side: str = ""
    carried: str | None = None
    writes: str = "hidden"
    memory: Callable[[ForwardPass], Tensor | None] | None = None
    carried_memory: tuple[str, ...] = ()


def sequence_metadata(
    like_BT: Tensor,
    positions_BT: Tensor | None,
    documents_BT: Tensor | None,
    *,
    prefix_BT: Tensor | None = None,
    rng_keys_B: Tensor | None = None,
    cache: KVCache | None = None,
    memory: SequenceMetadata | None = None,
    of_row: OfRow | None = None,
    starts: Tensor | None = None,
) -> SequenceMetadata:
    """Make the metadata. Without positions every row is one document, as long as `like` [B, T, …], and goes on
    where the cache ends. of_row: of the whole rows, where these are some of their tokens. starts: as there."""
    if of_row is not None:
        row = SequenceMetadata(of_row.positions, of_row.documents, prefix=of_row.prefix, rng_keys=rng_keys_B)
        return _with_tokens(Part(row, of_row.places, memory), like_BT)
    past = cache.length if cache else 0
    if positions_BT is None:
        rows, length = like_BT.shape[:2]
        positions_BT = torch.arange(past, past + length, device=like_BT.device).expand(rows, length)
    past_documents = None
    if cache is not None and (documents_BT is not None or cache.documents is not None):
        documents_BT = torch.zeros_like(positions_BT) if documents_BT is None else documents_BT
        past_documents = cache.documents
        cache.documents = (
            documents_BT if past_documents is None else torch.cat([past_documents, documents_BT], 1)
        )
    made = SequenceMetadata(
        positions_BT,
        documents_BT,
        prefix=prefix_BT,
        rng_keys=rng_keys_B,
        past=past,
        past_documents=past_documents,
        memory=memory,
        starts=starts,
    )
    return _with_tokens(made, like_BT)


def _with_tokens(made: SequenceMetadata, like_BT: Tensor) -> SequenceMetadata:
    if like_BT.dim() == 2 and not like_BT.dtype.is_floating_point:
        made.tokens = like_BT
    return made
