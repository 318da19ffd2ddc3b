"""The DeepSpeed engine's config: what is derived from ours, merged from a user's own, and refused by name."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatfm.config import Config, load_config
from megatfm.config.deepspeed import derive
from megatfm.errors import UsageError

BASE = ["data.tokenizer=t", "data.train=d", "optimizer.name=adamw"]


def config(*overrides: str, engine: str = "deepspeed") -> Config:
    return load_config("quickstart", [*BASE, f"parallel.engine={engine}", *overrides])


def test_what_is_derived() -> None:
    derived = derive(config("parallel.zero=2", "train.precision=bf16"), "bf16")
    assert derived["zero_optimization"] == {"stage": 2, "compute_grad_norm": False}
    assert derived["bf16"] == {"enabled": True}
    assert derived["data_types"] == {"grad_accum_dtype": "fp32"}
    assert "bf16" not in derive(config("parallel.zero=2"), "fp32")
    offloaded = derive(
        config(
            "deepspeed.offload_optimizer=cpu",
            "deepspeed.nvme_path=/disk",
            "deepspeed.offload_parameters=nvme",
        ),
        "fp32",
    )
    assert offloaded["zero_optimization"]["offload_param"] == {"device": "nvme", "nvme_path": "/disk"}
    assert offloaded["zero_optimization"]["offload_optimizer"] == {"device": "cpu"}
    copies = derive(config("deepspeed.hpz=8"), "fp32")["zero_optimization"]
    assert copies == {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,
        "memory_efficient_linear": False,
        "zero_hpz_partition_size": 8,
    }
    added_up = derive(config("parallel.zero=1"), "bf16")
    assert added_up["bf16"] == {"enabled": True, "immediate_grad_update": True}
    assert "compute_grad_norm" not in added_up["zero_optimization"], "which DeepSpeed would refuse"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["parallel.pp=2"], "set parallel.zero = 1, or parallel.pp = 1"),
        (["parallel.dp_replicate=2"], "set parallel.dp_replicate = 1"),
        (["train.precision=fp64"], "set 'fp32'"),
        (["train.precision=bf16", "parallel.zero=0", "parallel.pp=2"], "set parallel.zero = 1"),
        (["train.precision=fp16", "parallel.zero=0"], "set parallel.zero = 1"),
        (["deepspeed.hpz=2", "parallel.zero=2"], "set parallel.zero = 3"),
        (["deepspeed.hpz=2", "parallel.tp=2"], "set parallel.tp = 1"),
        (["deepspeed.hpz=2", "deepspeed.offload_parameters=cpu"], "leave one of them out"),
        (["train.compile=true"], "set train.compile = false"),
        (["optimizer.name=muon"], "optimizer.name = 'muon', which looks at whole tensors"),
        (["deepspeed.offload_optimizer=cpu", "parallel.zero=0"], "set parallel.zero = 1, 2 or 3"),
        (["deepspeed.offload_parameters=cpu", "parallel.zero=2"], "set parallel.zero = 3"),
        (["deepspeed.offload_parameters=nvme"], "needs nvme_path"),
        (
            ["deepspeed.offload_optimizer=nvme", "deepspeed.nvme_path=/disk"],
            "set deepspeed.offload_optimizer = 'cpu'",
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_what_it_can_t_carry_is_refused_when_the_config_is_read(overrides: list[str], said: str) -> None:
    with pytest.raises(UsageError) as found:
        config(*overrides)
    assert said in str(found.value)
    assert "\n" not in str(found.value)


def test_its_section_is_for_its_engine_alone() -> None:
    with pytest.raises(
        UsageError, match=r"deepspeed\.offload_optimizer is set, but parallel\.engine = 'native'"
    ):
        config("deepspeed.offload_optimizer=cpu", engine="native")


def merged(folder: Path, theirs: dict[str, Any]) -> dict[str, Any]:
    path = folder / "ds.json"
    path.write_text(json.dumps(theirs), encoding="utf-8")
    return derive(config(f"deepspeed.json_file={path}", "parallel.zero=2", "optimizer.clip=0.5"), "fp32")


def test_a_json_of_one_s_own_tunes(tmp_path: Path) -> None:
    theirs = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 1000, "overlap_comm": True},
        "wall_clock_breakdown": True,
    }
    found = merged(tmp_path, theirs)
    assert found["zero_optimization"]["reduce_bucket_size"] == 1000
    assert found["zero_optimization"]["overlap_comm"] is True
    assert found["wall_clock_breakdown"] is True
    assert found["gradient_clipping"] == 0, "the engine clips"


def test_conflicts_are_refused_by_key(tmp_path: Path) -> None:
    theirs = {
        "gradient_clipping": 1.0,
        "zero_optimization": {
            "stage": 3,
            "zero_quantized_weights": True,
            "unheard_of": 1,
            "zero_hpz_partition_size": 8,
            "offload_optimizer": {"super_offload": True, "ratio": 0.5},
        },
        "optimizer": {"type": "Lion", "params": {"lr": 1.0}},
        "scheduler": {"type": "WarmupLR"},
    }
    with pytest.raises(UsageError) as found:
        merged(tmp_path, theirs)
    for said in (
        "gradient_clipping = 1.0, but optimizer.clip = 0.5",
        "zero_optimization.stage = 3, but parallel.zero = 2",
        "zero_optimization.zero_quantized_weights: it is inexact",
        "zero_optimization.zero_hpz_partition_size = 8, but deepspeed.hpz = 1",
        "zero_optimization.offload_optimizer.super_offload: Adam's state stays in a process of its own",
        "zero_optimization.offload_optimizer.ratio: a second optimizer",
        "zero_optimization.unheard_of: not carried",
        'optimizer.type = "Lion", but optimizer.name = "AdamW"',
        "scheduler.type: set [schedule]",
    ):
        assert said in str(found.value)


def test_importing_megatfm_and_training_natively_never_imports_it() -> None:
    code = (
        "import sys, megatfm, megatfm.train.loop, megatfm.engines.registry as r; "
        "import megatfm.engines.native.engine; sys.exit('deepspeed' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_missing_installation_is_one_line() -> None:
    code = (
        "import sys, torch; sys.modules['deepspeed'] = None\n"
        "from megatfm.engines.deepspeed.library import load\n"
        "try: load(torch.device('cpu'))\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    said = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert said.startswith("UsageError parallel.engine = 'deepspeed': DeepSpeed can't be imported")
    assert "`make deepspeed` installs it" in said
    assert said.count("\n") == 1
