"""Tensor and sequence parallelism of the zoo's models (Shoeybi et al. 2019; Korthikanti et al. 2022).

One table serves all families, since their parts have the same names; a row whose pattern begins with "?" is for parts
that not every model has.
"""

from megatfm.parallel.plan import PLANS, Plan
from megatfm.parallel.styles import (
    COLUMN,
    ENTER,
    ROW,
    SEQUENCE,
    VOCABULARY_EMBEDDING,
    VOCABULARY_HEAD,
    WHOLE_IF_ANY,
    WHOLE_ONLY,
)

STACK: Plan = (
    ("*.embedding.tokens", VOCABULARY_EMBEDDING),
    ("?*.embedding.positions", WHOLE_ONLY),
    ("?*.embedding.segments", WHOLE_ONLY),
    ("?*.embedding.norm", WHOLE_ONLY),
    ("?*.embedding.projection", WHOLE_ONLY),
    ("?*coder.position", WHOLE_ONLY),
    ("*.layers.*_residual.norm", SEQUENCE),
    ("?*.layers.*_residual.norm_out", SEQUENCE),
    ("*.layers.*.attn", ENTER),
    ("*.layers.*.attn.w[qv]", COLUMN),
    ("*.layers.*.attn.wk", COLUMN),
    ("*.layers.*.attn.wo", ROW),
    ("?*.layers.*.attn.[qk]_norm", WHOLE_IF_ANY),
    ("?*.layers.*.attn.kv_norm", WHOLE_ONLY),
    ("?*.layers.*.attn.w*_down", WHOLE_ONLY),
    ("?*.layers.*.attn.wk_rope", WHOLE_ONLY),
    ("?*.layers.*.attn.w[qk]_position", WHOLE_ONLY),
    ("?*.layers.*.attn.core", WHOLE_IF_ANY),
    ("?*.layers.*.cross", ENTER),
    ("?*.layers.*.cross.w[qkv]", WHOLE_ONLY),
    ("?*.layers.*.cross.wo", ROW),
    ("?*.layers.*.cross.[qk]_norm", WHOLE_IF_ANY),
    ("*.layers.*.ffn", ENTER),
    ("?*.layers.*.ffn.w_gate", COLUMN),
    ("*.layers.*.ffn.w_up", COLUMN),
    ("*.layers.*.ffn.w_down", ROW),
    ("?*coder.norm", SEQUENCE),
)
HEAD: Plan = (("head", VOCABULARY_HEAD), ("?head.transform*", WHOLE_ONLY))

DECODER: Plan = (*STACK, *HEAD, ("?future.*", WHOLE_ONLY))
ENCODER: Plan = (*STACK, *HEAD, ("?sentence.*", WHOLE_ONLY), ("?boundary*", WHOLE_ONLY))
ENCODER_DECODER: Plan = (*STACK, *HEAD)
ELECTRA: Plan = (
    *STACK,
    ("generator.head*", WHOLE_ONLY),
    ("discriminator.dense", WHOLE_ONLY),
    ("discriminator.verdict", WHOLE_ONLY),
)
DISCRIMINATOR: Plan = (*STACK, ("dense", WHOLE_ONLY), ("verdict", WHOLE_ONLY))

for family, plan in {
    "decoder": DECODER,
    "encoder": ENCODER,
    "encoder_decoder": ENCODER_DECODER,
    "electra": ELECTRA,
    "discriminator": DISCRIMINATOR,
}.items():
    PLANS.register(family)(plan)
