"""Experts where rows are cut: what a capacity takes and what balances a row follow from all of its choices.

A capacity takes a row's choices in the order of its tokens, wherever these are. Each rank gets the choices of the
others, lays them as the row has them, and keeps what is said of its own tokens: whole numbers, of which nothing comes
back in the backward pass, and few of them (K a token).
"""

from functools import partial
from typing import Any

from torch import Tensor, nn

from megatfm.parallel.collectives import sum_partial
from megatfm.parallel.context_attention import everything
from megatfm.parallel.context_exchange import Contexts, fetch
from megatfm.parallel.forward import replace_forward

# B batch, T tokens of a rank, S tokens of the row, K chosen experts


def of_whole_rows(moe: nn.Module, contexts: Contexts) -> None:
    """Have a mixture's capacity, and its counts by row, be of whole rows."""
    experts = moe.get_submodule("experts")
    replace_forward(experts.get_submodule("whole"), partial(_whole, contexts))
    replace_forward(experts.get_submodule("own"), _own)
    replace_forward(moe.get_submodule("counted"), partial(sum_partial, group=contexts.group))


def _whole(contexts: Contexts, choices_BTK: Tensor, sequence: Any) -> Tensor:
    """[B, S, K], in the order of the rows."""
    wanted = sequence.once("everything", lambda: everything(contexts, sequence.length))
    return fetch(choices_BTK[:, None], wanted)[:, 0]


def _own(taken_BSK: Tensor, sequence: Any) -> Tensor:
    """[B, T, K]."""
    return taken_BSK[:, sequence.indices]
