"""Sections of models of images and text: the text tower, and how features of both towers are compared."""

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from megatfm.config.model_parts import PatchEmbeddingConfig
from megatfm.config.section import MAX_LAYERS, MAX_LENGTH, MAX_WIDTH, Section, nearest_divisor

if TYPE_CHECKING:
    from megatfm.config.model import ModelConfig
    from megatfm.config.root import Config

FAMILY = "two_towers"


class TextTowerConfig(Section):
    """The text encoder beside an image encoder; everything else is as in the image encoder (Radford et al. 2021)."""

    d_model: PositiveInt = Field(default=512, le=MAX_WIDTH)
    """Width of the text tower."""
    n_layers: PositiveInt = Field(default=12, le=MAX_LAYERS)
    """Number of blocks."""
    n_heads: PositiveInt = Field(default=8, le=MAX_WIDTH)
    """Attention heads of the text tower."""
    d_ff: PositiveInt = Field(default=2048, le=MAX_WIDTH)
    """Inner width of its feed-forward network."""
    max_positions: PositiveInt = Field(default=77, le=MAX_LENGTH)
    """Learned positions, and the tokens of a caption at most."""
    causal: bool = True
    """Whether a token sees those before it alone, as in CLIP; false in SigLIP."""

    @property
    def tp_dims(self) -> dict[str, int]:
        """Sizes that tensor parallelism divides, by key."""
        return {"n_heads": self.n_heads, "d_ff": self.d_ff}


class ContrastiveConfig(Section):
    """Features of images and captions, and the loss that compares all of a global batch."""

    loss: Literal["softmax", "sigmoid"] = "softmax"
    """Which caption belongs to an image, and which image to a caption (CLIP; Radford et al. 2021); or of each pair
    whether the two belong together (SigLIP; Zhai et al. 2023)."""
    width: PositiveInt = Field(default=512, le=MAX_WIDTH)
    """Numbers of a feature."""
    image_pool: Literal["class", "mean", "attention"] = "class"
    """The class token, the mean of patches, or a learned query that attends to all (SigLIP)."""
    project_image: bool = True
    """Whether a matrix maps the image tower's vector to a feature; without one (SigLIP) `width` is `d_model`."""
    projection_bias: bool = False
    """A bias in the projections (SigLIP's text)."""
    scale: PositiveFloat = 1 / 0.07
    """Factor on cosine similarities at first, the inverse temperature, which is learned (SigLIP: 10)."""
    max_scale: PositiveFloat | None = Field(default=None, examples=[100.0])
    """Upper bound of the factor (CLIP: 100); left out, none."""
    bias: float = -10.0
    """Summand of SigLIP's logits at first, which is learned."""


def image_tower(model: "ModelConfig") -> "ModelConfig":
    """Return the config of the image tower's stack."""
    return model.with_changes(
        {"family": "encoder", "text_tower": None, "contrastive": None, "vocab_size": None}
    )


def text_tower(model: "ModelConfig") -> "ModelConfig":
    """Return the config of the text tower's stack."""
    assert model.text_tower is not None  # checked with the family
    text = model.text_tower
    changes: dict[str, Any] = {
        "family": "encoder",
        "text_tower": None,
        "contrastive": None,
        "d_model": text.d_model,
        "n_layers": text.n_layers,
        "distinct_layers": None,
        "drop_path": 0.0,
        "attention.n_heads": text.n_heads,
        "attention.n_kv_heads": None,
        "attention.head_dim": None,
        "ffn.d_ff": text.d_ff,
        "embedding": {"name": "tokens", "norm": False},
        "position": {"name": "learned", "max_positions": text.max_positions},
    }
    return model.with_changes(changes)


def check_two_towers(model: "ModelConfig") -> None:
    """Raise a ValueError where the parts of a model of two towers don't go together."""
    text, contrastive = model.text_tower, model.contrastive
    if text is None or contrastive is None:
        raise ValueError(
            f"family = {FAMILY!r} needs the sections text_tower and contrastive: give [model.text_tower] and "
            "[model.contrastive], without keys for CLIP's own"
        )
    if not isinstance(model.embedding, PatchEmbeddingConfig):
        raise ValueError(f"family = {FAMILY!r} reads images: set embedding.name = 'patches'")
    if model.lm_head.name != "none":
        raise ValueError(f"family = {FAMILY!r} predicts no tokens: set lm_head.name = 'none'")
    if text.d_model % text.n_heads:
        raise ValueError(
            f"text_tower.n_heads = {text.n_heads} does not divide text_tower.d_model = {text.d_model}: choose "
            f"n_heads = {nearest_divisor(text.d_model, text.n_heads)}"
        )
    if contrastive.image_pool == "class" and not model.embedding.n_class_tokens:
        raise ValueError(
            "contrastive.image_pool = 'class' reads a class token, and embedding.n_class_tokens = 0: choose "
            "image_pool = 'mean', or n_class_tokens = 1"
        )
    if not contrastive.project_image and contrastive.width != model.d_model:
        raise ValueError(
            f"contrastive.width = {contrastive.width} without project_image: the image tower's vectors have d_model = "
            f"{model.d_model}: choose width = {model.d_model}"
        )
    for key in ("layer_types", "distinct_layers", "mup"):
        if getattr(model, key):
            raise ValueError(f"{key} has no meaning with family = {FAMILY!r}: leave it out")


def check_layout(config: "Config") -> None:
    """Raise a ValueError for layouts that can't compare the features of a global batch."""
    if config.model.family != FAMILY:
        return
    parallel = config.parallel
    for axis, size in (("pp", parallel.pp), ("cp", parallel.cp)):
        if size > 1:
            raise ValueError(
                f"parallel.{axis} = {size}: model.family = {FAMILY!r} needs all features of the global batch at once, "
                f"and each row on one rank: set parallel.{axis} = 1, and use parallel.dp_shard, dp_replicate or tp"
            )
