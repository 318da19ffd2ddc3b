"""Moments at which gradients of weights are added up in a backward pass, in closed form."""

from dataclasses import replace

import pytest

from megatfm.config import Config, load_config
from megatfm.estimate.devices import load_cluster
from megatfm.estimate.estimator import open_estimator
from megatfm.estimate.moments import GradientAccumulation, StageMemory
from megatfm.estimate.part_profile import PartProfile, WeightGradient
from megatfm.estimate.schedule import RunningPass
from megatfm.estimate.weights import LocalWeight, count_rank_bytes

WEIGHTS = [LocalWeight(name, rows, rows, 1, False, True, 0, (0,), True) for name, rows in (("a", 8), ("b", 16))]
"""Weights of one part, of 8 and 16 elements."""
GRADIENTS = [WeightGradient(1, 32, live=50, peak=100), WeightGradient(0, 16, live=-40, peak=10)]
"""Their gradients in bfloat16, the second weight's first."""


def make_config(*overrides: str) -> Config:
    layout = ["data.train=d", "data.tokenizer=t", "parallel.dp_shard=4", "train.precision=bf16"]
    return load_config("gpt2-124m", [*layout, *overrides])


def make_part(*gradients: WeightGradient) -> PartProfile:
    return PartProfile(
        "part", [], [], [], 0, 0, 0, 100, gradients, True, whole_backward_peak=120, peak_after_gradients=-60
    )


def list_moments(
    config: Config, *, is_first: bool = True, is_last: bool, compiled: bool = False
) -> list[tuple[int, int]]:
    """Run the part, and add what remains at the end."""
    state = count_rank_bytes(config, WEIGHTS, [0])
    accumulation = GradientAccumulation(config, WEIGHTS, [0], state, is_first=is_first, is_last=is_last)
    return list(accumulation.run_backward(0, make_part(*GRADIENTS), 7, compiled=compiled))


def test_a_first_pass_has_the_gradients_that_it_has_computed() -> None:
    """Each is cast to float32 when it is added, beside those before it."""
    assert list_moments(make_config("parallel.zero=0"), is_last=False) == [
        (100, 0), (50 + 64, 0), (10, 64), (-40 + 32, 64), (-60, 96)
    ]  # fmt: skip


def test_a_bucket_is_packed_once_its_gradients_are_complete() -> None:
    """Four ranks share a bucket of 24 elements, 6 each."""
    *before, packed, after = list_moments(make_config("parallel.zero=1"), is_last=True)
    assert before == [(100, 0), (50 + 64, 0), (10, 64), (-40 + 32, 64)]
    assert packed == (-40 - 16 + 96, 96)
    assert after == (-60, 24)


def test_later_passes_add_to_all_gradients() -> None:
    moments = list_moments(make_config("parallel.zero=1"), is_first=False, is_last=False)
    assert moments == [(100, 96), (50 + 64, 96), (10, 96), (-40 + 32, 96), (-60, 96)]


def test_a_compiled_block_returns_all_gradients_at_its_end() -> None:
    """A compiled block frees 7 bytes fewer than an eager one, and casts all 24 elements before it adds the first."""
    moments = list_moments(make_config("parallel.zero=0"), is_last=False, compiled=True)
    assert moments == [(120, 0), (-60 + 7 + 4 * 24, 0), (-60, 96)]


def test_a_tied_tables_gradient_waits_for_its_first_use() -> None:
    """The last of three parts computes it, too; the one between has no weights."""
    config = make_config("parallel.zero=0")
    tied = [LocalWeight("table", 10, 10, 1, False, True, 0, (0, 2), False)]
    parts = [make_part(WeightGradient(0, 20, live=5, peak=9)), make_part(), make_part(WeightGradient(0, 20, 5, 9))]
    accumulation = GradientAccumulation(
        config, tied, [0, 1, 2], count_rank_bytes(config, tied, [0, 1, 2]), is_first=True, is_last=False
    )
    moments = [list(accumulation.run_backward(i, parts[i], 0, compiled=False)) for i in (2, 1, 0)]
    assert moments == [[(9, 0), (5 + 40, 0), (-60, 40)], [(-60, 40)], [(9, 40), (5 + 40, 40), (-60, 40)]]


