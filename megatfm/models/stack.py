"""Embedding, blocks and final norm: what encoders and decoders have in common."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatfm.config import ModelConfig
from megatfm.layers import initialisation
from megatfm.layers.attention import KVCache
from megatfm.layers.block import Block
from megatfm.layers.embedding import Embedding
from megatfm.layers.initialisation import initialiser
from megatfm.layers.norm import make_norm
from megatfm.layers.position import POSITIONS
from megatfm.models.steps import Field, Pass, Step, Steps
from megatfm.ops.sequence import SequenceLayout, Sight

# B batch, T tokens, S tokens of the memory, D model width


class Stack(nn.Module):
    """Tokens to hidden vectors. kind: whose depth and initial weights it has; embedding: one made by another stack."""

    def __init__(
        self,
        config: ModelConfig,
        kind: initialisation.Stack,
        sight: Sight,
        *,
        cross: bool = False,
        embedding: Embedding | None = None,
    ) -> None:
        super().__init__()
        self.d_model = config.d_model
        self.embedding = embedding or Embedding(config, kind)
        n_layers = initialisation.depth(config, kind)
        distinct = config.distinct_layers or n_layers
        self.layers = nn.ModuleDict(
            {str(i): Block(config, kind, sight, cross=cross) for i in range(distinct)}
        )
        self.order = [str(i * distinct // n_layers) for i in range(n_layers)]
        self.skip_rates = [config.drop_path * i / max(n_layers - 1, 1) for i in range(n_layers)]
        bias = POSITIONS.get(config.position.name).bias
        self.position = bias(config, initialiser(config, kind)) if bias else None
        self.norm = make_norm(config) if config.norm.ends_stack else None
        self.sight: Sight = sight

    def forward(
        self,
        tokens_BT: Tensor,
        layout: SequenceLayout,
        *,
        segments_BT: Tensor | None = None,
        memory_BSD: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """[B, T, D]. memory: what cross-attention looks at; its layout is `layout.memory`."""
        reads = Reads(lambda _: tokens_BT, lambda _: layout, lambda _: segments_BT, lambda _: memory_BSD)
        return Steps(self.steps("", reads)).through(Pass({}, cache=cache)).carry["hidden"]

    def steps(
        self,
        path: str,
        reads: "Reads",
        *,
        writes: str = "hidden",
        tokens: str = "tokens",
        memory: Sequence[str] = (),
    ) -> Iterator[Step]:
        """Embedding, blocks and final norm, one after another. path: the stack's own, and a dot.

        writes: the part of the carry that holds the hidden vectors; tokens: the input that is as long as they are;
        memory: both the part of the carry and the module through which `reads` finds the memory.
        """
        made = {writes: Field(tokens, self.d_model)}

        def embed(batch: Pass) -> None:
            batch.carry[writes] = self.embedding(
                reads.tokens(batch), reads.layout(batch), reads.segments(batch)
            )

        def through(depth: int, name: str, skip_rate: float) -> Callable[[Pass], None]:
            def block(batch: Pass) -> None:
                layout = reads.layout(batch)
                bias = batch.once((path, "bias"), lambda: self._bias(layout))
                past = batch.cache.layers[depth] if batch.cache else None
                batch.carry[writes] = self.layers[name](
                    batch.carry[writes], layout.at_layer(depth, skip_rate), bias, reads.memory(batch), past
                )

            return block

        def finish(batch: Pass) -> None:
            batch.carry[writes] = self.norm(batch.carry[writes])  # type: ignore[misc]

        position = () if self.position is None else (f"{path}position",)
        yield Step(f"{path}embedding", embed, (f"{path}embedding",), reads.carried, made, tokens)
        for depth, (name, skip_rate) in enumerate(zip(self.order, self.skip_rates, strict=True)):
            yield Step(
                f"{path}layers.{depth}",
                through(depth, name, skip_rate),
                (f"{path}layers.{name}", *position, *memory),
                (writes, *memory),
                made,
                tokens,
            )
        if self.norm is not None:
            yield Step(f"{path}norm", finish, (f"{path}norm",), (writes,), made, tokens)

    def _bias(self, layout: SequenceLayout) -> Tensor | None:
        return None if self.position is None else self.position(layout, self.sight)


@dataclass(frozen=True)
class Reads:
    """Where a stack finds its tokens, their layout and segments, and the memory. carried: parts of the carry among
    them that the embedding reads."""

    tokens: Callable[[Pass], Tensor]
    layout: Callable[[Pass], SequenceLayout]
    segments: Callable[[Pass], Tensor | None] = lambda _: None
    memory: Callable[[Pass], Tensor | None] = lambda _: None
    carried: tuple[str, ...] = ()


def layout_of(
    tokens_BT: Tensor,
    positions_BT: Tensor | None,
    documents_BT: Tensor | None,
    *,
    prefix_BT: Tensor | None = None,
    keys_B: Tensor | None = None,
    cache: KVCache | None = None,
    memory: SequenceLayout | None = None,
) -> SequenceLayout:
    """The layout of a batch; without positions every row is one document, and goes on where the cache ends."""
    past = cache.length if cache else 0
    if positions_BT is None:
        positions_BT = torch.arange(past, past + tokens_BT.shape[1], device=tokens_BT.device).expand_as(
            tokens_BT
        )
    past_documents = None
    if cache is not None and (documents_BT is not None or cache.documents is not None):
        documents_BT = torch.zeros_like(tokens_BT) if documents_BT is None else documents_BT
        past_documents = cache.documents
        cache.documents = (
            documents_BT if past_documents is None else torch.cat([past_documents, documents_BT], 1)
        )
    return SequenceLayout(
        positions_BT,
        documents_BT,
        prefix=prefix_BT,
        keys=keys_B,
        past=past,
        past_documents=past_documents,
        memory=memory,
    )
