"""A step under DeepSpeed's ZeRO equals one device's, and ten steps equal those of the native engine."""

import importlib
import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatfm.config import Config
from megatfm.engines.deepspeed.internals import allow_fp16_on_cpu
from megatfm.engines.deepspeed.library import import_deepspeed
from tests.support.deepspeed_runs import (
    OPTIMIZERS,
    Distances,
    build_case_engine,
    compare_with_native,
    count_ranks,
    list_family_layouts,
    make_case,
    make_config,
    make_stage_cases,
    record_one_device_run,
    take_step,
    with_precision,
)
from tests.support.deepspeed_state import (
    check_optimizers,
    check_steps,
    compare_offloaded_runs,
    exchange_checkpoints,
    find_kept_gradients,
    make_offloaded_config,
    save_native_checkpoint,
)
from tests.support.source_losses import DECODER, check_losses_by_source
from tests.support.workers import Workers

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed: make deepspeed"
)


def check(errors: Distances, config: Config) -> None:
    """Float32's own error counts where the native engine has it, too; on some processors, images have 3e-6."""
    message = f"{config.parallel} {errors}"
    assert errors.gradients <= errors.native_gradients + 1e-6, message
    assert errors.update_native <= 1e-6, message
    assert errors.update_one <= max(1e-6, errors.native_update_one + 1e-7), message
    assert errors.losses_native <= 1e-6, message
    assert errors.losses_one <= 1e-6, message


def compare_all(workers: Workers, cases: list[Config], steps: int) -> None:
    (reference,) = workers.run(record_one_device_run, 1, cases[0], steps)
    for errors, config in zip(
        workers.run(compare_with_native, count_ranks(cases[0]), cases, steps, reference, timeout=400)[0],
        cases,
        strict=True,
    ):
        check(errors, config)


