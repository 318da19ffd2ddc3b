"""Settings that need a GPU, and those that they don't go with."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatfm.config.root import Config


def check(config: "Config") -> None:
    """Raise ValueError that names the conflicting setting and the way out."""
    if config.parallel.async_tp:
        _refuse("parallel.async_tp", _against_pieces(config))
    if config.train.cuda_graphs:
        _refuse("train.cuda_graphs", _against_graphs(config))


def _refuse(key: str, reasons: Mapping[str, bool]) -> None:
    """Raise for the first reason that holds."""
    for why in (why for why, holds in reasons.items() if holds):
        raise ValueError(f"{key} = true: {why}: set {key} = false")


def _against_pieces(config: "Config") -> dict[str, bool]:
    parallel, train, uncompiled = config.parallel, config.train, config.refuses_compile()
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


def _against_graphs(config: "Config") -> dict[str, bool]:
    parallel, train, objective = config.parallel, config.train, config.objective.name
    kinds = [config.model, *(config.model.type_config(kind) for kind in config.model.layer_type)]
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
        "experts have the host count the rows of each": any(hasattr(kind.ffn, "n_experts") for kind in kinds),
    }
