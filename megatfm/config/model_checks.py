"""Families of models and what each supports, and checks across the parts of a model."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatfm.config.ffn import MoEConfig, SoftMoEConfig
from megatfm.config.heads import ClassifierHeadConfig, PixelsHeadConfig
from megatfm.config.image_text import check_heads, check_two_towers, check_vision_language
from megatfm.config.model_parts import PatchEmbeddingConfig
from megatfm.config.position import GRID_POSITIONS, T5PositionConfig

if TYPE_CHECKING:
    from megatfm.config.model import ModelConfig

CAUSAL_FAMILIES = ("decoder", "encoder_decoder", "vision_language")


@dataclass(frozen=True)
class Family:
    """Keys and heads that a model family supports.

    supported_keys: of those that `_check_family` checks. heads_refusal: why `model.extra_heads` is refused;
    "": it is allowed. allows_no_lm_head: whether lm_head.name = "none" is allowed. name_prefixes: beginnings of names
    for which an error suggests the family.
    """

    supported_keys: frozenset[str]
    heads_refusal: str = ""
    allows_no_lm_head: bool = False
    name_prefixes: tuple[str, ...] = ()


FAMILIES = {
    "decoder": Family(
        frozenset({"n_mtp_heads", "embedding.n_segments", "ffn.name = 'moe'", "mup"}),
        name_prefixes=("gpt", "llama", "mistral", "deepseek", "causal"),
    ),
    "encoder": Family(
        frozenset({"extra_heads.sentence", "extra_heads.boundary", "embedding.n_segments", "ffn.name = 'moe'", "mup"}),
        name_prefixes=("bert", "roberta", "albert", "deberta", "masked"),
    ),
    "encoder_decoder": Family(
        frozenset({"n_encoder_layers", "ffn.name = 'moe'", "mup"}),
        name_prefixes=("t5", "bart", "seq2seq", "encoder-decoder"),
    ),
    "xlnet": Family(frozenset({"extra_heads.sentence", "mup"}), allows_no_lm_head=True),
    "electra": Family(
        frozenset({"generator", "embedding.n_segments"}),
        heads_refusal="which is trained as a whole (its discriminator alone may have heads: family = 'discriminator')",
    ),
    "masked_autoencoder": Family(
        frozenset({"pixel_decoder"}),
        heads_refusal="which predicts pixels",
        allows_no_lm_head=True,
        name_prefixes=("mae",),
    ),
    "two_towers": Family(
        frozenset({"text_tower", "contrastive"}),
        heads_refusal="which compares images and captions",
        allows_no_lm_head=True,
        name_prefixes=("clip", "siglip", "dual"),
    ),
    "vision_language": Family(
        frozenset({"vision_tower", "connector", "ffn.name = 'moe'"}),
        name_prefixes=("llava", "vlm", "image_text", "multimodal"),
    ),
    "discriminator": Family(frozenset({"extra_heads.sentence", "embedding.n_segments", "mup"})),
    "hierarchical": Family(frozenset({"stages"}), name_prefixes=("swin", "mvit", "pyramid")),
}
"""Name → family. Any other family is a plugin's, which may support every key."""


def find_supporting_families(key: str) -> list[str]:
    """Return the families that support a key that only some have."""
    return [name for name, family in FAMILIES.items() if key in family.supported_keys]


def suggest_family(name: str) -> str:
    """Return the family whose `name_prefixes` a name begins with, else the name."""
    lower = name.lower()
    return next(
        (family_name for family_name, family in FAMILIES.items() if lower.startswith(family.name_prefixes)), name
    )


def check_combinations(model: "ModelConfig") -> None:
    """Raise ValueError for parts of a model that don't go together, or that its family doesn't support."""
    if model.family == "electra" and model.generator is None:
        raise ValueError("family = 'electra' needs model.generator: give it")
    _check_family(model)
    if model.generator is not None:
        check_heads("generator", model.generator)
    _check_xlnet(model)
    _check_image_parts(model)
    _check_experts_see_no_future(model)
    if isinstance(model.position, T5PositionConfig):
        one_way = model.family in ("decoder", "vision_language")
        model.position.check_buckets(causal=model.family in CAUSAL_FAMILIES, bidirectional=not one_way)
    if model.mup and model.embedding.dim:
        raise ValueError("mup is for models of one width: leave out embedding.dim")
    if (model.init.name == "deepnorm") != (model.norm.placement == "deepnorm"):
        raise ValueError("norm.placement = 'deepnorm' and init.name = 'deepnorm' belong together: set both, or neither")


