"""Experts where rows are cut: what a capacity takes, which tokens experts choose, and what balances a row follow from
all of its tokens.

A capacity takes a row's choices in the order of its tokens, wherever these are. Each rank gets the choices of the
others, lays them as the row has them, and keeps what is said of its own tokens: of which nothing comes back in the
backward pass, and little of it (K whole numbers a token; of experts that choose, a probability of each expert).
"""

from functools import partial
from typing import Any

from torch import Tensor, nn

from megatfm.parallel.collectives import reduce_from_group
from megatfm.parallel.context_attention import fetch_all_plan
from megatfm.parallel.context_exchange import ContextParallel, fetch
from megatfm.parallel.forward import replace_forward

# B batch, T tokens of a rank, S tokens of the row, K chosen experts


GATHER_SPLIT_HOOKS = ("experts", "whole", "own"), ("router", "row", "part")
"""Parts of a mixture, and the names of what makes numbers of tokens ones of rows, and takes these apart again."""


def of_whole_rows(moe: nn.Module, contexts: ContextParallel) -> None:
    """Have a mixture's capacity, what its experts choose, and its counts by row, be of whole rows."""
    for owner, whole, own in GATHER_SPLIT_HOOKS:
        module = moe.get_submodule(owner)
        if hasattr(module, own):
            replace_forward(module.get_submodule(whole), partial(_gather_row, contexts))
            replace_forward(module.get_submodule(own), _local_tokens)
    replace_forward(moe.get_submodule("counted"), partial(reduce_from_group, group=contexts.group))


def _gather_row(contexts: ContextParallel, numbers_BTK: Tensor, sequence: Any) -> Tensor:
    """[B, S, K], in the order of the rows."""
    wanted = sequence.cached("everything", lambda: fetch_all_plan(contexts, sequence.length))
    return fetch(numbers_BTK[:, None], wanted)[:, 0]


def _local_tokens(taken_BSK: Tensor, sequence: Any) -> Tensor:
    """[B, T, K]."""
    return taken_BSK[:, sequence.indices]
