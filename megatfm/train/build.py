"""Builds model, optimizers and engine from a config."""

from collections.abc import Sequence
from fnmatch import fnmatchcase

import torch
from torch import nn

from megatfm.config import Config, PreferenceObjective
from megatfm.engines.interface import PRECISIONS, Engine, EngineSetup
from megatfm.engines.registry import ENGINES
from megatfm.errors import UsageError
from megatfm.layers.loss_terms import Preference
from megatfm.layers.output_head import LMHead
from megatfm.models import build
from megatfm.models.dtypes import check_sharded_shapes, convert_to_fp8
from megatfm.object_collectives import run_on_rank_0_raising
from megatfm.objectives import target_fraction
from megatfm.ops.fp8 import multiplies_fp8
from megatfm.optim.parameters import build_optimizer_groups
from megatfm.parallel.mesh import PIPELINE, TENSOR, Mesh
from megatfm.parallel.parallelize import parallelize
from megatfm.parallel.pipeline_stages import Pipeline, prune_to_stages, split_into_stages
from megatfm.registry import did_you_mean
from megatfm.tracking.utilization import measure_bf16_speedup

ASYNC_TP = "async tp  all-gathers and reduce-scatters over tp are split and overlap with matmuls\n"
"""Line that is added to the layout table."""


def build_engine(config: Config, mesh: Mesh, device: torch.device, precision: str) -> Engine:
    """Build the model on the meta device and parallelize it; return the engine, which shards and initializes it."""
    ENGINES.check(config, precision)
    with torch.device("meta"):
        model = build_model(config)
    fp8_scaling = PRECISIONS[precision].fp8
    fp8_modules = convert_to_fp8(model, rowwise=fp8_scaling == "rowwise") if fp8_scaling else {}
    optimizers = build_optimizer_groups(config.optimizer, model)
    parallel = config.parallel
    # Before parallelize: stages are balanced by the costs of full modules, and tp shards weights but not these counts.
    pipeline = plan_pipeline_split(config, model) if mesh.size(PIPELINE) > 1 else None
    layout = parallelize(model, mesh, sequence_parallel=parallel.sequence_parallel, cp_method=parallel.cp_method)
    if (tp_size := mesh.size(TENSOR)) > 1:
        check_sharded_shapes(fp8_modules, {name: placement.shape for name, placement in layout.items()}, tp_size)
    if pipeline is not None:
        prune_to_stages(model, pipeline.list_stages(mesh.rank(PIPELINE)))
        layout.table += f"\n{pipeline.format_table()}"
    if parallel.async_tp:
        layout.table += f"\n{ASYNC_TP}"
    setup = EngineSetup(
        config=config,
        model=model,
        layout=layout,
        mesh=mesh,
        device=device,
        precision=precision,
        optimizers=optimizers,
        pipeline=pipeline,
    )
    return ENGINES.build(config.parallel.engine, setup)


def build_model(config: Config) -> nn.Module:
    """Build the full model on the current default device, with frozen weights marked. Raises UsageError."""
    model = build(config.model)
    freeze(model, config.train.freeze)
    objective = config.objective
    if isinstance(objective, PreferenceObjective) and isinstance(head := getattr(model, "head", None), LMHead):
        head.preference = Preference(objective.beta, objective.label_smoothing)
    return model


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Disable gradients for the weights whose names match a pattern, such as "decoder.layers.*".

    Raises UsageError for a pattern without a match, and if no trainable weight is left.
    """
    parameters = dict(model.named_parameters())
    for pattern in patterns:
        matched = [name for name in parameters if fnmatchcase(name, pattern)]
        if not matched:
            raise UsageError(
                f"train.freeze: {pattern!r} matches no weight of the model{did_you_mean(pattern, parameters)}; names "
                f"are such as {next(iter(parameters))!r} (a tied weight has only its first name)"
            )
        for name in matched:
            parameters[name].requires_grad_(False)
    if patterns and not any(parameter.requires_grad for parameter in parameters.values()):
        raise UsageError(f"train.freeze = {list(patterns)} leaves no weight to train: freeze less of the model")


def fit_frozen_patterns(small: Config, full: Config) -> Config:
    """Return a small copy of a config without the patterns of `train.freeze` that match none of its weights.

    If the others would freeze all of its weights, none is frozen. Raises what `freeze` raises for the full model.
    """
    if not full.train.freeze:
        return small
    with torch.device("meta"):
        names = [name for name, _ in build(small.model).named_parameters()]
        patterns = [pattern for pattern in full.train.freeze if any(fnmatchcase(name, pattern) for name in names)]
        if all(any(fnmatchcase(name, pattern) for pattern in patterns) for name in names):
            patterns = []
        if len(patterns) < len(full.train.freeze):
            model = full.model.model_copy(update={"vocab_size": small.model.vocab_size})  # which may be unknown yet
            build_model(full.model_copy(update={"model": model}))
    return small.model_copy(update={"train": small.train.model_copy(update={"freeze": patterns})})


def plan_pipeline_split(config: Config, model: nn.Module) -> Pipeline:
    """Plan the split of a model, not yet parallelized, into pipeline stages. Does not modify the model."""
    parallel, data = config.parallel, config.data
    return split_into_stages(
        model,
        parallel.pp_schedule,
        parallel.pp,
        parallel.stages_per_rank,
        lengths={"tokens": data.target_length or data.sequence_length, "encoder_tokens": data.sequence_length},
        predicted=target_fraction(config.objective),
        pp_split_points=parallel.pp_split_points,
        sequence_shards=parallel.tp if parallel.sequence_parallel else 1,
    )


def describe_size(engine: Engine) -> str:
    """Describe the number of parameters and the layout, for the log."""
    n_parameters = sum(torch.Size(weight.shape).numel() for weight in engine.layout.values())
    return f"{n_parameters:,} parameters, {engine.mesh.describe()}"


def choose_precision(name: str, device: torch.device) -> str:
    """Resolve precision "auto": bf16 if matmuls are faster in it, else fp32. A collective.

    Raises UsageError if the device doesn't support a precision that was chosen explicitly.
    """
    if name != "auto":
        if PRECISIONS[name].fp8 and not multiplies_fp8(device):
            raise UsageError(
                f"train.precision = {name!r} needs a GPU of compute capability 8.9 or higher, and this one has "
                f"{'.'.join(map(str, torch.cuda.get_device_capability(device)))}: set train.precision = 'bf16'"
            )
        return name
    return "bf16" if run_on_rank_0_raising(lambda: is_bf16_faster(device)) else "fp32"


def is_bf16_faster(device: torch.device) -> bool:
    """Return whether matmuls are faster in bf16. Decided by compute capability on GPUs, where the launch dominates the
    time of a small matmul."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    return measure_bf16_speedup(device) > 1