SOME: dict[str, tuple[int, list[Config]]] = {
    "data ranks": (10, [make_case("decoder", zero=stage, dp_shard=2) for stage in (0, 2)]),
    "contexts": (2, [make_case("bert", "train.recompute=full", zero=1, dp_shard=1, cp=2)]),
    "pipelines": (2, [make_case("bert", zero=1, dp_shard=1, pp=2)]),
    "experts": (2, [make_case("moe", zero=2, dp_shard=2, ep=2)]),
    "heads of tasks in decoders": (2, [make_case("decoder, classes", zero=0, dp_shard=2)]),
    "adapters of experts": (2, [make_case("moe, adapters", zero=2, dp_shard=2, ep=2)]),
    "vision transformers": (2, [make_case("vit", zero=3, dp_shard=2)]),
    "vision-language models": (2, [make_case("llava", zero=2, dp_shard=2)]),
    "second copies": (2, [make_case("decoder", "deepspeed.zero_hpz_partition_size=2", zero=3, dp_shard=4)]),
    "tensors": (2, [make_case("decoder", "train.recompute=selective", zero=3, dp_shard=2, tp=2)]),
}
"""Each stage and layout once, and models of text, images and both: steps, and cases of one layout."""
EXTENDED: dict[str, tuple[int, list[Config]]] = {
    "ten steps of contexts": (10, SOME["contexts"][1]),
    "ten steps of pipelines": (10, SOME["pipelines"][1]),
    "ten steps of experts": (10, SOME["experts"][1]),
    "heads of tasks": (2, [make_case("bert, classes", zero=stage, dp_shard=2) for stage in (0, 1, 2, 3)]),
    "heads of tasks in decoders, stage 3": (2, [make_case("decoder, classes", zero=3, dp_shard=2)]),
    "heads of answers": (2, [make_case("bert, answers", zero=stage, dp_shard=2) for stage in (0, 3)]),
    "heads of choices": (2, [make_case("bert, choices", zero=stage, dp_shard=2) for stage in (2, 3)]),
    "vision transformers, other stages": (2, [make_case("vit", zero=stage, dp_shard=2) for stage in (0, 1, 2)]),
    "masked autoencoders": (2, [make_case("mae", zero=stage, dp_shard=2) for stage in (1, 3)]),
    "hierarchical models": (2, [make_case("swin", zero=stage, dp_shard=2) for stage in (1, 3)]),
    "masked images of hierarchical models": (2, [make_case("simmim", zero=2, dp_shard=2)]),
    "hierarchical models that pool": (2, [make_case("mvit v2", zero=stage, dp_shard=2) for stage in (1, 3)]),
    "hierarchical models by cosines": (2, [make_case("swin v2", zero=stage, dp_shard=2) for stage in (2, 3)]),
    "vision-language models, other stages": (2, [make_case("llava", zero=stage, dp_shard=2) for stage in (0, 1, 3)]),
    "tensors of an encoder-decoder": (2, [make_case("t5", "train.recompute=selective", zero=3, dp_shard=2, tp=2)]),
}
"""Further stages and models: what differs between stages shows on decoders, in `SOME` and below."""
MORE: dict[str, tuple[int, list[Config]]] = {
    "zbv": (10, [make_case("decoder", zero=1, dp_shard=2, pp=2, pp_schedule="zbv")]),
    "experts, contexts": (10, [make_case("moe", zero=stage, dp_shard=2, ep=2, cp=2) for stage in (1, 3)]),
    "experts, pipelines": (10, [make_case("moe", zero=0, dp_shard=2, ep=2, pp=2)]),
    "windows, contexts": (10, [make_case("windows", zero=1, dp_shard=1, cp=2)]),
    "heads of tasks in decoders, too": (10, [make_case("decoder, classes", zero=z, dp_shard=2) for z in (1, 2)]),
    "heads of tasks, tensors": (10, [make_case("bert, classes", zero=3, dp_shard=2, tp=2)]),
    "adapters of experts, too": (10, [make_case("moe, adapters", zero=z, dp_shard=2, ep=2) for z in (0, 1, 3)]),
    "two streams": (2, [make_case("xlnet", zero=stage, dp_shard=2) for stage in (0, 3)]),
    "generators and discriminators": (2, [make_case("electra", zero=stage, dp_shard=2) for stage in (1, 3)]),
    "hierarchical models that pool, too": (10, [make_case("mvit v2", zero=z, dp_shard=2) for z in (0, 2)]),
    "hierarchical models by cosines, too": (10, [make_case("swin v2", zero=z, dp_shard=2) for z in (0, 1)]),
    "hierarchical models, pipelines": (10, [make_case("mvit v2", zero=1, dp_shard=1, pp=2)]),
    "hierarchical models by cosines, pipelines": (10, [make_case("swin v2", zero=1, dp_shard=1, pp=2)]),
    "vision-language models, contexts": (10, [make_case("llava", zero=1, dp_shard=1, cp=2)]),
    "vision-language models, tensors": (10, [make_case("llava", "data.sequence_length=576", zero=1, dp_shard=1, tp=2)]),
    "vision-language models, pipelines": (10, [make_case("llava", zero=1, dp_shard=1, pp=2)]),
    "recomputed": (10, [make_case("bert", "train.recompute=selective", zero=3, dp_shard=2, tp=2)]),
}  # fmt: skip


@pytest.mark.parametrize("name", [
    *SOME,
    *(pytest.param(name, marks=pytest.mark.extended) for name in EXTENDED),
    *(pytest.param(name, marks=pytest.mark.slow) for name in MORE),
])  # fmt: skip
def test_steps_are_those_of_one_device_and_of_the_native_engine(workers: Workers, name: str) -> None:
    steps, cases = (SOME | EXTENDED | MORE)[name]
    compare_all(workers, cases, steps)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("family", "layout"), list(list_family_layouts()))
def test_ten_steps_of_every_stage_are_those(workers: Workers, family: str, layout: str, optimizer: str) -> None:
    compare_all(workers, make_stage_cases(family, layout, optimizer), 10)


