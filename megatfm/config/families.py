"""Model families and the keys and heads that each supports. Configs are checked without importing the models."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """Keys and heads that a model family supports.

    supported_keys: of those that `ModelConfig._check_family` checks. heads_refusal: why `model.extra_heads` is refused;
    "": it is allowed. allows_no_lm_head: whether lm_head.name = "none" is allowed. other_names: prefixes of names for
    suggestions.
    """

    supported_keys: frozenset[str]
    heads_refusal: str = ""
    allows_no_lm_head: bool = False
    other_names: tuple[str, ...] = ()


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
    "xlnet": Family(
        frozenset({"extra_heads.sentence", "mup"}),
        allows_no_lm_head=True,
    ),
    "electra": Family(
        frozenset({"generator", "embedding.n_segments"}),
        heads_refusal="which is trained as a whole (its discriminator alone may have heads: family = 'discriminator')",
    ),
    "masked_autoencoder": Family(
        frozenset({"pixel_decoder"}),
        heads_refusal="which predicts pixels",
        allows_no_lm_head=True,
        other_names=("mae",),
    ),
    "two_towers": Family(
        frozenset({"text_tower", "contrastive"}),
        heads_refusal="which compares images and captions",
        allows_no_lm_head=True,
        other_names=("clip", "siglip", "dual"),
    ),
    "vision_language": Family(
        frozenset({"vision_tower", "connector", "ffn.name = 'moe'"}),
        other_names=("llava", "vlm", "image_text", "multimodal"),
    ),
    "discriminator": Family(frozenset({"extra_heads.sentence", "embedding.n_segments", "mup"})),
    "hierarchical": Family(frozenset({"stages"}), other_names=("swin", "mvit", "pyramid")),
}
"""Name → family. Any other family is a plugin's, which may support every key."""


def find_supporting_families(key: str) -> list[str]:
    """Return the families that support a key that only some have."""
    return [name for name, family in FAMILIES.items() if key in family.supported_keys]


def suggest_family(name: str) -> str:
    """Return the family whose `other_names` a name begins with, else the name."""
    lower = name.lower()
    return next(
        (family_name for family_name, family in FAMILIES.items() if lower.startswith(family.other_names)),
        name,
    )
