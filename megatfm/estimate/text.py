"""An estimate as text: verdict, memory by rank, time by cause, traffic; beside a traced rank or a recorded run."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from megatfm.config.world_size import describe_sizes
from megatfm.estimate.devices import GIB
from megatfm.estimate.estimator import Estimate
from megatfm.estimate.memory import RankMemory
from megatfm.estimate.recorded import Recorded
from megatfm.estimate.search import SearchResult
from megatfm.estimate.step_time import StepTime
from megatfm.estimate.traced import Traced
from megatfm.estimate.traffic import join_axes, leaves_node, make_axes
from megatfm.parallel.mesh import EXPERT, EXPERT_SHARD, SHARD
from megatfm.terminal import format_counted, make_table

if TYPE_CHECKING:
    from rich.table import Table

CAUSES = {
    "matmul": "matrix products",
    "attention": "attention",
    "memory_bound": "memory-bound operators",
    "host": "waiting for the host to ask for kernels",
    "recompute": "recomputation",
    "tensor_parallel": "tensor-parallel traffic",
    "context_parallel": "context-parallel traffic",
    "expert_parallel": "expert-parallel traffic",
    "expert_imbalance": "waiting for the experts with most tokens",
    "data_parallel": "data-parallel traffic that nothing hides",
    "bubble": "pipeline bubble",
    "optimizer": "optimizer",
    "data": "waiting for data",
    "checkpoint": "checkpoints",
}

OWNERS_SHOWN = 8
"""Most lines of code that are listed with the memory that they asked for."""


def describe_run(estimate: Estimate) -> list[str]:
    """Return lines that name the model, the cluster and the layout."""
    config, counts = estimate.config, estimate.description
    return [
        f"{config.name}: {counts.parameters:,} parameters, on {estimate.cluster}",
        f"layout: {describe_layout(estimate)}",
    ]


def describe_layout(estimate: Estimate) -> str:
    """Return the layout in words."""
    parallel, train = estimate.config.parallel, estimate.config.train
    sizes = {axis.name: axis.size for axis in make_axes(parallel).values() if axis.name not in (EXPERT, EXPERT_SHARD)}
    words = [describe_sizes({name: size for name, size in sizes.items() if size > 1} or {SHARD: 1})]
    words += [f"ep {parallel.ep}"] if parallel.ep > 1 else []
    words.append(f"ZeRO {parallel.zero}")
    words += ["sharded gradients"] if parallel.grad_accumulation == "sharded" else []
    if parallel.pp > 1:
        virtual = f" of {parallel.virtual_stages} virtual stages" if parallel.virtual_stages else ""
        words.append(parallel.pp_schedule + virtual)
    words.append(f"{format_counted(estimate.microbatches, 'micro-batch', 'micro-batches')} of {train.micro_batch}")
    words.append(f'recompute "{train.recompute}"')
    words.append("compiled" if estimate.compiled else "not compiled")
    return ", ".join(words)


def describe_fit(estimate: Estimate) -> str:
    """Return a line that says whether the run fits, and which rank is fullest."""
    worst, device = estimate.worst, estimate.cluster.device
    rank = f"pipeline rank {worst.pipeline_rank}" if len(estimate.memory) > 1 else "every rank"
    share = worst.total / device.memory_bytes
    if estimate.fits:
        return f"fits: {_format_gib(worst.total)} of {device.memory_gib:.1f} GiB ({100 * share:.0f} %) on {rank}"
    excess = worst.total - device.memory_bytes
    return (
        f"DOES NOT FIT: {rank} needs {_format_gib(worst.total)} GiB and has {device.memory_gib:.1f}: "
        f"{_format_gib(excess)} too many, most of them {worst.largest}"
    )


def describe_speed(estimate: Estimate) -> list[str]:
    """Return lines on step time, tokens a second and the length of the run."""
    full, causal = estimate.mfu
    steps = estimate.config.train.steps
    return [
        f"step {estimate.time.step:.3g} s: {estimate.tokens_per_second:,.0f} tokens a second, "
        f"{estimate.tokens_per_second / estimate.cluster.gpus:,.0f} a GPU; MFU {100 * full:.1f} %"
        + (f" ({100 * causal:.1f} % counting the causal half of attention)" if causal < full else ""),
        f"{format_counted(steps, 'step')}: {estimate.days:.3g} days, {estimate.gpu_hours:,.0f} GPU hours, "
        "without failures",
    ]


def _make_table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], *, left: Collection[str] = ()
) -> "Table":
    """Return a table. left: columns of words; numbers are aligned to the right."""
    table = make_table(columns, left, title, title_justify="left")
    for row in rows:
        table.add_row(*row)
    return table


def make_memory_table(estimate: Estimate) -> "Table":
    """Return a table of memory by pipeline rank; with more than eight, of the first, the worst and the last."""
    rows = []
    for rank in _select_ranks(estimate.memory):
        mark = " (worst)" if rank is estimate.worst and len(estimate.memory) > 1 else ""
        rows.append([f"{rank.pipeline_rank}{mark}", *map(_format_gib, (*rank.parts.values(), rank.total))])
    return _make_table("Memory of a rank, GiB", ("pipeline rank", *estimate.worst.parts, "sum"), rows)


def _select_ranks(ranks: Sequence[RankMemory]) -> list[RankMemory]:
    if len(ranks) <= 8:
        return list(ranks)
    worst = max(ranks, key=lambda rank: rank.total)
    return [ranks[index] for index in sorted({0, worst.pipeline_rank, len(ranks) - 1})]


def make_time_table(estimate: Estimate) -> "Table":
    """Return a table of a step's time by cause."""
    rows = (
        (cause, f"{seconds:.3g}", f"{100 * seconds / estimate.time.step:.1f} %")
        for cause, seconds in list_causes(estimate.time)
    )
    return _make_table("Time of a step", ("cause", "seconds", "share"), rows, left=["cause"])


