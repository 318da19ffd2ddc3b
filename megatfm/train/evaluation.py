"""Loss and bits per byte on the named validation sets."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from megatfm.data import IGNORED_TARGET, Loader, PackedRows
from megatfm.engines import NativeEngine
from megatfm.objectives import Objective


def evaluate(
    engine: NativeEngine,
    rows: PackedRows,
    objective: Objective,
    byte_lengths: NDArray[np.int64],
    *,
    micro_batch: int,
    max_rows: int = 0,
) -> dict[str, Any]:
    """Evaluate one set, on all ranks together: loss in nats per target, bits per byte of text, tokens, bytes.

    byte_lengths [vocabulary]: bytes of text that each id stands for. Every text is coded from its first byte to its
    end, the mark at its end included, so that bits per byte compare with a file compressor's; what lies before the
    start of a row is not seen, which can only make the figure worse. max_rows: 0 for all.
    """
    data_ranks = engine.mesh.data_ranks
    stop = min(max_rows or len(rows), len(rows))
    n_bytes = torch.zeros(1, dtype=torch.float64, device=engine.device)
    with Loader(
        rows,
        global_batch=micro_batch * data_ranks,
        micro_batch=micro_batch,
        data_rank=engine.mesh.data_rank,
        data_ranks=data_ranks,
        stop=stop,
    ) as loader:

        def batches() -> Iterator[dict[str, NDArray[np.int64]]]:
            for microbatches in loader:
                for batch in microbatches:
                    targets = batch["targets"]
                    n_bytes.add_(int(byte_lengths[targets[targets != IGNORED_TARGET]].sum()))
                    yield batch

        result = engine.evaluate(batches(), objective)
    engine.mesh.sum(n_bytes, ("dp_shard", "dp_replicate"))
    nats = sum(result.sums.values())
    return {
        "loss": result.loss,
        "bits_per_byte": nats / math.log(2) / max(float(n_bytes), 1.0),
        "tokens": sum(result.counts.values()),
        "bytes": int(n_bytes),
        "rows": stop,
    }
