"""Two towers: image and text encoders whose features are similar for matching pairs (CLIP: Radford et al. 2021).

Batch fields with the prefix "encoder_" hold images, the others captions. The i-th image of a row belongs to the i-th
caption of the same row.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatfm.config import ContrastiveConfig, ModelConfig
from megatfm.config.image_text import make_image_tower, make_text_tower
from megatfm.errors import MegatfmError
from megatfm.layers.classifier import AttentionPool, ImageMean, find_boundary_tokens, index_documents
from megatfm.layers.embedding import InputEmbedding
from megatfm.layers.initialisation import Constant, make_initialiser
from megatfm.layers.linear import Linear
from megatfm.layers.loss_terms import add_by_name
from megatfm.layers.sequence import SequenceMetadata
from megatfm.models.base import MODELS, Model, Output, list_sequence_fields, make_sequence
from megatfm.models.stack import Stack
from megatfm.ops.contrastive import ONE_RANK, LossOptions, Ring, compute_retrieval_ranks, contrastive_loss
from megatfm.split_points import SplitPoint

# B batch, S tokens of an image row, T of a text row, M documents or pairs of all rows, D width of a tower
# W width of a feature

TOP_K = (1, 5)
"""Values of k of the metrics `topk`: the share of images with fewer than k other captions at least as similar."""
TERM = "contrastive"


class BoundaryVector(nn.Module):
    """The vector of each document's first token, or of its last."""

    cp_plan = "all_reduce"

    def __init__(self, *, last: bool) -> None:
        super().__init__()
        self.last = last
        self.all_reduce = nn.Identity()  # context parallelism replaces it by an all-reduce over ranks

    def forward(self, hidden_BTD: Tensor, index_M: Tensor, sequence: SequenceMetadata) -> Tensor:
        """Return vectors [M, D] of the documents of these indices (`index_documents`)."""
        token_N = find_boundary_tokens(sequence, last=self.last)
        n_documents = len(hidden_BTD) * sequence.max_documents_per_row
        vectors = hidden_BTD.new_zeros(n_documents, hidden_BTD.shape[-1])
        vectors = vectors.index_copy(0, index_documents(sequence, token_N), hidden_BTD.flatten(0, 1)[token_N])
        all_vectors: Tensor = self.all_reduce(vectors)
        return all_vectors[index_M]


class FeatureHead(nn.Module):
    """Unit vectors [M, W] of the documents of rows: pooled, then projected if so configured.

    pool: "class" takes each document's first token, "last" its last, "mean" and "attention" see its patches.
    """

    cp_plan = "local"
    tp_plan = (("", "gather_input_replicated"), ("*", "replicated"), ("pool.*", "replicated"))

    def __init__(self, config: ModelConfig, pool: str, width: int | None, *, bias: bool) -> None:
        super().__init__()
        pools = {"mean": ImageMean, "attention": lambda: AttentionPool(config)}
        self.pool: nn.Module = pools[pool]() if pool in pools else BoundaryVector(last=pool == "last")
        d = config.d_model
        self.projection: nn.Module | None = None
        if width:
            self.projection = Linear(d, width, make_initialiser(config)("dense", d, width), bias=bias)

    def forward(self, hidden_BTD: Tensor, sequence: SequenceMetadata, captions: SequenceMetadata) -> Tensor:
        """Return features [M, W], in float32 at least, of the pairs whose captions begin here, in the order of rows and
        of documents."""
        token_M = find_boundary_tokens(captions, last=False)
        x_MD = self.pool(hidden_BTD, index_documents(sequence, token_M, captions), sequence)
        y_MW: Tensor = x_MD if self.projection is None else self.projection(x_MD)
        return F.normalize(y_MW.to(torch.promote_types(y_MW.dtype, torch.float32)), dim=-1)


def check_pairs(images: SequenceMetadata, captions: SequenceMetadata) -> None:
    """Raise MegatfmError for a row with another number of images than captions."""
    n_images_B, n_captions_B = (_count_documents(side) for side in (images, captions))
    if len(unequal_rows := (n_images_B != n_captions_B).nonzero()):
        row = int(unequal_rows[0, 0])
        raise MegatfmError(
            f"row {row} has {int(n_images_B[row])} images and {int(n_captions_B[row])} captions: the i-th image of a "
            "row belongs to its i-th caption; give both sides documents of the same numbers"
        )


def _count_documents(sequence: SequenceMetadata) -> Tensor:
    """Return the number of documents [B] of the full rows, on the host."""
    return sequence.on_host().full_sequence.documents_or_zeros.amax(1) + 1


class Temperature(nn.Module):
    """The learned factor on similarities, and for the sigmoid loss the learned bias."""

    cp_plan = "local"
    tp_plan = (("", "replicated"),)

    def __init__(self, config: ContrastiveConfig) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.empty(1))
        self.initial = {"log_scale": Constant(math.log(config.scale))}
        self.max_log_scale = math.log(config.max_scale or math.inf)
        self.register_parameter("bias", None)
        if config.loss == "sigmoid":
            self.bias = nn.Parameter(torch.empty(1))
            self.initial["bias"] = Constant(config.bias)

    def forward(self) -> dict[str, Tensor]:
        """Return `scale` [1], and `bias` [1] if there is one."""
        log_scale = self.log_scale.to(torch.promote_types(self.log_scale.dtype, torch.float32))
        factors = {"scale": log_scale.clamp(max=self.max_log_scale).exp()}
        return factors if self.bias is None else factors | {"bias": self.bias.to(log_scale.dtype)}