SAVED: dict[str, list[Config]] = {
    "2": [make_config("decoder", zero=1, dp_shard=2),
          with_precision(make_config("decoder", zero=2, dp_shard=2), "bf16"),
          make_config("decoder", "deepspeed.offload_optimizer=cpu", "deepspeed.offload_parameters=cpu", dp_shard=2)],
    "2, experts": [make_config("moe", zero=2, dp_shard=2, ep=2)],
    "2, stages": [make_config("decoder", "deepspeed.offload_optimizer=cpu", zero=1, pp=2)],
    "4": [make_config("decoder", zero=2, dp_shard=2, tp=2)],
}  # fmt: skip
MORE_SAVED: dict[str, list[Config]] = {
    "2, more": [make_config("decoder", zero=0, dp_shard=2),
                with_precision(make_config("decoder", zero=3, dp_shard=2), "fp16"),
                make_config("decoder", "deepspeed.offload_optimizer=cpu", zero=2, dp_shard=2)],
    "4, stages": [with_precision(make_config("decoder", zero=1, dp_shard=2, pp=2), "bf16")],
    "4, second copies": [make_config("decoder", "deepspeed.zero_hpz_partition_size=2", dp_shard=4)],
    "4, experts": [make_config("moe", zero=3, dp_shard=2, ep=2, cp=2)],
}  # fmt: skip


def save_and_load(workers: Workers, folder: Path, ranks: int, cases: list[Config]) -> None:
    workers.run(save_native_checkpoint, 1, folder, cases[0])
    for result in workers.run(exchange_checkpoints, ranks, folder, cases, timeout=250):
        assert result == []


@pytest.mark.parametrize("ranks", [*SAVED, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE_SAVED)])
def test_checkpoints_go_from_native_and_back_to_the_bit(workers: Workers, tmp_path: Path, ranks: str) -> None:
    save_and_load(workers, tmp_path, int(ranks[0]), (SAVED | MORE_SAVED)[ranks])


def test_checkpoints_go_in_and_out_of_files(workers: Workers, tmp_path: Path) -> None:
    cases = [
        make_offloaded_config("decoder", dp_shard=2),
        with_precision(make_offloaded_config("decoder", parameters=False, dp_shard=2), "bf16"),
    ]
    save_and_load(workers, tmp_path, 2, cases)


CPU = "deepspeed.offload_optimizer=cpu", "deepspeed.offload_parameters=cpu"
OFFLOADED: dict[str, tuple[int, list[Config]]] = {
    "some": (3, [make_config("decoder", CPU[0], zero=2, dp_shard=2),
                 make_config("decoder", *CPU, "train.freeze=['*.attn.wq.*']", dp_shard=2)]),
}  # fmt: skip
MORE_OFFLOADED: dict[str, tuple[int, list[Config]]] = {
    "more": (10, [make_config("decoder", CPU[0], zero=1, dp_shard=2),
                  make_config("decoder", CPU[0], zero=3, dp_shard=2),
                  make_config("moe", *CPU, dp_shard=2, ep=2),
                  make_config("t5", *CPU, "train.freeze=['*.attn.wq.*']", dp_shard=2),
                  with_precision(make_config("decoder", CPU[0], zero=1, pp=2), "fp16")]),
}  # fmt: skip


@pytest.mark.parametrize("name", [*OFFLOADED, pytest.param("more", marks=pytest.mark.slow)])
def test_offloading_to_the_host_gives_the_same_run(workers: Workers, tmp_path: Path, name: str) -> None:
    steps, cases = (OFFLOADED | MORE_OFFLOADED)[name]
    for result in workers.run(compare_offloaded_runs, 2, tmp_path, cases, steps, timeout=250):
        assert result == []


