"""Traffic of a rank in a step over all axes; tensor, context, expert and pipeline parallelism, and the ring of losses
that compare all samples of a global batch, in closed forms."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from megatfm.config import Config, ContrastiveObjective
from megatfm.config.attention import MLAAttentionConfig
from megatfm.estimate.operators import Operator
from megatfm.estimate.part_profile import ModelProfile, PartProfile
from megatfm.estimate.traffic import Axis, Flows, add_data_flows, join_axes, make_axes, takes_two_passes
from megatfm.estimate.weights import LocalWeight, find_experts_section, get_item_sizes
from megatfm.parallel.mesh import CONTEXT, EXPERT, PIPELINE, REPLICATE, SHARD, TENSOR


@dataclass(frozen=True)
class StageSplit:
    """Stages of a pipeline."""

    parts: Sequence[Sequence[int]]
    """Indices of the split points of each stage."""
    rank_of: Sequence[int]
    """Stage → pipeline rank."""

    def get_stages(self, rank: int) -> dict[int, Sequence[int]]:
        """Return stage → split points of a pipeline rank."""
        return {stage: self.parts[stage] for stage, stage_rank in enumerate(self.rank_of) if stage_rank == rank}

    def list_parts(self, rank: int) -> list[int]:
        """Return the split points of a pipeline rank."""
        return [index for parts in self.get_stages(rank).values() for index in parts]

    def list_sending_stages(self) -> list[int]:
        """Return the stages whose output goes to another rank."""
        return [stage for stage, (sender, receiver) in enumerate(pairwise(self.rank_of)) if sender != receiver]


def compute_rank_flows(
    config: Config,
    profile: ModelProfile,
    weights: Sequence[LocalWeight],
    stages: StageSplit,
    rank: int,
    microbatches: int,
) -> Flows:
    """Estimate the traffic of a pipeline rank."""
    axes, flows = make_axes(config.parallel), Flows()
    indices = stages.list_parts(rank)
    for part in (profile.parts[index] for index in indices):
        _add_tensor_flows(flows, axes[TENSOR], part, config, microbatches)
        add_context_flows(flows, config, part, axes[CONTEXT], microbatches)
        add_expert_flows(flows, config, part, axes[EXPERT], microbatches)
    add_data_flows(flows, config, weights, indices, microbatches)
    _add_ring_flows(flows, config, profile.samples, microbatches)
    for stage in stages.list_sending_stages():  # activations forward, or as many gradients back
        if rank in stages.rank_of[stage : stage + 2]:
            flows.add(axes[PIPELINE], "send", profile.parts[stages.parts[stage][-1]].output_bytes, microbatches)
    rank_of_part = {
        index: stage_rank for parts, stage_rank in zip(stages.parts, stages.rank_of, strict=True) for index in parts
    }
    _add_shared_gradients(flows, config, weights, rank_of_part, rank)
    return flows


def list_recomputed_operators(part: PartProfile, mode: str) -> list[Operator]:
    """Return the operators of a part that recomputation runs again: none outside of blocks. Those of a budget in
    per cent, which torch chooses, are not known, and do not count.

    "full" repeats all until the last saved tensor exists, which leaves out the block's last sum over ranks; "selective"
    repeats pointwise kernels and gathers.
    """
    if not part.is_block or mode not in ("full", "selective"):
        return []
    if mode == "selective":
        return [op for op in part.forward if op.kind == "pointwise" or op.collective == "all_gather"]
    saved_numbers = {tensor.number for tensor in part.saved}
    last = max((i for i, op in enumerate(part.forward) if saved_numbers & op.writes.keys()), default=-1)
    return list(part.forward[: last + 1])


def _add_tensor_flows(flows: Flows, axis: Axis, part: PartProfile, config: Config, microbatches: int) -> None:
    for op in (*part.forward, *part.backward, *list_recomputed_operators(part, config.train.recompute)):
        if op.kind == "collective":
            flows.add(axis, op.collective, op.sent_bytes, microbatches)


def add_context_flows(flows: Flows, config: Config, part: PartProfile, axis: Axis, microbatches: int) -> None:
    """Add the traffic of attention in rows of one document: a ring of keys and values, or Ulysses' all-to-alls.

    Let c ranks have x bytes of keys and values (or latents) each. In a ring, a rank sends (c − 1) · x forward; backward
    it sends the same, and gradients in float32. By Ulysses a rank keeps 1 / c of queries, keys, values and output.
    Recomputation repeats the forward traffic; "selective" saves the results of all-to-alls. Local attention sends the
    keys of its windows alone.
    """
    if axis.size == 1:
        return
    c, mode = axis.size, config.train.recompute
    repeats = mode in ("full", "selective")
    for op in part.forward:
        if op.kind != "attention":
            continue
        q, k, v = list(op.reads.values())[:3]
        if op.fetched_tokens:  # of a window, keys forward and their gradients backward
            sent = (k + v) * op.fetched_tokens * c // _get_row_length(config, part)
            flows.add(axis, "send", sent, (2 + repeats) * microbatches)
            continue
        output = next(iter(op.writes.values()))
        latents = _count_latent_bytes(config, part, op.itemsize)
        ring = (c - 1) * (latents or k + v)
        # Ranks that outnumber the heads of keys get copies of them; latents are projected to as many as queries have.
        key_heads = max(1, config.model.attention.kv_heads // config.parallel.tp)
        copies = 1 if latents else max(1, c // key_heads)
        ulysses = (q + (k + v) * copies + output) * (c - 1) // c
        if _is_ulysses(config, ulysses, ring):
            flows.add(axis, "all_to_all", ulysses, (2 + (mode == "full")) * microbatches)
        else:
            flows.add(axis, "send", ring, (1 + repeats) * microbatches)
            flows.add(axis, "send", ring * (1 + max(4, op.itemsize) // op.itemsize), microbatches)


def _count_latent_bytes(config: Config, part: PartProfile, itemsize: int) -> int:
    """Return the bytes of a micro-batch's latents on a rank, of which keys and values are made; 0 without any."""
    attention = config.model.attention
    if not isinstance(attention, MLAAttentionConfig):
        return 0
    width = attention.kv_lora_rank + attention.qk_rope_head_dim
    return _count_local_tokens(config, part) * width * itemsize


