"""Compiled blocks over ranks, also with async tensor parallelism by torch's pass: the gradients of one device.

Most run without a backend that makes machine code, which takes minutes. With async tensor parallelism graphs go through
inductor as far as its last pass over them, and then run as they are: the operators of symmetric memory by torch's own
fallbacks for them, which gather or scatter, and multiply.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from megatfm.config import ModelConfig, ParallelConfig
from megatfm.engines.native.engine import NativeEngine
from tests.support.batches import CAUSAL, PassThroughObjective, family_case, global_batch
from tests.support.image_text_models import (
    LLAVA_MODELS,
    TOWER_MODELS,
    TowerObjective,
    llava_batch,
    tower_microbatches,
    tower_reference,
)
from tests.support.models import ADAMW, UNTIED_MODEL
from tests.support.parity import (
    build_engine,
    compile_blocks_by,
    gradient_errors,
    microbatches,
    model_gradient_errors,
    one_device,
    one_device_gradients,
    one_device_reference,
    uneven_microbatches,
)
from tests.support.workers import Workers

Microbatches = list[dict[str, Tensor]]
LAYOUTS = {
    "one": ParallelConfig(),
    "tp2": ParallelConfig(tp=2),
    "tp2 without sequence parallelism": ParallelConfig(tp=2, sequence_parallel=False),
    "zero3": ParallelConfig(dp_shard=2),
    "zero1": ParallelConfig(dp_shard=2, zero=1),
    "pp2": ParallelConfig(pp=2),
}
ONE_BLOCK, SHALLOW = "llama of one block", "llava of one block each"
BLOCKS = {"llama": 2, "towers": 5, "llava": 5, ONE_BLOCK: 1, SHALLOW: 2}
"""Model → number of its blocks, of both towers where there are two, all of which are compiled."""


def case(name: str) -> tuple[ModelConfig, nn.Module, Any, float, Callable[[NativeEngine], Microbatches]]:
    """A config, the model of one device with its gradients, objective, loss, and an engine's micro-batches."""
    if name == "towers":
        model, batch, loss = tower_reference("dropout")

        def split(engine: NativeEngine) -> Microbatches:
            n = 4 if engine.pipeline else 3
            return tower_microbatches(batch, engine.mesh.data_rank, engine.mesh.data_ranks, n)

        return TOWER_MODELS["dropout"], model, TowerObjective(), loss, split
    if name in ("llama", ONE_BLOCK):
        config, batch = family_case("llama", False)
        config = config.with_changes({"n_layers": BLOCKS[name]})
    else:
        config, batch = LLAVA_MODELS["dropout"], llava_batch("dropout")
    if name == SHALLOW:
        config = config.with_changes({"n_layers": 1, "vision_tower.n_layers": 1})
    model, objective, loss = one_device_reference(config, batch, PassThroughObjective)
    return config, model, objective, loss, lambda engine: uneven_microbatches(engine, batch)


def compare(name: str, layouts: Sequence[str], backend: str) -> dict[str, int]:
    """Compare loss and gradients with one device's; return the number of blocks that were compiled by layout."""
    config, model, objective, loss, split = case(name)
    n_blocks = {}
    for layout in layouts:
        with compile_blocks_by(backend) as compilation:
            engine = build_engine(config, LAYOUTS[layout], ADAMW, compile_blocks=True)
            stats = engine.forward_backward(split(engine), objective)
            assert stats.loss == pytest.approx(loss, rel=1e-12), layout
            assert model_gradient_errors(engine, model) == {}, layout
        assert all(block._compiled_call_impl is not None for block, _ in compilation.blocks)
        n_blocks[layout] = len(compilation.blocks)
    return n_blocks


def check(workers: Workers, name: str, layouts: Sequence[str], backend: str) -> None:
    by_rank = workers.run(compare, 1 if layouts == ["one"] else 2, name, layouts, backend, timeout=800.0)
    for layout in layouts:
        n_blocks = [rank[layout] for rank in by_rank]
        assert (sum(n_blocks) if layout == "pp2" else n_blocks[0]) == BLOCKS[name], layout


