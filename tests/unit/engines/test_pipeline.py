"""Pipeline stages and recomputed activations: types, communicators, gradients to the bit."""

import gc
import warnings
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._functorch.config
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from megatfm.config import ModelConfig, ParallelConfig
from megatfm.engines import activation_checkpointing
from megatfm.engines.passes import backward_input
from megatfm.engines.pipeline import PipelineForwardBackward
from megatfm.errors import MegatfmError
from megatfm.layers.initialisation import initialise
from megatfm.models import build
from megatfm.parallel.layout import iter_blocks
from megatfm.parallel.mesh import PIPELINE
from tests.support.batches import CAUSAL, PassThroughObjective, family_batch, global_batch
from tests.support.layouts import extend
from tests.support.models import ADAMW, FAMILY_MODELS, UNTIED_MODEL
from tests.support.parity import (
    build_engine,
    gradient_errors,
    microbatches,
    one_device,
    one_device_gradients,
    uneven_microbatches,
)
from tests.support.tensors import OperatorCounter, OperatorRecorder
from tests.support.workers import Workers


def test_a_carry_of_another_type_than_the_next_stage_takes_is_refused() -> None:
    """A plugin's float32 under bf16: gloo would fail by the size, and NCCL read beyond the end."""
    passes = PipelineForwardBackward.__new__(PipelineForwardBackward)
    passes._dtype = torch.bfloat16
    passes._pipeline = SimpleNamespace(stages={1: SimpleNamespace(rank=1)})  # type: ignore[assignment]
    stream = {"x": SimpleNamespace(d_model=8)}
    with pytest.raises(MegatfmError, match=r"x is torch\.float32, but the next pipeline stage expects torch\.bfloat16"):
        passes._send(stream, {"x": torch.ones(2, 8)}, 1, None)  # type: ignore[arg-type]
    with pytest.raises(MegatfmError, match=r"is torch\.int32, but the next pipeline stage expects torch\.int64"):
        passes._send({"x": SimpleNamespace(d_model=None)}, {"x": torch.ones(2, dtype=torch.int32)}, 1, None)  # type: ignore[dict-item, arg-type]


def groups_by_direction(parallel: ParallelConfig) -> None:
    engine = build_engine(UNTIED_MODEL, parallel)
    stage = dist.get_rank()
    actual: dict[str, set[str]] = {"forward": set(), "back": set()}
    calls = {name: getattr(dist, name) for name in ("isend", "irecv")}
    with pytest.MonkeyPatch.context() as patch:
        for name, ahead in (("isend", 1), ("irecv", -1)):

            def seen(
                tensor: Any, group: Any, *, group_dst: int = 0, group_src: int = 0, ahead: int = ahead, name: str = name
            ) -> Any:
                other = group_dst if name == "isend" else group_src
                actual["forward" if other - stage == ahead else "back"].add(str(group.group_name))
                peer = {"group_dst": other} if name == "isend" else {"group_src": other}
                return calls[name](tensor, group=group, **peer)

            patch.setattr(dist, name, seen)
        engine.forward_backward(uneven_microbatches(engine, global_batch(seed=2)), CAUSAL)
    (forward,), (back,) = actual.values()
    assert forward != back
    named = engine.process_groups()
    assert named[forward] == named[back] == PIPELINE


def test_no_direction_queues_behind_the_other(workers: Workers) -> None:
    workers.run(groups_by_direction, 2, ParallelConfig(pp=2, dp_shard=1))


WIDTH = 6


