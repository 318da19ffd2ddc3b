"""State on a rank against engines in as many processes, and activations against saved tensors, to the byte."""

import math
import sys
from functools import partial
from typing import Any

import pytest
import torch

from megatfm.config import Config, ModelConfig, ParallelConfig, load_config
from megatfm.describe import describe, to_lines
from megatfm.describe.activation_memory import measure_block_activations
from megatfm.describe.per_rank import count_rank_state, fake_ranks
from megatfm.engines.activation_checkpointing import measure_saved_bytes
from megatfm.engines.native.engine import NativeEngine
from megatfm.engines.native.replicated import Replicated
from megatfm.layers.moe import experts
from megatfm.models import build
from megatfm.parallel.layout import iter_blocks, replace_forward
from megatfm.train.startup_checks import compute_block_input_bytes
from tests.support.models import ADAMW, LENGTH, UNTIED_MODEL
from tests.support.parity import build_engine
from tests.support.sharded_engines import count_held_bytes
from tests.support.workers import Workers

LAYOUTS = [
    *(ParallelConfig(dp_shard=3, zero=zero) for zero in (0, 1, 2, 3)),
    ParallelConfig(dp_shard=3, zero=2, grad_accumulation="sharded"),
    ParallelConfig(dp_shard=1, tp=2),
    ParallelConfig(dp_shard=2, tp=2, zero=3),
    ParallelConfig(dp_shard=1, dp_replicate=2, zero=3),
    ParallelConfig(dp_shard=2, cp=2, zero=1),
    ParallelConfig(dp_shard=1, cp=3, zero=3),
]
FIRST_BLOCKS = tuple(f"decoder.layers.{number}." for number in range(3))


def make_config(parallel: ParallelConfig) -> Config:
    config = load_config("quickstart", ["data.tokenizer=t", "data.train=d"])
    changed = {
        "model": UNTIED_MODEL,
        "parallel": parallel,
        "optimizer": ADAMW,
        "data": config.data.model_copy(update={"sequence_length": LENGTH}),
        "train": config.train.model_copy(update={"global_batch": 12, "micro_batch": 2, "precision": "bf16"}),
    }
    return config.model_copy(update=changed)


def measure(parallel: ParallelConfig) -> tuple[int, int, int]:
    """Bytes of weights, gradients and moments on this rank: of an engine's tensors, and what it tells of gradients.

    ZeRO 2 keeps the weights that it gathers until a step's last backward pass.
    """
    engine: NativeEngine = build_engine(UNTIED_MODEL, parallel, ADAMW, precision="bf16")
    config, counted = make_config(parallel), count_held_bytes(parallel)
    microbatches = config.train.global_batch // (config.train.micro_batch * engine.mesh.data_ranks)
    gradients = engine.estimate_memory(microbatches, compute_block_input_bytes(config, 2)).gradients
    copy = counted["computed"] if isinstance(engine.data, Replicated) or parallel.zero == 2 else 0
    return counted["stored"] + copy, gradients, counted["optimizer"]


@pytest.mark.parametrize("parallel", LAYOUTS, ids=lambda parallel: str(parallel.model_dump(exclude_defaults=True)))
def test_counted_state_equals_that_of_the_engine(workers: Workers, parallel: ParallelConfig) -> None:
    ranks = parallel.dp_shard * parallel.dp_replicate * parallel.cp * parallel.tp * parallel.pp
    fullest = max(workers.run(measure, ranks, parallel), key=sum)
    state = count_rank_state(make_config(parallel))
    assert state is not None
    assert state.ranks == ranks
    assert (state.weight_bytes, state.gradient_bytes, state.optimizer_bytes) == fullest


def test_the_fullest_pipeline_stage_is_counted() -> None:
    """Embedding and three blocks, against a block, the norm and the head."""
    words = [
        "model.vocab_size=64", "parallel.pp=2", "parallel.pp_split_points=['decoder.layers.3']",
        "optimizer={name='adamw',lr=1e-3}",
    ]  # fmt: skip
    config = load_config("quickstart", words)
    sizes = {name: math.prod(shape) for name, shape in describe(config).shapes.items()}
    first = sum(size for name, size in sizes.items() if name.startswith(("decoder.emb", *FIRST_BLOCKS)))
    state = count_rank_state(config)
    assert state is not None
    assert first > sum(sizes.values()) / 2
    assert (state.parameters, state.weight_bytes) == (first, (4 + 2) * first)
    assert (state.gradient_bytes, state.optimizer_bytes) == (4 * first, 8 * first)


def test_the_state_on_a_rank_is_printed_for_several_ranks_only() -> None:
    for words, expected in (
        ([], None),
        (["parallel.engine=deepspeed", "parallel.dp_shard=2"], None),
        (["parallel.ep=2", "parallel.dp_shard=-1"], "of 2: weights"),
        (["parallel.tp=2", "parallel.zero=0"], "of 2: weights"),
    ):
        config = load_config("quickstart-moe", ["model.attention.n_heads=2", "model.vocab_size=64", *words])
        printed = dict(to_lines(describe(config)))
        assert (expected is None) == ("  on a rank" not in printed), words
        assert expected is None or expected in printed["  on a rank"], words


