"""Cross-checks of device features: torch.compile, CUDA graphs and asynchronous tensor parallelism."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from megatfm.config.attention import BigBirdPatternConfig
from megatfm.config.ffn import MoEConfig
from megatfm.config.layout_checks import split_backward_conflict

if TYPE_CHECKING:
    from megatfm.config.root import Config


def compile_conflict(config: "Config") -> str | None:
    """Return why blocks can't be compiled, and what to set instead; None if they can."""
    model, parallel, train = config.model, config.parallel, config.train
    patterns = {layer.attention.pattern for layer in model.layer_cycle}
    if any(isinstance(pattern, BigBirdPatternConfig) and pattern.n_random_blocks for pattern in patterns):
        return (
            "train.compile = true: model.attention.pattern.name = 'bigbird' draws random blocks for each length, "
            "which can't be compiled: leave train.compile out, or set model.attention.pattern.n_random_blocks = 0"
        )
    if train.recompute != "none" and any(isinstance(kind.ffn, MoEConfig) for kind in model.layer_kinds):
        return (
            f"train.recompute = {train.recompute!r}: blocks with ffn.name = 'moe' are compiled around their "
            "experts, and can't be computed again: set train.recompute = 'none', or train.compile = false"
        )
    if parallel.pp > 1 and parallel.splits_backward:
        return split_backward_conflict(parallel.pp_schedule, "train.compile", train.compile, False)
    if train.recompute.endswith("B"):
        return "train.recompute measures how much blocks keep while they run: set train.compile = false"
    return None


def check_compile(config: "Config") -> None:
    """Raise ValueError if train.compile can't be carried out."""
    if config.train.compile not in (False, "auto") and (conflict := compile_conflict(config)):
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
    parallel, train, uncompiled = config.parallel, config.train, compile_conflict(config)
    return {
        f"parallel.engine = {parallel.engine!r} compiles nothing": parallel.engine != "native",
        "the compiler takes what is sent apart, and train.compile = false": train.compile is False,
        f"blocks are not compiled ({uncompiled})": uncompiled is not None,
        f"parallel.cp = {parallel.cp} has blocks compiled in parts, from gathers to products": parallel.cp
        > 1,
        "train.device = 'cpu' has no memory that another device reads": train.device == "cpu",
        f"train.precision = {train.precision!r} multiplies what was rounded after it came": (
            train.precision in ("fp8", "fp8-tensorwise")
        ),
    }


def _find_cuda_graph_conflicts(config: "Config") -> dict[str, bool]:
    parallel, train, objective = config.parallel, config.train, config.objective.name
    axes = {name: getattr(parallel, name) for name in ("tp", "pp", "cp", "ep")}
    axes |= {"dp_shard": max(parallel.dp_shard, 1), "dp_replicate": parallel.dp_replicate}
    return {
        f"parallel.engine = {parallel.engine!r} records none": parallel.engine != "native",
        **{f"parallel.{name} = {n} has ranks send what is not recorded": n > 1 for name, n in axes.items()},
        "train.device = 'cpu' has none": train.device == "cpu",
        f"train.recompute = {train.recompute!r} measures passes": train.recompute.endswith("B"),
        f"objective.name = {objective!r} has the host count targets in each pass": (
            objective not in ("causal", "prefix")
        ),
        "experts have the host count the rows of each": any(
            hasattr(kind.ffn, "n_experts") for kind in config.model.layer_kinds
        ),
    }