def list_causes(time: StepTime) -> list[tuple[str, float]]:
    """Return the causes of a step's time and their seconds, the longest first, without those below a thousandth."""
    pairs = [(text, getattr(time, key)) for key, text in CAUSES.items()]
    return sorted((pair for pair in pairs if pair[1] >= time.step / 1000), key=lambda pair: -pair[1])


def make_traffic_table(estimate: Estimate) -> "Table":
    """Return a table of the busiest pipeline rank's traffic in a step."""
    node, axes, rows = estimate.cluster.node, make_axes(estimate.config.parallel), []
    for (name, collective), n_bytes in sorted(estimate.flows.sent.items()):
        joined = join_axes(axes[part] for part in name.split(" × "))
        link = node.between if leaves_node(joined, node) else node.within
        calls = estimate.flows.calls[name, collective]
        rows.append((name, collective, f"{calls:,}", f"{n_bytes / 1e9:,.2f}", link.name))
    columns = ("axis", "collective", "calls", "GB", "link")
    return _make_table("Sent in a step by the busiest rank", columns, rows, left=["axis", "collective", "link"])


def as_dict(estimate: Estimate) -> dict[str, object]:
    """Return the estimate for programs, as JSON's types."""
    full, causal = estimate.mfu
    return {
        "config": estimate.config.name,
        "device": estimate.cluster.device.key,
        "node": estimate.cluster.node.key,
        "gpus": estimate.cluster.gpus,
        "layout": describe_layout(estimate),
        "parallel": estimate.config.parallel.model_dump(exclude_defaults=True),
        "micro_batch": estimate.config.train.micro_batch,
        "recompute": estimate.config.train.recompute,
        "fits": estimate.fits,
        "memory": [{**vars(rank), "total": rank.total} for rank in estimate.memory],
        "step_seconds": estimate.time.step,
        "causes": vars(estimate.time),
        "tokens_per_second": estimate.tokens_per_second,
        "mfu": full,
        "mfu_causal": causal,
        "days": estimate.days,
        "gpu_hours": estimate.gpu_hours,
        "sent": {f"{axis} {name}": n_bytes for (axis, name), n_bytes in sorted(estimate.flows.sent.items())},
    }