def _get_row_length(config: Config, part: PartProfile) -> int:
    """Return the number of tokens of a row, of which an encoder-decoder's two sides have different ones."""
    is_decoder = part.name.startswith("decoder.")
    return (is_decoder and config.data.target_length) or config.data.sequence_length


def _count_local_tokens(config: Config, part: PartProfile) -> int:
    """Return the number of a micro-batch's tokens on a rank of `cp`."""
    return config.train.micro_batch * _get_row_length(config, part) // config.parallel.cp


def _is_ulysses(config: Config, ulysses: int, ring: int) -> bool:
    """Return whether Ulysses is used: if configured, or if heads divide and it sends less (see `parallel.cp_method`).

    ulysses, ring: bytes of a forward pass.
    """
    parallel, attention = config.parallel, config.model.attention
    if parallel.cp_method != "auto":
        return parallel.cp_method == "ulysses"
    heads, keys = (max(1, n // parallel.tp) for n in (attention.n_heads, attention.kv_heads))
    is_divisible = heads % parallel.cp == 0 and (keys % parallel.cp == 0 or parallel.cp % keys == 0)
    return is_divisible and 2 * ulysses < 3 * ring


def add_expert_flows(flows: Flows, config: Config, part: PartProfile, axis: Axis, microbatches: int) -> None:
    """Add the all-to-alls of evenly routed tokens: dispatch and combine, forward and backward."""
    if axis.size == 1:
        return
    matmuls = [op for op in part.forward if op.name == "_grouped_mm"]
    if not matmuls:
        return
    section = find_experts_section(config.model)
    top_k = getattr(section, "top_k", 1)
    rows = _count_local_tokens(config, part) * top_k
    if config.parallel.expert_tp != "by_channel":
        rows //= config.parallel.tp  # a tensor-parallel rank has a share of the experts, or of the tokens
    row_bytes = config.model.d_model * matmuls[0].itemsize
    sent = rows * row_bytes * (axis.size - 1) // axis.size
    repeats = config.train.recompute == "full"
    flows.add(axis, "all_to_all", sent, (4 + 2 * repeats) * microbatches)


def _add_shared_gradients(
    flows: Flows, config: Config, weights: Sequence[LocalWeight], rank_of_part: dict[int, int], rank: int
) -> None:
    """Add sums of partial gradients: of tied tables over pipeline ranks, and of norms and biases over tensor-parallel
    ranks with sequence parallelism."""
    parallel, axes = config.parallel, make_axes(config.parallel)
    size = 8 if config.train.precision == "fp64" else 4
    for weight in weights:
        ranks = {rank_of_part[index] for index in weight.parts}
        if rank not in ranks or not weight.is_trained:
            continue
        n_bytes = (weight.shard(parallel.zero_shards) if parallel.effective_zero else weight.local) * size
        if len(ranks) > 1:
            flows.add(axes[PIPELINE], "all_reduce", 2 * n_bytes * (len(ranks) - 1) / len(ranks))
        if weight.is_partial:
            flows.add(axes[TENSOR], "all_reduce", 2 * n_bytes * (parallel.tp - 1) / parallel.tp)


def count_kept_feature_bytes(config: Config, samples: int, microbatches: int) -> int:
    """Return the bytes of features and their gradients that a step in two passes keeps. samples: of a micro-batch.

    With several micro-batches, a step computes all features without a graph first (`step_in_two_passes`).
    """
    if not takes_two_passes(config, microbatches):
        return 0
    return 4 * samples * microbatches * _feature_row_bytes(config)


def _add_ring_flows(flows: Flows, config: Config, samples: int, microbatches: int) -> None:
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
