"""One GPU against a CPU in float64: gradients of the engine in every precision, eager, compiled and recomputed.

Each comparison takes the device as an argument, so that its logic runs on a CPU as well, where a GPU's would not be
found to be wrong for want of one.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TypedDict, Unpack

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatfm.checkpoint import Saver, read_tensors, staging
from megatfm.config import ModelConfig, ParallelConfig, load_config
from megatfm.engines.interface import ParallelizedModel
from megatfm.engines.native.compile import CompileOptions
from megatfm.engines.native.cuda_graphs import CudaGraphs
from megatfm.engines.native.engine import NativeEngine, NativeOptions
from megatfm.engines.native.zero import ZeroOptions
from megatfm.errors import MegatfmError
from megatfm.estimate.clock import Clock
from megatfm.estimate.trial_configs import list_trials
from megatfm.estimate.trials import measure_trials, tabulate_attention, tabulate_matmuls
from megatfm.models import build
from megatfm.models.dtypes import convert_to_fp8
from megatfm.ops.attention.bands import make_shard_bands
from megatfm.ops.attention.reference import AttentionOptions
from megatfm.ops.attention.tile import BackwardInputs, BlockAttentionPlan, merge_partial
from megatfm.ops.cross_entropy import IGNORE, LogitOptions, cross_entropy, cross_entropy_reference
from megatfm.ops.fp8 import multiplies_fp8
from megatfm.ops.transfer import allocate_aligned, move_to_device
from megatfm.optim.parameters import build_optimizer_groups
from megatfm.parallel.context_parallel import compute_token_indices
from megatfm.parallel.mesh import build_mesh
from megatfm.parallel.parallelize import parallelize
from megatfm.parallel.ring_attention import compute_partial_attention, compute_partial_attention_backward
from megatfm.train.profiling import explain_out_of_memory, record_allocations
from tests.support.batches import CAUSAL, global_batch
from tests.support.models import ADAMW, LENGTH, ROWS, UNTIED_MODEL
from tests.support.parity import one_device, one_device_gradients
from tests.support.workers import Workers


def on_a_gpu(test: Callable[..., None]) -> Callable[..., None]:
    """Marks a test. What torch and Triton warn of on a GPU has not been seen, and is shown, not an error."""
    marks = (
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
        pytest.mark.filterwarnings("default"),
    )
    for mark in marks:
        test = mark(test)
    return test


BOUNDS = {"fp64": 1e-9, "fp32": 1e-4, "bf16": 4e-2, "fp16": 1e-2}
"""‖g − r‖ / max(‖r‖, 1e-2 · ‖all gradients‖): float64 and float32 as on a CPU, the others by their 8 and 11 bits."""


WIDE = UNTIED_MODEL.with_changes({"d_model": 256, "attention.n_heads": 4, "attention.n_kv_heads": 2, "ffn.d_ff": 640})
"""Heads of 64, as real models have them."""
DEEP = WIDE.with_changes({"n_layers": 4})
"""A model with two blocks between the first and the last."""
NARROW = DEEP.with_changes({"d_model": 64, "ffn.d_ff": 160})
"""For CPUs, which multiply float8 tensors one number at a time."""
REAL = {
    "packed rows of 256": (WIDE, 256),
    # Rows of 64 beyond a multiple of 128, where a fused backward pass of torch is known to have given NaN on H100s.
    "packed rows of 1,088": (WIDE, 1088),
    "a window in rows of 1,088": (WIDE.with_changes({"attention.pattern": {"name": "window", "width": 200}}), 1088),
    "a soft cap in rows of 1,088": (WIDE.with_changes({"attention.softcap": 20.0}), 1088),
    "dropped probabilities in rows of 256": (WIDE.with_changes({"attention.dropout": 0.1}), 256),
    "ALiBi in rows of 256": (WIDE.with_changes({"position": {"name": "alibi"}}), 256),
    # FlexAttention takes no heads below 16 channels, and no kernel but it a soft cap.
    "a soft cap on heads of 8 channels in rows of 256": (UNTIED_MODEL.with_changes({"attention.softcap": 20.0}), 256),
}


class Options(TypedDict, total=False):
    """How an engine differs from the default one."""

    zero: int
    fp8: str
    recompute_mode: str
    compile_blocks: bool
    graphs: CudaGraphs | None


def engine_on(
    device: str, precision: str, model_config: ModelConfig = UNTIED_MODEL, **options: Unpack[Options]
) -> NativeEngine:
    parallel = ParallelConfig(zero=options.pop("zero", 3), dp_shard=1)
    mesh = build_mesh(parallel, 1, device)
    scaling = options.pop("fp8", None)
    with torch.device("meta"):
        model = build(model_config)
    if scaling:
        convert_to_fp8(model, rowwise=scaling == "rowwise")
    groups = build_optimizer_groups(ADAMW, model)
    layout = parallelize(model, mesh, sequence_parallel=True)
    native_options = NativeOptions(
        ZeroOptions(parallel.zero),
        options.get("recompute_mode", "none"),
        CompileOptions() if options.get("compile_blocks") else None,
        options.get("graphs"),
    )
    parallelized = ParallelizedModel(model=model, layout=layout, mesh=mesh, device=torch.device(device))
    return NativeEngine(parallelized, groups, precision=precision, seed=7, options=native_options)


def worst(engine: NativeEngine, expected: dict[str, Tensor]) -> float:
    floor = 1e-2 * float(torch.cat([g.flatten() for g in expected.values()]).norm())
    return max(
        float((g.cpu().double() - expected[name]).norm()) / max(float(expected[name].norm()), floor)
        for name, g in engine.gradients().items()
    )


def check_gradients(
    device: str,
    precision: str,
    model: ModelConfig = UNTIED_MODEL,
    length: int = LENGTH,
    bound: float | None = None,
    **options: Unpack[Options],
) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    engine = engine_on(device, precision, model, **options)
    batch = global_batch(seed=3, rows=ROWS if length == LENGTH else 2, length=length)
    batch["keys"] = torch.arange(len(batch["tokens"]))
    _, expected = one_device_gradients(one_device(model), batch)
    if engine.loss_scale:
        engine.loss_scale.value = 2.0**10
    engine.forward_backward([batch], CAUSAL)
    bound = bound or BOUNDS[precision]
    assert worst(engine, expected) < bound
    norm = torch.cat([g.flatten() for g in expected.values()]).norm()
    assert engine.step(1e-2, clip=0.3) == pytest.approx(float(norm), rel=bound)


def in_a_group() -> None:
    """In this process: one GPU, and NCCL's group of one."""
    if not torch.distributed.is_initialized():
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("nccl", store=store, rank=0, world_size=1)


