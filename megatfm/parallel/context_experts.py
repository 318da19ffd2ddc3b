"""Experts where rows are cut: what a capacity takes, which tokens experts choose, and what balances a row follow from
all of its tokens.

A capacity takes a row's choices in the order of its tokens, wherever these are. Each rank gets the choices of the
others, lays them as the row has them, and keeps what is said of its own tokens: of which nothing comes back in the
backward pass, and little of it (K whole numbers a token; of experts that choose, a probability of each expert).
"""

from functools import partial
from typing import Any

from torch import Tensor, nn

from megatfm.parallel.collectives import sum_partial
from megatfm.parallel.context_attention import everything
from megatfm.parallel.context_exchange import Contexts, fetch
from megatfm.parallel.forward import replace_forward

# B batch, T tokens of a rank, S tokens of the row, K chosen experts


SEAMS = ("experts", "whole", "own"), ("router", "row", "part")
"""Parts of a mixture, and the names of what makes numbers of tokens ones of rows, and takes these apart again."""


def of_whole_rows(moe: nn.Module, contexts: Contexts) -> None:
    """Have a mixture's capacity, what its experts choose, and its counts by row, be of whole rows."""
    for owner, whole, own in SEAMS:
        module = moe.get_submodule(owner)
        if hasattr(module, own):
            replace_forward(module.get_submodule(whole), partial(_whole, contexts))
            replace_forward(module.get_submodule(own), _own)
    replace_forward(moe.get_submodule("counted"), partial(sum_partial, group=contexts.group))


def _whole(contexts: Contexts, numbers_BTK: Tensor, sequence: Any) -> Tensor:
    """[B, S, K], in the order of the rows."""
    wanted = sequence.once("everything", lambda: everything(contexts, sequence.length))
    return fetch(numbers_BTK[:, None], wanted)[:, 0]


def _own(taken_BSK: Tensor, sequence: Any) -> Tensor:
    """[B, T, K]."""
    return taken_BSK[:, sequence.indices]
