"""Steps under DeepSpeed, under the native engine and on one device, and how far they are from each other.

    python -m tests.support.deepspeed_runs decoder adamw

prints the whole grid of a family and an optimizer as rows of a table: every layout and stage, ten steps each.
"""

import argparse
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatfm.config import Config, load_config
from megatfm.engines.interface import Engine
from megatfm.layers.lora import is_factor
from megatfm.parallel.mesh import build_mesh
from megatfm.train.build import build_engine
from megatfm.verify.rank_processes import _make_microbatches
from megatfm.verify.reference import draw_perturbation, take_reference_step
from megatfm.verify.shrink import draw_batch, objective_for, shrink
from tests.support.workers import Workers

FAMILIES = {
    "decoder": "quickstart", "bert": "bert-base", "t5": "t5-small", "moe": "mixtral-8x7b", "windows": "gemma3-1b",
    "bert, classes": "bert-base", "decoder, classes": "quickstart", "moe, adapters": "mixtral-8x7b", "vit": "vit-s16",
    "mae": "mae-b16", "swin": "swin-t", "simmim": "simmim-swin-b", "mvit v2": "mvitv2-t",
    "swin v2": "swinv2-t", "llava": "llava-1.5-7b", "bert, answers": "bert-base", "bert, choices": "bert-base",
    "xlnet": "xlnet-base", "electra": "electra-base",
}  # fmt: skip
HEADLESS = ["model.lm_head={name='none'}"]
CLASSIFIER = [*HEADLESS, "objective={name='text_classification'}"]
CHANGES = {
    "bert, classes": [*CLASSIFIER, "model.extra_heads={sentence={name='text_classifier',classes=3}}"],
    "bert, answers": [
        *HEADLESS,
        "objective={name='span_extraction'}",
        "model.extra_heads={span={name='span_extraction'}}",
    ],
    "bert, choices": [
        *HEADLESS,
        "objective={name='multiple_choice'}",
        "model.extra_heads={sentence={name='multiple_choice'}}",
    ],
    "decoder, classes": [
        *CLASSIFIER,
        "model.extra_heads={score={name='text_classifier',classes=3,pooler='none',token='last'}}",
    ],
    "moe, adapters": ["model.lora={rank=2,alpha=4.0,targets=['experts.w_*','wq']}"],
    # A query's gradient is a sum of three, in an order that ZeRO 3 changes: in seven blocks float32's rounding adds up.
    "mvit v2": ["model.n_layers=3", "model.stages={n_layers=[1,1,1],n_heads=[1,2,4],grid=[56,56]}"],
    "swin v2": ["model.n_layers=4", "model.stages={n_layers=[2,2],n_heads=[3,6],grid=[64,64],merging_norm='output'}"],
}
"""Family → what it has besides its preset, or in the place of its own head, objective and sizes."""
IMAGES = {"vit", "mae", "swin", "simmim", "mvit v2", "swin v2"}
ODD_ROWS = {*IMAGES, "llava"}
"""Families whose rows of whole images have an odd length, or whose heads no two ranks divide."""
VARIANTS = {"windows", "xlnet", "electra", *CHANGES, *ODD_ROWS}
OPTIMIZERS: dict[str, list[str]] = {
    # As large as the largest gradients, so that an update is off by as much as its gradient is.
    "adamw": ["optimizer.name=adamw", "optimizer.eps=1e-2"],
    # At a usual rate the losses would show a single sign, of a gradient that is nothing but rounding.
    "lion": ["~optimizer.eps", "optimizer.name=lion", "optimizer.lr=1e-5", "lr_schedule.name=constant"],
    "schedule_free_adamw": ["optimizer.name=schedule_free_adamw", "optimizer.eps=1e-2", "lr_schedule.name=constant"],
}
LAYOUTS: dict[str, dict[str, int]] = {
    "dp2": {"dp_shard": 2}, "dp4": {"dp_shard": 4}, "tp2 dp2": {"dp_shard": 2, "tp": 2},
    "cp2": {"dp_shard": 1, "cp": 2}, "pp2": {"dp_shard": 1, "pp": 2}, "ep2": {"dp_shard": 2, "ep": 2},
}  # fmt: skip
ONE_DEVICE = {"engine": "native", "zero": 0, "dp_shard": 1, "tp": 1, "cp": 1, "ep": 1, "pp": 1}
ROWS = 4
BUCKETS = Path(__file__).with_name("deepspeed_buckets.json")
"""Buckets of 2^20 gradients. DeepSpeed's default takes 2 GB a pass, and tests on memory of NaN fill all of it."""
RATE = 2.0**10
"""Rate of the first update, so that weights don't hide it: a usual rate moves some units of their last place."""


