"""The DeepSpeed engine's config: what is derived from ours, merged from a user's own, and refused by name."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from megatfm.config import Config, load_config
from megatfm.config.deepspeed_json import make_deepspeed_json
from megatfm.config.key_migrations import migrate
from megatfm.errors import UsageError
from megatfm.verify.shrink import shrink
from tests.support.forked_commands import ForkedCommand

WEIGHTS_IN_FILES = ["deepspeed.offload_parameters=nvme", "deepspeed.nvme_path=/disk"]
BASE = ["data.tokenizer=t", "data.train=d", "optimizer.name=adamw"]


def config(*overrides: str, engine: str = "deepspeed") -> Config:
    return load_config("quickstart", [*BASE, f"parallel.engine={engine}", *overrides])


def test_deepspeed_json_follows_from_the_config() -> None:
    derived = make_deepspeed_json(config("parallel.zero=2", "train.precision=bf16"), "bf16")
    assert derived["zero_optimization"] == {"stage": 2, "compute_grad_norm": False}
    assert derived["bf16"] == {"enabled": True}
    assert derived["data_types"] == {"grad_accum_dtype": "fp32"}
    assert "bf16" not in make_deepspeed_json(config("parallel.zero=2"), "fp32")
    offloaded = make_deepspeed_json(
        config("deepspeed.offload_optimizer=cpu", "deepspeed.nvme_path=/disk", "deepspeed.offload_parameters=nvme"),
        "fp32",
    )  # fmt: skip
    in_files = {"device": "nvme", "nvme_path": "/disk", "max_in_cpu": 0}
    assert offloaded["zero_optimization"]["offload_param"] == in_files
    assert offloaded["zero_optimization"]["stage3_max_reuse_distance"] == 0
    assert offloaded["zero_optimization"]["offload_optimizer"] == {"device": "cpu"}
    copies = make_deepspeed_json(config("deepspeed.zero_hpz_partition_size=8"), "fp32")["zero_optimization"]
    assert copies == {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,
        "memory_efficient_linear": False,
        "zero_hpz_partition_size": 8,
    }
    added_up = make_deepspeed_json(config("parallel.zero=1"), "bf16")
    assert added_up["bf16"] == {"enabled": True, "immediate_grad_update": True}
    assert "compute_grad_norm" not in added_up["zero_optimization"], "which DeepSpeed would refuse"


@pytest.mark.parametrize(("overrides", "message"), [
    (["parallel.pp=2"], "set parallel.zero = 1, or parallel.pp = 1"),
    (["parallel.dp_replicate=2"], "set parallel.dp_replicate = 1"),
    (["train.precision=fp64"], "set 'fp32'"),
    (["train.precision=fp8"], "train.precision = 'fp8', which is shown for our own engine alone: set 'bf16'"),
    (["parallel.reduce_dtype=bf16", "parallel.zero=1"], "set parallel.reduce_dtype = 'param'"),
    (["parallel.comm_buffers=process_group"], "set parallel.comm_buffers = 'torch'"),
    (["parallel.fsdp_prefetch=2"], "leave it out, and set stage3_prefetch_bucket_size"),
    (["optimizer.moments_dtype=bf16"], "set optimizer.moments_dtype = 'param'"),
    (["train.precision=bf16", "parallel.zero=0", "parallel.pp=2"], "set parallel.zero = 1"),
    (["train.precision=fp16", "parallel.zero=0"], "set parallel.zero = 1"),
    (["deepspeed.zero_hpz_partition_size=2", "parallel.zero=2"], "set parallel.zero = 3"),
    (["deepspeed.zero_hpz_partition_size=2", "parallel.tp=2"], "set parallel.tp = 1"),
    (["deepspeed.zero_hpz_partition_size=2", "deepspeed.offload_parameters=cpu"], "leave one of them out"),
    (["optimizer.name=schedule_free_adamw", "lr_schedule.name=constant"], "set parallel.zero = 2"),
    (["train.compile=true"], "set train.compile = false"),
    (["optimizer.name=muon"], "optimizer.name = 'muon', which looks at whole tensors"),
    (["deepspeed.offload_optimizer=cpu", "parallel.zero=0"], "set parallel.zero = 1, 2 or 3"),
    (["deepspeed.offload_parameters=cpu", "parallel.zero=2"], "set parallel.zero = 3"),
    (["deepspeed.offload_parameters=nvme"], "needs nvme_path"),
    ([*WEIGHTS_IN_FILES, "parallel.dp_shard=1"], "set parallel.dp_shard = 2 or more"),
    ([*WEIGHTS_IN_FILES, "parallel.dp_shard=4", "parallel.ep=4"], "parallel.ep to less than that"),
    (["deepspeed.offload_optimizer=nvme", "deepspeed.nvme_path=/disk", "parallel.zero=2"], "set parallel.zero = 3"),
], ids=lambda value: value[0] if isinstance(value, list) else "")  # fmt: skip
def test_options_that_deepspeed_can_t_carry_are_refused_on_reading(overrides: list[str], message: str) -> None:
    with pytest.raises(UsageError) as actual:
        config(*overrides)
    assert message in str(actual.value)
    assert "\n" not in str(actual.value)


def test_a_json_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "tuned.json").write_text('\ufeff{"wall_clock_breakdown": true}', encoding="utf-8")
    merged = make_deepspeed_json(config(f"deepspeed.json_file={tmp_path / 'tuned.json'}"), "fp32")
    assert merged["wall_clock_breakdown"] is True


def test_its_section_is_for_its_engine_alone() -> None:
    with pytest.raises(UsageError, match=r"deepspeed\.offload_optimizer is set, but parallel\.engine = 'native'"):
        config("deepspeed.offload_optimizer=cpu", engine="native")
    with pytest.raises(
        UsageError, match=r"deepspeed\.zero_hpz_partition_size is set"
    ):  # of a section that holds every key
        config("deepspeed.zero_hpz_partition_size=2").with_changes({"parallel.engine": "native"})


def test_config_and_its_deepspeed_section_are_no_circle() -> None:
    """Reading a config imports nothing of what makes or merges JSON."""
    code = "import sys, megatfm.config; print('megatfm.config.deepspeed_json' in sys.modules)"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert process.stdout == "False\n"


def test_a_config_is_read_where_its_json_is_gone(tmp_path: Path) -> None:
    removed = tmp_path / "gone.json"
    stored = config(f"deepspeed.json_file={removed}").model_dump(mode="json")
    read = Config.model_validate(stored)
    with pytest.raises(UsageError, match=r"\.json_file = .*gone\.json': can't read it: No such file or directory"):
        make_deepspeed_json(read, "fp32")
    removed.write_text('{"a": ' * 100_000)
    with pytest.raises(UsageError, match=r"deepspeed\.json_file = .*gone\.json': can't read it: maximum recursion"):
        make_deepspeed_json(read, "fp32")
    removed.write_text("[]")
    with pytest.raises(UsageError, match=r"deepspeed\.json_file = .*gone\.json' is no JSON object: give one"):
        make_deepspeed_json(read, "fp32")
    removed.write_text('{"zero_optimization": {"stage": 2}}')
    with pytest.raises(UsageError, match=r"zero_optimization\.stage = 2, but parallel\.zero = 3"):
        make_deepspeed_json(read, "fp32")


def merged(folder: Path, expected: dict[str, Any]) -> dict[str, Any]:
    path = folder / "ds.json"
    path.write_text(json.dumps(expected), encoding="utf-8")
    return make_deepspeed_json(
        config(f"deepspeed.json_file={path}", "parallel.zero=2", "optimizer.max_grad_norm=0.5"), "fp32"
    )


def test_a_user_json_sets_tuning_keys(tmp_path: Path) -> None:
    expected = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 1000, "overlap_comm": True},
        "wall_clock_breakdown": True,
    }
    actual = merged(tmp_path, expected)
    assert actual["zero_optimization"]["reduce_bucket_size"] == 1000
    assert actual["zero_optimization"]["overlap_comm"] is True
    assert actual["wall_clock_breakdown"] is True
    assert actual["gradient_clipping"] == 0, "the engine clips"


def test_conflicts_are_refused_by_key(tmp_path: Path) -> None:
    expected = {
        "gradient_clipping": 1.0,
        "zero_optimization": {
            "stage": 3, "zero_quantized_weights": True, "unheard_of": 1, "zero_hpz_partition_size": 8,
            "offload_optimizer": {"super_offload": True, "ratio": 0.5},
        },
        "optimizer": {"type": "Lion", "params": {"lr": 1.0}},
        "scheduler": {"type": "WarmupLR"},
        "aio": {"block_size": 1048576, "use_gds": True},
    }  # fmt: skip
    with pytest.raises(UsageError) as actual:
        merged(tmp_path, expected)
    for output in (
        "gradient_clipping = 1.0, but optimizer.max_grad_norm = 0.5",
        "zero_optimization.stage = 3, but parallel.zero = 2",
        "zero_optimization.zero_quantized_weights: what is sent would be rounded",
        "zero_optimization.zero_hpz_partition_size = 8, but deepspeed.zero_hpz_partition_size = 1",
        "zero_optimization.offload_optimizer.super_offload: Adam's state stays in a process of its own",
        "zero_optimization.offload_optimizer.ratio: a second optimizer",
        "zero_optimization.unheard_of: not carried",
        'optimizer.type = "Lion", but optimizer.name = "AdamW"',
        "scheduler: set [lr_schedule]",
        "aio.use_gds: its operator",
    ):
        assert output in str(actual.value)


HUGGING_FACE: dict[str, Any] = {
    "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16},
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "weight_decay": "auto"}},
    "zero_optimization": {
        "stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": True, "ratio": 1.0, "fast_init": False},
        "offload_param": {"device": "cpu", "pin_memory": True}, "overlap_comm": True, "sub_group_size": 1e9,
        "reduce_bucket_size": "auto", "stage3_param_persistence_threshold": "auto", "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
}  # fmt: skip
OFFLOADED = ["parallel.zero=3", "deepspeed.offload_optimizer=cpu", "deepspeed.offload_parameters=cpu"]


def list_refused_keys(folder: Path, expected: dict[str, Any], *overrides: str) -> list[str]:
    """Refusals of a JSON, each by its key."""
    path = folder / "ds.json"
    path.write_text(json.dumps(expected), encoding="utf-8")
    try:
        read = config(f"deepspeed.json_file={path}", *overrides)
        make_deepspeed_json(read, read.train.precision)
    except UsageError as error:
        message = str(error).partition("deepspeed.json_file: ")[2]
        return message.removesuffix(": leave these out of the file, or change our keys").split("; ")
    return []


def test_a_json_for_hugging_face_s_trainer_is_taken_but_for_its_scheduler(tmp_path: Path) -> None:
    scheduler = {"type": "WarmupLR", "params": {"warmup_max_lr": "auto", "warmup_num_steps": 100}}
    expected = {**HUGGING_FACE, "scheduler": scheduler}
    assert list_refused_keys(tmp_path, expected, *OFFLOADED) == ["scheduler: set [lr_schedule]"]
    assert list_refused_keys(tmp_path, HUGGING_FACE, *OFFLOADED) == []
    actual = make_deepspeed_json(config(f"deepspeed.json_file={tmp_path / 'ds.json'}", *OFFLOADED), "bf16")
    zero = actual["zero_optimization"]
    assert zero["offload_optimizer"] == {"device": "cpu", "pin_memory": True}
    assert zero["sub_group_size"] == 1e9
    assert zero["stage3_param_persistence_threshold"] == 0
    assert "reduce_bucket_size" not in zero
    assert actual["steps_per_print"] == 2000


def test_features_of_deepspeed_that_are_off_are_accepted(tmp_path: Path) -> None:
    expected = {
        "activation_checkpointing": {"partition_activations": False, "number_checkpoints": None},
        "compile": {"deepcompile": False},
        "optimizer": {"type": "Adam", "params": {"adam_w_mode": True, "torch_adam": True}},
        "prescale_gradients": False,
        "tensorboard": {"enabled": False, "output_path": "logs"},
        "zero_optimization": {"zero_quantized_weights": False, "mics_shard_size": -1},
    }
    assert list_refused_keys(tmp_path, expected) == []


def test_each_section_that_is_not_carried_is_named_once_with_the_way_out(tmp_path: Path) -> None:
    expected = {
        "pipeline": {"stages": "auto", "partition": "best", "activation_checkpoint_interval": 1},
        "tensor_parallel": {"autotp_size": 4},
        "optimizer": {"type": "Adam", "params": {"adam_w_mode": False}},
        "fp16": {"enabled": True, "auto_cast": True},
        "zero_optimization": {
            "stage3_param_persistence_threshold": 1e5, "zenflow": {"topk_ratio": 0.1, "update_interval": 4},
        },
        "compile": {"deepcompile": True},
        "activation_checkpointing.profile": True,
    }  # fmt: skip
    assert [
        message.partition(" and ")[0] for message in list_refused_keys(tmp_path, expected, "train.precision=bf16")
    ] == [
        "pipeline: set parallel.pp",
        "tensor_parallel: set parallel.tp",
        "optimizer.params.adam_w_mode = false, but optimizer.name = 'adamw' decays weights by themselves",
        "fp16.enabled = true, but train.precision = 'bf16'",
        "fp16.auto_cast: not carried",
        "zero_optimization.stage3_param_persistence_threshold: weights that stay gathered would be a second kind",
        "zero_optimization.zenflow: its updates come late,",
        "compile.deepcompile: its operator is compiled for CUDA alone,",
        "activation_checkpointing: set train.recompute",
    ]


def test_weights_in_files_need_what_a_usual_json_has_otherwise(tmp_path: Path) -> None:
    disk = {"device": "nvme", "nvme_path": "/disk", "max_in_cpu": 1e9}
    expected = {"zero_optimization": {"stage3_max_reuse_distance": 1e9, "offload_param": disk}}
    assert list_refused_keys(tmp_path, expected, *WEIGHTS_IN_FILES) == [
        f"zero_optimization.{key} = 1000000000.0, but deepspeed.offload_parameters = 'nvme' needs 0"
        for key in ("stage3_max_reuse_distance", "offload_param.max_in_cpu")
    ]


def test_float16_s_scale_is_ours_where_it_counts(tmp_path: Path) -> None:
    assert list_refused_keys(tmp_path, {"fp16": HUGGING_FACE["fp16"]}, "train.precision=bf16") == []
    (message,) = list_refused_keys(tmp_path, {"fp16": HUGGING_FACE["fp16"]}, "train.precision=fp16")
    assert message.startswith("fp16.loss_scale_window = 1000, but the scale starts at 2¹⁶")


def test_verify_keeps_second_copies_of_weights() -> None:
    small, _ = shrink(config("deepspeed.zero_hpz_partition_size=2", "parallel.dp_shard=2"))
    assert small.deepspeed.zero_hpz_partition_size == 2


def test_stored_configs_of_removed_keys_load_where_they_were_off() -> None:
    stored = config().model_dump(mode="json")
    stored["deepspeed"] |= {"quantized_weights": False, "quantized_gradients": False}
    assert Config.model_validate(migrate(stored)) == config()
    stored["deepspeed"]["quantized_weights"] = True
    with pytest.raises(ValidationError, match="quantized_weights"):
        Config.model_validate(migrate(stored))


def test_a_missing_installation_is_one_line(tmp_path: Path) -> None:
    code = (
        "import sys, torch; sys.modules['deepspeed'] = None\n"
        "from megatfm.engines.deepspeed.library import import_deepspeed\n"
        "try: import_deepspeed(torch.device('cpu'))\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    program = tmp_path / "program.py"
    program.write_text(code)
    command = ForkedCommand([], tmp_path / "output", tmp_path, program=str(program))
    assert command.wait() == 0
    stdout = command.output
    assert stdout.startswith("UsageError parallel.engine = 'deepspeed': DeepSpeed can't be imported")
    assert "`make deepspeed` installs it" in stdout
    assert stdout.count("\n") == 1
