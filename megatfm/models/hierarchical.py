"""Hierarchical image models: stages of blocks with ever smaller maps and wider vectors (Swin: Liu et al. 2021)."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from math import prod
from typing import Any, Self

from torch import Tensor, nn

from megatfm.config import ModelConfig, PooledAttentionConfig, require_variant
from megatfm.config.stages import StagesConfig
from megatfm.errors import UsageError
from megatfm.layers.embedding import InputEmbedding
from megatfm.layers.norm import make_norm
from megatfm.layers.sequence_views import MapSequence, MapSize, find_map_size, take_columns
from megatfm.layers.stage_blocks import PatchMerging, PooledBlock, StageBlock
from megatfm.models.base import (
    MODELS,
    Model,
    Output,
    list_sequence_fields,
    make_sequence,
    make_stack_view,
    require_field,
)
from megatfm.models.stack import unpack
from megatfm.split_points import CarrySpec, SplitPoint

# B batch, T tokens of a row, S tokens of a row in the last stage, D width of the last stage


class PyramidStack(nn.Module):
    """Embedding, stages of blocks and final norm: patches to hidden vectors of the last stage.

    Blocks are numbered across stages. Patch merging follows each stage except the last, unless attention pools.
    """

    tp_plan = (("norm", "sequence_parallel"),)
    full_rows_reason = "stages merge or pool neighbouring patches, which a shard of a row may not hold"

    def __init__(self, config: ModelConfig, embedding: InputEmbedding) -> None:
        super().__init__()
        self.stages = require_stages(config)
        self.embedding: InputEmbedding | None = embedding
        configs = [config.stage_config(stage) for stage in range(len(self.stages.n_layers))]
        self.widths = [stage_config.d_model for stage_config in configs]
        self.stage_of = [stage for stage, layers in enumerate(self.stages.n_layers) for _ in range(layers)]
        self.pools = isinstance(config.attention, PooledAttentionConfig)
        blocks = make_pooled_blocks(config) if self.pools else make_plain_blocks(config)
        self.layers = nn.ModuleDict({str(depth): block for depth, block in enumerate(blocks)})
        self.merges = nn.ModuleDict()
        for stage, stage_config in enumerate(() if self.pools else configs[:-1]):
            self.merges[str(stage)] = PatchMerging(
                stage_config, norm=self.stages.merging_norm, follows_block=sum(self.stages.n_layers[: stage + 1]) - 1,
                tokens_per_patch=0.25**stage,
            )  # fmt: skip
        self.skip_rates = [config.drop_path * depth / max(config.n_layers - 1, 1) for depth in range(config.n_layers)]
        self.norm = make_norm(config, self.widths[-1]) if config.norm.has_final_norm else None
        self.depths: Sequence[int] = range(config.n_layers)

    def forward(
        self, inputs: Tensor | None, maps: list[MapSequence], hidden: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return hidden vectors [B, S, D] and the blocks' auxiliary losses. maps: metadata of each stage."""
        losses: dict[str, Tensor] = {}
        x: Any = hidden if self.embedding is None else self.embedding(inputs, maps[0])
        for depth in self.depths:
            stage, block = self.stage_of[depth], self.layers[str(depth)]
            n_compiled = len(self.layers) if block._compiled_call_impl is not None else 0
            at_layer = maps[stage].at_layer(depth, self.skip_rates[depth], n_compiled_layers=n_compiled)
            x, losses = unpack(block, block(x, at_layer), losses)
            if self._is_before_merge(depth):
                x = self.merges[str(stage)](x, maps[stage].size)
        return x if self.norm is None else self.norm(x), losses

    def _is_before_merge(self, depth: int) -> bool:
        """Return whether patch merging follows the block at this depth."""
        is_last = depth + 1 == len(self.stage_of)
        return not (self.pools or is_last) and self.stage_of[depth + 1] != self.stage_of[depth]

    def stage(self, names: Collection[str]) -> Self | None:
        """Return a view that runs these split points only (names relative to the stack); None if there are none."""
        return make_stack_view(self, names)

    def split_points(self, path: str) -> list[SplitPoint]:
        """Return the split points of embedding, blocks and final norm.

        Patch merging belongs to the block before it, so that pipeline stages send the smaller map.
        """
        points = [SplitPoint(f"{path}.embedding", (f"{path}.embedding",), (), self._carry(0))]
        for depth, stage in enumerate(self.stage_of):
            modules = [f"{path}.layers.{depth}"]
            if self._is_before_merge(depth):
                modules.append(f"{path}.merges.{stage}")
                stage += 1
            d_out = getattr(self.layers[str(depth)], "d_out", self.widths[stage])
            next_carry = self._carry(stage, d_out)
            points.append(SplitPoint(f"{path}.layers.{depth}", tuple(modules), ("hidden",), next_carry))
        if self.norm is not None:
            last = self._carry(len(self.widths) - 1)
            points.append(SplitPoint(f"{path}.norm", (f"{path}.norm",), ("hidden",), last))
        return points

    def _carry(self, stage: int, width: int | None = None) -> dict[str, CarrySpec]:
        """Return the spec of the hidden vectors carried after a stage. width: None: that of the stage."""
        width = width or self.widths[stage]
        length_of = partial(self.compute_row_length, stage) if stage else None
        return {"hidden": CarrySpec("positions", width, length_of)}

    def compute_row_length(self, stage: int, batch: Mapping[str, Tensor]) -> int:
        """Return the number of tokens of a row in a stage."""
        first, last = (prod(self.compute_map_sizes(batch)[stage_index]) for stage_index in (0, stage))
        return batch["positions"].shape[1] // first * last

    def compute_map_sizes(self, batch: Mapping[str, Tensor]) -> list[MapSize]:
        """Return the map size in each stage for a batch's images."""
        grid = find_map_size(batch.get("grid"), self.stages.grid)
        return [self.stages.map_at(stage, grid) for stage in range(len(self.widths))]


