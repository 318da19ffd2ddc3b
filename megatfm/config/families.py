"""What each family of models knows of the keys that not all know. Configs are read without the models themselves."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """One family's row.

    knows: which of `FAMILY_KEYS` it has. no_heads: why it has no heads but its own, if so. bare: whether it makes
    sense without that one. other_names: beginnings of what people write for it.
    """

    knows: frozenset[str]
    no_heads: str = ""
    bare: bool = False
    other_names: tuple[str, ...] = ()


FAMILY_KEYS = (
    "n_encoder_layers", "extra_heads.sentence", "extra_heads.boundary", "n_mtp_heads",
    "embedding.n_segments", "generator", "ffn.name = 'moe'", "mup",
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
    "discriminator": Family(frozenset({"extra_heads.sentence", "embedding.n_segments", "mup"})),
}
"""A family that is not here is a plugin's, which may read what it likes."""


def families_supporting(part: str) -> list[str]:
    """The families that give a key a meaning."""
    return [name for name, family in FAMILIES.items() if part in family.knows]


def suggest_family(name: str) -> str:
    """The family that another name begins like, else the name itself: for a suggestion."""
    lower = name.lower()
    return next((known for known, family in FAMILIES.items() if lower.startswith(family.other_names)), name)