ROWS, TOKENS = 3, 24
SMALL = {"vocab_size": 50, "d_model": 32, "n_layers": 4, "attention.n_heads": 4, "ffn.d_ff": 40}
MODELS: dict[str, dict[str, Any]] = {
    "decoder": {"attention.n_kv_heads": 2},
    "encoder": {"family": "encoder", "dropout": 0.1, "attention.dropout": 0.1, "position.name": "learned",
                "position.max_positions": TOKENS},
    "t5": {"family": "encoder_decoder", "n_encoder_layers": 3, "position.name": "t5"},
    "kinds of blocks": {"n_layers": 8, "layer_types": ["wide", "plain"],
                        "layer_type": {"wide": {"ffn": {"d_ff": 80}}, "plain": {}}},
    "experts": {"ffn.name": "moe", "ffn.n_experts": 4, "ffn.top_k": 2, "ffn.n_shared_experts": 1},
    "electra": {"family": "electra", "generator": {"d_model": 16, "n_heads": 4, "d_ff": 24}, "embedding.dim": 16,
                "n_layers": 3},
    "latent": {"attention.name": "mla", "attention.kv_lora_rank": 7, "attention.qk_rope_head_dim": 6},
}  # fmt: skip


def small_config(name: str) -> Config:
    config = load_config("quickstart")
    return config.model_copy(
        update={
            "model": ModelConfig.from_dotted({**SMALL, **MODELS[name]}),
            "data": config.data.model_copy(update={"sequence_length": TOKENS, "target_length": None}),
            "train": config.train.model_copy(update={"micro_batch": ROWS, "precision": "fp32"}),
        }
    )


@pytest.mark.parametrize("name", MODELS)
def test_counted_activations_equal_those_of_a_forward_pass(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "is_host_readable", lambda tensor: False)  # experts as on a GPU
    config = small_config(name)
    model = build(config.model).train()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    tokens = torch.randint(50, (ROWS, TOKENS))
    sizes, inputs = list[int](), 0

    def of_block(block, forward, x_BTD, *args):
        nonlocal inputs
        result, saved_bytes = measure_saved_bytes(block, lambda: forward(x_BTD, *args))
        sizes.append(saved_bytes)
        inputs += x_BTD.nbytes
        return result

    for block in iter_blocks(model):
        replace_forward(block, partial(of_block, block, block.forward))
    fields = {"encoder_decoder": ("encoder_tokens",), "electra": ("targets", "original")}
    names = ("tokens", *fields.get(config.model.family, ()))
    model(**dict.fromkeys(names, tokens), keys=torch.arange(ROWS))
    assert measure_block_activations(config) == (sum(sizes), inputs + max(sizes))


def test_block_sparse_attention_saves_as_much_as_a_fused_kernel() -> None:
    plain = small_config("decoder")
    window = plain.model.with_changes({"attention.pattern": {"name": "window", "width": 6}})
    assert measure_block_activations(plain.model_copy(update={"model": window})) == measure_block_activations(plain)


def test_attention_dropout_does_not_change_the_count() -> None:
    """GPT-2's goes by blocks of keys on a CPU, where they are as long as these rows."""
    changes = {"position": {"name": "learned", "max_positions": 2048}, "dropout": 0.1}
    config = small_config("decoder")
    config = config.model_copy(update={"data": config.data.model_copy(update={"sequence_length": 2048})})
    models = [config.model.with_changes({**changes, "attention.dropout": rate}) for rate in (0.0, 0.1)]
    plain, dropped = (measure_block_activations(config.model_copy(update={"model": model})) for model in models)
    assert plain is not None
    assert dropped == plain


def test_activations_that_depend_on_values_are_not_counted() -> None:
    assert measure_block_activations(load_config("longformer-base", ["model.vocab_size=50"])) is None


def test_later_tracebacks_name_no_rank() -> None:
    """After each estimate, torch would put another rank before every line of a traceback."""
    excepthook = sys.excepthook
    with fake_ranks(2):
        assert sys.excepthook is not excepthook
    assert sys.excepthook is excepthook


def test_kernels_of_fake_tensors_are_not_logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors without values are on a CPU, on any device of the run."""
    monkeypatch.setattr("megatfm.terminal._LOGGED", set[str]())
    sizes = ["model.n_layers=1", "model.d_model=64", "model.attention.n_heads=2", "model.ffn.n_experts=4"]
    with caplog.at_level("INFO", "megatfm"):
        assert measure_block_activations(load_config("olmoe-1b-7b", [*sizes, "model.ffn.top_k=2"]))
    assert "kernel" not in caplog.text
