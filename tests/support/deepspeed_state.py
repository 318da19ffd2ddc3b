"""State of a run under DeepSpeed: saved and loaded by either engine, offloaded, left out, repeated."""

import gc
import importlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from megatfm import checkpoint
from megatfm.config import Config
from megatfm.engines.interface import Engine
from megatfm.files import atomic_write
from megatfm.verify.rank_processes import _make_microbatches
from megatfm.verify.shrink import draw_batch, objective_for
from tests.support.deepspeed_runs import (
    BUCKETS,
    ONE_DEVICE,
    OPTIMIZERS,
    build_case_engine,
    gather_weights,
    make_config,
    take_step,
    with_precision,
)
from tests.support.sharded_engines import load_checkpoint

MIN_SWAPPED_BYTES = 512
"""Bytes of a weight from which on it goes to files here; DeepSpeed's own bound is 1 MiB."""


def make_offloaded_config(
    family: str, *overrides: str, optimizer: bool = True, parameters: bool = True, **parallel: int
) -> Config:
    """A config that keeps nearly everything in files; `set_offload_folder` says where."""
    words = [f"deepspeed.offload_optimizer={'nvme' if optimizer else 'none'}", "deepspeed.nvme_path=nowhere"]
    return make_config(family, *words, *(["deepspeed.offload_parameters=nvme"] * parameters), *overrides, **parallel)


def set_offload_folder(config: Config, folder: Path) -> Config:
    """The settings with an existing folder, and small weights in files, too."""
    if config.deepspeed.nvme_path is None:
        return config
    for name in ("utils", "partitioned_param_swapper", "optimizer_utils"):
        importlib.import_module(f"deepspeed.runtime.swap_tensor.{name}").MIN_AIO_BYTES = MIN_SWAPPED_BYTES  # type: ignore[attr-defined]
    # Whole at once: each rank writes it, and another may be reading.
    options = {**json.loads(BUCKETS.read_text()), "aio": {"block_size": MIN_SWAPPED_BYTES}}
    atomic_write(folder / "aio.json", json.dumps(options))
    (folder / "nvme").mkdir(exist_ok=True)
    paths = {"nvme_path": str(folder / "nvme"), "json_file": str(folder / "aio.json")}
    return config.model_copy(update={"deepspeed": config.deepspeed.model_copy(update=paths)})


def find_misplaced_files(engine: Any, folder: Path) -> list[str]:
    """Mistakes in where an engine keeps things."""
    optimizer, wrong = engine.ds_engine.optimizer, []
    swapped = {
        path.parent.parent.name for path in (folder / "nvme").glob(".megatfm-offload-*/*/zero_stage_3/*/rank*/*.swp")
    }
    dtype = str(engine.precision.compute_dtype).removeprefix("torch.")
    expected = {
        name
        for name, is_swapped in (
            ("optimizer", optimizer.swap_optimizer),
            (f"{dtype}params", optimizer.params_in_nvme_and_cpu),
        )
        if is_swapped
    }
    if swapped != expected:
        wrong.append(f"in files are {swapped}, and not {expected}")
    for parameter in engine.parameters.values():
        size = parameter.ds_tensor.ds_numel * parameter.dtype.itemsize
        if (
            optimizer.params_in_nvme_and_cpu
            and size >= MIN_SWAPPED_BYTES
            and parameter.ds_tensor.final_location != "nvme"
        ):
            wrong.append(f"a weight of {size} bytes a rank is in memory")
    return wrong


def save_native_checkpoint(folder: Path, config: Config) -> None:
    """Save what the native engine has after two steps."""
    engine = build_case_engine(config, **ONE_DEVICE)
    for step in range(2):
        take_step(config, engine, step)
    checkpoint.save(folder / "first", 1, engine.state_dict(), {})


