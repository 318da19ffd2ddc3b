"""Compiled blocks: who compiles them unasked, and how; models of images have the gradients of eager blocks."""

import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatfm.config import ModelConfig, ParallelConfig, load_config
from megatfm.engines.native.compile import RECOMPILE_LIMIT, compile_all, keeps_attention_eager, should_compile
from megatfm.layers.initialisation import initialise
from megatfm.models import build
from megatfm.ops.attention import kernels, reference
from tests.support.batches import PassThroughObjective, family_case
from tests.support.image_models import IMAGE_MODELS, ImageObjective, image_model_batch
from tests.support.layouts import EXTENDED, extend
from tests.support.models import ADAMW, ROW_LENGTH, SCORE_MODELS, SCORE_SIZES, loss_gradients, score_inputs
from tests.support.parity import (
    build_engine,
    compile_blocks_by,
    microbatches,
    model_gradient_errors,
    one_device_reference,
)
from tests.support.workers import Workers

GPU, CPU = torch.device("cuda"), torch.device("cpu")
EXPERTS = ["model.ffn.name=moe", "model.ffn.n_experts=4", "model.ffn.top_k=2"]


@pytest.mark.parametrize(("overrides", "on_gpu", "on_cpu"), [
    ([], True, False),
    (["train.compile=true"], True, True),
    (["train.compile=autotune"], True, True),
    (["train.compile=false"], False, False),
    (["train.recompute=2 GB"], False, False),
    (["parallel.cp=2"], True, False),
    ([*EXPERTS, "train.recompute=full"], True, False),
    (["model.attention.pattern=bigbird"], False, False),
    (["parallel.pp=2", "parallel.pp_schedule=zbv"], False, False),
])  # fmt: skip
def test_blocks_are_compiled_on_gpus_where_nothing_forbids(overrides: list[str], on_gpu: bool, on_cpu: bool) -> None:
    config = load_config("quickstart", overrides)
    assert should_compile(config, GPU) is on_gpu
    assert should_compile(config, CPU) is on_cpu


def test_attention_of_long_rows_is_not_compiled_on_cpus() -> None:
    long, short = (load_config("quickstart", [f"data.sequence_length={n}"]) for n in (2048, 512))
    assert keeps_attention_eager(long, CPU)
    assert not keeps_attention_eager(short, CPU)
    assert not keeps_attention_eager(long, GPU)


