"""Expected traffic of contrastive losses over the global batch: a ring of data ranks, and a first pass.

With n pairs of width d on each of P > 1 ranks, a rank sends n((3P − 2)d + 2P − 1) elements a step for the softmax loss
and n(3P − 2)d for the sigmoid loss: forward P − 1 blocks of text features (and P times the statistics of their
columns), backward P − 1 blocks (and their columns) and P times their gradient. Context ranks count, too: a pair is on
that with the caption's first token.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from megatfm.config import Config
from megatfm.engines.interface import PRECISIONS
from megatfm.verify.axes import CONTEXT, REPLICATE, SHARD, MeshPosition, name_group
from megatfm.verify.module_calls import Call
from megatfm.verify.shrink import Arrays
from megatfm.verify.traffic import ExpectedTraffic


def list_first_pass_calls(config: Config, calls: Sequence[Sequence[Call]]) -> list[list[Call]]:
    """Return the calls of the first pass over all micro-batches, without gradients.

    Only contrastive losses have it, for several micro-batches, and in pipelines for one, too.
    """
    if config.model.contrastive is None or (len(calls) == 1 and config.parallel.pp == 1):
        return []
    return [
        [replace(call, has_gradient=False, in_layer=False) for call in microbatch_calls] for microbatch_calls in calls
    ]


def add_contrastive_loss(
    traffic: ExpectedTraffic, config: Config, batches: Sequence[Arrays], position: MeshPosition
) -> None:
    """Add the bytes that a rank sends to compare its pairs with those of all others. batches: of each context rank."""
    contrastive, parallel = config.model.contrastive, config.parallel
    data_ranks = parallel.dp_replicate * parallel.dp_shard
    ranks, rank = data_ranks * parallel.cp, position.data_rank * parallel.cp + position.cp
    if contrastive is None or ranks == 1:
        return
    axis = name_group(traffic.sizes, REPLICATE, SHARD, CONTEXT)
    traffic.all_gather(axis, 8)
    size = max(4, PRECISIONS[config.train.precision].compute_dtype.itemsize)
    is_first = [(batch["positions"] == 0) & (batch["documents"] >= 0) for batch in batches]
    pairs_by_context = [[int(rows.sum()) for rows in np.split(chosen, data_ranks)] for chosen in is_first]
    pairs = [n for by_rank in zip(*pairs_by_context, strict=True) for n in by_rank]
    is_softmax = contrastive.loss == "softmax"
    for step in range(ranks):
        n, is_last = pairs[(rank - step) % ranks], step == ranks - 1
        feature, column = n * contrastive.width * size, n * size
        block, columns = [feature] * (not is_last), [column] * is_softmax
        forward, backward = [*block, *columns], [feature, *block, *(columns if not is_last else [])]
        for sent in (*forward, *backward) if n else ():
            traffic.send(axis, sent)