def make_plain_blocks(config: ModelConfig) -> Iterator[nn.Module]:
    """Yield the blocks of all stages, for models with patch merging."""
    for stage in range(len(require_stages(config).n_layers)):
        stage_config = config.stage_config(stage)
        for depth in range(stage_config.n_layers):
            yield StageBlock(stage_config, depth, 0.25**stage)


def make_pooled_blocks(config: ModelConfig) -> Iterator[nn.Module]:
    """Yield MViTv2's blocks; the first block of each later stage pools its queries, which shrinks the map."""
    options = require_variant(config.attention, PooledAttentionConfig, "model.attention")
    stages = require_stages(config)
    d_in, kv_stride = config.d_model, options.kv_stride
    for stage in range(len(stages.n_layers)):
        stage_config = config.stage_config(stage)
        kv_stride = max(kv_stride // 2, 1) if stage else kv_stride
        for depth in range(stage_config.n_layers):
            pools = bool(stage) and not depth
            ends_stage = depth + 1 == stage_config.n_layers and stage + 1 < len(stages.n_layers)
            widens = options.widening == "ffn" and ends_stage
            d_out = stage_config.d_model * (2 if widens else 1)
            yield PooledBlock(
                stage_config, d_in=d_in, d_out=d_out, stride=2 if pools else 1, kv_stride=kv_stride,
                size=stages.map_at(stage - pools), tokens_per_patch=0.25**stage,
            )  # fmt: skip
            d_in = d_out


def require_stages(config: ModelConfig) -> StagesConfig:
    """Return the config of the stages. Raises UsageError without it."""
    if config.stages is None:
        raise UsageError("model.family = 'hierarchical' needs model.stages: give n_layers and n_heads of each stage")
    return config.stages


@MODELS.register("hierarchical")
class Hierarchical(Model):
    """A stack of stages and heads on the last map. Rows hold whole images, all of one size, without special tokens."""

    encoder: PyramidStack | None

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        embedding = InputEmbedding(config, "encoder")
        self.encoder = PyramidStack(config, embedding)
        self.input_field = embedding.input_field
        self.compute_map_sizes = self.encoder.compute_map_sizes
        self.add_heads(None, config.stage_config(len(require_stages(config).n_layers) - 1))
        self.accept(self.input_field, *list_sequence_fields(config), targets=())
        self.split_points = [*self.encoder.split_points("encoder"), *self.list_head_points()]

    def forward(
        self,
        patches: Tensor | None = None,
        *,
        keys: Tensor | None = None,
        hidden: Tensor | None = None,
        **fields: Tensor | None,
    ) -> Output:
        """Run the model on patches [B, T, K] of images, row by row of each image's grid.

        `hidden` of the output is [B, S, D], the last stage's. keys [B] and, of `fields`, positions and documents [B, T]
        and grid [B, T, 4]: see SequenceMetadata; without documents rows hold as many images as fit. hidden: from the
        pipeline stage before. Further fields are those of heads. Raises TypeError for one that nothing would read, and
        UsageError for images of several sizes.
        """
        batch = self.read(patches=patches, keys=keys, **fields)
        first = make_sequence(batch, self.input_field, keys=keys)
        sizes = self.compute_map_sizes(batch)
        maps = [MapSequence.from_sequence(first, sizes[0])]
        maps += [maps[0].downsampled(size, previous) for previous, size in pairwise(sizes)]
        x, losses = hidden, dict[str, Tensor]()
        if self.encoder is not None:
            x, losses = self.encoder(require_field(batch, self.input_field), maps, hidden)
        if self.extra_heads:
            batch = self._downsample_fields(batch, maps)
        return self.output(batch, x, losses, sequence=maps[-1])

    def _downsample_fields(self, batch: Mapping[str, Tensor], maps: list[MapSequence]) -> dict[str, Tensor]:
        """Return a batch in which the fields that heads read are downsampled to the last stage's tokens."""
        heads: list[Any] = [getattr(self, name) for name in self.extra_heads]
        names = {
            name
            for head in heads
            if not getattr(head, "reads_first_map", False)
            for name in (*head.input_fields, *getattr(head, "optional_fields", ()))
        }
        index_S, (rows, length) = maps[0].find_downsampled_indices(maps[-1].size), maps[0].positions.shape
        return {
            name: take_columns(values, index_S) if name in names and values.shape[:2] == (rows, length) else values
            for name, values in batch.items()
        }
