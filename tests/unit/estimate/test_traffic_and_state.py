"""Traffic and state of estimated ranks, against executed ranks and against what `describe` counts."""

from collections.abc import Sequence
from typing import Literal

import pytest
import torch
import torch.nn.functional as F

from megatfm.config import Config, ParallelConfig, load_config
from megatfm.describe.per_rank import count_rank_state
from megatfm.engines.native.replicated import BUCKET_ELEMENTS, assign_buckets
from megatfm.estimate.devices import load_cluster
from megatfm.estimate.estimator import Estimate, open_estimator
from megatfm.estimate.memory import RankStages, StepMemory, estimate_rank_memory
from megatfm.estimate.operators import Operator, OperatorRecorder
from megatfm.estimate.part_profile import PartProfile, SavedTensor
from megatfm.estimate.rank_flows import add_context_flows
from megatfm.estimate.schedule import list_running_passes
from megatfm.estimate.traffic import Axis, Flows, make_axes
from megatfm.estimate.weights import LocalWeight, count_pending_bytes, count_rank_bytes, list_buckets
from megatfm.verify.shrink import shrink
from tests.support.layouts import EXTENDED, count_sent_bytes, extend
from tests.support.workers import Workers

LEAST = 1024
"""Smaller flows are sums of losses, norms and counts, which an estimate leaves out."""


def small(preset: str, parallel: ParallelConfig, **train: object) -> Config:
    config = load_config(preset, ["data.tokenizer=t", "data.train=d"])
    config, _ = shrink(config.model_copy(update={"parallel": parallel}))
    return config.model_copy(update={"train": config.train.model_copy(update=train)})


def describe_layout(value: object) -> str:
    """The id of a row's value: a layout by what differs from the defaults."""
    return str(value.model_dump(exclude_defaults=True) if isinstance(value, ParallelConfig) else value)


def ranks_of(parallel: ParallelConfig) -> int:
    return parallel.pp * parallel.dp_replicate * parallel.dp_shard * parallel.cp * parallel.tp


def estimate(config: Config, n_gpus: int = 0) -> Estimate:
    """Estimate on H100s, as many as the layout's ranks if not given."""
    with open_estimator(config, load_cluster("h100", n_gpus or ranks_of(config.parallel))) as opened:
        return opened.estimate(opened.base)


def profile_part(config: Config, name: str) -> PartProfile:
    """The part of a model on one GPU."""
    with open_estimator(config, load_cluster("h100", 1)) as opened:
        return next(part for part in opened.profile(opened.base).parts if part.name == name)


@pytest.mark.parametrize(("side", "length"), [("encoder", 512), ("decoder", 128)])
def test_windows_send_keys_of_the_rows_of_their_side(side: str, length: int) -> None:
    """Keys and values of 16 tokens are sent forward, and their gradients back; each of two ranks has half a row."""
    config = load_config("t5-base", ["data.sequence_length=512", "data.target_length=128", "parallel.cp=2"])
    token_bytes = 10
    keys = length // 2 * token_bytes
    attention = Operator("attention", "attention", 0, {1: 1, 2: keys, 3: keys}, {4: 1}, fetched_tokens=16)
    part = PartProfile(f"{side}.layers.0", [attention], [], [], 0, 0, 0, 0, [], is_block=True)
    flows = Flows()
    add_context_flows(flows, config, part, Axis("cp", 2, 1, 2), 1)
    assert flows.sent == {("cp", "send"): 2 * 16 * 2 * token_bytes}


