"""XLNet has no tensor parallelism: its two streams are of different lengths, and only one of them is the row's."""

from torch import nn

from megatfm.errors import UsageError
from megatfm.parallel.plan import PLANS, Plan
from megatfm.parallel.styles import Own, Ranks, Style


def _refuse(module: nn.Module, ranks: Ranks, own: Own) -> None:
    raise UsageError(
        f"parallel.tp = {ranks.group.size()}: model.family = 'xlnet' is not cut by tensor parallelism: set "
        "parallel.tp = 1 and use parallel.dp_shard"
    )


UNCUT = Style("whole, no tp", install=_refuse)
XLNET: Plan = (("*", UNCUT),)
PLANS.register("xlnet")(XLNET)
