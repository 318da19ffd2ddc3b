"""Counts of `megatfm describe`. Names and shapes of the presets are held in tests/unit/models."""

import argparse
import math
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatfm.commands.estimate import add_describe_arguments, describe_command
from megatfm.config import Config, ModelConfig, list_presets, load_config
from megatfm.cost import TokenCounts, compute_module_cost
from megatfm.describe import Description, describe, description
from megatfm.describe.description import compute_row_cost
from megatfm.describe.text import to_lines
from megatfm.engines.optimizers import TorchOptimizer
from megatfm.errors import UsageError
from megatfm.layers.attention.dot_product import DotProductAttention
from megatfm.layers.attention.patterns import AttentionPattern
from megatfm.layers.initialisation import make_initialiser
from megatfm.layers.output_head import DEFAULT_MASKED_FRACTION
from megatfm.layers.sequence import SequenceMetadata
from megatfm.models import build
from megatfm.objectives import OBJECTIVES, Objective, target_fraction
from megatfm.ops.attention.kernels import KERNELS
from megatfm.optim.parameters import build_optimizer_groups
from tests.plugins import plugin

VOCABULARY = ["model.vocab_size=4096"]  # what the quickstart's tokenizer has


ONE_OF_EACH_KIND = {
    "albert-base", "bigbird-base", "clip-b32", "deberta-base", "deberta-v3-base", "deepseek-v2-lite", "electra-small",
    "gemma3-1b", "gpt2-124m", "llava-1.5-7b", "longformer-base", "mae-b16", "mistral-7b-v0.1", "mixtral-8x7b",
    "modernbert-base", "mvitv2-t", "prefix-lm-base", "swin-t", "swinv2-t", "switch-base-8", "t-dmca", "t5-small",
    "transformer-base", "vit-s16", "xlnet-base",
}  # fmt: skip
"""A preset for each family with its kinds of attention, pattern, network and positions."""


@pytest.mark.parametrize("tied", ["true", "false"])
def test_flops_of_a_small_model_by_hand(tied: str) -> None:
    """6 FLOPs for each weight of each matrix product, and 12·h for each pair of tokens in a layer."""
    actual = describe(load_config("quickstart", [*VOCABULARY, f"model.embedding.tied={tied}"]))
    model, s = actual.config.model, actual.config.data.sequence_length
    d, ff, v, layers = model.d_model, model.ffn.d_ff, 4096, model.n_layers
    matrices = layers * (4 * d * d + 3 * d * ff) + v * d
    norms = (2 * layers + 1) * d
    assert actual.parameters == actual.embedding + actual.non_embedding == matrices + norms + (tied == "false") * v * d
    assert actual.matmul_parameters == matrices + norms
    assert actual.flops_full == 6 * (matrices + norms) + 12 * layers * d * s
    assert actual.flops_full - actual.flops_causal == 6 * layers * d * s
    assert actual.tokens == actual.tokens_per_step * actual.config.train.steps


SMALL = {"d_model": 24, "n_layers": 2, "attention.n_heads": 4, "ffn.d_ff": 40}
SMALL_ENCODER = ModelConfig.from_dotted({**SMALL, "family": "encoder", "vocab_size": 50})
FAMILIES = {
    "decoder": {"attention.n_kv_heads": 2},
    "latent": {"attention.name": "mla", "attention.kv_lora_rank": 7, "attention.q_lora_rank": 9,
               "attention.qk_rope_head_dim": 6, "attention.v_head_dim": 3},
    "encoder": {"family": "encoder", "lm_head.name": "transform", "embedding.n_segments": 2,
                "position.name": "learned", "position.max_positions": 32},
    "albert": {"family": "encoder", "n_layers": 4, "distinct_layers": 2, "embedding.dim": 8, "embedding.tied": False},
    "shaw": {"position.name": "shaw", "position.max_distance": 5, "attention.n_kv_heads": 2},
    "deberta": {"family": "encoder", "attention.name": "deberta", "position.name": "deberta",
                "position.max_distance": 6},
    "deberta v3": {"family": "encoder", "attention.name": "deberta_v2", "position.name": "deberta_v2",
                   "position.buckets": 4, "position.max_distance": 7},
    "xlnet": {"family": "xlnet", "attention.name": "two_stream", "position.name": "transformer_xl"},
    "shared xlnet": {"family": "xlnet", "attention.name": "two_stream", "position.name": "transformer_xl",
                     "n_layers": 4, "distinct_layers": 2},
    "t5": {"family": "encoder_decoder", "n_encoder_layers": 3, "position.name": "t5"},
}  # fmt: skip

