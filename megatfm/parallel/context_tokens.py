"""What is looked up at other tokens of a row, where rows are cut: it is fetched from the ranks that have it."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from megatfm.ops.moved import moved, to_host
from megatfm.parallel.context_exchange import ContextParallel, FetchPlan, fetch

# B batch, T tokens of a rank, S tokens of the row, M masked tokens, D model width


def make_span_boundary_forward(
    around: nn.Module, contexts: ContextParallel
) -> Callable[..., tuple[Tensor, Tensor]]:
    """What is run instead of a module's `forward` that looks up the tokens around spans, by their distances."""

    def forward(
        hidden_BTD: Tensor, left_BT: Tensor, right_BT: Tensor, row_left_BS: Tensor, row_right_BS: Tensor
    ) -> tuple[Tensor, Tensor]:
        dealt = contexts.token_indices(row_left_BS.shape[1])
        row = to_host(row_left_BS), to_host(row_right_BS)
        wanted = FetchPlan.of(contexts, dealt, [span_boundary_indices(*row, here) for here in dealt])
        x_BLD = fetch(hidden_BTD[:, None], wanted)[:, 0]
        places, looked_at = (moved(x, left_BT.device) for x in (dealt[contexts.rank], wanted.indices))
        rows, columns = (left_BT > 0).nonzero(as_tuple=True)
        left_M, right_M = places[columns] - left_BT[rows, columns], places[columns] + right_BT[rows, columns]
        at_left, at_right = (torch.searchsorted(looked_at, at) for at in (left_M, right_M))
        return x_BLD[rows, at_left], x_BLD[rows, at_right]

    return forward


def span_boundary_indices(left_BS: Tensor, right_BS: Tensor, here: Tensor) -> Tensor:
    """The places of the tokens around spans, in any of the rows, that masked tokens at some places look up; sorted."""
    rows, columns = (left_BS[:, here] > 0).nonzero(as_tuple=True)
    at = here[columns]
    return torch.cat([at - left_BS[rows, at], at + right_BS[rows, at]]).unique()