LEFT = {
    "window with t5": {"position.name": "t5", "attention.pattern": {"name": "window", "width": 5}},
    "compressed": {"position.name": "none", "attention.name": "compressed"},
}  # fmt: skip


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compare_with_blocks_compiled_around_attention(
    monkeypatch: pytest.MonkeyPatch, sections: dict[str, Any], prepare: Callable[[], None]
) -> None:
    """Compare the gradients of eager blocks with those of blocks compiled after `prepare`."""
    config = ModelConfig.from_dotted(sections)
    inputs = score_inputs(config.family, prefix=False)
    model = build(config).double().train()
    initialise(model, 3)
    eager, real = loss_gradients(model, inputs), nn.Module.compile
    prepare()
    monkeypatch.setattr(nn.Module, "compile", lambda self, **options: real(self, **options, backend="eager"))
    stack = model.decoder if config.family == "decoder" else model.encoder
    compile_all(stack.layers.values(), autotune=False, fullgraph=False)
    for key, gradient in loss_gradients(model, inputs).items():
        torch.testing.assert_close(gradient, eager[key], rtol=1e-10, atol=1e-12)


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("name", LEFT)
def test_attention_that_is_left_goes_by_blocks(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Gradients equal those of a mask of all pairs."""
    served = []
    blocked = next(kernel for kernel in kernels.KERNELS if kernel.name == "blocks")
    run = replace(blocked, run=lambda *inputs: (served.append(True), blocked.run(*inputs))[1])

    def prefer_blocks() -> None:
        monkeypatch.setattr(kernels, "KERNELS", tuple(run if item is blocked else item for item in kernels.KERNELS))
        monkeypatch.setattr(kernels, "LONG", 1)

    sizes = {"vocab_size": 20, "d_model": 16, "n_layers": 1, "attention.n_heads": 4, "ffn.d_ff": 24}
    compare_with_blocks_compiled_around_attention(monkeypatch, {**sizes, **LEFT[name]}, prefer_blocks)
    assert served


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("name", extend(["shaw", "deberta", "xlnet"], kept=["shaw", "xlnet"]))
def test_attention_that_is_left_goes_by_some_queries(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Gradients equal those of all queries at once."""
    pieces = []

    def split() -> None:
        noted = lambda *inputs, **how: (pieces.append(inputs), checkpoint(*inputs, **how))[1]  # noqa: E731
        monkeypatch.setattr(reference, "checkpoint", noted)
        monkeypatch.setattr(reference, "MAX_SCORES", 1)

    compare_with_blocks_compiled_around_attention(monkeypatch, {**SCORE_SIZES, **SCORE_MODELS[name]}, split)
    assert len(pieces) > ROW_LENGTH


class Norm(nn.Module):
    """Something of a block's."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True))


def in_lengths() -> list[int]:
    """How many graphs are made for a block that meets three lengths, some of them again."""
    from torch._dynamo.testing import CompileCounter

    counter, block, real = CompileCounter(), Norm(), nn.Module.compile
    options: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            nn.Module,
            "compile",
            lambda self, **inputs: (options.update(inputs), real(self, **inputs, backend=counter))[1],
        )
        compile_all([block], autotune=False)
    result = []
    for length in (2, 3, 5, 3, 2, 5):
        block(torch.ones(length, 4))
        result.append(counter.frame_count)
    assert options == {"fullgraph": True, "dynamic": False}
    assert torch._dynamo.config.recompile_limit >= RECOMPILE_LIMIT
    torch._dynamo.reset()
    return result


def test_each_length_of_a_warmup_has_its_kernels(workers: Workers) -> None:
    """Left to itself, torch makes one graph for all lengths at the second."""
    assert workers.run(in_lengths, 1) == [[1, 2, 3, 3, 3, 3]]


def test_kernels_are_chosen_by_trying_where_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch takes a mode or options, not both: the latter where products send."""
    inputs: list[dict[str, Any]] = []
    monkeypatch.setattr(nn.Module, "compile", lambda self, **options: inputs.append(options))
    for options in ({"autotune": True}, {"autotune": True, "async_tp": True}, {"autotune": False, "async_tp": True}):
        compile_all([nn.Linear(1, 1)], **options)
    assert inputs[0]["mode"] == "max-autotune-no-cudagraphs"
    tried, plain = (item["options"] for item in inputs[1:])
    assert tried["max_autotune"]
    assert "max_autotune" not in plain
    assert plain["_micro_pipeline_tp"]


def image_case(name: str) -> tuple[ModelConfig, dict[str, Tensor], type[PassThroughObjective]]:
    """A model of images, a batch and the class of its objective."""
    if name in IMAGE_MODELS:
        return IMAGE_MODELS[name], image_model_batch(name), ImageObjective
    return *family_case(name, deep=False), PassThroughObjective


def compare_compiled_images(name: str, backend: str) -> int:
    """Compare loss and gradients with one device's, in float64; return how many graphs were made."""
    config, batch, objective_class = image_case(name)
    model, objective, loss = one_device_reference(config, batch, objective_class)
    with compile_blocks_by(backend) as compilation:
        engine = build_engine(config, ParallelConfig(), ADAMW, compile_blocks=True)
        stats = engine.forward_backward(microbatches(engine, batch), objective)
    assert stats.loss == pytest.approx(loss, rel=1e-12)
    assert model_gradient_errors(engine, model) == {}
    return len(compilation.graphs)


@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("name", "blocks"), [
    ("class", 2),
    pytest.param("swin", 5, marks=EXTENDED),
    pytest.param("mvit v2", 3, marks=EXTENDED),
    pytest.param("mae", 4, marks=pytest.mark.slow),
    pytest.param("swin v2", 5, marks=pytest.mark.slow),
])  # fmt: skip
def test_compiled_blocks_of_images_equal_one_device(workers: Workers, name: str, blocks: int, backend: str) -> None:
    """A ViT, Swin, MViTv2, a masked autoencoder and Swin V2, with dropout and stochastic depth; no graph is broken."""
    (graphs,) = workers.run(compare_compiled_images, 1, name, backend, timeout=200.0)
    assert graphs >= blocks


TWO_BLOCKS = {
    "class": {},
    "swin": {"stages.n_layers": (2,), "stages.n_heads": (4,)},
    "mvit v2": {"stages.n_layers": (1, 1)},
}
"""Model → what makes it one of two blocks. Swin's are of one stage, the second with shifted windows."""


def compare_machine_code(name: str) -> None:
    """Compare inductor's code with eager blocks, in float32."""
    config, batch, objective_class = image_case(name)
    config = config.with_changes({"n_layers": 2, **TWO_BLOCKS[name]})
    _, objective, _ = one_device_reference(config, batch, objective_class)
    losses, gradients = [], []
    for is_compiled in (False, True):
        engine = build_engine(config, ParallelConfig(), ADAMW, precision="fp32", compile_blocks=is_compiled)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own: its tracer looks at .grad of what is no leaf
            losses.append(engine.forward_backward(microbatches(engine, batch)[:1], objective).loss)
        gradients.append(engine.gradients())
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    for parameter, gradient in gradients[0].items():
        assert torch.allclose(gradients[1][parameter], gradient, rtol=1e-4, atol=1e-6), parameter


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", TWO_BLOCKS)
def test_machine_code_of_images_equals_eager_blocks(workers: Workers, name: str) -> None:
    """Inductor equals eager as closely as for text (`tests/unit/engines/test_pipeline.py`)."""
    workers.run(compare_machine_code, 1, name, timeout=800.0)