class Parts(nn.Module):
    """A stage with layers on the way, one that is used twice, a bias that several steps share, and a loss
    that doesn't depend on the input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.twice = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.bias = nn.Embedding(3, WIDTH)
        self.aside = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))

    def forward(self, x: Tensor, memory: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        shared = self.bias(torch.arange(3)).tanh().sum(0)
        y = torch.tanh(self.first(x) + shared)
        y = self.twice(torch.tanh(self.twice(y)))
        y = y + self.second(memory * y) + shared
        return y, (memory * 2).sin(), self.aside(torch.ones(2, WIDTH, dtype=x.dtype)).sum()


@pytest.fixture
def parts() -> Parts:
    torch.manual_seed(0)
    return Parts().double()


def inputs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, memory = torch.randn(2, 2, WIDTH, dtype=torch.float64, generator=generator)
    return x.requires_grad_(), memory.requires_grad_()


def gradients(parts: Parts) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in parts.named_parameters() if p.grad is not None}


def test_the_parts_of_a_backward_pass_make_up_the_whole(parts: Parts) -> None:
    x, memory = inputs()
    y, z, loss = parts(x, memory)
    into_y, into_z = torch.full_like(y, 0.5), torch.full_like(z, -0.25)
    torch.autograd.backward([y, z, loss], [into_y, into_z, None])
    assert x.grad is not None
    assert memory.grad is not None
    expected = gradients(parts), x.grad.clone(), memory.grad.clone()
    parts.zero_grad()

    x, memory = inputs()
    y, z, loss = parts(x, memory)
    later = backward_input([y, z, loss], [into_y, into_z, None], [x, memory])
    torch.testing.assert_close((x.grad, memory.grad), expected[1:], rtol=1e-13, atol=0)
    at_once = gradients(parts).keys()
    assert {"twice.weight", "bias.weight", "aside.0.weight"} <= at_once
    assert not {"first.weight", "second.weight", "second.bias"} & at_once, "these can wait"
    later()
    torch.testing.assert_close(gradients(parts), expected[0], rtol=1e-12, atol=1e-15)


def test_micro_batches_add_up(parts: Parts) -> None:
    x, memory = inputs()
    parts(x, memory)[0].sum().backward()
    once = gradients(parts)
    parts.zero_grad()
    laters = []
    for _ in range(3):
        x, memory = inputs()
        laters.append(backward_input([parts(x, memory)[0].sum()], [None], [x, memory]))
    for later in laters:
        later()
    torch.testing.assert_close(gradients(parts), {name: 3 * g for name, g in once.items()}, rtol=1e-12, atol=1e-15)


def test_a_stage_without_inputs_does_all_of_it_later(parts: Parts) -> None:
    loss = parts.aside(torch.ones(2, WIDTH, dtype=torch.float64)).sum()
    later = backward_input([loss], [None], [])
    assert gradients(parts) == {}
    later()
    assert gradients(parts).keys() == {f"aside.{i}.{key}" for i in (0, 2) for key in ("weight", "bias")}


# ------------------------------------------------------------------------------------- recomputed activations


LAYOUTS = {
    "gpt": {"zero3": ParallelConfig(dp_shard=2), "tp2": ParallelConfig(tp=2)},
    "t5": {
        "tp2 without sequence parallel": ParallelConfig(tp=2, sequence_parallel=False),
        "zero1": ParallelConfig(dp_shard=2, zero=1),
    },
}
HOW = ("full", "selective", "60 kB")
LLAMA = ModelConfig(
    vocab_size=96, d_model=32, n_layers=4, attention={"n_heads": 4}, ffn={"d_ff": 48}, embedding={"tied": False},
)  # fmt: skip
TERMS = {"gpt": ["causal", "future_1"], "t5": ["span"]}


def recomputed_gradients(name: str, parallel: ParallelConfig, how: str) -> dict[str, Tensor]:
    engine = build_engine(FAMILY_MODELS[name], parallel, ADAMW, recomputed=how)
    engine.forward_backward(microbatches(engine, family_batch(FAMILY_MODELS[name])), PassThroughObjective(TERMS[name]))
    return engine.gradients()


def compare(name: str, layout: str) -> None:
    expected = recomputed_gradients(name, LAYOUTS[name][layout], "none")
    for how in HOW:
        for parameter, gradient in recomputed_gradients(name, LAYOUTS[name][layout], how).items():
            assert torch.equal(gradient, expected[parameter]), (how, parameter)


@pytest.mark.parametrize(
    ("name", "layout"),
    extend(
        [(name, layout) for name in TERMS for layout in LAYOUTS[name]],
        kept=[("gpt", "zero3"), ("t5", "tp2 without sequence parallel")],
    ),
)
def test_gradients_are_the_same_to_the_bit(workers: Workers, name: str, layout: str) -> None:
    workers.run(compare, 2, name, layout)


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


WEIGHT_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


def kept_and_repeated(how: str) -> tuple[int, int, int]:
    """Bytes that the forward pass keeps besides weights; weights' products, and all operations in the backward pass."""
    model = build(LLAMA).train()
    initialise(model, 7)
    activation_checkpointing.recompute(model, iter_blocks(model), how)
    tokens = torch.arange(48).reshape(2, 24) % 64

    def forward() -> Tensor:
        return model(tokens, targets=tokens).losses["causal"]

    forward()  # a budget measures in the first
    loss, saved_bytes = activation_checkpointing.measure_saved_bytes(model, forward)
    with OperatorRecorder(lambda operator, *_: [operator]) as operators:
        loss.backward()
    return saved_bytes, sum(map(operators.records.count, WEIGHT_PRODUCTS)), len(operators.records)


def test_less_is_kept_and_only_as_much_repeated_as_is_said() -> None:
    plain, none, least = kept_and_repeated("none")
    full, all_again, most = kept_and_repeated("full")
    _, no_product, selected = kept_and_repeated("selective")
    assert none == no_product, "selective repeats no weight's product"
    assert least < selected < most
    assert all_again == none + 4 * 6, "each block's but for w_down's, whose output no gradient needs"
    assert full < plain / 3


def refer_to_product(operator: Any, _: object, outputs: list[Tensor]) -> list[StorageWeakRef]:
    """The storage of a weight's product."""
    return [StorageWeakRef(x.untyped_storage()) for x in outputs if operator is torch.ops.aten.mm.default]


