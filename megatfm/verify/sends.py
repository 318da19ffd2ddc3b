"""What pipeline ranks should send one another in a step: b·s·h elements for each boundary between stages of two ranks,
each way, and as much again where an encoder's memory travels along (its own length); ELECTRA's corrupted tokens go one
way. It knows the table of stages and the shapes of the batch, and nothing of what runs the stages."""

from collections import Counter

import torch

from megatfm.config import Config
from megatfm.models import build
from megatfm.parallel.mesh import AXES
from megatfm.train.build import cut_model
from megatfm.verify.batch import Arrays
from megatfm.verify.expected import Flows


def expected_sends(config: Config, batch: Arrays) -> list[Flows]:
    """Of each rank, over the axis pp, in float64."""
    with torch.device("meta"):
        pipeline = cut_model(config, build(config.model))
    share = config.train.global_batch // (config.parallel.dp_replicate * config.parallel.dp_shard)
    calls, sent = Counter[int](), Counter[int]()
    for stage in pipeline.stages[1:]:
        before = pipeline.stages[stage.index - 1].rank
        if before == stage.rank:
            continue
        for field in stage.takes.values():
            tokens = share * batch[field.like].shape[1]
            size = 8 * tokens * (field.width or 1)
            if field.width is not None:  # what has a gradient, which comes back
                size //= pipeline.sequence_parts
                calls[stage.rank] += share // config.train.micro_batch
                sent[stage.rank] += size
            calls[before] += share // config.train.micro_batch
            sent[before] += size
    assert AXES[0] == "pp"
    return [
        {("pp", "send"): (calls[pp], sent[pp])} if calls[pp] else {}
        for pp in range(config.parallel.pp)
        for _ in range(_ranks_each(config))
    ]


def _ranks_each(config: Config) -> int:
    """Ranks that share a pipeline rank's stages."""
    return config.parallel.dp_replicate * config.parallel.dp_shard * config.parallel.tp