def check_flows(workers: Workers, config: Config) -> None:
    """Each pipeline rank's flows are what its executed ranks send at most, to the byte.

    Sums of losses, norms and counts are left out; rows that travel to experts depend on values.
    """
    ranks, pp = ranks_of(config.parallel), config.parallel.pp
    by_rank = workers.run(count_sent_bytes, ranks, config, ranks)
    for stage_rank, modelled in enumerate(estimate(config).flows_by_rank):
        most: dict[tuple[str, str], int] = {}
        for flows in by_rank[stage_rank * ranks // pp : (stage_rank + 1) * ranks // pp]:
            for key, n_bytes in flows.items():
                most[key] = max(n_bytes, most.get(key, 0))
        assert max(most.values()) > 8 * LEAST
        for key in modelled.sent.keys() | most.keys():
            sent, n_bytes = modelled.sent.get(key, 0), most.get(key, 0)
            if key == ("ep", "all_to_all"):
                assert sent == pytest.approx(n_bytes, rel=0.02), (stage_rank, key)
            elif key[1] == "all_reduce":
                assert 0 <= n_bytes - sent < LEAST, (stage_rank, key, sent, n_bytes)
            else:
                assert sent == n_bytes, (stage_rank, key, sent, n_bytes)


TENSOR_AND_ZERO_3 = ParallelConfig(dp_shard=2, tp=2)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("preset", "parallel", "recompute"), [
    ("llama3-8b", ParallelConfig(dp_shard=2, zero=0), "none"),
    ("llama3-8b", ParallelConfig(dp_shard=2, tp=2, zero=1), "none"),
    ("llama3-8b", ParallelConfig(dp_shard=2, zero=2, grad_accumulation="sharded"), "none"),
    ("llama3-8b", ParallelConfig(dp_replicate=2, dp_shard=2), "none"),
    ("llama3-8b", ParallelConfig(pp=2, dp_shard=2, zero=1), "none"),
    ("llama3-8b", ParallelConfig(pp=3, dp_shard=1), "none"),
    ("llama3-8b", ParallelConfig(pp=2, dp_shard=1, pp_schedule="interleaved"), "none"),
    ("llama3-8b", ParallelConfig(dp_shard=1, cp=2, zero=1), "none"),
    ("llama3-8b", ParallelConfig(dp_replicate=2, dp_shard=1, cp=2, grad_accumulation="sharded"), "none"),
    ("llama3-8b", TENSOR_AND_ZERO_3, "selective"),
    *(pytest.param("llama3-8b", TENSOR_AND_ZERO_3, recompute, marks=EXTENDED) for recompute in ("none", "full")),
    # Tied tables are summed over pipeline ranks.
    ("gpt2-124m", ParallelConfig(pp=2, dp_shard=2, zero=0), "none"),
    ("gpt2-124m", ParallelConfig(pp=2, dp_shard=2, zero=1), "none"),
    # Combined axes, on six and eight ranks.
    ("llama3-8b", ParallelConfig(tp=2, pp=2, dp_shard=2, zero=1), "none"),
    ("mixtral-8x7b", ParallelConfig(dp_replicate=2, dp_shard=2, cp=2, ep=2), "none"),
    pytest.param("gpt2-124m", ParallelConfig(pp=3, dp_shard=2), "none", marks=EXTENDED),
    pytest.param("gpt2-124m", ParallelConfig(pp=3, dp_shard=2, pp_schedule="interleaved"), "none", marks=EXTENDED),
    pytest.param("llama3-8b", ParallelConfig(dp_shard=3, cp=2), "none", marks=EXTENDED),
], ids=describe_layout)  # fmt: skip
def test_a_step_sends_what_executed_ranks_send(
    workers: Workers, preset: str, parallel: ParallelConfig, recompute: str
) -> None:
    check_flows(workers, small(preset, parallel, recompute=recompute))


ONE_KEY_HEAD = {"name": "gqa", "n_heads": 4, "n_kv_heads": 1}
LATENTS = {"name": "mla", "n_heads": 4, "kv_lora_rank": 12, "qk_rope_head_dim": 4}


@pytest.mark.parametrize(("attention", "cp", "method"), [
    (ONE_KEY_HEAD, 4, "auto"),
    (LATENTS, 2, "auto"),
    pytest.param(ONE_KEY_HEAD, 4, "ulysses", marks=EXTENDED),
    pytest.param(LATENTS, 2, "ulysses", marks=EXTENDED),
])  # fmt: skip
def test_ranks_that_share_rows_send_few_key_heads_and_latents(
    workers: Workers, attention: dict[str, object], cp: int, method: Literal["auto", "ulysses"]
) -> None:
    """By Ulysses each of four ranks needs the only head of keys; a ring sends it once, and of MLA the latents."""
    config = small("llama3-8b", ParallelConfig(dp_shard=1, cp=cp, cp_method=method))
    check_flows(workers, config.with_changes({"model.attention": attention}))


def test_folded_experts_gather_no_tokens_over_tensor_parallel_ranks(workers: Workers) -> None:
    """Each rank sends its own tokens to experts; by expert, ranks would gather those of all first."""
    config = small("mixtral-8x7b", ParallelConfig(dp_shard=2, tp=2, ep=4, expert_tp="folded"))
    modelled = estimate(config).flows.sent
    for flows in workers.run(count_sent_bytes, 4, config, 4):
        for name in ("all_gather", "reduce_scatter"):
            assert flows["tp", name] == modelled["tp", name] > LEAST, name