def count_products(sequence_parallel: bool, how: str) -> tuple[set[int], int, dict[str, float]]:
    """Return how many products of the first block live after its forward pass, and how many a step computes."""
    parallel = ParallelConfig(tp=2, dp_shard=1, sequence_parallel=sequence_parallel)
    engine = build_engine(LLAMA, parallel, ADAMW, recomputed=how)
    batch = global_batch(seed=3)
    _, expected = one_device_gradients(one_device(LLAMA), batch)
    block, counts = next(iter(iter_blocks(engine.model))), set()
    original = block.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        if counts:  # the first micro-batch shows it
            return original(*args, **kwargs)
        with OperatorRecorder(refer_to_product) as products:
            output = original(*args, **kwargs)
        gc.collect()
        counts.add(sum(not storage.expired() for storage in products.records))
        return output

    block.forward = forward
    micro_batches = microbatches(engine, batch)
    with OperatorCounter(WEIGHT_PRODUCTS) as products:
        engine.forward_backward(micro_batches, CAUSAL)
    return counts, products.count, gradient_errors(engine, expected)


@pytest.mark.parametrize("sequence_parallel", extend([True, False], kept=[True]))
def test_recompute_saves_sums_over_ranks_and_not_their_terms(workers: Workers, sequence_parallel: bool) -> None:
    """Llama's block has seven products; the outputs of attention and of the feed-forward network are terms of sums."""
    computed = [count for _, count, _ in workers.run(count_products, 2, sequence_parallel, "none")]
    for counts, count, errors in workers.run(count_products, 2, sequence_parallel, "selective"):
        assert counts == {5}
        assert count == computed[0], "no product is repeated"
        assert errors == {}


def test_a_budget_recomputes_no_more_blocks_than_it_must() -> None:
    plain, none, _ = kept_and_repeated("none")
    full, _, _ = kept_and_repeated("full")
    tables = 2 * 24 * LLAMA.head_width * 4  # rotary, of 24 tokens in float32: blocks share them
    # What it saves to recompute one, which is a little less than what the block keeps.
    block, remaining = divmod(plain - full - tables, 4)
    assert remaining == 0
    for blocks_kept in range(5):
        saved_bytes, products, _ = kept_and_repeated(f"{block * (blocks_kept + 0.5) / 1e3} kB")
        assert products == none + (4 - blocks_kept) * 6
        assert saved_bytes == full + blocks_kept * block + (tables if blocks_kept else 0)


class WideModule(nn.Module):
    """Keeps thirty times as much as `Small` of the same inputs."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, width), nn.Linear(width, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)).tanh())


def test_blocks_of_one_input_that_differ_are_measured_each() -> None:
    for order in ((64, 2048), (2048, 64)):
        torch.manual_seed(0)
        stage = nn.Sequential(*map(WideModule, order), *map(WideModule, order)).train()
        activation_checkpointing.recompute(stage, list(stage), "500 kB")
        x = torch.randn(32, 32, requires_grad=True)
        stage(x)  # measures
        _, saved_bytes = activation_checkpointing.measure_saved_bytes(stage, partial(stage, x))
        assert saved_bytes < 500_000, "two of the small ones fit, and none of the wide"
        with OperatorCounter(WEIGHT_PRODUCTS) as products:
            stage(x).sum().backward()
        assert products.count == 4 * 2 + 4 * 4 + 2, "both passes, and the first product of each wide block again"


@pytest.mark.parametrize(("text", "size"), [("2 GB", 2_000_000_000), ("1.5MB", 1_500_000), ("60 kB", 60_000)])
def test_recompute_sizes_are_parsed(text: str, size: int) -> None:
    assert activation_checkpointing.parse_bytes(text) == size


def test_without_gradients_nothing_is_kept_for_later() -> None:
    """In evaluation a recomputed block runs as it is."""
    model = build(LLAMA)
    initialise(model, 7)
    tokens = torch.arange(24)[None] % 64
    expected = model.eval()(tokens).logits
    activation_checkpointing.recompute(model, iter_blocks(model), "full")
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


@torch._functorch.config.patch(activation_memory_budget=1.0)
def test_under_compile_a_share_says_how_much_is_kept() -> None:
    x, saved_bytes, actual = torch.randn(64, 32), {}, {}
    for how in ("none", "50 %", "0 %"):
        torch._dynamo.reset()
        torch.manual_seed(0)
        block = Small()
        activation_checkpointing.recompute(block, [block], how, compiled=True)
        block.compile(fullgraph=True, backend="aot_eager_decomp_partition")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # torch's own
            output, saved_bytes[how] = activation_checkpointing.measure_saved_bytes(
                block, partial(block, x.clone().requires_grad_())
            )
        output.square().sum().backward()
        actual[how] = [p.grad for p in block.parameters()]
    assert saved_bytes["0 %"] == x.nbytes
    assert saved_bytes["0 %"] < saved_bytes["50 %"] < saved_bytes["none"]
    for how, gradients_of in actual.items():
        for gradient, expected in zip(gradients_of, actual["none"], strict=True):
            assert torch.equal(gradient, expected), how
