"""Modelled peaks of a process on a CPU, against the bytes that torch allocates in a step; what blocks save."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from megatfm.config import Config, load_config
from megatfm.data.loader import without_documents
from megatfm.estimate.devices import load_cluster
from megatfm.estimate.estimator import open_estimator
from megatfm.estimate.part_profile import PartProfile, add_shared_inputs
from megatfm.parallel.mesh import build_mesh
from megatfm.train.build import build_engine
from megatfm.verify.shrink import draw_batch, objective_for
from tests.support.workers import Workers

SMALL = ["model.d_model=128", "model.attention.n_heads=4", "model.ffn.d_ff=512", "model.n_layers=3"]
SMALL += ["model.vocab_size=1024", "data.sequence_length=256", "train.micro_batch=2", "train.global_batch=4"]
SMALL += [f"model.{key}dropout=0" for key in ("", "attention.", "ffn.")]
SMALL += ["train.precision=fp32", "train.compile=false", "train.device=cpu", "parallel.zero=0"]
HEADS = ["model.attention.head_dim=32"]
MODELS = {
    "llama3-8b": [*HEADS, "model.attention.n_kv_heads=2"],
    "t5-base": [*HEADS, "model.n_encoder_layers=3", "data.target_length=256"],
    "olmoe-1b-7b": ["model.ffn.d_ff=128", "model.ffn.n_experts=4", "model.ffn.top_k=2"],
}
"""Preset → overrides of its small model."""


def measure_peak(config: Config) -> int:
    """Take two steps in one process, whose threads all are the profiler's, and return the second's peak."""
    torch.set_num_threads(1)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        mesh = build_mesh(config.parallel, 1, "cpu")
        engine = build_engine(config, mesh, torch.device("cpu"), config.train.precision)
        rows = config.train.micro_batch
        fields = draw_batch(config.with_changes({"train.global_batch": rows}), "one")
        microbatches = config.train.global_batch // rows
        batches = [
            {name: torch.from_numpy(values.copy()) for name, values in without_documents(fields).items()}
            for _ in range(microbatches)
        ]
        for step in range(2):
            with record_function(f"step {step}"):
                engine.forward_backward(batches, objective_for(config))
                engine.step(config.optimizer.lr, config.optimizer.max_grad_norm)
    assert recorded.profiler is not None
    assert recorded.profiler.kineto_results is not None
    events = recorded.profiler.kineto_results.events()
    start = next(event.start_ns() for event in events if event.name() == "step 1")
    live = peak = 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live) if event.start_ns() >= start else live
    return peak


@pytest.mark.parametrize("preset", MODELS)
def test_a_cpus_operators_hold_what_is_modelled(workers: Workers, preset: str) -> None:
    """RMSNorm and SiLU of several operators, T5's biases by all scores and the mask of its padded targets, and experts'
    rows that are added up in place."""
    config = load_config(preset, [*SMALL, *MODELS[preset], "data.train=d", "data.tokenizer=t", "parallel.dp_shard=1"])
    with open_estimator(config, load_cluster("cpu", 1)) as opened:
        worst = opened.estimate(opened.base).worst
    [executed] = workers.run(measure_peak, 1, config)
    assert worst.total - worst.reserved == pytest.approx(executed, rel=0.015)


def profile_blocks(preset: str, *overrides: str) -> list[PartProfile]:
    """Return the profiles of a GPU's blocks, with rows of 256 tokens of a small model."""
    config = load_config(preset, [*SMALL, *MODELS.get(preset, []), *overrides])
    with open_estimator(config, load_cluster("h100", 2)) as opened:
        return [part for part in opened.profile(opened.base).parts if part.is_block]


def test_what_blocks_share_is_saved_once() -> None:
    """The encoder's output, of two rows of 256 tokens, and tables of positions."""
    *_, first, second, third = profile_blocks("t5-base", "train.precision=bf16")
    memory = 2 * 256 * 128 * 2
    assert first.shared_inputs["encoder_hidden"] == first.shared_input_bytes == memory
    alone = [block.count_saved_bytes("none", compiled=False) for block in (first, second, third)]
    assert add_shared_inputs([first, second, third], alone) == [
        alone[0] + sum(first.shared_inputs.values()),
        *alone[1:],
    ]
    assert first.count_saved_bytes("full", compiled=False) == first.input_bytes - memory == memory


def test_context_parallel_blocks_save_attention_before_and_after_its_exchange() -> None:
    *_, block = profile_blocks("llama3-8b", "parallel.cp=2", "parallel.dp_shard=1")
    *_, half_row = profile_blocks("llama3-8b", "data.sequence_length=128", "parallel.dp_shard=2")
    heads = 2 * 128 * 4 * 32 * 4
    saved, saved_alone = (part.count_saved_bytes("none", compiled=False) for part in (block, half_row))
    assert saved == saved_alone + heads