def _format_gib(n_bytes: float) -> str:
    return f"{n_bytes / GIB:,.2f}"


def make_search_table(result: SearchResult, shown: int) -> "Table":
    """Return a table of a search's best layouts, and why the others come after the first. shown: most rows."""
    rows = (
        (
            f"{estimate.time.step:.3f}",
            f"{estimate.worst.total / GIB:.1f}",
            f"{100 * estimate.mfu[0]:.1f} %",
            describe_layout(estimate),
            explain_loss(estimate, result.best[0]),
        )
        for estimate in result.best[:shown]
    )
    columns = ("step, s", "GiB", "MFU", "layout", "why not")
    return _make_table("Best layouts", columns, rows, left=["layout", "why not"])


def explain_loss(estimate: Estimate, best: Estimate) -> str:
    """Return how much slower an estimate is than the chosen one, and the cause on which it loses most."""
    if estimate is best:
        return ""
    extra = {text: getattr(estimate.time, key) - getattr(best.time, key) for key, text in CAUSES.items()}
    cause = max(extra, key=lambda text: extra[text])
    share = 100 * (estimate.time.step / best.time.step - 1)
    if share <= -0.05:
        return f"{-share:.1f} % faster, which is within the model's error"
    if share < 0.05:
        return "as fast, with more memory" if estimate.worst.total > best.worst.total else "as fast"
    return f"{share:.1f} % slower: {extra[cause]:+.3g} s {cause}"


def describe_search(result: SearchResult) -> list[str]:
    """Return lines on how many layouts were tried, and why others were refused."""
    legal = result.tried - result.refused.total()
    lines = [
        f"{result.tried:,} layouts in {result.seconds:.0f} s: {result.refused.total():,} refused, "
        f"{legal - result.n_fit:,} do not fit, {result.n_fit:,} fit"
    ]
    lines += [f"refused {format_counted(count, 'time')}: {reason}" for reason, count in result.refused.most_common(3)]
    return lines


def make_traced_table(pairs: Sequence[tuple[str, int, int]], traced: Traced) -> "Table":
    """Return a table of modelled figures beside those of the traced rank. pairs: (name, modelled, traced) bytes."""
    facts = traced.facts
    rank = f"Rank {facts['rank']} of {facts['world']:,} on an imaginary GPU"
    title = f"{rank}, {format_counted(facts['microbatches'], 'micro-batch', 'micro-batches')}"
    title += ", compiled" if facts["is_compiled"] else ""
    rows = []
    for name, modelled, measured in pairs:
        difference = f"{100 * (modelled / measured - 1):+.2f} %" if measured else "not sent"
        rows.append((name, f"{modelled / 1e9:,.3f}", f"{measured / 1e9:,.3f}", difference))
    return _make_table(title, ("", "modelled, GB", "traced, GB", "difference"), rows, left=[""])


def describe_compiled_blocks(traced: Traced) -> list[str]:
    """Return lines on the blocks that a traced rank compiled: how many, graph breaks, and recompilations."""
    facts = traced.facts
    if not facts["is_compiled"]:
        return []
    stacks = Counter(path.rpartition(".")[0] for path in facts["saved"])
    names = ", ".join(f"{count} of {stack}" for stack, count in stacks.items())
    breaks, recompilations = facts["graph_breaks"], facts["recompilations"]
    n_breaks = format_counted(sum(breaks.values()), "graph break")
    n_recompilations = format_counted(sum(recompilations.values()), "recompilation")
    lines = [f"blocks compiled up to their graphs: {names}: {n_breaks}, {n_recompilations}"]
    lines += [f"graph break {times} ×: {line}" for line, times in breaks.items()]
    return lines + [f"compiled again {times} ×: {line}" for line, times in recompilations.items()]


