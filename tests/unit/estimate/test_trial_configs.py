"""Small copies of models for a calibration: their sizes, and the operators that they run."""

import re
from argparse import Namespace
from collections import Counter
from pathlib import Path

import pytest
import torch

from megatfm.commands.estimate import _calibrate
from megatfm.config import Config, MLAAttentionConfig, ParallelConfig, load_config
from megatfm.config.ffn import MoEConfig
from megatfm.config.sources import list_presets
from megatfm.config.world_size import compute_axis_sizes
from megatfm.describe import describe
from megatfm.errors import UsageError
from megatfm.estimate import calibrate, trial_configs
from megatfm.estimate.clock import Clock
from megatfm.estimate.devices import load_cluster
from megatfm.estimate.estimator import open_estimator
from megatfm.estimate.operators import Operator
from megatfm.estimate.roofline import name_matmuls
from megatfm.estimate.trial_configs import list_trials
from megatfm.estimate.trials import measure_trials
from megatfm.train import build
from tests.support.layouts import extend
from tests.support.recommended_layouts import few_layers

ONE_RANK = {
    "parallel": ParallelConfig(zero=0, dp_shard=1),
    "train.device": "cpu",
    "train.precision": "fp32",
    "train.compile": False,
    "train.cuda_graphs": False,
    "train.recompute": "none",
}


def list_on_cpu(preset: str, *overrides: str) -> list[Config]:
    return list_trials(load_config(preset, list(overrides)), "cpu", "fp32")


def check_sizes(configs: list[Config], min_widths: int) -> None:
    assert len({config.model.d_model for config in configs}) >= min_widths
    descriptions = [describe(config) for config in configs]
    assert len({description.tokens_per_step for description in descriptions}) > 1
    for config, description in zip(configs, descriptions, strict=True):
        assert set(compute_axis_sizes(config.parallel, 1).values()) == {1}
        assert description.flops_full * description.tokens_per_step <= trial_configs.MAX_FLOPS["cpu"]
        assert description.parameters <= trial_configs.MAX_PARAMETERS["cpu"]


def test_trials_are_small_copies_on_one_rank() -> None:
    configs = list_on_cpu("vit-b16")
    check_sizes(configs, min_widths=3)
    assert {config.data.sequence_length for config in configs} == {197}, "an image is a row"


DEEPER = [
    "model.n_layers=4", "model.d_model=64", "model.attention.n_heads=2", "model.ffn.d_ff=64", "model.vocab_size=300",
]  # fmt: skip
FIRST_HALF = ["decoder.embedding.*", "decoder.layers.[01].*", "decoder.norm.*", "head.*"]


@pytest.mark.parametrize(("frozen", "expected"), [
    (["decoder.layers.0.*", "decoder.layers.3.*"], ["decoder.layers.0.*"]),
    (["decoder.layers.3.*"], []),
    (FIRST_HALF, []),
], ids=["a block less", "no block", "all that is there"])  # fmt: skip
def test_trials_freeze_what_they_have(frozen: list[str], expected: list[str]) -> None:
    """Copies have two of four blocks, or all."""
    trials = list_on_cpu("quickstart", *DEEPER, f"train.freeze={frozen}")
    assert {trial.model.n_layers for trial in trials} == {2, 4}
    for trial in trials:
        assert list(trial.train.freeze) == (frozen if trial.model.n_layers == 4 else expected)
        describe(trial)


@pytest.mark.parametrize(("frozen", "reason"), [
    (["decoder.layers.3.*", "decoder.layer.0.*"], "'decoder.layer.0.*' matches no weight"),
    (["*"], "leaves no weight to train"),
])  # fmt: skip
def test_trials_refuse_to_freeze_what_the_model_lacks(frozen: list[str], reason: str) -> None:
    with pytest.raises(UsageError, match=re.escape(reason)):
        list_on_cpu("quickstart", *DEEPER, f"train.freeze={frozen}")


@pytest.mark.extended
@pytest.mark.timeout(900)
def test_each_preset_has_trials() -> None:
    for preset in list_presets():
        if not preset.endswith("-data"):  # a corpus, not a model
            vocabulary = ["model.vocab_size=512"] if preset in ("quickstart", "quickstart-moe") else []
            check_sizes(list_on_cpu(preset, *vocabulary), min_widths=2)