IN_FILES: dict[str, list[Config]] = {
    "some": [make_offloaded_config("decoder", "train.freeze=['*.attn.wq.*']", "train.recompute=selective", dp_shard=2)]
}
EXTENDED_IN_FILES: dict[str, list[Config]] = {"mixtures": [make_offloaded_config("moe", dp_shard=2)]}
MORE_IN_FILES: dict[str, list[Config]] = {
    "optimizer": [make_offloaded_config("bert", parameters=False, dp_shard=2)],
    "parameters": [make_offloaded_config("bert", "train.recompute=full", optimizer=False, dp_shard=2)],
    "both": [
        make_offloaded_config("t5", "train.freeze=['encoder.*']", dp_shard=2),
        with_precision(make_offloaded_config("bert", dp_shard=2), "fp16"),
    ],
    "experts": [make_offloaded_config("moe", dp_shard=4, ep=2), make_offloaded_config("decoder", dp_shard=2, tp=2)],
    "lion": [make_offloaded_config("decoder", *OPTIMIZERS["lion"], dp_shard=2)],
}


@pytest.mark.parametrize("row", [
    *IN_FILES,
    *(pytest.param(name, marks=pytest.mark.extended) for name in EXTENDED_IN_FILES),
    *(pytest.param(name, marks=pytest.mark.slow) for name in MORE_IN_FILES),
])  # fmt: skip
def test_offloading_to_files_gives_the_same_run(workers: Workers, tmp_path: Path, row: str) -> None:
    cases = (IN_FILES | EXTENDED_IN_FILES | MORE_IN_FILES)[row]
    for result in workers.run(compare_offloaded_runs, count_ranks(cases[0]), tmp_path, cases, 4, timeout=250):
        assert result == []


def on_a_host_without_fast_float16() -> list[torch.dtype]:
    """Dtypes that stage 3 gives float32 weights, as it is and while we make an engine."""
    import_deepspeed(torch.device("cpu"))
    parameters = importlib.import_module("deepspeed.runtime.zero.partition_parameters")
    kind, accelerator = parameters.InsertPostInitMethodToModuleSubClasses, parameters.get_accelerator()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(accelerator), "is_fp16_supported", lambda self: False)
        modules = [SimpleNamespace(), SimpleNamespace(), SimpleNamespace()]
        kind._set_dtype(modules[0], None, torch.float32)
        with allow_fp16_on_cpu():
            kind._set_dtype(modules[1], None, torch.float32)
            kind._set_dtype(modules[2], None, torch.float16)
        assert not accelerator.is_fp16_supported()
    return [item.dtype for item in modules]


def test_float16_and_float32_are_supported_on_every_host(workers: Workers) -> None:
    """Once DeepSpeed has mended the first, our correction can go."""
    dtypes = [torch.bfloat16, torch.float32, torch.float16]
    assert workers.run(on_a_host_without_fast_float16, 1) == [dtypes]


def test_gradients_that_are_dropped_are_gone(workers: Workers) -> None:
    assert workers.run(find_kept_gradients, 2, timeout=250) == [[], []]


def test_steps_left_out_frozen_weights_and_overflows(workers: Workers) -> None:
    for result in workers.run(check_steps, 2, timeout=250):
        assert result == []


def test_other_optimizers_compose(workers: Workers, tmp_path: Path) -> None:
    for result in workers.run(check_optimizers, 2, tmp_path, timeout=250):
        assert result == []


def test_the_loss_of_each_source_is_that_of_its_rows(workers: Workers) -> None:
    check_losses_by_source(workers, DECODER, {"dp_shard": 2, "engine": "deepspeed", "zero": 2})


def run_with_stage_3() -> bool:
    linear = torch.nn.functional.linear
    take_step(config := make_case("bert", zero=3, dp_shard=2), build_case_engine(config), 1)
    return torch.nn.functional.linear is linear


def test_torch_is_left_as_it_was(workers: Workers) -> None:
    """Else a model that is made later computes with what DeepSpeed put there, and selective recomputation is wrong."""
    assert all(workers.run(run_with_stage_3, 2))
