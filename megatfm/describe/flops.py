"""FLOPs of training on one row, from the config and the parameters' names.

A weight costs 6 FLOPs for each token that it is multiplied with, forward and backward (Chowdhery et al. 2022, appendix
B; nothing is recomputed), and attention 12 for each channel of each pair of tokens.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from megatfm.config import Config, LatentAttentionConfig, ModelConfig

SHARED = re.compile(r"^(\w+\.)?(encoder|decoder)\.layers\.")
TABLE = re.compile(r"embedding\.(positions|segments)\.|\.position\.|boundary\.positions\.")
"""Only looked up, or added to scores."""


@dataclass(frozen=True)
class Row:
    """tokens: of all sides. work: the sum over all parameters of their size times the tokens that they see.

    attention: FLOPs of the scores and what is done with them. causal: without the half on tokens that aren't seen.
    """

    tokens: int
    work: float
    attention: float
    causal: float


def row(config: Config, shapes: Mapping[str, tuple[int, ...]]) -> Row:
    """What a row costs. Heads of masked models see the masked tokens alone."""
    model, s = config.model, config.data.sequence_length
    two = model.family == "encoder_decoder"
    t = (config.data.target_length or s) if two else 0
    share = getattr(config.objective, "rate", 1.0) if model.family in ("encoder", "electra") else 1.0
    if model.family == "xlnet":
        share = 1 / getattr(config.objective, "every", 1)
    last = f"encoder.layers.{(model.distinct_layers or model.n_layers) - 1}."
    repeats = model.n_layers / (model.distinct_layers or model.n_layers)

    def seen(name: str) -> float:
        """How many tokens a parameter is multiplied with."""
        if name.endswith("embedding.tokens.weight"):
            return heads(name) if model.embedding.tied else 0.0
        if TABLE.search(name):
            return 0.0
        if model.family == "xlnet" and SHARED.match(name):
            if name.endswith("wk_position.weight"):
                return (2 * s - 1) * repeats
            if re.search(r"\.attn\.w[kv]\.", name):
                return s * repeats
            # The content stream ends where nothing looks at it any more.
            return s * (repeats - name.startswith(last) + repeats * share)
        if re.match(r"^(generator\.)?head\.", name):
            return heads(name)
        if name.startswith("boundary."):
            return s * share
        if name.startswith("sentence."):
            return 1.0
        times = repeats if SHARED.match(name) else 1.0
        if name.endswith(("_position.weight", "_position.bias")):  # of a table of relative positions
            return 2 * getattr(model.position, "max_distance", 0) * times
        of_encoder = not two or name.startswith("encoder.") or re.search(r"\.cross\.w[kv]\.", name)
        return (s if of_encoder else t) * times

    def heads(name: str) -> float:
        if model.family == "discriminator":
            return 0.0
        return (t if two else s) * share * (1 + model.future_tokens + ("boundary" in model.heads))

    work = sum(prod(shape) * seen(name) for name, shape in shapes.items())
    full, half = _attention(model, s, t)
    if model.family == "xlnet":
        # Two streams, of which the content's has no last layer, and scores of 2 s − 1 relative positions beside those
        # of content.
        full *= (1 - 1 / model.n_layers + share) * (1 + (2 * s - 1) / (2 * s))
    return Row(s + t, work, full, full - half)


def _attention(model: ModelConfig, s: int, t: int) -> tuple[float, float]:
    """FLOPs in full, and what of them falls on later tokens where those aren't seen."""
    width = float(model.attention.n_heads * model.head_width)
    if isinstance(latent := model.attention, LatentAttentionConfig):
        width = latent.n_heads * (model.head_width + latent.rope_dim + (latent.v_dim or model.head_width)) / 2
    if model.family == "encoder_decoder":
        own = 12 * width * t * t * model.n_layers
        rest = 12 * width * (s * s * model.encoder_layers + s * t * model.n_layers)
        return own + rest, own / 2
    layers = model.n_layers + model.future_tokens
    full = 12 * width * s * s * layers
    if model.generator is not None:
        full += 12 * model.generator.d_model * s * s * (model.generator.n_layers or model.n_layers)
    return full, full / 2 if model.family == "decoder" else 0.0