def test_trials_run_on_a_machine_that_the_config_is_not_for() -> None:
    configs = list_on_cpu("gpt2-124m", "train.device=cuda", "train.cuda_graphs=true", "train.precision=bf16")
    assert {(config.train.device, config.train.precision) for config in configs} == {("cpu", "fp32")}


def test_fewer_heads_of_the_same_width_where_their_number_has_no_divisors() -> None:
    sizes = {(c.model.d_model, c.model.attention.n_heads, c.model.ffn.d_ff) for c in list_on_cpu("gpt2-xl")}
    assert sizes == {(64 * heads, heads, 256 * heads) for heads in (2, 3, 4, 6, 8, 10, 12, 18)}, "of 25"


def test_numbers_of_tokens_and_layers_take_turns() -> None:
    configs = list_on_cpu("gpt2-124m")
    rows = {(c.model.d_model, c.train.micro_batch, c.data.sequence_length, c.model.n_layers) for c in configs}
    assert {row for row in rows if row[0] < 512} == {
        (384, 2, 192, 4), (384, 1, 320, 2), (320, 1, 128, 2), (320, 2, 512, 2), (256, 2, 192, 4), (256, 1, 320, 2),
        (192, 1, 128, 2), (192, 2, 512, 4), (128, 2, 192, 4), (128, 1, 320, 2),
    }, "of four layers, the fourth is too large"  # fmt: skip