def make_config(family: str, *overrides: str, **parallel: Any) -> Config:
    """Return a small config of a family that fits its layout."""
    base = [
        *["data.tokenizer=t"] * (family not in IMAGES),
        "data.train=d",
        "train.precision=fp32",
        f"deepspeed.json_file={BUCKETS}",
    ]
    base += OPTIMIZERS["adamw"]
    base += [*CHANGES.get(family, []), *overrides]
    keys = {"engine": "deepspeed", **parallel}
    return shrink(load_config(FAMILIES[family], [*base, *(f"parallel.{key}={value}" for key, value in keys.items())]))[
        0
    ]


def make_case(family: str, *overrides: str, **parallel: Any) -> Config:
    """A model and rows that are equal in every layout; its name is the family's."""
    config = make_config(family, *overrides, **parallel)
    rows = ROWS // config.parallel.dp_shard
    train = config.train.model_copy(update={"global_batch": ROWS, "micro_batch": max(1, rows // 2)})
    return config.model_copy(update={"name": family, "model": _make_model_config(family), "train": train})


@cache
def _make_model_config(family: str) -> Any:
    return make_config(family, zero=0, tp=1 if family in ODD_ROWS else 2, dp_shard=2).model


def with_precision(config: Config, precision: str) -> Config:
    """The config in another precision."""
    return config.model_copy(update={"train": config.train.model_copy(update={"precision": precision})})


def build_case_engine(config: Config, **parallel: Any) -> Engine:
    """The engine of a config, with other values in its section parallel."""
    config = config.model_copy(update={"parallel": config.parallel.model_copy(update=parallel)})
    mesh = build_mesh(config.parallel, dist.get_world_size(), "cpu")
    return build_engine(config, mesh, torch.device("cpu"), config.train.precision)


def gather_tensors(engine: Engine, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Blocks of all ranks put together, on each of them."""
    pieces = {
        name: [(part.offsets, part.tensor.clone()) for part in engine.weights()[name].with_tensor(tensor).blocks]
        for name, tensor in tensors.items()
    }
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, pieces)
    actual: dict[str, Tensor] = {}
    for rank in everyone:
        for name, parts in rank.items():
            actual.setdefault(name, torch.full(engine.layout[name].shape, torch.nan))
            for offsets, part in parts:
                actual[name][tuple(slice(o, o + s) for o, s in zip(offsets, part.shape, strict=True))] = part
    return actual


def gather_weights(engine: Engine) -> dict[str, Tensor]:
    """Whole weights, on each rank."""
    return gather_tensors(engine, {name: box.tensor for name, box in engine.weights().items() if name in engine.layout})


def take_step(config: Config, engine: Engine, step: int) -> float:
    """Take a step on a batch of its own; returns the loss."""
    seeded = config.model_copy(update={"train": config.train.model_copy(update={"seed": step})})
    batch = _make_microbatches(config, engine, draw_batch(seeded))
    stats = engine.forward_backward(batch, objective_for(config))
    engine.step(config.optimizer.lr, config.optimizer.max_grad_norm)
    return stats.loss


@dataclass(frozen=True)
class RunResult:
    """From the same seed: the gradients and the update of a first step, and the losses of the steps of another run."""

    initial: dict[str, Tensor]
    gradients: dict[str, Tensor]
    update: dict[str, Tensor]
    losses: list[float]


def record_run(config: Config, steps: int, **parallel: Any) -> RunResult:
    """Train for some steps; returns what is compared."""
    engine = build_case_engine(config, **parallel)
    initial = gather_weights(engine)
    for name, box in engine.weights().items():
        for part in box.blocks if name in engine.layout else ():
            sizes = tuple(part.tensor.shape)
            part.tensor.add_(draw_perturbation(config.train.seed, name, box.global_shape, part.offsets, sizes))
    engine.sync_weights()
    before = gather_weights(engine)
    engine.forward_backward(_make_microbatches(config, engine, draw_batch(config)), objective_for(config))
    gradients = gather_tensors(engine, engine.gradients())
    engine.step(RATE, config.optimizer.max_grad_norm)
    update = {name: after.double() - before[name].double() for name, after in gather_weights(engine).items()}
    engine = build_case_engine(config, **parallel)
    return RunResult(initial, gradients, update, [take_step(config, engine, step) for step in range(steps)])


def record_one_device_run(config: Config, steps: int) -> tuple[RunResult, dict[str, Tensor]]:
    """The native engine on one device, and the first gradients of what is trained, by plain autograd in float64."""
    gradients = take_reference_step(config, draw_batch(config)).gradients
    trained = {n: g for n, g in gradients.items() if config.model.lora is None or is_factor(n)}
    return record_run(config, steps, **ONE_DEVICE), trained


def relative_distance(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> float:
    """By norm, of the worst parameter; those with hardly any part in the whole count for a thousandth of it."""
    least = 1e-3 * math.hypot(*(float(tensor.norm()) for tensor in second.values()))
    errors = (float((first[n] - second[n]).norm()) / max(float(second[n].norm()), least) for n in second)
    return max(errors, key=lambda error: math.inf if math.isnan(error) else error)


def update_distance(
    first: Mapping[str, Tensor], second: Mapping[str, Tensor], exact: Mapping[str, Tensor], *, signs: bool
) -> float:
    """The state without parameters whose gradient is zero but for rounding, as that of keys' biases; of an optimizer
    that takes signs, without elements whose gradient is no more than float32's error of it."""
    everything = math.hypot(*(float(gradient.norm()) for gradient in exact.values()))
    names = [name for name, gradient in exact.items() if gradient.norm() > 1e-6 * everything]
    least = 1e-5 * max(float(gradient.abs().max()) for gradient in exact.values()) if signs else -1.0
    return relative_distance(
        *({name: item[name] * (exact[name].abs() > least) for name in names} for item in (first, second))
    )


def loss_distance(first: RunResult, second: RunResult) -> float:
    """Largest relative difference of two runs' losses."""
    return max(abs(a / b - 1) for a, b in zip(first.losses, second.losses, strict=True))


@dataclass(frozen=True)
class Distances:
    """Errors of gradients against float64's; of the rest against the native engine and one device, and native's own."""

    gradients: float
    native_gradients: float
    update_native: float
    update_one: float
    losses_native: float
    losses_one: float
    native_update_one: float
    native_losses_one: float


def compare_with_native(
    cases: list[Config], steps: int, one_device: tuple[RunResult, dict[str, Tensor]]
) -> list[Distances]:
    """Cases of one layout, whose stages the native engine need not repeat."""
    single, exact = one_device
    native = record_run(cases[0], steps, engine="native")
    actual = []
    updates = partial(update_distance, exact=exact, signs=cases[0].optimizer.name == "lion")
    for config in cases:
        output = record_run(config, steps)
        for name, tensor in single.initial.items():
            assert torch.equal(output.initial[name], tensor), f"initial {name} differs"
        actual.append(
            Distances(relative_distance(output.gradients, exact), relative_distance(native.gradients, exact),
                   updates(output.update, native.update), updates(output.update, single.update),
                   loss_distance(output, native), loss_distance(output, single), updates(native.update, single.update),
                   loss_distance(native, single)),
        )  # fmt: skip
    return actual


def make_stage_cases(family: str, layout: str, optimizer: str) -> list[Config]:
    """A row of the grid."""
    last = 2 if layout == "pp2" else 3 if optimizer == "schedule_free_adamw" else 4
    words = OPTIMIZERS[optimizer]
    return [make_case(family, *words, zero=stage, **LAYOUTS[layout]) for stage in range(last)]


def list_family_layouts() -> Iterator[tuple[str, str]]:
    """Families and the layouts that they have, less variants of decoder and BERT: only where they are asked for."""
    for family in (family for family in FAMILIES if family not in VARIANTS):
        for layout in LAYOUTS:
            if supports_layout(family, layout):
                yield family, layout


def supports_layout(family: str, layout: str) -> bool:
    """Whether a family can be laid out so."""
    return family == "moe" or layout != "ep2"


def count_ranks(config: Config) -> int:
    """Number of ranks that a config is laid over."""
    parallel = config.parallel
    return parallel.dp_shard * parallel.tp * parallel.cp * parallel.pp


def main() -> None:
    """Print the errors of a family and an optimizer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", choices=FAMILIES)
    parser.add_argument("optimizer", choices=OPTIMIZERS)
    parser.add_argument("layouts", nargs="*", default=list(LAYOUTS))
    args = parser.parse_args()
    available = [layout for layout in args.layouts if supports_layout(args.family, layout)]
    with Workers() as workers:
        cases = {layout: make_stage_cases(args.family, layout, args.optimizer) for layout in available}
        (one_device,) = workers.run(record_one_device_run, 1, cases[available[0]][0], 10, timeout=200)
        for layout, case in cases.items():
            actual = workers.run(compare_with_native, count_ranks(case[0]), case, 10, one_device, timeout=500)[0]
            worst = [max(getattr(item, key) for item in actual) for key in Distances.__annotations__]
            print(f"| {args.family}, {args.optimizer} | {layout} | 0–{len(case) - 1} |", end="")
            print(" | ".join(f" {value:.1e}" for value in worst), "|", flush=True)


if __name__ == "__main__":
    main()
