"""Expected traffic of contrastive losses over the global batch: a ring of data ranks, and a first pass.

With n pairs of width d on each of P > 1 ranks, a rank sends n((3P − 2)d + 2P − 1) elements a step for the softmax loss
and n(3P − 2)d for the sigmoid loss: forward P − 1 blocks of text features (and P times the statistics of their
columns), backward P − 1 blocks (and their columns) and P times their gradient.
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


def first_pass_calls(config: Config, calls: Sequence[Sequence[Call]]) -> list[list[Call]]:
    """Return the calls of the first pass over all micro-batches, without gradients; only contrastive losses have it."""
    if config.model.contrastive is None or len(calls) == 1:
        return []
    return [
        [replace(call, has_gradient=False, in_layer=False) for call in microbatch_calls]
        for microbatch_calls in calls
    ]


def add_contrastive_loss(ledger: ExpectedTraffic, config: Config, batch: Arrays, data_rank: int) -> None:
    """Add the bytes that a data rank sends to compare its pairs with those of all others."""
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
        feature, column = n * contrastive.width * size, n * size
        block, columns = [feature] * (not is_last), [column] * is_softmax
        forward, backward = [*block, *columns], [feature, *block, *(columns if not is_last else [])]
        for sent in (*forward, *backward) if n else ():
            ledger.send(axis, sent)
