"""Losses that compare all samples of a global batch: features that a rank keeps, and what the ring of ranks sends.

With several micro-batches, a step computes all features without a graph first (`engines.passes.step_in_two_passes`).
"""

from megatfm.config import Config, ContrastiveObjective
from megatfm.estimate.traffic import Flows, join_axes, make_axes, takes_two_passes
from megatfm.estimate.weights import get_item_sizes
from megatfm.parallel.mesh import CONTEXT, REPLICATE, SHARD


def count_kept_feature_bytes(config: Config, samples: int, microbatches: int) -> int:
    """Return the bytes of features and their gradients that a step in two passes keeps. samples: of a micro-batch."""
    if not takes_two_passes(config, microbatches):
        return 0
    return 4 * samples * microbatches * _feature_row_bytes(config)


def add_ring_flows(flows: Flows, config: Config, samples: int, microbatches: int) -> None:
    """Add the sends of captions' features, their gradients and softmax's sums around the ring of n data ranks.

    Forward, features are sent n − 1 times and sums n times; backward, gradients n times, features and sums n − 1.
    """
    contrastive = config.model.contrastive
    if not isinstance(config.objective, ContrastiveObjective) or contrastive is None:
        return
    axes = make_axes(config.parallel)
    ring = join_axes((axes[SHARD], axes[REPLICATE], axes[CONTEXT]))
    features = samples * microbatches * _feature_row_bytes(config)
    sums = samples * microbatches * get_item_sizes(config).stored * (contrastive.loss == "softmax")
    flows.add(ring, "send", (3 * ring.size - 2) * features + (2 * ring.size - 1) * sums)


def _feature_row_bytes(config: Config) -> int:
    assert config.model.contrastive is not None
    return config.model.contrastive.width * get_item_sizes(config).stored
