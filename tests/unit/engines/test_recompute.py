"""Recomputed activations: gradients to the bit, dropout included, under every layout; and that something is saved."""

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from megatfm.config import ModelConfig, ParallelConfig
from megatfm.engines import activation_checkpointing
from megatfm.layers.initialisation import initialise
from megatfm.models import build
from megatfm.parallel.layout import transformer_blocks
from tests.support.batches import CAUSAL, PassThroughObjective, family_batch, global_batch
from tests.support.models import ADAMW, FAMILY_MODELS
from tests.support.parity import build_engine, microbatches
from tests.support.workers import Workers

LAYOUTS = {
    "gpt": {"zero3": ParallelConfig(dp_shard=2), "tp2": ParallelConfig(tp=2)},
    "t5": {
        "zero1": ParallelConfig(dp_shard=2, zero=1),
        "tp2 without sequence parallel": ParallelConfig(tp=2, sequence_parallel=False),
    },
}
HOW = ("full", "selective", "60 kB")
LLAMA = ModelConfig(
    vocab_size=96,
    d_model=32,
    n_layers=4,
    attention={"n_heads": 4},
    ffn={"d_ff": 48},
    embedding={"tied": False},
)
TERMS = {"gpt": ["causal", "future_1"], "t5": ["span"]}


def gradients(name: str, parallel: ParallelConfig, how: str) -> dict[str, Tensor]:
    engine = build_engine(FAMILY_MODELS[name], parallel, ADAMW, recomputed=how)
    engine.forward_backward(
        microbatches(engine, family_batch(FAMILY_MODELS[name])), PassThroughObjective(TERMS[name])
    )
    return engine.gradients()


def compare(name: str) -> None:
    for layout, parallel in LAYOUTS[name].items():
        expected = gradients(name, parallel, "none")
        for how in HOW:
            for parameter, gradient in gradients(name, parallel, how).items():
                assert torch.equal(gradient, expected[parameter]), (layout, how, parameter)


@pytest.mark.parametrize("name", TERMS)
def test_gradients_are_the_same_to_the_bit(workers: Workers, name: str) -> None:
    workers.run(compare, 2, name)


