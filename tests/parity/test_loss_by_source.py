"""The loss of each source of rows, in every kind of layout, is that of its rows computed one by one from all logits."""

from typing import Any

import pytest

from tests.support.source_losses import DECODER, ENCODER, check_losses_by_source
from tests.support.workers import Workers

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "one rank": (DECODER, {}),
    "future heads, zero1": (DECODER | {"n_mtp_heads": 2}, {"dp_shard": 2, "zero": 1}),
    "zero3 x tp": (DECODER, {"dp_shard": 2, "tp": 2}),
    "tp without sequence parallelism": (DECODER, {"tp": 2, "sequence_parallel": False}),
    "pp x cp": (DECODER, {"pp": 2, "cp": 2, "pp_schedule": "1f1b"}),
    "zero bubble": (DECODER, {"pp": 2, "pp_schedule": "zbv"}),
    "sparse head, tp": (ENCODER, {"tp": 2}),
    "sparse head, cp": (ENCODER, {"cp": 2}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_loss_of_each_source_is_that_of_its_rows(workers: Workers, case: str) -> None:
    """DeepSpeed's is in test_deepspeed, whose processes have imported it."""
    check_losses_by_source(workers, *CASES[case])
