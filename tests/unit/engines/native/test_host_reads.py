"""How often the host waits in a step, and how many operations it asks for: budgets that may only fall."""

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from megatfm.config import ModelConfig, ParallelConfig
from megatfm.engines import base
from megatfm.layers import sequence
from megatfm.layers.attention.patterns import bigbird
from megatfm.layers.initialisation import initialise
from megatfm.layers.moe import experts
from megatfm.models import build
from megatfm.ops import transfer
from megatfm.ops.transfer import DeferredReads
from megatfm.parallel import context_attention, context_parallel, ring_attention
from tests.support.batches import CAUSAL, global_batch, task_batch
from tests.support.context_parity import context_case, context_microbatches
from tests.support.layouts import EXTENDED, extend
from tests.support.models import ADAMW, FAMILY_MODELS, TIED_MODEL, UNTIED_MODEL
from tests.support.parity import build_engine, microbatches, model_gradient_errors
from tests.support.tensors import BLOCKING_METHODS, HostWaits, OperatorRecorder
from tests.support.workers import Workers

MOE = TIED_MODEL.with_changes({"ffn": {"name": "moe", "n_experts": 4, "top_k": 2, "d_ff": 48}})


def waits_of_a_step(model: ModelConfig, parallel: ParallelConfig, precision: str, early: bool) -> tuple[list[str], int]:
    """Host waits, and reads of assembled tensors, in a step that is clipped. early: which the device may skip by
    itself, as a GPU does, whose rows of experts nobody looks at."""
    engine = build_engine(model, parallel, ADAMW, precision=precision)
    if early:
        engine.skipping_optimizers = list(engine.optimizers)
    batches = [microbatches(engine, global_batch(seed=step)) for step in range(2)]
    reads, real, requested = [], DeferredReads.read, []

    def noted(name: str) -> Callable[..., Any]:
        method = getattr(Tensor, name)
        return lambda self, *inputs: (requested.append(name), method(self, *inputs))[1]

    def read(self: DeferredReads) -> None:
        reads.append(1)
        before = len(requested)
        real(self)
        del requested[before:]

    for batch in batches:
        reads.clear()
        requested.clear()
        with pytest.MonkeyPatch.context() as patch, HostWaits() as waits:
            patch.setattr(DeferredReads, "read", read)
            for name in BLOCKING_METHODS:
                patch.setattr(Tensor, name, noted(name))
            if early:
                patch.setattr(experts, "is_host_readable", lambda _: False)
            stats = engine.forward_backward(batch, CAUSAL)
            engine.step(1e-2, clip=1e-3)
            assert stats.loss > 0
    return [*waits.operators, *requested], len(reads)


WAITING_LAYOUTS = {
    "one": (1, ParallelConfig()),
    **{f"zero {zero}": (2, ParallelConfig(zero=zero, dp_shard=2)) for zero in (0, 1, 3)},
    "tp": (2, ParallelConfig(tp=2)),
}  # fmt: skip
STEPS = [("fp32", False), ("bf16", True), ("fp32", True), ("bf16", False)]
"""Precision, and whether the device may skip a step by itself."""


@pytest.mark.parametrize(
    ("layout", "precision", "early"),
    extend(
        [(layout, *step) for step in STEPS for layout in WAITING_LAYOUTS],
        kept=[
            *((layout, "fp32", False) for layout in WAITING_LAYOUTS),
            ("one", "bf16", True),
            ("zero 1", "bf16", True),
        ],
    ),
)
def test_the_host_waits_once_a_step(workers: Workers, layout: str, precision: str, early: bool) -> None:
    ranks, parallel = WAITING_LAYOUTS[layout]
    for waits, reads in workers.run(waits_of_a_step, ranks, TIED_MODEL, parallel, precision, early):
        assert waits == []
        assert reads == 1


