"""Sequences of two parts: what is given, and what is to be predicted from it."""

import numpy as np

from megatfm.objectives.registry import Example, SpecialTokens, TokenArray
from megatfm.ops.cross_entropy import IGNORE


def seq2seq_example(inputs: TokenArray, target_tokens: TokenArray, special: SpecialTokens) -> Example:
    """For an encoder-decoder: `given` + EOS for the encoder, `wanted` + EOS as targets, and for the decoder's input the
    targets shifted right, after the padding token (T5's start token)."""
    targets = np.append(target_tokens, special.eos).astype(np.int64)
    return {
        "encoder_tokens": np.append(inputs, special.eos).astype(np.int64),
        "tokens": np.append(special.pad, targets[:-1]).astype(np.int64),
        "targets": targets,
    }


def prefix_lm_example(inputs: TokenArray, target_tokens: TokenArray, special: SpecialTokens) -> Example:
    """For a decoder: `given`, which all tokens see, then `wanted` and EOS, the next token predicted from its last on.

    One token shorter than both and EOS, since the last is only a target. `given` must not be empty.
    """
    whole = np.concatenate([inputs, target_tokens, [special.eos]]).astype(np.int64)
    targets = whole[1:].copy()
    targets[: len(inputs) - 1] = IGNORE
    prefix = np.zeros(len(targets), np.int64)
    prefix[: len(inputs)] = 1
    return {"tokens": whole[:-1], "targets": targets, "prefix": prefix}
