"""Two towers: image and text encoders whose features are similar for matching pairs (CLIP: Radford et al. 2021).

Batch fields with the prefix "encoder_" hold images, the others captions. The i-th image of a row belongs to the i-th
caption of the same row.
"""

from typing import Any

from torch import Tensor

from megatfm.config import ModelConfig
from megatfm.config.image_text import make_image_tower, make_text_tower
from megatfm.layers.contrastive import ContrastiveLoss, FeatureHead, Temperature, check_pairs
from megatfm.layers.embedding import InputEmbedding
from megatfm.layers.loss_terms import add_by_name
from megatfm.models.base import MODELS, Model, Output
from megatfm.models.batch_fields import list_sequence_fields, make_sequence
from megatfm.models.stack import Stack
from megatfm.split_points import SplitPoint

# B batch, S tokens of an image row, T of a text row, M pairs, W width of a feature


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
