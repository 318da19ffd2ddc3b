"""Every combination of norms, activations, positions and masks, as a small model."""

from megatfm.config import ModelConfig

DENSE_VOCABULARY = 23
SMALL_DENSE = {
    "vocab_size": DENSE_VOCABULARY,
    "d_model": 16,
    "n_layers": 2,
    "attention.n_heads": 2,
    "ffn.d_ff": 20,
    "norm.eps": 1e-3,
}
NORM_POSITIONS = ("pre", "post", "sandwich", "deepnorm")
NORMS = ("layer_norm", "rms_norm")
ACTIVATIONS = ("relu", "relu2", "gelu", "gelu_tanh", "swish", "swiglu", "geglu", "geglu_tanh")
POSITIONS = {
    "sinusoidal": {},
    "learned": {"position.max_positions": 16},
    "rope": {"position.theta": 100.0},
    "alibi": {},
    "t5": {"position.buckets": 8, "position.max_distance": 6},
    "shaw": {"position.max_distance": 3},
    "none": {},
}
MASKS = ("causal", "prefix", "full", "pairs")


def combination(norm_position: str, norm: str, activation: str, position: str, mask: str) -> ModelConfig:
    """A model of these parts."""
    families = {"full": "encoder", "pairs": "encoder_decoder"}
    return ModelConfig.from_dotted(
        **SMALL_DENSE,
        **POSITIONS[position],
        family=families.get(mask, "decoder"),
        **{
            "norm.placement": norm_position,
            "norm.name": norm,
            "ffn.activation": activation,
            "position.name": position,
            "init.name": "deepnorm" if norm_position == "deepnorm" else "normal",
        },
    )