def describe_trace(traced: Traced) -> list[str]:
    """Return lines on the kernels, host waits and largest tensor of a traced step."""
    facts = traced.facts
    bound = "at least " if facts["is_compiled"] else ""
    lines = [f"{bound}{sum(facts['kernels'].values()):,} kernels in {facts['seconds']:.0f} s of tracing"]
    lines += describe_compiled_blocks(traced)
    lines += [f"attention: {name.partition(': ')[2]}" for name in facts["kernels"] if "attention" in name]
    lines += [f"the host waits {times} ×: {line}" for line, times in facts["waits"].items()]
    lines += [f"a tensor of all pairs of tokens: {line}" for line in facts["all_pairs"]]
    lines.append(f"largest tensor: {facts['largest']}")
    lines.append("held at the fullest moment, by phase and line that asked for it:")
    return [*lines, *_iter_owner_lines(facts["at_peak"])]


def _iter_owner_lines(owners: Mapping[str, int]) -> Iterator[str]:
    """Yield lines on who holds the peak, the largest first. owners: "PHASE LAYER LINE" → bytes (`imaginary.ledger`)."""
    sums, blocks = Counter[str](), Counter[str]()
    for owner, n_bytes in owners.items():
        phase, layer, line = owner.split(" ", 2)
        sums[f"{phase}: {line}"] += n_bytes
        blocks[f"{phase}: {line}"] += layer != "-"
    for place, n_bytes in sums.most_common(OWNERS_SHOWN):
        yield f"  {n_bytes / 1e9:8.3f} GB  {place}" + (f", of {blocks[place]} blocks" if blocks[place] else "")


def describe_recorded(estimate: Estimate, recorded: Recorded) -> list[str]:
    """Return lines on the memory that a run recorded, beside the estimate's."""
    lines = []
    if recorded.peak:
        modelled = estimate.memory[0].total - estimate.memory[0].reserved
        included = "" if recorded.is_gpu else ", Python and its libraries included, at the end of a step on a CPU"
        lines.append(
            f"recorded: {recorded.peak / GIB:.2f} GiB on rank 0 in step {recorded.peak_step}{included}; predicted for "
            f"its tensors: {modelled / GIB:.2f}"
        )
    else:
        lines.append("recorded: no step, so no memory: the first one did not end")
    for rank, allocated, requested in recorded.failures:
        prediction = f"an earlier start had more ranks than {recorded.processes}"
        if rank < recorded.processes:
            pipeline_rank = rank * estimate.config.parallel.pp // recorded.processes
            prediction = f"predicted for it: {estimate.memory[pipeline_rank].total / GIB:.2f}"
        request = f" and asked for {requested} more" if requested else ""
        lines.append(f"rank {rank} held {allocated:.2f} GiB{request}; {prediction}")
    if not recorded.failures:
        lines.append("no rank of it ran out of memory, as far as its logs tell")
    if recorded.snapshot is not None:
        lines.append(f"in {recorded.snapshot.name}, by the line that asked for it:")
        for owner, n_bytes in recorded.owners.most_common(OWNERS_SHOWN):
            lines.append(f"  {n_bytes / GIB:8.3f} GiB  {owner}")
    return lines


def make_phases_table(estimate: Estimate) -> "Table":
    """Return a table of the fullest moment of each phase, on the fullest rank."""
    worst, memory = estimate.worst, estimate.cluster.device.memory_bytes
    rows = (
        (phase, _format_gib(n_bytes), f"{100 * n_bytes / memory:.0f} %") for phase, n_bytes in worst.by_phase.items()
    )
    title = f"Fullest moment by phase, pipeline rank {worst.pipeline_rank}"
    return _make_table(title, ("phase", "GiB", "of the device"), rows, left=["phase"])
