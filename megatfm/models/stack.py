"""The stack of embedding, blocks and final norm that families share."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Self

from torch import Tensor, nn

from megatfm.config import ModelConfig
from megatfm.errors import UsageError
from megatfm.layers import initialisation
from megatfm.layers.attention.kv_cache import KVCache
from megatfm.layers.attention.linformer import make_layerwise_projection, shares_projection
from megatfm.layers.block import Block
from megatfm.layers.embedding import InputEmbedding
from megatfm.layers.initialisation import make_initialiser
from megatfm.layers.loss_terms import BlockOutput, add_by_name
from megatfm.layers.norm import make_norm
from megatfm.layers.position import POSITIONS
from megatfm.layers.sequence import SequenceMetadata
from megatfm.models.base import make_stack_view
from megatfm.split_points import CarrySpec, SplitPoint

# B batch, T tokens, S tokens of the memory, D model width


class Stack(nn.Module):
    """Embedding, blocks and final norm: tokens to hidden vectors.

    kind: determines depth, initial weights and causality. cross: blocks attend to an encoder's output. embedding: None:
    a new one.
    """

    tp_plan = (("norm", "sequence_parallel"),)

    cp_plan = "local"

    def __init__(
        self,
        config: ModelConfig,
        kind: initialisation.StackKind,
        *,
        cross: bool = False,
        embedding: InputEmbedding | None = None,
    ) -> None:
        super().__init__()
        self.d_model = config.d_model
        embedding = embedding or InputEmbedding(config, kind)
        self.embedding: InputEmbedding | None = embedding
        self.input_field = embedding.input_field
        n_layers = initialisation.count_blocks(config, kind)
        distinct = config.distinct_layers or n_layers
        self.layers = nn.ModuleDict({str(i): Block(config, kind, i, cross=cross) for i in range(distinct)})
        self.layer_of_depth = [str(i * distinct // n_layers) for i in range(n_layers)]
        self.skip_rates = [config.drop_path * i / max(n_layers - 1, 1) for i in range(n_layers)]
        bias = POSITIONS.get(config.position.name).score_bias
        self.position = bias(config, make_initialiser(config, kind)) if bias else None
        self.has_position_bias = [has_position_bias(config, depth) for depth in range(n_layers)]
        self.has_shared_projection = [
            kind == "encoder" and shares_projection(config.layer_config(depth)) for depth in range(n_layers)
        ]
        self.sketch = make_layerwise_projection(config, self.has_shared_projection, make_initialiser(config, kind))
        self.norm = make_norm(config) if config.norm.has_final_norm else None
        self.causal = kind == "decoder"
        self.depths: Sequence[int] = range(n_layers)

    def forward(
        self,
        inputs: Tensor | None,
        sequence: SequenceMetadata,
        *,
        segments: Tensor | None = None,
        hidden: Tensor | None = None,
        memory: Tensor | None = None,
        cache: KVCache | None = None,
        layers: list[Tensor] | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return hidden vectors [B, T, D] and the blocks' auxiliary losses.

        inputs: the field that the embedding reads. hidden: output of the previous pipeline stage, for a stage without
        embedding. memory: [B, S, D], the encoder's output. layers: list to which the embeddings and each block's output
        are appended.
        """
        losses: dict[str, Tensor] = {}
        x_BTD: Any = hidden if self.embedding is None else self.embedding(inputs, sequence, segments)
        if layers is not None:
            layers.append(x_BTD)
        bias = None
        if self.position is not None and any(self.has_position_bias[depth] for depth in self.depths):
            bias = self.position(sequence, self.causal)
        for depth in self.depths:
            block = self.layers[self.layer_of_depth[depth]]
            n_compiled = len(self.layer_of_depth) if block._compiled_call_impl is not None else 0
            at_layer = sequence.at_layer(depth, self.skip_rates[depth], n_compiled_layers=n_compiled)
            shared = bias if self.has_position_bias[depth] else None
            if self.sketch is not None and self.has_shared_projection[depth]:
                shared = self.sketch()
            layer_cache = None if cache is None else cache.layers[depth]
            x_BTD, losses = unpack(block, block(x_BTD, at_layer, shared, memory, layer_cache), losses)
            if layers is not None:
                layers.append(x_BTD)
        if self.norm is not None:
            x_BTD = self.norm(x_BTD)
        # Last, so that a pass that fails before its first layer does not change the cache.
        if cache is not None:
            ids = sequence.document_ids()
            cache.documents = None if ids is None else ids[1]
        return x_BTD, losses

    def stage(self, names: Collection[str]) -> Self | None:
        """Return a view that runs these split points only (names relative to the stack); None if there are none."""
        return make_stack_view(self, names)

    def split_points(
        self,
        path: str,
        carry: str = "hidden",
        *,
        side: str = "",
        reads: Sequence[str] = (),
        embedding_modules: Sequence[str] = (),
        memory: Sequence[str] = (),
        memory_modules: Sequence[str] = (),
    ) -> list[SplitPoint]:
        """Return the split points of embedding, blocks and final norm.

        path: module path of the stack. carry: name of the hidden vectors between stages. side: prefix of the batch
        fields. reads: carried tensors that the embedding reads instead of the batch's field. embedding_modules: modules
        that process them. memory, memory_modules: names of the encoder's output, and modules that process it.
        """
        writes, tokens = {carry: CarrySpec(f"{side}positions", self.d_model)}, f"{side}tokens"
        modules = (*embedding_modules, f"{path}.embedding")
        points = [SplitPoint(f"{path}.embedding", modules, reads, writes, tokens)]
        for depth, name in enumerate(self.layer_of_depth):
            shared = [] if self.position is None else [f"{path}.position"]
            shared += [f"{path}.sketch"] if self.has_shared_projection[depth] else []
            modules = (f"{path}.layers.{name}", *shared, *memory_modules)
            points.append(SplitPoint(f"{path}.layers.{depth}", modules, (carry, *memory), writes, tokens))
        if self.norm is not None:
            points.append(SplitPoint(f"{path}.norm", (f"{path}.norm",), (carry,), writes, tokens))
        return points


def has_position_bias(config: ModelConfig, depth: int) -> bool:
    """Return whether the block at this depth uses the stack's shared position biases.

    Raises UsageError for a layer type with another encoding that only a whole stack can have.
    """
    position = config.layer_config(depth).position
    encoding = POSITIONS.get(position.name)
    if position != config.position and (encoding.absolute or encoding.score_bias):
        raise UsageError(
            f"model.layer_type.{config.get_layer_type(depth)}.position: {position.name} is shared by all blocks "
            "of a stack: set it as model.position, and position.name = 'none' for blocks without it"
        )
    return encoding.score_bias is not None


def unpack(block: nn.Module, result: Any, losses: Mapping[str, Tensor]) -> tuple[Any, dict[str, Tensor]]:
    """Return a block's output, and `losses` with its auxiliary losses added.

    In training, also passes its counts to `accumulate_counts` of its sublayers.
    """
    if not isinstance(result, BlockOutput):
        return result, dict(losses)
    if block.training:
        for path, counts in result.counts.items():
            block.get_submodule(path).accumulate_counts(counts)  # type: ignore[operator]
    return result.y, add_by_name(losses, result.losses)
