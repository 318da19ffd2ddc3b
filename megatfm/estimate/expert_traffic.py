"""Traffic of context and expert parallelism for one part of a model, in closed forms."""

from collections.abc import Mapping

from megatfm.config import Config
from megatfm.estimate.part_profile import PartProfile
from megatfm.estimate.traffic import Axis, Flows
from megatfm.estimate.weights import experts_section


def context_flows(flows: Flows, config: Config, part: PartProfile, axis: Axis, microbatches: int) -> None:
    """Add what attention sends of rows that are one document: heads for tokens, or keys and values round a ring.

    By a ring of c ranks, for x bytes of keys and values on each: (c − 1)·x forward, and back x in the activations'
    type and their gradients in float32; recomputing a block repeats the forward's. By heads each rank keeps 1/c.
    """
    if axis.size == 1:
        return
    c, again = axis.size, config.train.recompute == "full"
    for op in part.forward:
        if op.kind != "attention":
            continue
        q, k, v, out, _ = _attention_bytes(op.reads, op.writes)
        ring = (c - 1) * (k + v)
        exchanged = (q + max(k, q // _heads(config)) + max(v, q // _heads(config)) + out) * (c - 1) // c
        if _by_heads(config, exchanged, ring):
            flows.add(axis, "all_to_all", exchanged, (2 + again) * microbatches)
        else:
            flows.add(axis, "send", ring, (1 + again) * microbatches)
            flows.add(axis, "send", ring * (1 + 4 // op.itemsize), microbatches)


def _attention_bytes(reads: Mapping[int, int], writes: Mapping[int, int]) -> tuple[int, ...]:
    q, k, v = list(reads.values())[:3]
    out, sums = list(writes.values())[:2]
    return q, k, v, out, sums


def _heads(config: Config) -> int:
    return max(1, config.model.attention.n_heads // config.parallel.tp)


def _by_heads(config: Config, exchanged: int, ring: int) -> bool:
    """Whether tokens are exchanged for heads (see `parallel.cp_method`)."""
    parallel, attention = config.parallel, config.model.attention
    if parallel.cp_method != "auto":
        return parallel.cp_method == "ulysses"
    heads, keys = attention.n_heads // parallel.tp, max(1, attention.kv_heads // parallel.tp)
    can = heads % parallel.cp == 0 and (keys % parallel.cp == 0 or parallel.cp % keys == 0)
    return can and 2 * exchanged < 3 * ring


def expert_flows(flows: Flows, config: Config, part: PartProfile, axis: Axis, microbatches: int) -> None:
    """Add the exchanges of tokens with experts' ranks, routed evenly: there and back, forward and backward."""
    if axis.size == 1:
        return
    products = [op for op in part.forward if op.name == "_grouped_mm"]
    if not products:
        return
    section = experts_section(config.model)
    top_k = getattr(section, "top_k", 1)
    rows = config.train.micro_batch * config.data.sequence_length // config.parallel.cp * top_k
    if config.parallel.tp > 1:
        rows //= config.parallel.tp  # experts of a rank, or tokens of its own
    width = config.model.d_model * products[0].itemsize
    sent = rows * width * (axis.size - 1) // axis.size
    again = config.train.recompute in ("full", "selective")
    flows.add(axis, "all_to_all", sent, (4 + 2 * again) * microbatches)