FIRST = {"llama": ["tp2", "zero3"], "towers": ["tp2"], "llava": ["zero3", "pp2"]}
"""Layouts that are compared as dynamo traces blocks, in `make test` and in its extension; all others are slow."""
OTHERS = {name: [layout for layout in LAYOUTS if layout not in ("one", *layouts)] for name, layouts in FIRST.items()}


@pytest.mark.parametrize(("name", "layouts"), [
    pytest.param(ONE_BLOCK, ["tp2"], marks=pytest.mark.extended),  # async TP compiles a block under tp2, too
    (SHALLOW, ["zero3"]),
    pytest.param("llama", ["zero3"], marks=pytest.mark.extended),
    pytest.param("towers", FIRST["towers"], marks=pytest.mark.extended),
    pytest.param("llava", FIRST["llava"], marks=pytest.mark.extended),
])  # fmt: skip
def test_compiled_blocks_equal_one_device(workers: Workers, name: str, layouts: list[str]) -> None:
    check(workers, name, layouts, "eager")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", FIRST)
def test_compiled_blocks_equal_one_device_under_other_layouts(workers: Workers, name: str) -> None:
    check(workers, name, OTHERS[name], "eager")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", FIRST)
def test_graphs_of_autograd_equal_one_device(workers: Workers, name: str) -> None:
    check(workers, name, ["one"], "aot_eager")
    check(workers, name, FIRST[name], "aot_eager")


BIASED = {"attention.bias": True, "ffn.bias": True}
BLOCK = UNTIED_MODEL.with_changes({"n_layers": 1})
MODELS = {
    "gated": BLOCK,
    "gated, biased": BLOCK.with_changes(BIASED),
    "plain": BLOCK.with_changes({"ffn.activation": "gelu"}),
    "plain, biased": BLOCK.with_changes({"ffn.activation": "gelu", **BIASED}),
    "one key head": BLOCK.with_changes({"attention.n_kv_heads": 1}),
}
KINDS = {
    "all_gather_into_tensor": "gathers",
    "reduce_scatter_tensor": "scatters",
    "fused_all_gather_matmul": "gathers in pieces",
    "fused_matmul_reduce_scatter": "scatters in pieces",
}
IN_PIECES = {"gathers in pieces": 2, "scatters in pieces": 2}
BACKWARD = {
    "none": IN_PIECES,
    "full": {"gathers in pieces": 4, "scatters in pieces": 3},
    "selective": {**IN_PIECES, "gathers": 2},
}
"""Sends of a block's backward pass, by `train.recompute`. The second gather, for gradients of weights alone, is
the right factor of its products, and each of their rows needs all of it."""

Counts = dict[str, int]


def count_sends(gm: GraphModule) -> Counts:
    """Sends of a graph, by kind."""
    called = (str(node.target) for node in gm.graph.nodes if node.op == "call_function")
    return dict(Counter(kind for target in called for name, kind in KINDS.items() if f".{name}." in target))