PRODUCTS = next(kernel for kernel in KERNELS if kernel.name == "products")
LATENT = ['model.attention={name="mla", n_heads=4, kv_lora_rank=16, qk_rope_head_dim=6}']


@pytest.mark.parametrize("family", FAMILIES)
def test_flops_equal_torch_s_flop_counter(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward pass has a third of them: its matrix products, counted as they run. Biases and norms are left out."""
    monkeypatch.setattr("megatfm.layers.attention.dot_product.choose_kernel", lambda case: PRODUCTS)
    monkeypatch.setattr("megatfm.objectives.target_fraction", lambda objective: 1.0)
    model = ModelConfig.from_dotted(**(SMALL | FAMILIES[family]), vocab_size=50)
    lengths = {"sequence_length": 32, "target_length": 20}
    config = load_config("quickstart").model_copy(update={"model": model})
    config = config.model_copy(update={"data": config.data.model_copy(update=lengths)})
    built = build(model)
    for parameter in built.parameters():
        torch.nn.init.normal_(parameter)
    tokens, more = torch.zeros(1, 32, dtype=torch.int64), {}
    if family == "t5":
        tokens, more = tokens[:, :20], {"encoder_tokens": tokens}
    if "xlnet" in family:
        built.requires_grad_(False)  # the counter stumbles over views of parameters
        more = {"order": torch.arange(32)[None]}
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        built(tokens, **more)
    counted = compute_row_cost(config, built)
    assert counted.tokens == (52 if family == "t5" else 32)
    assert 6 * counted.matmul_macs + counted.attention_flops == 3 * counter.get_total_flops()
    assert counted.macs > counted.matmul_macs, "norms and biases are multiplied, too"
    if family in ("decoder", "latent"):
        assert counted.visible_attention_flops == counted.attention_flops / 2


def test_a_plugin_s_objective_declares_its_target_fraction(monkeypatch: pytest.MonkeyPatch) -> None:
    class EveryOther(Objective):
        target_fraction = 0.5

    class Unknown(Objective):
        pass

    monkeypatch.setitem(OBJECTIVES._parts, "every other", EveryOther)
    monkeypatch.setitem(OBJECTIVES._parts, "unknown share", Unknown)
    names = ("every other", "unknown share")
    known, unknown = (load_config("bert-base", ["plugins=tests", f"objective={{name='{name}'}}"]) for name in names)
    assert (target_fraction(known.objective), target_fraction(unknown.objective)) == (0.5, None)
    model = build(SMALL_ENCODER)
    rows = [compute_row_cost(config.model_copy(update={"model": SMALL_ENCODER}), model) for config in (known, unknown)]
    head = 24 * 50 * known.data.sequence_length
    assert rows[0].matmul_macs - rows[1].matmul_macs == pytest.approx((0.5 - DEFAULT_MASKED_FRACTION) * head)


def test_heads_of_masked_models_run_on_masked_tokens_only() -> None:
    for preset, head in (("bert-base", 768 * 30522), ("electra-small", 128 * 30522)):
        rare = describe(load_config(preset, ["objective.mask_rate=0.1"]))
        often = describe(load_config(preset, ["objective.mask_rate=0.3"]))
        assert often.matmul_parameters - rare.matmul_parameters == pytest.approx(0.2 * head, rel=0.05)


def preset_case(preset: str) -> object:
    return pytest.param(preset, marks=() if preset in ONE_OF_EACH_KIND else pytest.mark.slow)


PATTERNS = {
    "gemma3-1b": "22 × window (width 512), 4 × full", "mistral-7b-v0.1": "window (width 4096)",
    "t-dmca": "3 × chunked (size 256), 2 × compressed", "gpt2-124m": None,
}  # fmt: skip


@pytest.mark.parametrize("preset", [preset_case(name) for name in list_presets() if not name.startswith("quickstart")])
def test_every_preset_is_described(preset: str) -> None:
    actual = describe(load_config(preset))
    printed = dict(to_lines(actual))
    assert f"{actual.parameters:,}" in printed["parameters"]
    assert not any("None" in text for text in printed.values())
    assert printed.get("  pattern") == PATTERNS.get(preset, printed.get("  pattern"))
    assert actual.tokens_per_row == actual.config.data.sequence_length + (actual.config.data.target_length or 0)


@pytest.mark.parametrize(("name", "about"), [
    ("adamw", "8: two moments"),
    ("muon", "8: momentum and a whole copy, or two moments"),
    ("soap", "30.6: two moments, covariances, bases and a whole copy"),
    ("adafactor", "4.22: rows, columns and a whole copy"),
    ("lamb", "12: two moments and a whole copy"),
    ("lion", "4: a momentum"),
    ("schedule_free_adamw", "8: second moment and z"),
])  # fmt: skip
def test_state_bytes_equal_those_of_the_optimizers(name: str, about: str) -> None:
    """Counted on the optimizer itself, after a step that moves every weight of a small model."""
    optimizer = f'optimizer={{name="{name}", lr=1e-3}}'
    constant = ['lr_schedule={name="constant"}'] if name == "schedule_free_adamw" else []
    small = ["model.vocab_size=64", "model.d_model=32", "model.ffn.d_ff=80"]
    actual = describe(load_config("quickstart", [optimizer, *constant, *small]))
    assert actual.optimizer_bytes * actual.parameters == pytest.approx(state_bytes(actual), rel=1e-12)
    assert f"{actual.optimizer_bytes:.3g}" == about.partition(":")[0]
    assert actual.state_bytes == 8 + actual.optimizer_bytes
    experts = 'model.ffn={name="moe", d_ff=40, n_experts=3, top_k=2}'
    sparse = describe(load_config("quickstart", [optimizer, *constant, *small, experts]))
    assert sparse.optimizer_bytes * sparse.parameters == pytest.approx(state_bytes(sparse), rel=1e-12)


@pytest.mark.parametrize(("parallel", "precision", "state", "unsharded", "sharing"), [
    (["zero=0"], "bf16", 18, 18, "on each data rank"),
    (["zero=0"], "fp32", 16, 16, "on each data rank"),
    (["zero=1"], "bf16", 18, 6, "sharded over dp_shard except 6 bytes a parameter on each data rank"),
    (["zero=2"], "fp16", 18, 2, "sharded over dp_shard except 2 bytes a parameter on each data rank"),
    (["zero=2"], "fp32", 16, 0, "sharded over dp_shard"),
    (["zero=3"], "bf16", 16, 0, "sharded over dp_shard"),
    (["zero=3", "dp_shard=1"], "bf16", 18, 18, "on each data rank"),
])  # fmt: skip
def test_state_bytes_equal_those_of_a_rank(
    parallel: list[str], precision: str, state: float, unsharded: float, sharing: str
) -> None:
    """Bytes are those that `test_sharing.py` measures: 2 of the copy, 4 of weight and gradient each, 8 of AdamW."""
    overrides = [f"parallel.{setting}" for setting in parallel]
    words = ["model.vocab_size=64", f"train.precision={precision}", *ADAMW, *overrides]
    actual = describe(load_config("quickstart", words))
    assert (actual.state_bytes, actual.unsharded_bytes) == (state, unsharded)
    assert actual.total_bytes == state * actual.parameters
    memory = f"{state * actual.parameters / 2**20:,.2f} MiB, {sharing}"  # GiB would be 0.00
    assert memory in [text for _, text in to_lines(actual)]


ADAMW = ['optimizer={name="adamw", lr=1e-3}']


def state_bytes(actual: Description) -> int:
    """Bytes of the optimizer's state, tried on ones."""
    n_bytes = 0
    for group in build_optimizer_groups(actual.config.optimizer, build(actual.config.model)):
        tensors = {n: torch.ones(actual.shapes[n]) for n in group.names}
        optimizer = TorchOptimizer(group, tensors)
        optimizer.step({n: torch.ones_like(tensor) for n, tensor in tensors.items()}, 1e-3)
        n_bytes += sum(v.nbytes for state in optimizer.state().values() for v in state.values() if v.dim())
        n_bytes += sum(t.nbytes for t in tensors.values()) * (group.granularity == "whole_tensor")
    return n_bytes


def test_an_optimizer_is_probed_once_for_each_number_of_dims(monkeypatch: pytest.MonkeyPatch) -> None:
    """AdamW has two groups, with weight decay and without; each training run describes its model at its start."""
    probed: list[int] = []
    genuine = description._get_state_shapes
    monkeypatch.setattr(description, "_get_state_shapes", lambda *group: probed.append(group[2]) or genuine(*group))
    describe(load_config("llama3-8b", ["model.n_layers=2"]))
    assert sorted(probed) == [1, 2]


def test_describe_allocates_no_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """405 billion parameters in no memory: they are on the meta device."""
    models: list[torch.nn.Module] = []
    monkeypatch.setattr("megatfm.train.build.build", lambda config: models.append(build(config)) or models[-1])
    describe(load_config("llama3-405b", ["model.n_layers=2"]))
    assert all(parameter.is_meta for parameter in models[0].parameters())


def test_describe_prints_sizes_and_counts(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_describe_arguments(parser)
    assert describe_command(parser.parse_args(["llama3-8b", "train.steps=2000"])) == 0
    printed = capsys.readouterr().out
    for text in (
        "32 heads of 128, 8 key-value heads",
        "8,030,261,248",
        "theta 500,000",
        "8,388,608,000 in 2,000 steps",
    ):
        assert text in printed


@pytest.mark.parametrize("options", [[], ["model.attention.n_kv_heads=1", "model.attention.head_dim=12"], LATENT])
def test_the_printed_formula_gives_the_printed_flops(options: list[str]) -> None:
    actual = describe(load_config("quickstart", ["model.vocab_size=64", *options]))
    model, length = actual.config.model, actual.config.data.sequence_length
    attention = 12 * model.n_layers * model.attention.n_heads * model.head_width * length
    printed = dict(to_lines(actual))
    assert ("  6N + 12·L·h·s" in printed) == (options != LATENT)
    if options != LATENT:
        assert f"{6 * actual.matmul_parameters + attention:.4g}," in printed["  6N + 12·L·h·s"]
        assert f"{6 * actual.matmul_parameters + attention / 2:.4g}," in printed["  6N + 6·L·h·s"]
    else:
        assert actual.flops_full != 6 * actual.matmul_parameters + attention


def test_an_error_while_activations_are_measured_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ValueError("a mistake\nof two lines")

    actual = describe(load_config("quickstart", ["model.vocab_size=64"]))
    monkeypatch.setattr("megatfm.layers.block.Block.forward", fail)
    assert "not counted: ValueError: a mistake of two lines" in dict(to_lines(actual)).values()


def test_an_unknown_vocabulary_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"model\.vocab_size is not set, and there is no tokenizer at"):
        describe(load_config("quickstart", [f"data.tokenizer={tmp_path}/tokenizer.model"]))


def test_frozen_weights_have_no_gradient_and_no_optimizer_state() -> None:
    options = ["model.vocab_size=64", "model.n_layers=2"]
    full = describe(load_config("quickstart", options))
    still = describe(load_config("quickstart", [*options, 'train.freeze=["decoder.layers.*"]']))
    blocks = sum(math.prod(shape) for name, shape in full.shapes.items() if ".layers." in name)
    assert (full.frozen, still.frozen, still.parameters) == (0, blocks, full.parameters)
    trained = full.parameters - blocks
    assert still.total_bytes == pytest.approx(trained * still.state_bytes + blocks * still.weight_bytes)
    assert f"{blocks:,} of them frozen" in dict(to_lines(still))["parameters"]


def by_hand(config: Config, pairs: list[int]) -> tuple[int, int]:
    """Matrices of a decoder without plugins' parts, each by its tokens; channels by pairs of each block."""
    model, s = config.model, config.data.sequence_length
    assert model.vocab_size is not None
    d = model.d_model
    widths = [model.layer_config(depth).ffn.d_ff for depth in range(model.n_layers)]
    matrices = sum(4 * d * d + 3 * d * width for width in widths) + d * model.vocab_size
    return s * matrices, 2 * d * sum(pairs)


def test_blocks_of_several_kinds_are_counted_separately() -> None:
    """A plugin's pattern counts the pairs that it sees, by hand; full attention all, and half where causal."""
    plugin("dilated")
    kinds = {"layer_types": ["near", "near", "all"], "layer_type.all": {}, "layer_type.near.ffn.d_ff": 24}
    kinds["layer_type.near.attention.pattern"] = {"name": "dilated", "width": 3, "step": 2}
    model = ModelConfig.from_dotted({**SMALL, "n_layers": 4, "vocab_size": 50, **kinds})
    config = load_config("quickstart", []).model_copy(update={"model": model})
    s = config.data.sequence_length
    near = sum(1 for q in range(s) for k in range(s) if q - k in (0, 2, 4, 6))
    products, attention = by_hand(config, [near, near, s * s, near])
    counted = compute_row_cost(config, build(model))
    assert counted.matmul_macs == products
    assert counted.attention_flops == 6 * attention
    assert counted.visible_attention_flops == 6 * by_hand(config, [near, near, s * s // 2, near])[1]
    message = dict(to_lines(describe(config)))
    assert "patterns count the pairs they see; full attention counts all" in message["  with attention"]


def test_pairs_of_a_pattern_are_counted_over_all_heads() -> None:
    @dataclass(frozen=True)
    class Widening(AttentionPattern):
        """Head n sees n tokens before the query."""

        @property
        def differs_by_head(self) -> bool:
            return True

        def mask_mod(self, q: torch.Tensor, k: torch.Tensor, heads: torch.Tensor) -> torch.Tensor:
            return (q - k >= 0) & (q - k <= heads)

    model = ModelConfig.from_dotted({**SMALL, "n_layers": 1, "vocab_size": 50})
    core = DotProductAttention(model, make_initialiser(model), Widening())
    n_pairs = sum(1 for n in range(4) for q in range(9) for k in range(9) if 0 <= q - k <= n)
    assert core.cost(TokenCounts(9)).attention_macs == 2 * 6 * n_pairs  # each head has 6 channels


def test_a_plugin_s_network_declares_its_active_parameters() -> None:
    """Its matrices as torch counts them; of its scales a token meets one of three."""
    plugin("chosen")
    ffn = {"name": "chosen", "d_ff": 40, "choices": 3, "rate": 0.1, "weight": 0.5}
    model = ModelConfig.from_dotted({**SMALL, "vocab_size": 50}).with_changes({"ffn": ffn})
    config = load_config("quickstart").model_copy(update={"model": model})
    block = build(model).decoder.layers["0"].ffn
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        block(torch.zeros(1, 7, 24), SequenceMetadata(torch.arange(7)[None]))
    assert 2 * compute_module_cost(block, TokenCounts(7)).matmul_macs == counter.get_total_flops()
    actual = describe(config)
    assert actual.parameters - actual.active == 2 * 2 * 24
    assert dict(to_lines(actual))["  active"] == f"{actual.active:,} for each token"
    assert "  active" not in dict(to_lines(describe(load_config("quickstart", VOCABULARY))))


def test_a_module_without_a_cost_is_counted_by_its_weights() -> None:
    class Bottleneck(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down, self.up = torch.nn.Linear(24, 5), torch.nn.Linear(5, 24)
            self.table, self.roles = torch.nn.Parameter(torch.ones(9, 24)), {"table": "embedding"}

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.up(self.down(x))

    module = Bottleneck()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        module(torch.zeros(1, 7, 24))
    assert 2 * compute_module_cost(module, TokenCounts(7)).matmul_macs == counter.get_total_flops()


def test_what_is_not_counted_for_another_engine_is_printed() -> None:
    config = load_config("gpt2-124m", ["parallel.engine=deepspeed", "parallel.zero=2"])
    text = "\n".join(value for _, value in to_lines(describe(config)))
    assert "counted as for the native engine; deepspeed's buckets and offloading are not counted" in text