@pytest.mark.parametrize("expert_tp", ["by_expert", "by_channel"])
def test_by_channel_all_tensor_parallel_ranks_send_all_rows_to_experts(
    expert_tp: Literal["by_expert", "by_channel"],
) -> None:
    """By expert, each of two sends the rows of its own half of the experts."""
    parallel = ParallelConfig(dp_shard=2, tp=2, ep=2, expert_tp=expert_tp)
    config = small("mixtral-8x7b", parallel, precision="bf16")
    choices = config.train.global_batch // 2 * config.data.sequence_length * 2
    to_the_other_rank = choices // 2 // (2 if expert_tp == "by_expert" else 1)
    passes = 2 * 2  # dispatch and combine, forward and backward
    expected = config.model.n_layers * passes * to_the_other_rank * config.model.d_model * 2
    assert estimate(config).flows.sent["ep", "all_to_all"] == expected


@pytest.mark.parametrize(("preset", "optimizer", "parallel"), [
    ("albert-base", "lamb", ParallelConfig(dp_shard=3, zero=1)),
    ("llama3-8b", "muon", ParallelConfig(dp_shard=2, tp=2)),
    ("llama3-8b", "muon", ParallelConfig(dp_shard=1, cp=2, cp_method="ulysses")),
    pytest.param("mixtral-8x7b", "muon", ParallelConfig(dp_shard=4, ep=2, zero=1), marks=EXTENDED),
], ids=describe_layout)  # fmt: skip
def test_full_tensors_travel_to_their_owners_and_back(
    workers: Workers, preset: str, optimizer: str, parallel: ParallelConfig
) -> None:
    config = small(preset, parallel).with_changes({"optimizer": {"name": optimizer, "lr": 0.01}})
    by_rank = workers.run(count_sent_bytes, ranks_of(parallel), config, ranks_of(parallel))
    flows_by_rank, axes = estimate(config).flows_by_rank, make_axes(parallel)
    for rank, executed_flows in enumerate(by_rank):
        modelled = flows_by_rank[rank * parallel.pp // ranks_of(parallel)]
        assert modelled.by_member
        for key in modelled.by_member:
            assert modelled.get_sent_bytes(key, rank, axes) == executed_flows[key], (rank, key)


@pytest.mark.parametrize("preset", extend(["clip-b32", "siglip-b16"], kept=["clip-b32"]))
def test_features_travel_around_the_ring_of_ranks(workers: Workers, preset: str) -> None:
    config = small(preset, ParallelConfig(dp_shard=3, zero=1))
    modelled = estimate(config).flows.sent["dp_shard", "send"]
    assert [flows["dp_shard", "send"] for flows in workers.run(count_sent_bytes, 3, config, 3)] == [modelled] * 3


def test_local_attention_fetches_the_keys_of_its_window_alone() -> None:
    """The other kind of ModernBERT's layers exchanges heads; keys, values and gradients are in bfloat16."""
    words = ["data.sequence_length=8192", "train.micro_batch=1", "train.global_batch=2", "model.n_layers=2"]
    flows = estimate(load_config("modernbert-large", [*words, "parallel.cp=2", "parallel.dp_shard=1"])).flows
    microbatches, passes = 2, 2
    assert flows.sent["cp", "send"] == microbatches * passes * 64 * 2 * 1024 * 2
    assert flows.sent["cp", "all_to_all"] > 0


def test_a_rank_keeps_the_largest_whole_tensor_that_it_owns() -> None:
    """Adafactor's owner of a tied table has a copy of it, and sums of its rows and columns; the rest lies on others."""
    config = load_config("t5-base", ["model.n_layers=1", "model.n_encoder_layers=1", "parallel.zero=1"])
    assert estimate(config, 8).worst.optimizer == 4 * (32128 * 768 + 32128 + 768)


def test_scores_that_chunks_of_attention_hold_are_counted() -> None:
    """Disentangled attention of many tokens keeps a chunk's scores of positions: [rows, heads, tokens, positions]."""
    config = load_config("deberta-base", ["model.n_layers=1", "train.precision=bf16", "model.vocab_size=999"])
    block = profile_part(config, "encoder.layers.0")
    scores = config.train.micro_batch * 12 * 512 * 1024 * 2
    assert [tensor.n_bytes for tensor in block.saved].count(scores) == 1


@pytest.mark.parametrize(("preset", "parallel"), [
    ("gpt2-124m", ParallelConfig(dp_shard=3, zero=0)),
    ("gpt2-124m", ParallelConfig(dp_shard=3, zero=1)),
    ("gpt2-124m", ParallelConfig(dp_shard=3, zero=2, grad_accumulation="sharded")),
    ("gpt2-124m", ParallelConfig(dp_shard=3)),
    ("gpt2-124m", ParallelConfig(dp_shard=2, tp=2)),
    ("gpt2-124m", ParallelConfig(dp_shard=2, tp=2, pp=2, pp_schedule="interleaved")),
    ("gpt2-124m", ParallelConfig(dp_shard=1, tp=4)),
    ("gpt2-124m", ParallelConfig(dp_shard=1, cp=3, zero=1)),
    ("gpt2-124m", ParallelConfig(dp_shard=2, cp=2)),
    ("mixtral-8x7b", ParallelConfig(dp_shard=4, ep=2)),
], ids=describe_layout)  # fmt: skip
def test_the_fullest_rank_has_the_state_that_describe_counts(preset: str, parallel: ParallelConfig) -> None:
    config = small(preset, parallel, precision="bf16")
    state = count_rank_state(config)
    assert state is not None
    fullest = max(estimate(config).memory, key=lambda rank: rank.weights + rank.copies + rank.optimizer)
    gathered = fullest.gathered if parallel.zero == 2 else 0  # for a step; `describe` counts it
    counted = state.weight_bytes + state.optimizer_bytes
    assert fullest.weights + fullest.copies + fullest.optimizer + gathered == counted


@pytest.mark.parametrize(("pattern", "point"), [("*.ffn.experts.*", "decoder.layers.0"), ("head.*", "head")])
def test_frozen_weights_have_no_gradient_matmuls(pattern: str, point: str) -> None:
    """Frozen experts and a frozen head compute the gradients of their inputs alone."""
    base = ["model.n_layers=1", "train.precision=bf16", "data.sequence_length=512"]
    flops = {}
    for frozen in ("[]", f'["{pattern}"]'):
        config = load_config("mixtral-8x7b", [*base, f"train.freeze={frozen}"])
        part = profile_part(config, point)
        matmuls = [op for op in (*part.forward, *part.backward) if op.kind == "matmul"]
        flops[frozen] = sum(op.flops for op in matmuls)
    model, rows = config.model, config.train.micro_batch * 512
    if point == "head":
        expected = 2 * rows * model.d_model * (model.vocab_size or 0)
    else:  # three matrices of each of a token's two experts
        expected = 2 * (2 * rows) * 3 * model.d_model * 14336
    assert flops["[]"] - flops[f'["{pattern}"]'] == pytest.approx(expected, rel=1e-9)


def test_all_batches_of_a_step_lie_on_the_device() -> None:
    rows, tokens = 4, 1 + 14 * 14
    overrides = ["parallel.zero=1", "train.precision=bf16", f"train.micro_batch={rows}"]
    overrides += ["train.global_batch=8", "data.images.mixup=0", "data.images.cutmix=0"]
    config = load_config("vit-s16", overrides)
    with open_estimator(config, load_cluster("h100", 2)) as opened:
        used = []
        for microbatches in (3, 5):
            train = opened.base.train.model_copy(update={"global_batch": microbatches * rows * 2})
            used.append(opened.estimate(opened.base.model_copy(update={"train": train})).worst.total)
    pixels, grid, label, position, key = 3 * 16 * 16, 4 * 4, 8, 8, 8
    assert used[1] - used[0] == 2 * rows * (tokens * (pixels + grid + label + position) + key)


@pytest.mark.parametrize("groups", [1, 2, 6])
@pytest.mark.parametrize("needs_input", [True, False])
def test_a_convolutions_products_are_counted(groups: int, needs_input: bool) -> None:
    maps = torch.randn(3, 6, 10, 8, requires_grad=needs_input)
    weight = torch.randn(12, 6 // groups, 3, 3, requires_grad=True)
    recorder = OperatorRecorder()
    with recorder.record() as forward:
        out = F.conv2d(maps, weight, stride=2, padding=1, groups=groups)
    with recorder.record() as backward:
        out.sum().backward()
    products = 3 * 5 * 4 * 12 * (6 // groups) * 9  # places of the outputs, their channels, inputs of each
    assert sum(op.flops for op in forward.operators) == 2 * products
    assert sum(op.flops for op in backward.operators) == 2 * products * (1 + needs_input)


def weight(name: str, shape: Sequence[int], *, is_expert: bool) -> LocalWeight:
    rows, columns = shape
    return LocalWeight(name, rows * columns, rows, columns, is_expert, True, 0, (0,), True)


@pytest.mark.parametrize(("first", "last"), [
    ((8, 1_000_000), (4000, 4000)), ((8, 1_000_000), (8, 2_000_000)), ((8, 100), (2, 20_000_000)), ((8, 10), (8, 8)),
])  # fmt: skip
def test_the_last_gather_of_zero_1_is_that_of_the_engines_last_bucket(
    first: tuple[int, int], last: tuple[int, int]
) -> None:
    """The engine assigns weights with other data ranks, such as experts, to buckets of their own."""
    dense = {"a": (4096, 4096), "b": (100, 5)}
    experts = {"c": first, "d": (4, 100), "e": last}
    listed = [weight(name, shape, is_expert=name in experts) for name, shape in (experts | dense).items()]
    *_, bucket = assign_buckets(experts, 4, BUCKET_ELEMENTS)
    assert [w.name for w in list_buckets(listed)[-1]] == list(bucket.shapes)
    assert sum(w.shard(4) for w in list_buckets(listed)[-1]) == bucket.width
    *_, bucket = assign_buckets(dense, 4, BUCKET_ELEMENTS)
    assert [w.name for w in list_buckets(w for w in listed if not w.is_expert)[-1]] == list(bucket.shapes)


def test_zero_1_gathers_all_weights_beside_the_shard_of_the_last_bucket() -> None:
    overrides = ["parallel.zero=1", "parallel.dp_shard=4", "train.precision=bf16", "data.train=d", "data.tokenizer=t"]
    weights = [weight("a", (4096, 4096), is_expert=False), weight("b", (100, 5), is_expert=False)]
    state = count_rank_bytes(load_config("gpt2-124m", overrides), weights, [0])
    assert state.regathered == 2 * (4096 * 4096 + 100 * 5 + 25 * 5), "the first fills a bucket"


@pytest.mark.parametrize(("precision", "batch", "expected"), [("fp32", 8, 0), ("fp32", 4, 4 * 30), ("bf16", 8, 2 * 30)])
def test_whole_gradients_outside_of_blocks_accumulate_in_their_precision(
    precision: str, batch: int, expected: int
) -> None:
    """The head's gradient waits under ZeRO 3 in the block's backward pass, unless it is added to that of an earlier
    micro-batch at once: FSDP2 does so for gradients in the stored precision."""
    overrides = ["parallel.dp_shard=2", f"train.precision={precision}", "train.micro_batch=2"]
    config = load_config("gpt2-124m", [*overrides, f"train.global_batch={batch}", "data.train=d", "data.tokenizer=t"])
    block, head = (
        LocalWeight(name, 30, 10, 3, False, True, 0, (part,), part == 0) for part, name in enumerate(("block", "head"))
    )
    assert count_pending_bytes(config, [block, head], [0, 1], 0) == expected


@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize(("microbatches", "gradients"), [(2, 100), (3, 200)])
def test_a_pipeline_has_no_gradients_while_all_its_micro_batches_wait(
    zero: int, microbatches: int, gradients: int
) -> None:
    """Two parts of a stage have 100 bytes of weights each and save 1,000 bytes; two micro-batches are in flight. The
    first backward pass adds to earlier gradients only if there are more; a single data rank shards nothing."""
    overrides = ["parallel.pp=2", "parallel.dp_shard=1", f"parallel.zero={zero}", "train.precision=fp32"]
    overrides += ["train.micro_batch=1", f"train.global_batch={microbatches}", "data.train=d", "data.tokenizer=t"]
    weights = [LocalWeight(name, 25, 25, 1, False, True, 0, (part,), True) for part, name in enumerate("ab")]
    profiles = [PartProfile(name, [], [], [SavedTensor(1, 1000)], 0, 0, 0, 0, [], True) for name in "ab"]
    config = load_config("gpt2-124m", overrides)
    step = StepMemory(config, microbatches, weights, profiles, compiled=False, reserved=0)
    rank = estimate_rank_memory(
        step, RankStages(0, {0: [0, 1]}, list_running_passes("1f1b", 2, 1, microbatches)[0], {})
    )
    assert (rank.activations, rank.gradients, rank.workspace) == (4000, gradients, 0)
    assert rank.total == 200 + 4000 + gradients
