"""Sequences of two parts: what is given, and what is to be predicted from it."""

import numpy as np

from megatfm.objectives.registry import Fields, SpecialTokens, Tokens
from megatfm.ops.cross_entropy import IGNORE


def pair(given: Tokens, wanted: Tokens, special: SpecialTokens) -> Fields:
    """For an encoder-decoder: `given` + EOS for the encoder, `wanted` + EOS as targets, and for the decoder's input the
    targets shifted right, after the padding token (T5's start token)."""
    targets = np.append(wanted, special.eos).astype(np.int64)
    return {
        "encoder_tokens": np.append(given, special.eos).astype(np.int64),
        "tokens": np.append(special.pad, targets[:-1]).astype(np.int64),
        "targets": targets,
    }


def prefixed(given: Tokens, wanted: Tokens, special: SpecialTokens) -> Fields:
    """For a decoder: `given`, which all tokens see, then `wanted` and EOS, the next token predicted from its last on.

    One token shorter than both and EOS, since the last is only a target. `given` must not be empty.
    """
    whole = np.concatenate([given, wanted, [special.eos]]).astype(np.int64)
    targets = whole[1:].copy()
    targets[: len(given) - 1] = IGNORE
    prefix = np.zeros(len(targets), np.int64)
    prefix[: len(given)] = 1
    return {"tokens": whole[:-1], "targets": targets, "prefix": prefix}
