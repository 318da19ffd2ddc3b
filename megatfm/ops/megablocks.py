"""Products of groups of rows by the operator that MegaBlocks uses (Gale et al. 2023), from the package grouped_gemm.

Not run on a GPU yet: its contract is held on CPU by a stand-in.
"""

import importlib
from functools import cache
from importlib.util import find_spec

import torch.nn.functional as F
from torch import Tensor

# M rows, G groups, I width of the rows, O of the products


@cache
def is_installed() -> bool:
    """Whether the package is there (`make moe`)."""
    return find_spec("grouped_gemm") is not None


def linear(x_MI: Tensor, weight_GOI: Tensor, ends_G: Tensor) -> Tensor:
    """x Wᵀ [M, O], with the group's W for rows from the end of the group before up to its own; 0 beyond the last.

    The operator wants bfloat16, contiguous, and the groups' sizes as int64 on the host, which has to wait for them.
    """
    sizes_G = ends_G.diff(prepend=ends_G.new_zeros(1)).long().cpu()
    rows = int(sizes_G.sum())
    if not rows:  # it takes no empty x
        return (x_MI.sum() * weight_GOI.sum() * 0).expand(len(x_MI), weight_GOI.shape[1])
    gmm = importlib.import_module("grouped_gemm.ops").gmm
    product_RO: Tensor = gmm(x_MI[:rows].contiguous(), weight_GOI.contiguous(), sizes_G, trans_b=True)
    return F.pad(product_RO, (0, 0, 0, len(x_MI) - rows))
