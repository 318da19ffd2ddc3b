"""Expected traffic of losses that compare all samples of a global batch: a ring of the data ranks, and a first pass.

With n pairs of width d on each of P > 1 ranks, a rank sends n((3P − 2)d + 2P − 1) numbers a step for the softmax loss
and n(3P − 2)d for the sigmoid one: forward P − 1 blocks of captions (and P times what is known of their columns),
backward P − 1 blocks (and their columns) and P times their gradient.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from megatfm.config import Config
from megatfm.engines.interface import PRECISIONS
from megatfm.verify.axes import REPLICATE, SHARD, joined
from megatfm.verify.module_calls import Call
from megatfm.verify.shrink import Arrays
from megatfm.verify.traffic import ExpectedTraffic


def forward_alone(config: Config, calls: Sequence[Sequence[Call]]) -> list[list[Call]]:
    """Return the calls of a pass over all micro-batches without a gradient, if their samples are compared."""
    if config.model.contrastive is None or len(calls) == 1:
        return []
    return [[replace(call, has_gradient=False, in_layer=False) for call in of_one] for of_one in calls]


def add_comparison(ledger: ExpectedTraffic, config: Config, batch: Arrays, data_rank: int) -> None:
    """Add what a data rank sends to compare its pairs with those of the others."""
    contrastive, parallel = config.model.contrastive, config.parallel
    ranks = parallel.dp_replicate * parallel.dp_shard
    if contrastive is None or ranks == 1:
        return
    axis = joined(ledger.sizes, REPLICATE, SHARD)
    ledger.all_gather(axis, 8)
    size = max(4, PRECISIONS[config.train.precision].compute_dtype.itemsize)
    is_first = (batch["positions"] == 0) & (batch["documents"] >= 0)
    pairs = [int(rows.sum()) for rows in np.split(is_first, ranks)]
    is_softmax = contrastive.loss == "softmax"
    for step in range(ranks):
        n, is_last = pairs[(data_rank - step) % ranks], step == ranks - 1
        feature, number = n * contrastive.width * size, n * size
        block, columns = [feature] * (not is_last), [number] * is_softmax
        forward, backward = [*block, *columns], [feature, *block, *(columns if not is_last else [])]
        for sent in (*forward, *backward) if n else ():
            ledger.send(axis, sent)
