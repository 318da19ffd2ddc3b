"""Families of models: the keys and heads that each one knows. Configs are read without the models themselves."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """Keys and heads that one family of models has.

    knows: the `FAMILY_KEYS` that it supports. no_heads: why `model.extra_heads` is refused; empty if it is allowed.
    bare:
    whether lm_head.name = "none" is allowed. other_names: name prefixes used for suggestions.
    """

    knows: frozenset[str]
    no_heads: str = ""
    bare: bool = False
    other_names: tuple[str, ...] = ()


FAMILY_KEYS = (
    "n_encoder_layers", "extra_heads.sentence", "extra_heads.boundary", "n_mtp_heads",
    "embedding.n_segments", "generator",
    "ffn.name = 'moe'", "mup", "stages", "pixel_decoder", "text_tower", "contrastive", "vision_tower", "connector",
)  # fmt: skip
"""Keys of a model, or values of them, that only some families give a meaning."""

FAMILIES = {
    "decoder": Family(
        frozenset({"n_mtp_heads", "embedding.n_segments", "ffn.name = 'moe'", "mup"}),
        other_names=("gpt", "llama", "mistral", "deepseek", "causal"),
    ),
    "encoder": Family(
        frozenset(
            {
                "extra_heads.sentence",
                "extra_heads.boundary",
                "embedding.n_segments",
                "ffn.name = 'moe'",
                "mup",
            }
        ),
        other_names=("bert", "roberta", "albert", "deberta", "masked"),
    ),
    "encoder_decoder": Family(
        frozenset({"n_encoder_layers", "ffn.name = 'moe'", "mup"}),
        other_names=("t5", "bart", "seq2seq", "encoder-decoder"),
    ),
    "xlnet": Family(frozenset({"mup"}), no_heads="whose query stream ends with what it predicts", bare=True),
    "electra": Family(
        frozenset({"generator", "embedding.n_segments"}),
        no_heads="which is trained as a whole (its discriminator alone may have heads: family = 'discriminator')",
    ),
    "masked_autoencoder": Family(
        frozenset({"pixel_decoder"}), no_heads="which predicts pixels", bare=True, other_names=("mae",)
    ),
    "two_towers": Family(
        frozenset({"text_tower", "contrastive"}),
        no_heads="which compares images and captions",
        bare=True,
        other_names=("clip", "siglip", "dual"),
    ),
    "vision_language": Family(
        frozenset({"vision_tower", "connector", "ffn.name = 'moe'"}),
        other_names=("llava", "vlm", "image_text", "multimodal"),
    ),
    "discriminator": Family(frozenset({"extra_heads.sentence", "embedding.n_segments", "mup"})),
    "hierarchical": Family(frozenset({"stages"}), other_names=("swin", "mvit", "pyramid")),
}
"""Any other family is a plugin's, which may read any field."""


def families_supporting(part: str) -> list[str]:
    """Families that give a key a meaning."""
    return [name for name, family in FAMILIES.items() if part in family.knows]


def suggest_family(name: str) -> str:
    """Suggest the family that a name begins like, else the name itself."""
    lower = name.lower()
    return next(
        (family_name for family_name, family in FAMILIES.items() if lower.startswith(family.other_names)),
        name,
    )
