"""Sections of models of images and text: towers, the contrastive loss, and the connector to a decoder."""

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from megatfm.config.ffn import ActivationName
from megatfm.config.model_parts import GeneratorConfig, PatchEmbeddingConfig, PixelDecoderConfig
from megatfm.config.section import MAX_LAYERS, MAX_LENGTH, MAX_WIDTH, Section, find_nearest_divisor

if TYPE_CHECKING:
    from megatfm.config.model import ModelConfig

FAMILY = "two_towers"
VISION_LANGUAGE = "vision_language"


class TextTowerConfig(Section):
    """The text encoder beside an image encoder; other settings are the image encoder's (Radford et al. 2021)."""

    d_model: PositiveInt = Field(default=512, le=MAX_WIDTH)
    """Width of the text tower."""
    n_layers: PositiveInt = Field(default=12, le=MAX_LAYERS)
    """Number of blocks."""
    n_heads: PositiveInt = Field(default=8, le=MAX_WIDTH)
    """Attention heads of the text tower."""
    d_ff: PositiveInt = Field(default=2048, le=MAX_WIDTH)
    """Inner width of its feed-forward network."""
    max_positions: PositiveInt = Field(default=77, le=MAX_LENGTH)
    """Number of learned positions, the maximal tokens of a caption."""
    causal: bool = True
    """Causal attention, as in CLIP; false in SigLIP."""


class ContrastiveConfig(Section):
    """Features of images and captions, and the loss over all pairs of a global batch."""

    loss: Literal["softmax", "sigmoid"] = "softmax"
    """softmax: which caption belongs to an image, and which image to a caption (CLIP; Radford et al. 2021). sigmoid:
    whether each pair belongs together (SigLIP; Zhai et al. 2023)."""
    width: PositiveInt = Field(default=512, le=MAX_WIDTH)
    """Width of a feature."""
    image_pool: Literal["class", "mean", "attention"] = "class"
    """The class token, the mean of patches, or a learned query that attends to all (SigLIP)."""
    project_image: bool = True
    """Whether a matrix maps the image tower's vector to a feature; without one (SigLIP) `width` is `d_model`."""
    projection_bias: bool = False
    """A bias in the projections (SigLIP's text)."""
    scale: PositiveFloat = 1 / 0.07
    """Initial factor on cosine similarities, the learned inverse temperature (SigLIP: 10)."""
    max_scale: PositiveFloat | None = Field(default=None, examples=[100.0])
    """Upper bound of the factor (CLIP: 100); left out, none."""
    bias: float = -10.0
    """Initial value of SigLIP's learned logit bias."""


class VisionTowerConfig(Section):
    """The image encoder of `family = "vision_language"`: a ViT with pre-norm blocks, as in CLIP and SigLIP."""

    d_model: PositiveInt = Field(default=1024, le=MAX_WIDTH)
    """Width of the image encoder."""
    n_layers: PositiveInt = Field(default=23, le=MAX_LAYERS)
    """Number of blocks (LLaVA leaves out the last of CLIP's 24)."""
    n_heads: PositiveInt = Field(default=16, le=MAX_WIDTH)
    """Attention heads of the image encoder."""
    d_ff: PositiveInt = Field(default=4096, le=MAX_WIDTH)
    """Inner width of its feed-forward network."""
    activation: ActivationName = "quick_gelu"
    """Activation of its feed-forward network (SigLIP: gelu_tanh)."""
    norm_eps: PositiveFloat = 1e-5
    """Epsilon of its norms (SigLIP: 1e-6)."""
    final_norm: bool = False
    """A norm after the last block (SigLIP)."""
    embedding: PatchEmbeddingConfig = PatchEmbeddingConfig(patch_size=14, bias=False, norm=True)
    """The embedding of patches. Patches attend to class and register tokens; the decoder does not get these."""
    grid: tuple[PositiveInt, PositiveInt] = Field(default=(24, 24), examples=[(24, 24)])
    """Rows and columns of the table of learned positions, interpolated to each image's grid."""


class ConnectorConfig(Section):
    """The map from the image encoder's vectors to the decoder's, and their token (LLaVA; Liu et al. 2023)."""

    name: Literal["mlp", "linear"] = "mlp"
    """Two matrices with GELU between them (LLaVA-1.5), or one (LLaVA)."""
    bias: bool = True
    """Biases of the matrices."""
    image_token_id: NonNegativeInt = Field(examples=[32000])
    """Id of the token that one vector of an image replaces: in the vocabulary, but in no text."""


def make_image_tower(model: "ModelConfig") -> "ModelConfig":
    """Return the config of the image encoder of two towers or of a vision-language model."""
    if model.vision_tower is None:
        return model.with_changes({"family": "encoder", "text_tower": None, "contrastive": None, "vocab_size": None})
    tower = model.vision_tower
    values = {
        "family": "encoder",
        "d_model": tower.d_model,
        "n_layers": tower.n_layers,
        "dropout": model.dropout,
        "attention": {"n_heads": tower.n_heads, "bias": True},
        "ffn": {"d_ff": tower.d_ff, "activation": tower.activation, "bias": True},
        "norm": {"name": "layer_norm", "eps": tower.norm_eps, "final_norm": tower.final_norm},
        "position": {"name": "learned_2d", "grid": tower.grid},
        "embedding": tower.embedding.model_dump(),
        "lm_head": {"name": "none"},
        "init": model.init.model_dump(),
    }
    return type(model).model_validate(values)


def make_text_tower(model: "ModelConfig") -> "ModelConfig":
    """Return the config of the text tower."""
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


def check_heads(key: str, stack: GeneratorConfig | PixelDecoderConfig | TextTowerConfig | VisionTowerConfig) -> None:
    """Raise ValueError unless the heads of a further stack of blocks, the section `key`, divide its width."""
    if stack.d_model % stack.n_heads:
        raise ValueError(
            f"{key}.n_heads = {stack.n_heads} does not divide {key}.d_model = {stack.d_model}: choose "
            f"n_heads = {find_nearest_divisor(stack.d_model, stack.n_heads)}"
        )


def check_two_towers(model: "ModelConfig") -> None:
    """Raise ValueError if the sections of a model of two towers contradict one another."""
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
    check_heads("text_tower", text)
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


def check_vision_language(model: "ModelConfig") -> None:
    """Raise ValueError if the sections of a vision-language model contradict one another."""
    tower, connector = model.vision_tower, model.connector
    if tower is None or connector is None:
        raise ValueError(
            f"family = {VISION_LANGUAGE!r} needs the sections vision_tower and connector: give [model.vision_tower], "
            "without keys for CLIP's ViT-L/14 at 336 pixels, and [model.connector] with image_token_id"
        )
    if isinstance(model.embedding, PatchEmbeddingConfig):
        raise ValueError(
            f"family = {VISION_LANGUAGE!r}: [model] describes the decoder of text, which reads tokens: set "
            "embedding.name = 'tokens', and patches in [model.vision_tower.embedding]"
        )
    check_heads("vision_tower", tower)
    if model.vocab_size is not None and connector.image_token_id >= model.vocab_size:
        raise ValueError(
            f"connector.image_token_id = {connector.image_token_id} is outside the vocabulary of vocab_size = "
            f"{model.vocab_size}: choose an id that no text uses, or vocab_size = {connector.image_token_id + 1}"
        )
    if model.embedding.dim:
        raise ValueError(f"embedding.dim has no meaning with family = {VISION_LANGUAGE!r}: leave it out")