CASES: dict[str, tuple[str, Options]] = {
    "float32": ("fp32", {}),
    "float32, zero 1": ("fp32", {"zero": 1}),
    "bfloat16": ("bf16", {}),
    "bfloat16, zero 0": ("bf16", {"zero": 0}),
    "float16, scaled": ("fp16", {}),
    "bfloat16, recomputed": ("bf16", {"recompute_mode": "full"}),
    "bfloat16, compiled": ("bf16", {"compile_blocks": True}),
    "bfloat16, compiled and recomputed": ("bf16", {"compile_blocks": True, "recompute_mode": "selective"}),
}


@on_a_gpu
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_a_cpu(case: str) -> None:
    in_a_group()
    precision, options = CASES[case]
    check_gradients("cuda", precision, **options)


@on_a_gpu
@pytest.mark.parametrize("how", ["fp64", "fp32", "bf16", "bf16, compiled"])
@pytest.mark.parametrize("case", REAL)
def test_gradients_at_real_sizes(case: str, how: str) -> None:
    in_a_group()
    model, length = REAL[case]
    check_gradients("cuda", how[:4], model, length, compile_blocks="compiled" in how)


def recorded_passes_are_those_requested(
    device: str, precision: str, graphs: CudaGraphs | None, length: int, *, compiled: bool
) -> None:
    """Steps of several micro-batches, of two shapes, one of them skipped."""
    requested, recorded = (
        engine_on(device, precision, WIDE, compile_blocks=compiled, graphs=passes) for passes in (None, graphs)
    )
    for number in range(5):
        batch = global_batch(seed=number, rows=4, length=length * 3 // 4 if number == 3 else length)
        batch["keys"] = torch.arange(4)
        parts = [{name: values[i : i + 2] for name, values in batch.items()} for i in (0, 2)]
        losses = [engine.forward_backward(parts, CAUSAL) for engine in (requested, recorded)]
        expected = {name: gradient.cpu().double() for name, gradient in requested.gradients().items()}
        assert losses[0].loss == pytest.approx(losses[1].loss, rel=BOUNDS[precision])
        assert worst(recorded, expected) < BOUNDS[precision]
        norms = [engine.step(1e-3, clip=0.3, skip=number == 1) for engine in (requested, recorded)]
        assert norms[0] == pytest.approx(norms[1], rel=BOUNDS[precision], nan_ok=True)


@on_a_gpu
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_recorded_passes_are_those_that_were_asked_for(precision: str, compiled: bool) -> None:
    in_a_group()
    recorded_passes_are_those_requested("cuda", precision, CudaGraphs(), 256, compiled=compiled)


@on_a_gpu
def test_a_pass_that_copies_from_the_host_is_not_recorded() -> None:
    graphs, values = CudaGraphs(), torch.arange(4.0)
    with pytest.raises(MegatfmError, match="a pass can't be recorded"):
        graphs.record(lambda: move_to_device(values, torch.device("cuda")).add_(1))
    assert move_to_device(values, torch.device("cuda")).sum() == 6


# Of each product both factors are rounded, by 2⁻⁴ or 2⁻³ of a number at most, on top of what bfloat16 costs.
FP8 = {"rowwise": 2**-3 + BOUNDS["bf16"], "tensorwise": 2**-3 + 2**-4 + BOUNDS["bf16"]}


@on_a_gpu
@pytest.mark.skipif(
    torch.cuda.is_available() and not multiplies_fp8(torch.device("cuda")), reason="no products in 8 bits"
)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("how", FP8)
def test_gradients_by_products_in_8_bits(how: str, compiled: bool) -> None:
    in_a_group()
    check_gradients("cuda", "bf16", DEEP, 256, FP8[how], fp8=how, compile_blocks=compiled)


def check_saved_steps(device: str, folder: Path, size: int) -> None:
    """Check steps that are saved while the device still computes, and the next update waits already."""
    weights = torch.zeros(size, device=device)
    turned = torch.zeros(512, size // 2**14, device=device).T
    busy = torch.randn(size // 2**14, size // 2**14, device=device)
    with Saver(folder) as saver:
        for step in (1, 2, 3):
            for _ in range(50):
                busy = (busy @ busy).clamp(-1, 1)
            for tensor in (weights, turned):
                tensor.add_(1)
            saver.save(step, {"weights": weights, "turned": turned}, {}, wait_for_staging=False)
            saver.wait_for_staging()
            for tensor in (weights, turned):
                tensor.add_(100)
            saver.wait_for_save()
            for name, read in read_tensors(folder / f"step-{step:08}").items():
                assert bool((read == 101 * step - 100).all()), name
    assert bool((weights == 303).all())


@on_a_gpu
def test_a_save_is_of_the_step_that_it_was_made_in(tmp_path: Path) -> None:
    check_saved_steps("cuda", tmp_path, 2**26)


@on_a_gpu
def test_a_save_goes_on_where_memory_cannot_be_pinned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that is pinned already is not pinned again, and no later launch raises that error."""
    cudart, pinned = torch.cuda.cudart(), []

    def allocate_pinned(size: int, line: int) -> NDArray[np.uint8]:
        pinned.append(allocate_aligned(size, line))
        assert int(cudart.cudaHostRegister(pinned[-1].ctypes.data, size, 0)) == 0
        return pinned[-1]

    monkeypatch.setattr(staging, "allocate_aligned", allocate_pinned)
    check_saved_steps("cuda", tmp_path, 2**20)
    for memory in pinned:
        cudart.cudaHostUnregister(memory.ctypes.data)
    assert pinned


@on_a_gpu
def test_a_calibration_measures_the_operators_of_both_passes() -> None:
    """Autograd runs the backward pass in a thread of the GPU's own."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()  # a calibration makes a group of its own
    config = load_config("gpt2-124m", ["model.n_layers=2", "data.sequence_length=1024"])
    trial = list_trials(config, "cuda", "bf16")[-1]
    times, _ = measure_trials([trial], Clock(torch.device("cuda")))
    tables = tabulate_matmuls(times)
    assert {"bf16", "bf16 nn", "bf16 tn"} <= tables.keys(), tables.keys()
    assert tabulate_attention(times).keys() == {"forward", "backward"}
    assert all(seconds > 0 for _, seconds in times.operators)
    assert 0 < times.trials[0].update < times.trials[0].step < 1


@on_a_gpu
@pytest.mark.parametrize("variant", [LogitOptions(), LogitOptions(5.0, 0.1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_cross_entropy_by_its_kernel(variant: LogitOptions, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = (300, 64), (10_001, 64)
    inputs = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    targets = torch.randint(10_001, (300,), generator=generator)
    targets[::7] = IGNORE
    exact, actual = (
        [x.to(device, type_).requires_grad_() for x in inputs]
        for device, type_ in (("cpu", torch.float64), ("cuda", dtype))
    )
    expected = cross_entropy_reference(*exact, targets, None, variant)
    observed = cross_entropy(*actual, targets.cuda(), None, variant, chunk=128)
    bound = 1e-4 if dtype == torch.float32 else 4e-2
    assert observed.item() == pytest.approx(expected.item(), rel=bound)
    gradients = torch.autograd.grad(observed, actual), torch.autograd.grad(expected, exact)
    for a, b in zip(*gradients, strict=True):
        assert float((a.cpu().double() - b).norm()) < bound * float(b.norm())


@on_a_gpu
def test_kernels_of_vocabulary_shards_and_of_bf16_moments(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cases that are interpreted on a CPU."""
    from tests.support import triton_kernels as cases

    monkeypatch.setattr(cases.module, "_choose_kernels", None)  # set by each case, and restored at the end
    monkeypatch.setattr(cases.optimizers, "_choose_kernel", None)
    monkeypatch.setattr(cases.cross_entropy_triton, "BLOCK", 16)
    for case in cases.SHARDED:
        cases.check_shards(cases.cross_entropy_triton, *case, device="cuda")
    for sizes, offsets in cases.BLOCKS:
        cases.check_adamw(sizes, offsets, can_skip=sizes[0] == 3, device="cuda")


def check_shards(device: str, dtype: torch.dtype, bound: float) -> None:
    """Compare attention to the keys of two ranks, as a ring adds it up, with the softmax of all pairs in float64."""
    length, documents = 1088, torch.tensor([[0] * 700 + [1] * 388, [0] * 1088])
    indices = compute_token_indices(length, 2, is_zigzag=True)
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, heads, length, 64) for heads in (4, 2, 2, 4)]
    exact = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    q, k, v, g = (x.to(device, dtype) for x in exact)
    spans = [(row, begin, end) for row, cut in ((0, 700), (1, 1088)) for begin, end in ((0, cut), (cut, length))]
    spans = [span for span in spans if span[1] < span[2]]
    plans = [
        BlockAttentionPlan.build(
            make_shard_bands(spans, indices[0], keys, causal=True) or [], 1, 64, AttentionOptions(), zero_distance=0,
            sums_parts=True,
        )
        for keys in indices
    ]  # fmt: skip
    local_q, local_g = (x[:, :, indices[0]] for x in (q, g))
    shards = [(k[:, :, keys], v[:, :, keys]) for keys in indices]
    parts = [
        compute_partial_attention(local_q, *shard, None, None, plan) for shard, plan in zip(shards, plans, strict=True)
    ]
    out, lse = merge_partial(*parts[0], *parts[1])
    inputs = [BackwardInputs(local_g, local_q, *shard, out.to(dtype), lse) for shard in shards]
    gradients = [compute_partial_attention_backward(x, None, None, plan) for x, plan in zip(inputs, plans, strict=True)]
    exact_q, exact_k, exact_v = (x.requires_grad_() for x in exact[:3])
    index = torch.arange(length)
    is_visible = (documents[:, None, :, None] == documents[:, None, None, :]) & (index <= index[:, None])
    scores = (exact_q @ exact_k.repeat_interleave(2, 1).mT / 8).masked_fill(~is_visible, -torch.inf)
    expected = (scores.softmax(-1) @ exact_v.repeat_interleave(2, 1))[:, :, indices[0]]
    expected_gradients = torch.autograd.grad(expected, (exact_q, exact_k, exact_v), exact[3][:, :, indices[0]])
    pairs = [(out, expected), (gradients[0][0] + gradients[1][0], expected_gradients[0][:, :, indices[0]])]
    for shard, keys in enumerate(indices):
        pairs += [(gradients[shard][i], expected_gradients[i][:, :, keys]) for i in (1, 2)]
    for actual, x in pairs:
        assert (actual.cpu().double() - x).norm().item() < bound * x.norm().item()


@on_a_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_attention_to_the_keys_of_two_ranks(dtype: torch.dtype) -> None:
    check_shards("cuda", dtype, 1e-2)


@on_a_gpu
def test_running_out_of_memory_leaves_a_snapshot(tmp_path: Path) -> None:
    """The record names the lines of Python that took memory: those of this file, too."""
    record_allocations(torch.device("cuda"))
    memory = torch.ones(2**20, device="cuda")
    with (
        pytest.raises(MegatfmError, match="memory snapshot: "),
        explain_out_of_memory(tmp_path, 0, torch.device("cuda")),
    ):
        torch.empty(2**50, dtype=torch.uint8, device="cuda")
    assert Path(__file__).name.encode() in (tmp_path / "memory" / "rank-0.pickle").read_bytes()
    assert memory.all()


def on_a_cpu(folder: Path) -> None:
    for precision, options in CASES.values():
        if "compile_blocks" not in options:
            check_gradients("cpu", precision, **options)
    for model, length in REAL.values():
        check_gradients("cpu", "fp32", model, min(length, 192))
    for how, bound in FP8.items():
        check_gradients("cpu", "bf16", NARROW, 64, bound, fp8=how)
    recorded_passes_are_those_requested("cpu", "fp32", None, 64, compiled=False)
    check_saved_steps("cpu", folder, 2**20)
    for dtype, bound in ((torch.float64, 1e-12), (torch.bfloat16, 1e-2)):
        check_shards("cpu", dtype, bound)


def test_the_same_comparisons_pass_on_a_cpu(workers: Workers, tmp_path: Path) -> None:
    workers.run(on_a_cpu, 1, tmp_path, timeout=200)