@pytest.mark.parametrize(
    ("ranks", "parallel", "looks"), [(1, ParallelConfig(), []), (2, ParallelConfig(dp_shard=2, ep=2), ["tolist"])]
)
def test_rows_of_experts_are_counted_on_the_device(
    workers: Workers, ranks: int, parallel: ParallelConfig, looks: list[str]
) -> None:
    """The host reads counts once in each layer's forward pass, to allocate the rows that come from other ranks."""
    passes = MOE.n_layers * len(range(0, 8 // ranks, 2))
    for waits, reads in workers.run(waits_of_a_step, ranks, MOE, parallel, "fp32", True):
        assert waits == looks * passes
        assert reads == 1


REPEATED = "_grouped_mm", "all_to_all"


def work_of_recomputed_experts(recomputed: str) -> tuple[int, list[int]]:
    """Host reads of a step's passes on a device that is not the host, and launches of `REPEATED`."""
    engine = build_engine(MOE, ParallelConfig(dp_shard=2, ep=2), ADAMW, precision="fp32", recomputed=recomputed)
    batch, real, reads = microbatches(engine, global_batch(seed=0)), Tensor.cpu, []
    with pytest.MonkeyPatch.context() as patch, OperatorRecorder(name_launch) as passes:
        patch.setattr(transfer, "is_on_host", lambda _: False)
        patch.setattr(Tensor, "cpu", lambda tensor: (reads.append(1), real(tensor).clone())[1])
        engine.forward_backward(batch, CAUSAL)
    launched = [name.replace("alltoall", "all_to_all") for name in passes.records]
    return len(reads), [sum(name.startswith(way) for name in launched) for way in REPEATED]


def test_recomputed_experts_wait_for_no_rows_again_and_selected_ones_repeat_no_product(workers: Workers) -> None:
    """The host knows how many rows arrive; of a block's six all-to-alls, "full" repeats two, and that of the counts."""
    passes = MOE.n_layers * 2
    work = {how: workers.run(work_of_recomputed_experts, 2, how) for how in ("none", "selective", "full")}
    for (reads, [products, exchanges]), selective, full in zip(*work.values(), strict=True):
        assert reads == passes
        assert selective == (reads, [products, exchanges])
        assert full[0] == reads
        assert full[1][0] > products
        assert full[1][1] > exchanges


class Device(HostWaits):
    """Tensors moved to a device, and operators' results from them, lie there; only their reads are noted.

    What they make of nothing that lies there counts as the host's (`torch.arange`, though on a device it would not be).
    """

    def __init__(self, on_device: Iterable[Tensor]) -> None:
        super().__init__()
        self._memory: dict[int, Tensor] = {}
        """By address; held, so that nothing else comes to lie there."""
        self.put(on_device)
        self.moves = True

    def put(self, tensors: Iterable[Any]) -> None:
        for x in tensors:
            if isinstance(x, Tensor) and x.numel():
                self._memory[x.untyped_storage().data_ptr()] = x

    def holds(self, x: Any) -> bool:
        return isinstance(x, Tensor) and x.untyped_storage().data_ptr() in self._memory

    def moved(self, values: Tensor, device: torch.device) -> Tensor:
        """In the place of `move_to_device`."""
        if not self.moves or not values.numel() or self.holds(values):
            return values
        copy = values.clone()
        self.put([copy])
        return transfer.remember_host_copy(copy, values)

    def here(self, *inputs: Any) -> dict[str, Tensor]:
        """In the place of `here`: what comes before the move is the host's."""
        self.moves = False
        batch = HERE(*inputs)
        self.moves = True
        return {name: self.moved(values, values.device) for name, values in batch.items()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        on_device = any(self.holds(x) for x in tree_leaves((args, kwargs)))
        result = super().__torch_dispatch__(func, types, args, kwargs) if on_device else func(*args, **(kwargs or {}))
        if on_device:
            self.put(tree_leaves(result))
        return result


HERE, MOVED, READ = base.make_local_batch, transfer.move_to_device, DeferredReads.read


@contextmanager
def watch_host(device: Device, *, known: bool = True) -> Iterator[list[str]]:
    """Tensors that are moved lie on the device; yields the methods that read one. known: the host has copies."""
    requested: list[str] = []

    def noted(name: str) -> Any:
        method = getattr(Tensor, name)
        return lambda self, *inputs: (device.holds(self) and requested.append(name), method(self, *inputs))[1]

    with pytest.MonkeyPatch.context() as patch, device:
        for name in BLOCKING_METHODS:
            patch.setattr(Tensor, name, noted(name))
        for module in [*sys.modules.values()]:
            # `bigbird` moves to where the queries are.
            if getattr(module, "move_to_device", None) is MOVED and module is not bigbird:
                patch.setattr(module, "move_to_device", device.moved)
        for module in (transfer, sequence):
            patch.setattr(module, "is_on_host", lambda x: not device.holds(x))
        patch.setattr(base, "make_local_batch", device.here)
        if not known:
            patch.setattr(transfer, "remember_host_copy", lambda tensor, _: tensor)
        yield requested


def waits_of_rows(name: str, parallel: ParallelConfig, known: bool) -> list[str]:
    """Host waits in the passes of two micro-batches, beside the one read of the losses. known: the host has copies.

    For `zero` = 0: the shards of FSDP2 are DTensors, which have no address.
    """
    config, batch, model, objective, loss = context_case(name)
    engine = build_engine(config, parallel, ADAMW)
    engine.forward_backward(context_microbatches(engine, batch), objective)  # makes what is made once
    engine.zero_grad()
    device = Device([*engine.model.parameters(), *engine.model.buffers()])
    with watch_host(device, known=known) as requested:
        sums = engine.forward_backward(context_microbatches(engine, batch), objective)
    assert sums.loss == pytest.approx(loss, rel=1e-12)
    assert model_gradient_errors(engine, model) == {}
    return [*device.operators, *requested]


@pytest.mark.parametrize(("name", "parallel"), [
    ("llama", ParallelConfig(zero=0, cp=2, cp_method="ring")),
    ("llama", ParallelConfig(zero=0, cp=2, cp_method="ulysses")),
    ("prefix language model", ParallelConfig(zero=0, cp=2, cp_method="ring")),
    ("window, prefixes", ParallelConfig(zero=0, cp=2)),
    pytest.param("patterns of decoders", ParallelConfig(zero=0, cp=2), marks=EXTENDED),
    ("patterns of encoders", ParallelConfig(zero=0, cp=2)),
    pytest.param("patterns of encoders, rows of 11 tokens", ParallelConfig(zero=0, cp=2), marks=EXTENDED),
])  # fmt: skip
def test_the_host_does_not_wait_for_known_values(workers: Workers, name: str, parallel: ParallelConfig) -> None:
    assert workers.run(waits_of_rows, 2, name, parallel, True) == [[], []]


TASK_HEADS = [
    {"name": "text_classifier", "classes": 2}, {"name": "text_classifier", "classes": 2, "both_orders": True},
    {"name": "multiple_choice"}, {"name": "span_extraction"},
]  # fmt: skip


@pytest.mark.parametrize("head", TASK_HEADS, ids=str)
def test_task_heads_do_not_wait_for_known_values(head: dict[str, Any]) -> None:
    changes = {"lm_head.name": "none", "lm_head.bias": False, "extra_heads": {"sentence": head}}
    config = FAMILY_MODELS["bert"].with_changes(changes)
    model, batch = build(config).train(), task_batch(config)
    initialise(model, 7)
    device = Device([*model.parameters(), *model.buffers()])
    with watch_host(device) as requested:
        model(**{name: device.moved(values, values.device) for name, values in batch.items()})
    assert [*device.operators, *requested] == []


def test_the_host_reads_the_device_without_host_copies(workers: Workers) -> None:
    assert all(workers.run(waits_of_rows, 2, "window", ParallelConfig(zero=0, cp=2), False))


def count_moves(layers: int, pattern: str, method: str) -> int:
    """Tensors that context parallelism moves to the device in the passes of a micro-batch."""
    changes = {
        "n_layers": layers,
        "attention.pattern": {"name": pattern} | ({"width": 5} if pattern == "window" else {}),
    }
    parallel, moves = ParallelConfig(zero=0, cp=2, cp_method=method), []
    engine = build_engine(UNTIED_MODEL.with_changes(changes), parallel, ADAMW)
    with pytest.MonkeyPatch.context() as patch:
        for module in (context_attention, context_parallel, ring_attention):
            patch.setattr(module, "move_to_device", lambda *inputs: (moves.append(1), MOVED(*inputs))[1])
        engine.forward_backward(microbatches(engine, global_batch(seed=0))[:1], CAUSAL)
    return len(moves)


@pytest.mark.parametrize(("pattern", "method"), [("full", "ulysses"), ("full", "ring"), ("window", "auto")])
def test_layers_share_what_context_parallelism_moves_to_the_device(workers: Workers, pattern: str, method: str) -> None:
    assert workers.run(count_moves, 2, 2, pattern, method) == workers.run(count_moves, 2, 4, pattern, method)


# ------------------------------------------------------------------------------------------------- operations


GPT2 = UNTIED_MODEL.with_changes(
    {"attention": {"n_heads": 4, "bias": True}, "ffn": {"d_ff": 80, "activation": "gelu_tanh", "bias": True},
     "norm": {"name": "layer_norm"}, "position": {"name": "learned", "max_positions": 16}, "embedding.tied": True},
)  # fmt: skip
FREE = (
    "empty", "empty_like", "detach", "new_empty", "lift_fresh", "alias", "_unsafe_view", "promote_types", "clone",
)  # fmt: skip
"""Operators that move no number; and clones, most of which lay tensors anew that a CPU's allocator placed."""
MICRO_BATCHES = 4


def name_launch(operator: Any, *_: object) -> list[str]:
    """The name of an operator that computes or copies; views do neither."""
    packet = operator._schema.name.partition("::")[2]
    return [] if operator.is_view or packet in FREE else [packet]


def launches(
    model: ModelConfig, parallel: ParallelConfig, precision: str, early: bool = False
) -> tuple[Counter[str], Counter[str]]:
    """Launches of the second step: forward and backward; clipping and update. early: decided on the device."""
    engine = build_engine(model, parallel, ADAMW, precision=precision)
    if early:
        engine.skipping_optimizers = list(engine.optimizers)
    for seed in range(2):
        batch = microbatches(engine, global_batch(seed=seed))
        with OperatorRecorder(name_launch) as passes:
            stats = engine.forward_backward(batch, CAUSAL)
        with OperatorRecorder(name_launch) as step:
            engine.step(1e-2, clip=1e-3)
        assert stats.loss > 0
    return Counter(passes.records), Counter(step.records)


BUDGETS = {
    ("gpt2", "fp32"): (54, 20),
    ("gpt2", "bf16"): (81, 20),
    ("llama", "fp32"): (116, 20),
    ("llama", "bf16"): (150, 20),
}
"""Launches of each block and micro-batch, forward and backward; of clipping and AdamW, for any depth. Where a
change makes them fewer, lower them here. `torch.compile` fuses most of a block's."""


@pytest.mark.parametrize(("model", "precision"), BUDGETS)
def test_a_step_asks_for_no_more_than_its_budget(workers: Workers, model: str, precision: str) -> None:
    config = {"gpt2": GPT2, "llama": UNTIED_MODEL}[model]
    (two,), (four,) = (
        workers.run(launches, 1, config.with_changes({"n_layers": n}), ParallelConfig(), precision) for n in (2, 4)
    )
    block, step = BUDGETS[model, precision]
    assert (four[0].total() - two[0].total()) / (2 * MICRO_BATCHES) <= block, four[0] - two[0]
    assert two[1].total() <= step, two[1]
    assert four[1].total() <= step, four[1]


def count_walks() -> list[str]:
    """Walks over the modules in a second step, between evaluations."""
    engine = build_engine(UNTIED_MODEL, ParallelConfig(), ADAMW)
    batch = microbatches(engine, global_batch(seed=0))
    walks: list[str] = []

    def step() -> None:
        engine.forward_backward(batch, CAUSAL)
        engine.step(1e-2, clip=1.0)

    step()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("named_modules", "train"):
            method = getattr(nn.Module, name)

            def walk(*args: Any, name: str = name, method: Any = method, **options: Any) -> Any:
                walks.append(name)
                return method(*args, **options)

            patch.setattr(nn.Module, name, walk)
        step()
    engine.evaluate(batch, CAUSAL)
    assert not any(module.training for module in engine.model.modules())
    step()
    assert all(module.training for module in engine.model.modules())
    return walks


def test_a_step_walks_over_no_modules(workers: Workers) -> None:
    """A walk is milliseconds for deep models, while a GPU has nothing to do."""
    assert workers.run(count_walks, 1) == [[]]


EARLY = 35


@pytest.mark.parametrize("layers", [2, 4])
def test_a_step_that_the_device_decides_on_asks_for_little_more(workers: Workers, layers: int) -> None:
    """Whether the loss is finite, the factor of the gradients, and step counts that are set back."""
    config = UNTIED_MODEL.with_changes({"n_layers": layers})
    ((_, step),) = workers.run(launches, 1, config, ParallelConfig(), "bf16", True)
    assert step.total() <= EARLY, step