@pytest.mark.parametrize("zero", [0, 3])
def test_a_gradient_of_hidden_vectors_waits_for_the_other_heads(zero: int) -> None:
    """Two heads read what a block writes: the first head runs backward beside 11 bytes that the second one computed."""
    block = replace(make_part(), writes=frozenset({"hidden"}), waiting_gradients={"memory": 3})
    head = replace(make_part(), waiting_gradients={"hidden": 11})
    config, profiles = make_config(f"parallel.zero={zero}"), [block, block, head, head]
    state = count_rank_bytes(config, [], range(4))
    memory = StageMemory(config, [], range(4), profiles, dict.fromkeys(range(4), 1000), state, compiled=False)
    fullest: dict[int, int] = {}
    for moment in memory.list_moments(RunningPass(0, False, True, True, (0,), (0,)), is_alone=True):
        if moment.activations >= 1000:
            fullest[moment.activations] = max(moment.workspace, fullest.get(moment.activations, -60))
    live = 120 if zero == 3 else -60
    assert fullest == {4000: live, 3000: live + 11, 2000: live, 1000: live + 3}


SMALL = [
    "model.d_model=64", "model.attention.n_heads=4", "model.ffn.d_ff=256", "model.n_layers=3", "train.compile=false",
]  # fmt: skip
SMALL += ["train.micro_batch=2", "train.global_batch=2", "train.precision=bf16", "data.train=d"]


def profile_parts(preset: str, *overrides: str) -> dict[str, PartProfile]:
    config = load_config(preset, [*SMALL, *overrides])
    with open_estimator(config, load_cluster("h100", 1)) as opened:
        points = opened.get_split_points(opened.base)
        return dict(zip((point.name for point in points), opened.profile(opened.base).parts, strict=True))


TEXT = ["model.vocab_size=512", "data.sequence_length=128", "data.tokenizer=t"]
TEXT += [f"model.{key}dropout=0" for key in ("", "attention.", "ffn.")]
HIDDEN = 2 * 128 * 64 * 2
"""Bytes of hidden vectors."""


def test_a_blocks_first_gradient_is_added_after_its_input_is_freed() -> None:
    """The down projection: its bias and weight are computed beside the gradients of its output and its input. Then its
    input is freed, and the weight's gradient is added."""
    block = profile_parts("gpt2-124m", *TEXT)["decoder.layers.1"]
    bias, down, *_ = block.gradients
    weight = 64 * 256 * 2
    assert (bias.n_bytes, down.n_bytes) == (64 * 2, weight)
    assert bias.peak == HIDDEN + 4 * HIDDEN + weight + bias.n_bytes
    assert down.live == HIDDEN + weight


@pytest.mark.parametrize("preset", ["gpt2-124m", "llama3-8b"])
def test_a_backward_pass_frees_what_its_block_alone_saves(preset: str) -> None:
    """Its input remains, and the gradients of the hidden vectors between its branches, of the first branch, and of its
    input; that of its output is freed. All blocks save rotary tables, which the first block frees."""
    heads = ["model.attention.head_dim=16", "model.attention.n_kv_heads=4"] if preset == "llama3-8b" else []
    block = profile_parts(preset, *TEXT, *heads)["decoder.layers.1"]
    assert bool(block.shared_inputs) == (preset == "llama3-8b")
    assert block.peak_after_gradients == 4 * HIDDEN - block.count_saved_bytes("none", compiled=False)


@pytest.mark.parametrize(("preset", "part"), [("gpt2-124m", "head"), ("bert-base", "head"), ("bert-base", "sentence")])
def test_a_head_has_its_input_in_the_forward_pass_alone(preset: str, part: str) -> None:
    """Chunks of the loss save gradients instead, and heads of BERT the tokens that they read."""
    parts = profile_parts(preset, *TEXT)
    assert parts[part].unsaved_input_bytes == HIDDEN
    assert all(profile.unsaved_input_bytes == 0 for profile in parts.values() if profile.is_block)


def test_stochastic_depth_spares_the_first_block() -> None:
    """The others scale a branch's output, whose gradient is one more tensor; the scales are freed then."""
    blocks = profile_parts("vit-s16", "model.drop_path=0.1", "data.images.mixup=0", "data.images.cutmix=0")
    first, second, third = (blocks[f"encoder.layers.{layer}"] for layer in range(3))
    assert second is third
    tokens = 2 * 197
    assert second.backward_peak - first.backward_peak == tokens * 64 * 2 - tokens * 2


def test_frozen_blocks_have_no_gradients() -> None:
    blocks = profile_parts("gpt2-124m", *TEXT, 'train.freeze=["decoder.layers.0.*"]')
    assert not blocks["decoder.layers.0"].gradients
    assert len(blocks["decoder.layers.1"].gradients) == 16
