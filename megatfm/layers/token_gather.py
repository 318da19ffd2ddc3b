"""Tokens of one row at the places of another, e.g. visible patches among masked ones, or an image's in a text."""

from torch import Tensor, nn

# B batch, S tokens of the row that is read, T tokens of the other, D width


class TokenGather(nn.Module):
    """The vectors at given indices of a row: the seam at which context parallelism fetches those of other ranks."""

    cp_plan = "token_gather"

    def forward(self, x_BSD: Tensor, at_BT: Tensor, length: int) -> Tensor:
        """[B, T, D], x at the indices `at` of full rows of `length` tokens; any token's vector at an index of −1."""
        return x_BSD.gather(1, at_BT.clamp(min=0)[..., None].expand(-1, -1, x_BSD.shape[-1]))