class ContrastiveLoss(nn.Module):
    """Compares the features of a global batch. The engine passes the ring that brings those of other data ranks."""

    dp_plan = "ring"
    cp_plan = "local"

    def __init__(self, config: ContrastiveConfig) -> None:
        super().__init__()
        self.kind = config.loss

    def forward(
        self,
        images_MW: Tensor,
        texts_MW: Tensor,
        scale: Tensor,
        bias: Tensor | None = None,
        captions_M: Tensor | None = None,
        ring: Ring = ONE_RANK,
    ) -> dict[str, Tensor]:
        """Return the summed loss, and, given numbers of captions, how many images find theirs (`top1`, `top5`).

        ring: the data ranks, of which these are this rank's part. Raises MegatfmError for an image without a caption.
        """
        if len(images_MW) != len(texts_MW):
            raise MegatfmError(
                f"{len(images_MW)} images and {len(texts_MW)} captions: the i-th image belongs to the i-th caption"
            )
        loss = contrastive_loss(images_MW, texts_MW, scale, bias, LossOptions(self.kind, ring))
        if captions_M is None:
            return {TERM: loss}
        ranks_M = compute_retrieval_ranks(images_MW, texts_MW, captions_M, ring)
        return {TERM: loss, **{f"top{k}": (ranks_M < k).sum() for k in TOP_K}}


@MODELS.register("two_towers")
class TwoTowers(Model):
    """Image and text stacks with a feature head each; the image stack's weights are those of the family "encoder"."""

    stacks, head_split_point = ("encoder", "text"), "features"
    encoder: Stack | None
    text: Stack | None

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        contrastive, image, text = config.contrastive, make_image_tower(config), make_text_tower(config)
        assert contrastive is not None  # checked with the config
        assert config.text_tower is not None
        self.encoder = Stack(image, "encoder", embedding=InputEmbedding(image, "encoder"))
        self.text = Stack(text, "decoder" if config.text_tower.causal else "encoder")
        width, bias = contrastive.width, contrastive.projection_bias
        self.image_features = FeatureHead(
            image, contrastive.image_pool, width if contrastive.project_image else None, bias=bias
        )
        self.text_features = FeatureHead(text, "last", width, bias=bias)
        self.temperature = Temperature(contrastive)
        self.contrastive = ContrastiveLoss(contrastive)
        image_fields = (f"encoder_{name}" for name in ("patches", *list_sequence_fields(image)))
        self.accept("tokens", *list_sequence_fields(text), *image_fields, targets=())
        heads = ("image_features", "text_features", "temperature", "contrastive")
        self.split_points = [
            *self.encoder.split_points("encoder", "encoder_hidden", side="encoder_"),
            *self.text.split_points("text"),
            SplitPoint("features", heads, ("encoder_hidden", "hidden")),
        ]

    def forward(
        self,
        encoder_patches: Tensor | None = None,
        tokens: Tensor | None = None,
        *,
        keys: Tensor | None = None,
        encoder_hidden: Tensor | None = None,
        hidden: Tensor | None = None,
        **fields: Tensor | None,
    ) -> Output:
        """Run both towers on uint8 patches [B, S, K] and int64 tokens [B, T] of captions.

        `predictions` holds unit vectors `images` and `texts` [M, W], `scale` [1] and, for the sigmoid loss, `bias` [1].
        Under context parallelism a rank has the pairs whose captions begin among its tokens. Raises MegatfmError for a
        row with another number of images than captions.
        Both sides take positions and documents, the images' with the prefix "encoder_", and they need grid.
        encoder_hidden, hidden: from the previous stage.
        """
        batch = self.read(encoder_patches=encoder_patches, tokens=tokens, keys=keys, **fields)
        image_sequence = make_sequence(batch, "patches", "encoder_", keys=keys)
        text_sequence = make_sequence(batch, "tokens", keys=keys)
        losses, text_losses, x_BTD, features = dict[str, Tensor](), dict[str, Tensor](), hidden, None

        if self.encoder is not None:
            encoder_hidden, losses = self.encoder(encoder_patches, image_sequence, hidden=encoder_hidden)
        if self.text is not None:
            x_BTD, text_losses = self.text(tokens, text_sequence, hidden=hidden)
        if self.runs_head:
            check_pairs(image_sequence, text_sequence)
            features = {
                "images": self.image_features(encoder_hidden, image_sequence, text_sequence),
                "texts": self.text_features(x_BTD, text_sequence, text_sequence),
                **self.temperature(),
            }
        carry = {} if encoder_hidden is None else {"encoder_hidden": encoder_hidden}
        return Output(x_BTD, None, add_by_name(losses, text_losses) or None, features, carry or None)  # type: ignore[arg-type]

    def compare(self, features: dict[str, Any], captions: Tensor | None = None) -> dict[str, Tensor]:
        """Return the loss terms for the features of a global batch, as returned by `forward`.

        captions: int64 [M], caption ids, equal for equal captions; given, retrieval metrics are added.
        """
        terms: dict[str, Tensor] = self.contrastive(
            features["images"], features["texts"], features["scale"], features.get("bias"), captions
        )
        return terms