@contextmanager
def in_pieces() -> Iterator[dict[str, list[Counts]]]:
    """Within, compiled blocks go through torch's pass as on a GPU; what their graphs send, by direction."""
    warnings.simplefilter("ignore")  # torch's own: inductor's imports, and its tracer looks at .grad of what is no leaf
    from torch._dynamo.utils import detect_fake_mode
    from torch._inductor.compile_fx import compile_fx, view_to_reshape
    from torch._inductor.fx_passes.post_grad import post_grad_passes
    from torch._inductor.virtualized import V
    from torch.distributed import _symmetric_memory as memory

    actual: dict[str, list[Counts]] = {"forward": [], "backward": []}

    def last_passes(gm: GraphModule, _: Sequence[Any], **inputs: Any) -> Callable[..., Any]:
        view_to_reshape(gm)
        values = [node.meta["val"] for node in gm.graph.nodes if node.op == "placeholder"]
        with V.set_fake_mode(detect_fake_mode(values)):
            post_grad_passes(gm, inputs.get("is_inference", False))
        gm.recompile()
        actual["backward" if inputs.get("is_backward") else "forward"].append(count_sends(gm))

        def run(values: list[Any]) -> Any:
            return gm(*values)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def compile_block(block: nn.Module, *, fullgraph: bool, dynamic: bool, options: dict[str, Any]) -> None:
        torch._TorchCompileInductorWrapper(None, options, dynamic)  # refuses what it doesn't know
        backend = partial(compile_fx, inner_compile=last_passes, config_patches=options)
        block._compiled_call_impl = torch.compile(
            block._call_impl, fullgraph=fullgraph, dynamic=dynamic, backend=backend
        )

    with ExitStack() as stack:
        stack.enter_context(patch.object(nn.Module, "compile", compile_block))
        stack.enter_context(patch("torch.distributed.is_nccl_available", lambda: True))
        stack.enter_context(memory._test_mode())
        library = stack.enter_context(torch.library._scoped_library("symm_mem", "IMPL"))
        library.impl("fused_all_gather_matmul", memory._fused_all_gather_matmul_fallback, "CPU")
        library.impl("fused_matmul_reduce_scatter", memory._fused_matmul_reduce_scatter_fallback, "CPU")
        torch._dynamo.reset()
        yield actual
        torch._dynamo.reset()


def step(config: ModelConfig, parallel: ParallelConfig, recomputed: str) -> dict[str, list[Counts]]:
    with warnings.catch_warnings(), in_pieces() as actual:
        engine = build_engine(config, parallel, ADAMW, recomputed=recomputed, compile_blocks=True, async_tp=True)
        batch = global_batch(seed=3)
        loss, expected = one_device_gradients(one_device(config), batch)
        stats = engine.forward_backward(microbatches(engine, batch), CAUSAL)
        assert stats.loss == pytest.approx(loss, rel=1e-12)
        assert gradient_errors(engine, expected) == {}
    return actual


CASES = [
    ("gated", "none", ParallelConfig(tp=2)),
    pytest.param("plain, biased", "selective", ParallelConfig(tp=2), marks=pytest.mark.extended),
    *(
        pytest.param(name, recomputed, parallel, marks=pytest.mark.slow)
        for name, recomputed, parallel in [
            ("gated, biased", "full", ParallelConfig(tp=2)),
            ("plain", "none", ParallelConfig(tp=2)),
            ("one key head", "none", ParallelConfig(tp=2)),
            ("gated", "none", ParallelConfig(dp_shard=2, tp=2)),
        ]
    ),
]


@pytest.mark.parametrize(("name", "recomputed", "parallel"), CASES)
def test_blocks_send_in_pieces(workers: Workers, name: str, recomputed: str, parallel: ParallelConfig) -> None:
    """Forward before attention and the feed-forward network, and after each; backward the other way round."""
    ranks = parallel.tp * max(1, parallel.dp_shard)
    for result in workers.run(step, ranks, MODELS[name], parallel, recomputed, timeout=200.0):
        assert result == {"forward": [IN_PIECES], "backward": [BACKWARD[recomputed]]}


def family(name: str) -> dict[str, list[Counts]]:
    with warnings.catch_warnings(), in_pieces() as actual:
        config, batch = family_case(name, deep=False)
        model, objective, loss = one_device_reference(config, batch)
        engine = build_engine(config, ParallelConfig(tp=2), compile_blocks=True, async_tp=True)
        stats = engine.forward_backward(uneven_microbatches(engine, batch), objective)
        assert stats.loss == pytest.approx(loss, rel=1e-12)
        assert model_gradient_errors(engine, model) == {}
    return actual


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt", "t5", "bert", "latent attention", "deberta", "xlnet", "electra"])
def test_every_family_s_blocks_send_in_pieces(workers: Workers, name: str) -> None:
    """Blocks have dropout, and micro-batches two shapes."""
    for result in workers.run(family, 2, name, timeout=280.0):
        for direction in ("forward", "backward"):
            assert result[direction]
            assert all({"gathers in pieces", "scatters in pieces"} == item.keys() for item in result[direction])
