"""Tensor and sequence parallelism of the zoo's models (Shoeybi et al. 2019; Korthikanti et al. 2022).

One table serves all families, since their parts have the same names; a row whose pattern begins with "?" is for parts
that not every model has.
"""

from megatfm.parallel.plan import PLANS, Plan
from megatfm.parallel.styles import (
    COLUMN,
    ENTER,
    ENTER_OUTPUT,
    LAST_DIM,
    OWN_OUTPUT,
    PART_DROPOUT,
    ROW,
    SEQUENCE,
    SHARED_BY_HEADS,
    TOKEN_DROPOUT,
    VOCABULARY_EMBEDDING,
    VOCABULARY_HEAD,
    WHOLE,
    WHOLE_INPUT,
    WHOLE_OUTPUT,
)

EMBEDDING: Plan = (
    ("?*.embedding.tokens", VOCABULARY_EMBEDDING),
    ("?*.embedding.positions", OWN_OUTPUT),
    ("?*.embedding.segments", OWN_OUTPUT),
    ("?*.embedding.norm", SEQUENCE),
    ("*.embedding.dropout", TOKEN_DROPOUT),
    ("?*.embedding.projection", SEQUENCE),
)
ATTENTION: Plan = (
    ("*.layers.*.attn", ENTER),
    ("*.layers.*.attn.w[qkv]", COLUMN),
    ("*.layers.*.attn.wo", ROW),
    ("?*.layers.*.attn.core", SHARED_BY_HEADS),
    ("*.layers.*.attn.core.dropout", PART_DROPOUT),
    ("?*.layers.*.attn.[qk]_norm", SHARED_BY_HEADS),
    ("?*.layers.*.attn.w*_down", SHARED_BY_HEADS),
    ("?*.layers.*.attn.kv_norm", SHARED_BY_HEADS),
    ("?*.layers.*.attn.wk_rope", SHARED_BY_HEADS),
    ("?*.layers.*.attn.w[qk]_position", COLUMN),
    ("?*coder.position", LAST_DIM),
    ("?*coder.position.*", SHARED_BY_HEADS),
)
CROSS_ATTENTION: Plan = (
    ("memory", ENTER_OUTPUT),
    ("*.layers.*.cross", ENTER),
    ("*.layers.*.cross.w[qkv]", COLUMN),
    ("*.layers.*.cross.wo", ROW),
    ("*.layers.*.cross.core.dropout", PART_DROPOUT),
    ("?*.layers.*.cross.[qk]_norm", SHARED_BY_HEADS),
)
RESIDUAL: Plan = (
    ("*.layers.*_residual.norm", SEQUENCE),
    ("?*.layers.*_residual.norm_out", SEQUENCE),
    ("*.layers.*_residual.branch.dropout", TOKEN_DROPOUT),
    ("?*coder.norm", SEQUENCE),
)
STACK: Plan = (*EMBEDDING, *RESIDUAL, *ATTENTION)
HEAD: Plan = (
    ("?head", VOCABULARY_HEAD),
    ("?head.transform", SHARED_BY_HEADS),
    ("?head.transform.*", SHARED_BY_HEADS),
)

DECODER: Plan = (*STACK, *HEAD, ("?future.*.final_norm", SEQUENCE))
ENCODER: Plan = (
    *STACK,
    *HEAD,
    ("?sentence", WHOLE_INPUT),
    ("?sentence.*", WHOLE),
    ("?boundary", VOCABULARY_HEAD),
    ("?boundary.*", SHARED_BY_HEADS),
)
ENCODER_DECODER: Plan = (*STACK, *CROSS_ATTENTION, *HEAD)
DISCRIMINATOR: Plan = (*STACK, ("dense", SEQUENCE), ("verdict", WHOLE_OUTPUT))
ELECTRA: Plan = (
    *STACK,
    *((f"{'?' * row.startswith('?')}generator.{row.removeprefix('?')}", style) for row, style in HEAD),
    ("discriminator.dense", SEQUENCE),
    ("discriminator.verdict", WHOLE_OUTPUT),
)

for family, plan in {
    "decoder": DECODER,
    "encoder": ENCODER,
    "encoder_decoder": ENCODER_DECODER,
    "electra": ELECTRA,
    "discriminator": DISCRIMINATOR,
}.items():
    PLANS.register(family)(plan)
