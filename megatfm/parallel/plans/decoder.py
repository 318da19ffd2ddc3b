"""Tensor and sequence parallelism of the decoder (Shoeybi et al. 2019; Korthikanti et al. 2022)."""

from megatfm.parallel.plan import PLANS, Plan
from megatfm.parallel.styles import COLUMN, ENTER, ROW, SEQUENCE, VOCABULARY_EMBEDDING, VOCABULARY_HEAD

DECODER: Plan = (
    ("embedding", VOCABULARY_EMBEDDING),
    ("layers.*.norm[12]", SEQUENCE),
    ("layers.*.attn", ENTER),
    ("layers.*.attn.w[qkv]", COLUMN),
    ("layers.*.attn.wo", ROW),
    ("layers.*.ffn", ENTER),
    ("layers.*.ffn.w_gate", COLUMN),
    ("layers.*.ffn.w_up", COLUMN),
    ("layers.*.ffn.w_down", ROW),
    ("norm", SEQUENCE),
    ("head", VOCABULARY_HEAD),
)
PLANS.register("decoder")(DECODER)
