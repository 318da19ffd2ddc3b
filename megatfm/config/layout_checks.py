"""Cross-checks of the layout: sizes that it divides, and what torch.compile, CUDA graphs and async_tp support.

Each check raises ValueError, with a value that would work, for settings of a validated config that contradict.
"""

from collections.abc import Mapping
from math import gcd
from typing import TYPE_CHECKING

from megatfm.config.attention import BigBirdPatternConfig, LongformerPatternConfig
from megatfm.config.ffn import MoEConfig, SoftMoEConfig
from megatfm.config.section import find_nearest_divisor, list_divisors

if TYPE_CHECKING:
    from megatfm.config.root import Config


def check_tensor_parallel(config: "Config") -> None:
    """Check that `tp` divides heads, experts and inner widths."""
    parallel = config.parallel
    divided = config.model.tp_dims_for(parallel.expert_tp)

    def divides(tp: int, key: str) -> bool:
        return divided[key] % tp == 0 or (key.endswith("n_kv_heads") and tp % divided[key] == 0)

    for key, count in divided.items():
        if not divides(parallel.tp, key):
            sizes = [n for name, n in divided.items() if not name.endswith("n_kv_heads")] or [count]
            smaller = [tp for tp in list_divisors(gcd(*sizes)) if tp < parallel.tp]
            fitting = [tp for tp in smaller if all(divides(tp, name) for name in divided)]
            raise ValueError(
                f"parallel.tp = {parallel.tp} does not divide model.{key} = {count}: the nearest tp that fits "
                f"is {fitting[-1]}"
            )


def check_row_lengths(config: "Config") -> None:
    """Check that rows of every length fit the model, and divide over tensor- and context-parallel ranks."""
    parallel, data, model = config.parallel, config.data, config.model
    tp = parallel.tp if parallel.sequence_parallel else 1
    max_length, limiting_key = model.max_row_length
    lengths = {
        "data.sequence_length": data.sequence_length,
        "data.target_length": data.target_length or 0,
        **{f"data.rampup[{i}].sequence_length": stage.sequence_length or 0 for i, stage in enumerate(data.rampup)},
    }
    for key, length in lengths.items():
        if max_length is not None and length > max_length:
            raise ValueError(
                f"{key} = {length}: model.{limiting_key} = {max_length}, and a document as long as the row would have "
                f"tokens beyond: choose {key} = {max_length}, or model.{limiting_key} = {length}"
            )
        if length % tp:
            raise ValueError(
                f"{key} = {length} does not divide into parallel.tp = {tp} shards of the sequence: choose "
                f"{length - length % tp or tp}, or parallel.sequence_parallel=false"
            )
        if parallel.cp > 1 and 0 < length < 2 * parallel.cp * tp:
            raise ValueError(
                f"{key} = {length} is too short for parallel.cp = {parallel.cp}, which cuts rows into "
                f"{2 * parallel.cp} runs of at least {tp}: choose at least {2 * parallel.cp * tp}"
            )
    group = model.attention.query_multiple
    if group > 1 and group % tp:
        raise ValueError(
            f"parallel.tp = {tp}: model.attention.name = {model.attention.name!r} cuts its queries in groups of "
            f"{group}, not a multiple of it: choose tp = {gcd(tp, group)}, or parallel.sequence_parallel=false"
        )