def compiled() -> None:
    config = LLAMA.model_copy(update={"n_layers": 1, "dropout": 0.1})
    batch = global_batch(seed=1) | {"keys": torch.arange(8) * 7 + 1}
    result = []
    for how, compile_blocks in (("none", False), ("selective", True)):
        engine = build_engine(
            config, ParallelConfig(), ADAMW, precision="fp32", recomputed=how, compile_blocks=compile_blocks
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own: its tracer looks at .grad of what is no leaf
            engine.forward_backward(microbatches(engine, batch), CAUSAL)
        result.append(engine.gradients())
    for name, gradient in result[0].items():
        assert torch.allclose(result[1][name], gradient, rtol=1e-4, atol=1e-6), name


@pytest.mark.slow
def test_compiled_blocks_are_recomputed(workers: Workers) -> None:
    workers.run(compiled, 1, timeout=200)


class Products(TorchDispatchMode):
    """Counts the weights' products of a backward pass, and all operations."""

    counted = everything = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.everything += 1
        self.counted += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return func(*args, **(kwargs or {}))


def kept_and_repeated(how: str) -> tuple[int, int, int]:
    """Bytes that the forward pass keeps besides weights; weights' products, and all operations in the backward pass."""
    model = build(LLAMA).train()
    initialise(model, 7)
    activation_checkpointing.recompute(model, transformer_blocks(model), how)
    tokens = torch.arange(48).reshape(2, 24) % 64

    def forward() -> Tensor:
        return model(tokens, targets=tokens).losses["causal"]

    forward()  # a budget measures in the first
    loss, kept = activation_checkpointing.measure_saved_bytes(model, forward)
    with Products() as products:
        loss.backward()
    return kept, products.counted, products.everything


def test_less_is_kept_and_only_as_much_repeated_as_is_said() -> None:
    plain, none, least = kept_and_repeated("none")
    full, all_again, most = kept_and_repeated("full")
    _, no_product, selected = kept_and_repeated("selective")
    assert none == no_product, "selective repeats no weight's product"
    assert least < selected < most
    assert all_again == none + 4 * 6, "each block's but for w_down's, whose output no gradient needs"
    assert full < plain / 3


def test_a_budget_recomputes_no_more_blocks_than_it_must() -> None:
    plain, none, _ = kept_and_repeated("none")
    full, _, _ = kept_and_repeated("full")
    tables = 2 * 24 * LLAMA.head_width * 4  # rotary, of 24 tokens in float32: blocks share them
    # What it saves to recompute one, which is a little less than what the block keeps.
    block, remaining = divmod(plain - full - tables, 4)
    assert remaining == 0
    for blocks_kept in range(5):
        kept, products, _ = kept_and_repeated(f"{block * (blocks_kept + 0.5) / 1e3} kB")
        assert products == none + (4 - blocks_kept) * 6
        assert kept == full + blocks_kept * block + (tables if blocks_kept else 0)


class Wide(nn.Module):
    """Of the same inputs as `Small`, keeps thirty times as much."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, width), nn.Linear(width, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)).tanh())


def test_blocks_of_one_input_that_differ_are_measured_each() -> None:
    for order in ((64, 2048), (2048, 64)):
        torch.manual_seed(0)
        stage = nn.Sequential(*map(Wide, order), *map(Wide, order)).train()
        activation_checkpointing.recompute(stage, list(stage), "500 kB")
        x = torch.randn(32, 32, requires_grad=True)
        stage(x)  # measures
        _, kept = activation_checkpointing.measure_saved_bytes(stage, partial(stage, x))
        assert kept < 500_000, "two of the small ones fit, and none of the wide"
        with Products() as products:
            stage(x).sum().backward()
        assert products.counted == 4 * 2 + 4 * 4 + 2, (
            "both passes, and the first product of each wide block again"
        )


@pytest.mark.parametrize(("text", "size"), [("2 GB", 2_000_000_000), ("1.5MB", 1_500_000), ("60 kB", 60_000)])
def test_recompute_sizes_are_parsed(text: str, size: int) -> None:
    assert activation_checkpointing.parse_size(text) == size


def test_without_gradients_nothing_is_kept_for_later() -> None:
    """In evaluation a recomputed block runs as it is."""
    model = build(LLAMA)
    initialise(model, 7)
    tokens = torch.arange(24)[None] % 64
    expected = model.eval()(tokens).logits
    activation_checkpointing.recompute(model, transformer_blocks(model), "full")
    assert torch.equal(model(tokens).logits, expected)
    with torch.no_grad():
        assert torch.equal(nn.Module.train(model)(tokens).logits, expected)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x: Tensor) -> Tensor:
        normed = nn.functional.layer_norm(x, (32,))
        return x + self.down(nn.functional.gelu(self.up(normed)).tanh())


def test_under_compile_a_share_says_how_much_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._functorch.config as functorch

    monkeypatch.setattr(functorch, "activation_memory_budget", 1.0)
    x, kept, actual = torch.randn(64, 32), {}, {}
    for how in ("none", "50 %", "0 %"):
        torch._dynamo.reset()
        torch.manual_seed(0)
        block = Small()
        activation_checkpointing.recompute(block, [block], how, compiled=True)
        block.compile(fullgraph=True, backend="aot_eager_decomp_partition")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # torch's own
            output, kept[how] = activation_checkpointing.measure_saved_bytes(
                block, partial(block, x.clone().requires_grad_())
            )
        output.square().sum().backward()
        actual[how] = [p.grad for p in block.parameters()]
    assert kept["0 %"] == x.nbytes
    assert kept["0 %"] < kept["50 %"] < kept["none"]
    for how, gradients_of in actual.items():
        for gradient, expected in zip(gradients_of, actual["none"], strict=True):
            assert torch.equal(gradient, expected), how