def _check_family(model: "ModelConfig") -> None:
    """Check that the family, unless it is a plugin's, supports the keys and heads that are set."""
    if (family := FAMILIES.get(model.family)) is None:
        return
    values = {
        "n_encoder_layers": model.n_encoder_layers,
        "extra_heads.sentence": "sentence" in model.extra_heads,
        "extra_heads.boundary": "boundary" in model.extra_heads,
        "n_mtp_heads": model.n_mtp_heads,
        "embedding.n_segments": model.embedding.n_segments,
        "generator": model.generator,
        "ffn.name = 'moe'": isinstance(model.ffn, MoEConfig),
        "mup": model.mup,
        "stages": model.stages,
        "pixel_decoder": model.pixel_decoder,
        "text_tower": model.text_tower,
        "contrastive": model.contrastive,
        "vision_tower": model.vision_tower,
        "connector": model.connector,
    }
    for key, value in values.items():
        if value and key not in family.supported_keys:
            raise ValueError(
                f"{key} has no meaning with family = {model.family!r}: leave it out, or choose family = "
                + " or ".join(map(repr, find_supporting_families(key)))
            )
    if family.heads_refusal and (model.extra_heads or (model.lm_head.name == "none" and not family.allows_no_lm_head)):
        heads = [f"extra_heads.{name}" for name in model.extra_heads] or ["lm_head.name = 'none'"]
        raise ValueError(
            f"{heads[0]} has no meaning with family = {model.family!r}, {family.heads_refusal}: leave it out, or "
            "choose another family"
        )


def _check_xlnet(model: "ModelConfig") -> None:
    belongs_to_xlnet = {
        model.family == "xlnet",
        model.attention.name == "two_stream",
        model.position.name == "transformer_xl",
    }
    if len(belongs_to_xlnet) > 1:
        raise ValueError(
            "family = 'xlnet', attention.name = 'two_stream' and position.name = 'transformer_xl' belong together: "
            "set all three, or none"
        )
    if model.family == "xlnet" and model.extra_heads and model.lm_head.name != "none":
        raise ValueError(
            f"extra_heads.{next(iter(model.extra_heads))} beside a language model head: family = 'xlnet' trains one "
            "of them at a time: set lm_head.name = 'none'"
        )


def _check_experts_see_no_future(model: "ModelConfig") -> None:
    ffn, key = model.ffn, ""
    if isinstance(ffn, SoftMoEConfig):
        key = "ffn.name = 'soft_moe'"
    elif isinstance(ffn, MoEConfig) and ffn.router.is_bidirectional:
        key = f"ffn.router.name = {ffn.router.name!r}"
    if key and model.family in CAUSAL_FAMILIES:
        raise ValueError(
            f"{key} leaks the future in a causal model: what a token gets depends on later ones: choose family = "
            "'encoder', or another router"
        )


def _check_image_parts(model: "ModelConfig") -> None:
    """Raise ValueError for positions or heads that the model's embedding doesn't support."""
    position, embedding = model.position.name, model.embedding
    if position in GRID_POSITIONS and not isinstance(embedding, PatchEmbeddingConfig):
        raise ValueError(
            f"position.name = {position!r} is for patches of images: set embedding.name = 'patches', or "
            "another position"
        )
    if model.family == "masked_autoencoder":
        _check_autoencoder(model)
    if model.family == "two_towers":
        check_two_towers(model)
    if model.family == "vision_language":
        check_vision_language(model)
    by_head = position == "rope_2d"
    key, width = ("attention.head_dim", model.head_width) if by_head else ("d_model", model.embedding_width)
    if position in ("rope_2d", "sinusoidal_2d") and width % 4:
        raise ValueError(
            f"position.name = {position!r} takes channels by fours, and {key} = {width}: choose {key} = "
            f"{width + 4 - width % 4}"
        )
    for name, head in model.extra_heads.items():
        if isinstance(head, PixelsHeadConfig):
            _check_stride(model, name, head)
        if not isinstance(head, ClassifierHeadConfig) or "class" not in head.pool:
            continue
        if isinstance(embedding, PatchEmbeddingConfig) and not embedding.n_class_tokens:
            raise ValueError(
                f"extra_heads.{name}.pool = {head.pool!r} reads a class token, and embedding.n_class_tokens = 0: "
                "choose pool = 'mean', or n_class_tokens = 1"
            )


def _check_stride(model: "ModelConfig", name: str, head: PixelsHeadConfig) -> None:
    patch_size = getattr(model.embedding, "patch_size", None)
    if patch_size is None or model.embedding.name != "patches":
        raise ValueError(
            f"extra_heads.{name} predicts pixels of patches: set embedding.name = 'patches', or leave it out"
        )
    if model.stages is None and head.stride % patch_size == 0:
        return  # perhaps a stage of a model
    stride = patch_size * 2 ** (len(model.stages.n_layers) - 1 if model.stages else 0)
    if head.stride != stride:
        raise ValueError(
            f"extra_heads.{name}.stride = {head.stride}: a token of the last map stands for a square of {stride} "
            f"pixels: choose extra_heads.{name}.stride = {stride}"
        )


def _check_autoencoder(model: "ModelConfig") -> None:
    decoder = model.pixel_decoder
    if decoder is None or not isinstance(model.embedding, PatchEmbeddingConfig):
        raise ValueError(
            "family = 'masked_autoencoder' needs embedding.name = 'patches' and the section pixel_decoder: give "
            "[model.pixel_decoder], without keys for MAE's own"
        )
    check_heads("pixel_decoder", decoder)
