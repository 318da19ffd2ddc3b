"""Bytes that blocks save and a step's peak on a CPU: modelled, and by torch's own partitioner and allocator."""

from functools import partial

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from megatfm.config import Config, load_config
from megatfm.data.loader import without_documents
from megatfm.engines.activation_checkpointing import measure_saved_bytes
from megatfm.estimate.devices import load_cluster
from megatfm.estimate.estimator import open_estimator
from megatfm.estimate.part_profile import PartProfile, add_shared_inputs
from megatfm.estimate.roofline import estimate_elementwise_seconds, estimate_pass_seconds
from megatfm.parallel.layout import iter_blocks, replace_forward
from megatfm.parallel.mesh import build_mesh
from megatfm.train.build import build_engine, build_model
from megatfm.verify.shrink import draw_batch, objective_for
from tests.support.workers import Workers

ROWS, TOKENS, WIDTH, HEAD, HIDDEN = 2, 64, 128, 64, 320
SMALL = [
    f"model.d_model={WIDTH}", "model.n_layers=2", "model.attention.n_heads=2", f"model.ffn.d_ff={HIDDEN}",
    "model.dropout=0", "model.attention.dropout=0", "model.ffn.dropout=0", "train.precision=fp32",
    f"train.micro_batch={ROWS}", f"train.global_batch={ROWS}", "parallel.dp_shard=1",
]  # fmt: skip
TEXT = [f"data.sequence_length={TOKENS}", "model.vocab_size=512", "data.train=d", "data.tokenizer=t"]


def small(preset: str, *overrides: str) -> Config:
    return load_config(preset, [*SMALL, *([] if preset.startswith("vit") else TEXT), *overrides])


def profile_block(config: Config) -> PartProfile:
    with open_estimator(config, load_cluster("h100", 1)) as opened:
        return [part for part in opened.profile(opened.base).parts if part.is_block][-1]


def measure_compiled(config: Config) -> int:
    """Return the bytes that the last block saves, compiled without code generation."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = build_model(config).train()
    *_, block = iter_blocks(model)
    for module in block.modules():
        if not getattr(module, "is_compiled", True):
            replace_forward(module, torch.compiler.disable(module.forward))
    compiled = torch.compile(block.forward, backend="aot_eager_decomp_partition", dynamic=False)
    saved = list[int]()

    def forward(*args):
        output, n_bytes = measure_saved_bytes(block, partial(compiled, *args))
        saved.append(n_bytes)
        return output

    replace_forward(block, forward)
    fields = without_documents(draw_batch(config, "one"))
    model(**{name: torch.from_numpy(field) for name, field in fields.items()})
    torch._dynamo.reset()  # later tests compile the same code for other shapes
    return saved[-1]


# A block's backward pass reads the inputs of its matmuls, q, k and v, attention's result and residual sums: 8 vectors a
# token. torch recomputes none of them, nor a hidden vector that a matmul reads, but what lies between.
VECTORS = 8 * WIDTH


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's own reading
@pytest.mark.parametrize(
    ("preset", "overrides", "elements", "elements_on_cpu"),
    [
        pytest.param("gpt2-124m", [], VECTORS + 2 * HIDDEN, 0, marks=pytest.mark.extended),
        pytest.param("bert-base", [], VECTORS + 2 * HIDDEN, 0, marks=pytest.mark.extended),
        ("vit-ti16", [], VECTORS + 2 * HIDDEN, 0),
        # A byte a channel for the mask of the second of two dropouts; that of the first is computed again.
        ("gpt2-124m", ["model.dropout=0.1"], VECTORS + 2 * HIDDEN + WIDTH // 4, 0),
        ("bert-base", ["model.dropout=0.1"], VECTORS + 2 * HIDDEN + WIDTH // 4, 0),
        # q and k before their rotation are not read; SwiGLU has three hidden vectors. A CPU copies attention's result,
        # and the tables of the rotation are saved with the first block.
        ("llama3-8b", ["model.attention.n_kv_heads=2"], VECTORS + 3 * HIDDEN, WIDTH + HEAD),
    ],
)
def test_a_compiled_block_saves_what_the_estimate_counts(
    preset: str, overrides: list[str], elements: int, elements_on_cpu: int
) -> None:
    config = small(preset, *overrides)
    block = profile_block(config)
    tokens = block.input_bytes // (4 * WIDTH)
    statistics = 4 * tokens * 8  # of norms and of attention: some floats a token
    expected = 4 * tokens * elements
    assert expected <= block.count_compiled_bytes() <= expected + statistics
    on_cpu = measure_compiled(config) - 4 * tokens * elements_on_cpu
    assert expected <= on_cpu <= expected + statistics


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_compiled_block_does_not_save_what_selective_recomputation_does_not_read(dropout: float) -> None:
    """An eager block also saves the output of its last matmul, which only the block's output is computed of."""
    block = profile_block(small("gpt2-124m", f"model.dropout={dropout}"))
    tokens = block.input_bytes // (4 * WIDTH)
    saved = block.count_saved_bytes("selective", compiled=True)
    # Input, q, k, v, attention's result and its projection, the first hidden vector, and attention's statistics.
    assert saved == 4 * tokens * (6 * WIDTH + HIDDEN + 2)
    assert block.count_saved_bytes("selective", compiled=False) - saved == 4 * tokens * WIDTH