def find_differences(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> list[str]:
    """Names of tensors that differ in a bit."""
    assert {name for name in first if "loss_scale" not in name} == {n for n in second if "loss_scale" not in n}
    return [n for n in first if "loss_scale" not in n and not torch.equal(first[n], second[n])]


def exchange_checkpoints(folder: Path, cases: list[Config]) -> list[str]:
    """Each stage opens what native has saved, saves it, goes a step on, and native goes on with what that saved."""
    wrong, first = [], folder / "first/step-00000001"
    expected = checkpoint.read_tensors(first)
    for number, case in enumerate(cases):
        config = set_offload_folder(case, folder)
        engine, native = build_case_engine(config), build_case_engine(config, engine="native")
        load_checkpoint(engine, first)
        path = checkpoint.save(folder / str(number), 1, engine.state_dict(), {})
        wrong += [f"{number}: {name}" for name in find_differences(expected, checkpoint.read_tensors(path))]
        loss = take_step(config, engine, 2)
        path = checkpoint.save(folder / str(number), 2, engine.state_dict(), {})
        stored = checkpoint.read_tensors(path)
        load_checkpoint(native, path)
        saved = checkpoint.save(folder / f"{number} native", 2, native.state_dict(), {})
        wrong += [f"{number}, native: {name}" for name in find_differences(stored, checkpoint.read_tensors(saved))]
        load_checkpoint(engine, first)  # over what has moved: the same step once more
        if take_step(config, engine, 2) != loss:
            wrong.append(f"{number}: the loss of a repeated step")
        path = checkpoint.save(folder / str(number), 3, engine.state_dict(), {})
        wrong += [f"{number}, repeated: {name}" for name in find_differences(stored, checkpoint.read_tensors(path))]
    return wrong


def compare_offloaded_runs(folder: Path, cases: list[Config], steps: int) -> list[str]:
    """Differences, by a bit, between a run that offloads and one that does not."""
    wrong = []
    for number, case in enumerate(cases):
        config = set_offload_folder(case, folder)
        places = {"offload_optimizer": "none", "offload_parameters": "none"}
        plain = config.model_copy(update={"deepspeed": config.deepspeed.model_copy(update=places)})
        engine: Any = build_case_engine(config)
        other = build_case_engine(plain)
        for step in range(steps):
            if take_step(config, engine, step) != take_step(plain, other, step):
                wrong.append(f"{number}: loss {step}")
            if step in (0, steps - 1):
                wrong += [
                    f"{number}, {step}: {name}"
                    for name in find_differences(gather_weights(engine), gather_weights(other))
                ]
        engine.device = torch.device("cuda")  # what would be free there
        if config.deepspeed.offload_optimizer != "none" and engine.estimate_memory(1, 1).optimizer_state:
            wrong.append(f"{number}: a device would be asked for moments that are not to be there")
        if "nvme" in (config.deepspeed.offload_optimizer, config.deepspeed.offload_parameters):
            wrong += [f"{number}: {message}" for message in find_misplaced_files(engine, folder)]
            dist.barrier()
            del engine
            gc.collect()
            dist.barrier()  # the other rank's are in the same folder
            if left := list((folder / "nvme").glob(".megatfm-offload-*/*-*/")):
                wrong.append(f"{number}: files are left: {left}")
            dist.barrier()
    return wrong


def check_steps() -> list[str]:
    """Further requests of a step, one after another under stages 2 and 3."""
    wrong = []
    for stage in (2, 3):
        config = make_config("decoder", "train.freeze=['*.attn.wq.*']", zero=stage, dp_shard=2)
        engine, native = build_case_engine(config), build_case_engine(config, engine="native")
        start = gather_weights(engine)
        batch = _make_microbatches(config, engine, draw_batch(config))
        engine.forward_backward(batch, objective_for(config))
        if not math.isnan(engine.step(1.0, 1.0, skip=True)) or find_differences(start, gather_weights(engine)):
            wrong.append(f"{stage}: a step that is left out")
        if abs(take_step(config, engine, 1) / take_step(config, native, 1) - 1) > 1e-6:
            wrong.append(f"{stage}: the loss with frozen weights")
        after, reference = gather_weights(engine), gather_weights(native)
        still = {name for name in start if torch.equal(start[name], after[name])}
        if still != {name for name in start if ".attn.wq." in name}:
            wrong.append(f"{stage}: what is frozen")
        if any((after[name] - reference[name]).abs().max() > 1e-6 for name in start):
            wrong.append(f"{stage}: the update with frozen weights")
        batches = _make_microbatches(config, engine, draw_batch(config))
        message = [item.evaluate(batches, objective_for(config)).loss for item in (engine, native)]
        if abs(message[0] / message[1] - 1) > 1e-6:
            wrong.append(f"{stage}: the evaluated loss")
    with patch.object(torch.ops.mkldnn, "_is_mkldnn_fp16_supported", lambda: False):  # as on most CPUs
        scaled: Any = build_case_engine(with_precision(make_config("decoder", zero=2, dp_shard=2), "fp16"))
        scaled.loss_scale.value = 2.0**60
        if math.isfinite(_take_overflowing_step(scaled)) or scaled.loss_scale.value != 2.0**59:
            wrong.append("an overflow of float16")
    return wrong


STAGES = [
    (0, "fp32", "none"), (1, "bf16", "none"), (1, "fp16", "cpu"), (2, "fp32", "cpu"), (2, "fp16", "none"),
    (2, "bf16", "cpu"), (3, "fp32", "none"), (3, "fp16", "cpu"),
]  # fmt: skip
"""Stage, precision, and where the optimizer is offloaded to."""


def find_kept_gradients() -> list[str]:
    """Stages at which the gradients of a step that was dropped or left out are in those of the next one."""
    return [f"{stage}" for stage in STAGES if _keeps_gradients(*stage)]


def _keeps_gradients(zero: int, precision: str, offload: str) -> bool:
    words = [f"deepspeed.offload_optimizer={offload}"] * (offload != "none")
    config = with_precision(make_config("decoder", *words, zero=zero, dp_shard=2), precision)
    engine = build_case_engine(config)
    batch = _make_microbatches(config, engine, draw_batch(config))

    def compute() -> dict[str, Tensor]:
        engine.forward_backward(batch, objective_for(config))
        return {name: gradient.clone() for name, gradient in engine.gradients().items()}

    first = compute()
    engine.zero_grad()
    second = compute()
    engine.step(1.0, 1.0, skip=True)
    return bool(find_differences(first, second) or find_differences(first, compute()))


def _take_overflowing_step(engine: Engine) -> float:
    config = make_config("decoder", zero=2, dp_shard=2)
    before = gather_weights(engine)
    engine.forward_backward(_make_microbatches(config, engine, draw_batch(config)), objective_for(config))
    norm = engine.step(1.0, 1.0)
    assert find_differences(before, gather_weights(engine)) == []
    return norm


def check_optimizers(folder: Path) -> list[str]:
    """Optimizers whose state differs from the native engine's."""
    wrong = []
    for optimizer in ("lion", "schedule_free_adamw"):
        config = make_config("decoder", *OPTIMIZERS[optimizer], zero=1, dp_shard=2)
        actual, native = build_case_engine(config), build_case_engine(config, engine="native")
        for step in range(3):
            if abs(take_step(config, actual, step) / take_step(config, native, step) - 1) > 1e-6:
                wrong.append(f"{optimizer}: loss {step}")
        path = checkpoint.save(folder / optimizer, 1, actual.state_dict(), {})
        load_checkpoint(native, path)
        saved = checkpoint.save(folder / optimizer, 2, native.state_dict(), {})
        wrong += find_differences(checkpoint.read_tensors(path), checkpoint.read_tensors(saved))
    return wrong