def test_a_block_of_each_kind_with_few_experts_and_divided_ranks() -> None:
    model = next(config for config in list_on_cpu("deepseek-v3") if config.model.d_model == 7168 // 16).model
    assert model.layer_types == ("dense", "sparse")
    assert (model.d_model, model.attention.n_heads, model.head_width) == (448, 8, 128)
    assert isinstance(model.attention, MLAAttentionConfig)
    assert (model.attention.kv_lora_rank, model.attention.q_lora_rank) == (32, 96)
    sparse = model.type_config("sparse").ffn
    assert isinstance(sparse, MoEConfig)
    assert (model.ffn.d_ff, sparse.d_ff, sparse.n_experts, sparse.top_k) == (1152, 128, 32, 8)


def test_query_heads_still_share_keys() -> None:
    """4 query heads of 256 channels share a key head. Of 5 local layers and a global one there is one each."""
    models = [config.model for config in list_on_cpu("gemma3-1b")]
    assert {(m.attention.n_heads, m.attention.kv_heads, m.head_width) for m in models} == {(2, 1, 256), (3, 1, 256)}
    assert {(m.layer_types, m.n_layers) for m in models} == {(("local", "global"), n) for n in (2, 4)}


def test_stages_keep_their_ratios() -> None:
    models = [config.model for config in list_on_cpu("swin-t")]
    heads = {m.d_model: m.stages.n_heads for m in models if m.stages}
    assert heads == {96: (3, 6, 12, 24), 64: (2, 4, 8, 16)} | dict.fromkeys((32, 24, 16, 8), (1, 2, 4, 8))
    assert all(m.ffn.d_ff == 4 * m.d_model for m in models)
    assert {(m.n_layers, m.stages and m.stages.n_layers) for m in models} == {(8, (2, 2, 2, 2)), (10, (2, 2, 4, 2))}


def test_second_towers_and_decoders_are_divided() -> None:
    siglip = next(config for config in list_on_cpu("siglip-b16") if config.model.d_model == 192)
    tower, contrastive = siglip.model.text_tower, siglip.model.contrastive
    assert tower is not None
    assert contrastive is not None
    assert (siglip.model.d_model, tower.d_model, tower.n_heads, tower.d_ff, tower.n_layers) == (192, 192, 3, 768, 2)
    assert contrastive.width == 192
    llava = list_on_cpu("llava-1.5-7b")[0]
    assert llava.model.vision_tower is not None
    assert llava.model.connector is not None
    assert llava.model.connector.image_token_id < (llava.model.vocab_size or 0)
    assert (llava.model.d_model, llava.model.vision_tower.d_model) == (256, 64)
    assert (llava.data.sequence_length, llava.data.target_length) == (577, 577 + 128), "an image and a text"
    mae = next(config for config in list_on_cpu("mae-b16") if config.model.d_model == 192).model.pixel_decoder
    assert mae is not None
    assert (mae.d_model, mae.n_heads, mae.d_ff, mae.n_layers) == (128, 4, 512, 2), "of 16 heads of 32 channels"


LARGE_IMAGES = (
    "data.images.transforms=[]", "data.images.size=1024", "data.sequence_length=65537", "model.embedding.patch_size=4",
)  # fmt: skip


def test_a_model_without_small_copies_says_why() -> None:
    reason = (
        r"^no small copy of vit-b16 can be made: of width 8, it has 12,736 parameters, and a step takes 2e\+12 FLOPs$"
    )
    with pytest.raises(UsageError, match=reason):
        list_on_cpu("vit-b16", *LARGE_IMAGES)


def test_another_model_is_measured_in_its_place(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured: list[Config] = []
    monkeypatch.setattr(calibrate, "measure_device", lambda clock, precision, configs: ({}, measured.extend(configs)))
    monkeypatch.setattr(calibrate, "write_table", lambda table, path: None)
    config = load_config("vit-b16", [*LARGE_IMAGES, "train.precision=fp32"])
    _calibrate(Namespace(hardware=None, json=False, calibrate=Path("here.toml"), config="vit-b16"), config)
    assert {trial.name for trial in measured} == {"llama3-8b"}
    assert "FLOPs; operators are measured in trials of llama3-8b\n" in capsys.readouterr().out


@pytest.mark.parametrize(("precision", "is_fast", "measured", "warns"), [
    ("auto", True, "bf16", False), ("auto", False, "fp32", False),
    ("bf16", True, "bf16", False), ("bf16", False, "bf16", True),
])  # fmt: skip
def test_a_machine_is_measured_in_the_precision_that_it_trains_in(
    precision: str, is_fast: bool, measured: str, warns: bool,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    precisions: list[str] = []
    monkeypatch.setattr(build, "is_bf16_faster", lambda device: is_fast)
    monkeypatch.setattr(calibrate, "measure_device", lambda clock, name, configs: ({}, precisions.append(name)))
    monkeypatch.setattr(calibrate, "write_table", lambda table, path: None)
    config = load_config("gpt2-124m", [f"train.precision={precision}"])
    _calibrate(Namespace(hardware=None, json=False, calibrate=Path("here.toml"), config="gpt2-124m"), config)
    assert precisions == [measured]
    assert ("warning: this device multiplies in bfloat16 no faster" in capsys.readouterr().out) == warns


UNMEASURED = {
    "slice_backward": "a profile's predicted tokens are the first of each row; a step takes them by their indices"
}


def name_operator(operator: Operator) -> str:
    return name_matmuls(operator) if operator.kind == "matmul" else operator.variant


def find_unmeasured(preset: str) -> dict[str, float]:
    """Operators of a step of few layers and rows that trials lack, with their shares of the bytes, from a thousandth.

    The narrowest trials run first, and no more as soon as nothing is missing.
    """
    config = load_config(preset, [])
    rows = min(2, config.train.micro_batch)
    step = load_config(preset, few_layers(config))
    step = step.with_changes({**ONE_RANK, "train.micro_batch": rows, "train.global_batch": rows})
    needed = Counter[str]()
    with open_estimator(step, load_cluster("cpu", 1)) as opened:
        for part in opened.profile(opened.base).parts:
            for operator in (*part.forward, *part.backward):
                if operator.kind != "attention" and operator.name != "_grouped_mm":  # measured beside the trials
                    needed[name_operator(operator)] += operator.moved_bytes
    shares = {name: n_bytes / needed.total() for name, n_bytes in needed.items() if name not in UNMEASURED}
    missing = {name: share for name, share in shares.items() if share > 1e-3}
    trials = list_trials(config, "cpu", "fp32")
    while trials and missing:
        times, _ = measure_trials(trials[-2:], Clock(torch.device("cpu")))
        measured = {name_operator(operator) for operator, _ in times.operators}
        missing = {name: share for name, share in missing.items() if name not in measured}
        del trials[-2:]
    return missing


FAMILIES = (
    "mae-b16", "gpt2-xl", "deepseek-v3", "switch-base-128", "t-dmca-moe", "swin-t", "swinv2-t", "mvitv2-t",
    "simmim-swin-b", "clip-b32", "siglip-b16", "llava-1.5-7b", "deberta-v3-base", "xlnet-base", "t5-base",
    "bigbird-base", "longformer-base",
)  # fmt: skip


@pytest.mark.usefixtures("equal_seconds")
@pytest.mark.parametrize("preset", extend(FAMILIES, ["mae-b16"]))
def test_trials_run_the_operators_of_a_step(preset: str) -> None:
    """By name, precision, and what their time depends on beside bytes."""
    assert find_unmeasured(preset) == {}