def test_experts_stay_eager_in_a_compiled_block() -> None:
    experts = ["model.ffn.n_experts=4", "model.ffn.top_k=2", "model.attention.n_kv_heads=2"]
    block = profile_block(small("olmoe-1b-7b", *experts))
    eager = sum(tensor.n_bytes for tensor in block.saved if tensor.is_eager)
    tokens = block.input_bytes // (4 * WIDTH)
    assert eager >= 4 * tokens * 2 * (3 * HIDDEN + WIDTH), "of two experts a token: input, and three hidden vectors"
    assert block.count_compiled_bytes() >= eager + 4 * tokens * 6 * WIDTH
    assert block.count_compiled_bytes() <= block.count_saved_bytes("none", compiled=False)
    for operators in (block.forward, block.backward):
        pointwise = [op for op in operators if op.kind == "pointwise"]
        of_experts = [op for op in pointwise if op.is_eager]
        assert of_experts
        assert len(of_experts) < len(pointwise), "norms and attention are compiled"
        device = load_cluster("h100", 1).device
        alone = sum(estimate_elementwise_seconds(device, op) for op in of_experts)
        compiled, eager = (
            estimate_pass_seconds(device, operators, compiled=compiled).pointwise for compiled in (True, False)
        )
        assert alone < compiled < eager


SMALL_STEP = ["model.d_model=128", "model.attention.n_heads=4", "model.ffn.d_ff=512", "model.n_layers=3"]
SMALL_STEP += ["model.vocab_size=1024", "data.sequence_length=256", "train.micro_batch=2", "train.global_batch=4"]
SMALL_STEP += [f"model.{key}dropout=0" for key in ("", "attention.", "ffn.")]
SMALL_STEP += ["train.precision=fp32", "train.compile=false", "train.device=cpu", "parallel.zero=0"]
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
    config = load_config(
        preset, [*SMALL_STEP, *MODELS[preset], "data.train=d", "data.tokenizer=t", "parallel.dp_shard=1"]
    )
    with open_estimator(config, load_cluster("cpu", 1)) as opened:
        worst = opened.estimate(opened.base).worst
    [executed] = workers.run(measure_peak, 1, config)
    assert worst.total - worst.reserved == pytest.approx(executed, rel=0.015)


def profile_blocks(preset: str, *overrides: str) -> list[PartProfile]:
    """Return the profiles of a GPU's blocks, with rows of 256 tokens of a small model."""
    config = load_config(preset, [*SMALL_STEP, *MODELS.get(preset, []), *overrides])
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
