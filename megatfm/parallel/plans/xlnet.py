"""XLNet: both streams are cut along their own sequences; what the content is to the queries is gathered in a seam."""

from megatfm.parallel.plan import PLANS, Plan
from megatfm.parallel.plans.transformer import EMBEDDING, HEAD, RESIDUAL
from megatfm.parallel.styles import (
    COLUMN,
    ENTER_HEADS,
    ENTER_OUTPUT,
    OWN_OUTPUT,
    PART_DROPOUT,
    ROW,
    TOKEN_DROPOUT,
)

XLNET: Plan = (
    *EMBEDDING,
    ("encoder.query", OWN_OUTPUT),
    ("encoder.query_dropout", TOKEN_DROPOUT),
    *RESIDUAL,
    ("*.layers.*.attn", ENTER_HEADS),
    ("*.layers.*.attn.content", ENTER_OUTPUT),
    ("*.layers.*.attn.w[qkv]", COLUMN),
    ("*.layers.*.attn.wk_position", COLUMN),
    ("*.layers.*.attn.dropout", PART_DROPOUT),
    ("*.layers.*.attn.wo", ROW),
    ("encoder.dropout", TOKEN_DROPOUT),
    *HEAD,
)
PLANS.register("xlnet")(XLNET)