def check_expert_parallel(config: "Config") -> None:
    """Check that `ep` divides the experts, and that recomputation supports them."""
    parallel = config.parallel
    ep, tp = parallel.ep, parallel.tp if parallel.expert_tp == "by_expert" else 1
    experts = {key: n // tp for key, n in config.model.tp_dims.items() if key.endswith("n_experts")}
    if ep > 1 and not experts:
        raise ValueError(
            f"parallel.ep = {ep}, but the model has no experts to divide: set parallel.ep = 1, or "
            "model.ffn.name = 'moe'"
        )
    for key, n in experts.items():
        if n % ep:
            and_tp = f" and parallel.tp = {tp}" if tp > 1 else ""
            raise ValueError(
                f"parallel.ep = {ep}{and_tp} do{'' if and_tp else 'es'} not divide model.{key} = {n * tp}: the "
                f"nearest ep that does is {find_nearest_divisor(gcd(*experts.values()), ep)}"
            )
    if ep > 1 and config.train.recompute.endswith("B"):
        raise ValueError(
            f"train.recompute = {config.train.recompute!r}: ranks have different numbers of rows under parallel.ep = "
            f"{ep}, and would not compute the same blocks again: set train.recompute = 'full' or 'selective'"
        )


def check_context_parallel(config: "Config") -> None:
    """Check that heads and recomputation support rows that are cut over `cp` ranks."""
    parallel, model = config.parallel, config.model
    if parallel.cp == 1:
        return
    if parallel.cp_method == "ulysses":
        heads = [(layer.attention.n_heads, layer.attention.kv_heads) for layer in model.layer_cycle]
        if model.generator is not None:
            heads.append((model.generator.n_heads, model.generator.n_heads))
        for n_heads, n_kv_heads in heads:
            n_q, n_kv = n_heads // parallel.tp, max(1, n_kv_heads // parallel.tp)
            if n_q % parallel.cp or (n_kv % parallel.cp and parallel.cp % n_kv):
                raise ValueError(
                    f"parallel.cp_method = 'ulysses': {n_q} query and {n_kv} key heads of a tensor-parallel rank can't "
                    f"be divided over parallel.cp = {parallel.cp} ranks: choose cp_method = 'ring'"
                )
    if config.train.recompute.endswith("B"):
        raise ValueError(
            f"parallel.cp = {parallel.cp}: train.recompute = {config.train.recompute!r} measures blocks on each rank, "
            "and ranks with unequal parts of rows may decide otherwise: choose recompute = 'full' or 'selective'"
        )


def check_global_tokens(config: "Config") -> None:
    """Check that Longformer's global tokens are within a row."""
    length = config.data.sequence_length
    for layer in config.model.layer_cycle:
        pattern = layer.attention.pattern
        if isinstance(pattern, LongformerPatternConfig) and max(pattern.global_tokens, default=0) >= length:
            raise ValueError(
                f"model.attention.pattern.global_tokens names position {max(pattern.global_tokens)}, but rows have "
                f"data.sequence_length = {length} tokens: choose positions below {length}"
            )


def check_soft_moe(config: "Config") -> None:
    """Check that models with soft mixtures of experts have tp = 1."""
    if config.parallel.tp > 1 and any(isinstance(kind.ffn, SoftMoEConfig) for kind in config.model.layer_kinds):
        raise ValueError(
            f"parallel.tp = {config.parallel.tp}: ffn.name = 'soft_moe' is not cut over tensor-parallel ranks: set "
            "parallel.tp = 1, and use dp_shard, cp, ep or pp"
        )


def check_sample_prompts(config: "Config") -> None:
    """Check that every rank has all tokens and layers, which evaluate.sample_prompts needs."""
    parallel, n_prompts = config.parallel, len(config.evaluate.sample_prompts)
    if not n_prompts:
        return
    sequence_parallel = parallel.tp > 1 and parallel.sequence_parallel
    unsupported = {
        f"parallel.pp = {parallel.pp}": (parallel.pp > 1, "parallel.pp = 1"),
        f"parallel.cp = {parallel.cp}": (parallel.cp > 1, "parallel.cp = 1"),
        f"parallel.tp = {parallel.tp} with sequence_parallel": (
            sequence_parallel,
            "parallel.sequence_parallel = false",
        ),
        f"train.precision = {config.train.precision!r}": (
            config.train.precision.startswith("fp8"),
            "train.precision = 'bf16'",
        ),
    }
    for setting, (is_set, remedy) in unsupported.items():
        if is_set:
            raise ValueError(
                f"evaluate.sample_prompts has {n_prompts}, and with {setting} no rank can continue a text token by "
                f"token: set {remedy}, or leave the prompts out and use `megatfm generate` on a checkpoint"
            )


def check_pipeline(config: "Config") -> None:
    """Check that recomputation, heads and gradient accumulation support the pipeline schedule."""
    parallel, train = config.parallel, config.train
    if parallel.pp == 1:
        return
    if parallel.splits_backward and train.recompute != "none":
        raise ValueError(
            explain_split_backward_conflict(parallel.pp_schedule, "train.recompute", train.recompute, "none")
        )
    for name, head in config.model.extra_heads.items():
        if getattr(head, "layers", []):
            raise ValueError(
                f"model.extra_heads.{name}.layers reads vectors of several layers, which lie on other pipeline stages: "
                "set parallel.pp = 1"
            )
    if parallel.grad_accumulation == "sharded":
        raise ValueError(
            "parallel.grad_accumulation = 'sharded': under pipeline stages gradients are reduced once a "
            "step: leave it out"
        )


def explain_split_backward_conflict(schedule: str, key: str, value: object, remedy_value: object) -> str:
    """Return why a setting doesn't work under a schedule that splits backward passes, and what to set."""
    return (
        f"parallel.pp_schedule = {schedule!r} takes backward passes in two parts, which {key} = {value!r} would "
        f"repeat: use parallel.pp_schedule = 'interleaved' or '1f1b', or {key} = {remedy_value!r}"
    )


def find_compile_conflict(config: "Config") -> str | None:
    """Return why blocks can't be compiled, and what to set instead; None if they can."""
    model, parallel, train = config.model, config.parallel, config.train
    patterns = {layer.attention.pattern for layer in model.layer_cycle}
    if any(isinstance(pattern, BigBirdPatternConfig) and pattern.n_random_blocks for pattern in patterns):
        return (
            "train.compile = true: model.attention.pattern.name = 'bigbird' draws random blocks for each length, "
            "which can't be compiled: leave train.compile out, or set model.attention.pattern.n_random_blocks = 0"
        )
    if train.recompute.endswith("%") and any(isinstance(kind.ffn, MoEConfig) for kind in model.layer_kinds):
        return (
            f"train.recompute = {train.recompute!r}: blocks with ffn.name = 'moe' are compiled around their "
            "experts, whose activations the compiler does not choose among: set train.recompute = 'selective' or 'full'"
        )
    if parallel.pp > 1 and parallel.splits_backward:
        return explain_split_backward_conflict(parallel.pp_schedule, "train.compile", train.compile, False)
    if train.recompute.endswith("B"):
        return "train.recompute measures how much blocks keep while they run: set train.compile = false"
    return None


def check_compile(config: "Config") -> None:
    """Raise ValueError if train.compile can't be carried out."""
    if config.train.compile not in (False, "auto") and (conflict := find_compile_conflict(config)):
        raise ValueError(conflict)


def check_gpu_only(config: "Config") -> None:
    """Raise ValueError if parallel.async_tp or train.cuda_graphs can't be carried out, and name the conflict."""
    if config.parallel.async_tp:
        _refuse("parallel.async_tp", _find_async_tp_conflicts(config))
    if config.train.cuda_graphs:
        _refuse("train.cuda_graphs", _find_cuda_graph_conflicts(config))


def _refuse(key: str, conflicts: Mapping[str, bool]) -> None:
    """Raise ValueError for the first reason that holds. conflicts: reason → whether it holds."""
    for reason, is_conflict in conflicts.items():
        if is_conflict:
            raise ValueError(f"{key} = true: {reason}: set {key} = false")


def _find_async_tp_conflicts(config: "Config") -> dict[str, bool]:
    parallel, train, uncompiled = config.parallel, config.train, find_compile_conflict(config)
    return {
        f"parallel.engine = {parallel.engine!r} compiles nothing": parallel.engine != "native",
        "the compiler cuts communication into chunks, and train.compile = false": train.compile is False,
        f"blocks are not compiled ({uncompiled})": uncompiled is not None,
        f"parallel.cp = {parallel.cp} compiles blocks in parts, which divide gathers from matrix products": (
            parallel.cp > 1
        ),
        "train.device = 'cpu': ranks can't read each other's memory there": train.device == "cpu",
        f"train.precision = {train.precision!r} rounds inputs after they are gathered": (
            train.precision in ("fp8", "fp8-tensorwise")
        ),
    }


def _find_cuda_graph_conflicts(config: "Config") -> dict[str, bool]:
    parallel, train, objective = config.parallel, config.train, config.objective.name
    axes = {name: getattr(parallel, name) for name in ("tp", "pp", "cp", "ep")}
    axes |= {"dp_shard": max(parallel.dp_shard, 1), "dp_replicate": parallel.dp_replicate}
    return {
        f"parallel.engine = {parallel.engine!r} records no CUDA graphs": parallel.engine != "native",
        **{f"parallel.{name} = {n} needs communication, which is not recorded": n > 1 for name, n in axes.items()},
        "train.device = 'cpu' has no CUDA graphs": train.device == "cpu",
        f"train.recompute = {train.recompute!r} measures the memory of each pass": train.recompute.endswith("B"),
        f"objective.name = {objective!r} counts its targets on the host in each pass": (
            objective not in ("causal", "prefix")
        ),
        "the rows of each expert are counted on the host": any(
            hasattr(kind.ffn, "n_experts") for kind in config.model.layer_kinds
        ),
    }
