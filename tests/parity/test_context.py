"""Rows that are cut over ranks: loss and every gradient of one device, bytes on the wire, and checkpoints.

Blocks are also computed again or compiled, and a checkpoint opens under any other number of ranks.
"""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatfm import checkpoint
from megatfm.config import ParallelConfig
from megatfm.config.objective import (
    CausalObjective,
    MaskedObjective,
    PermutationObjective,
    SpanBoundaryObjective,
    SpanCorruptionObjective,
)
from tests.support.context_parity import (
    CONTEXT_LAYOUTS,
    CONTEXT_MODELS,
    CONTEXT_MODELS_BY_RANKS,
    CP2_ALONE,
    PATTERN_NAMES,
    compare_context_layouts,
    context_case,
    context_layouts_of,
    context_microbatches,
)
from tests.support.layouts import EXTENDED, SLOW, list_traffic_mismatches, make_cases, traffic_config
from tests.support.models import ADAMW
from tests.support.parity import build_engine, compile_blocks_by, model_gradient_errors
from tests.support.workers import Workers

LATER = (
    ("patterns of encoders", 8),
    ("patterns of decoders, rows of 11 tokens", 8),
    ("patterns of encoders, rows of 11 tokens", 8),
    ("t5 positions, patterns", 4),
    ("deberta v3", 4),
    ("deberta, rows of 11 tokens", 2),
)
"""Dear ones that others are much like."""
LONGER = {
    2: ("window, rows of 11 tokens", "llama, rows of 11 tokens", "latent, patterns",
        "patterns of decoders, rows of 11 tokens", "patterns of encoders, experts"),
    3: ("soft experts, rows of 11 tokens", "llama, rows of 11 tokens"),
    4: ("patterns of encoders", "patterns of encoders, rows of 11 tokens", "patterns of decoders, rows of 11 tokens",
        "latent, patterns, rows of 11 tokens", "xlnet", "deberta", "t5", "alibi, patterns, rows of 11 tokens",
        "latent, patterns", "bert", "pp2 gpipe × cp2", "pp2 interleaved × cp2",
        "pp2 interleaved-zero-bubble × cp2", "pp2 dualpipev × cp2", "zero2 × cp2"),
    8: ("patterns of decoders",),
}  # fmt: skip
"""Models and layouts of extended cases: `make test` has them on another number of ranks, or in longer rows."""
CASES = [
    case
    for ranks, names in CONTEXT_MODELS_BY_RANKS.items()
    for case in make_cases(
        {name: context_layouts_of(name, ranks) for name in names}, ranks, extended=LONGER[ranks], label=f" on {ranks}"
    )
    if (case.values[0], ranks) not in LATER
]
CASES += [pytest.param(name, [*context_layouts_of(name, ranks)], ranks, marks=SLOW) for name, ranks in LATER]


@pytest.mark.parametrize(("name", "layouts", "ranks"), CASES)
def test_gradients_equal_one_device(workers: Workers, name: str, layouts: list[str], ranks: int) -> None:
    tried = {layout: CONTEXT_LAYOUTS[ranks][layout] for layout in layouts}
    assert workers.run(compare_context_layouts, ranks, name, tried, timeout=180.0)[0] == layouts


def compare_recomputed(names: Sequence[str]) -> None:
    """Compare with blocks whose forward pass and its traffic run again in the backward pass."""
    for name, recomputed in zip(names, itertools.cycle(("full", "selective")), strict=False):
        config, batch, model, objective, loss = context_case(name)
        engine = build_engine(config, CONTEXT_LAYOUTS[2]["cp2"], ADAMW, recomputed=recomputed)
        stats = engine.forward_backward(context_microbatches(engine, batch), objective)
        assert stats.loss == pytest.approx(loss, rel=1e-12), name
        assert model_gradient_errors(engine, model) == {}, name


@pytest.mark.parametrize("names", [
    ["patterns of decoders", "deberta", "soft experts", "latent"],
    pytest.param(["xlnet", "patterns of encoders", "t5 positions, patterns"], marks=EXTENDED),
], ids=["decoders, DeBERTa and experts", "encoders and biases"])  # fmt: skip
def test_recomputed_blocks_have_the_gradients_of_one_device(workers: Workers, names: list[str]) -> None:
    workers.run(compare_recomputed, 2, names, timeout=180.0)


AGAIN = ("cp2, recomputed",)
TRAFFIC: dict[int, dict[str, tuple[str, ...]]] = {
    2: {"llama": ("cp2", "cp2 by heads, recomputed"), "patterns of decoders": AGAIN, "t5": CP2_ALONE, "bert": CP2_ALONE,
        "patterns of encoders": ("cp2, recomputed, one document",), "latent, patterns": ("cp2 by heads",),
        "deberta": AGAIN, "xlnet": CP2_ALONE, "soft experts": ("cp2", "ep2 × cp2, recomputed")},
    3: {"soft experts, rows of 11 tokens": ("cp3",)},
    4: {"soft experts": ("ep4 of 2 × cp2",), "llama": ("cp4 by a ring",), "latent, patterns": ("pp2 zbv × cp2",)},
}  # fmt: skip
EXTENDED_TRAFFIC: dict[int, dict[str, tuple[str, ...]]] = {
    2: {"llama": AGAIN, "patterns of decoders": CP2_ALONE, "patterns of encoders": CP2_ALONE,
        "latent, patterns": ("cp2", *AGAIN), "alibi, patterns": ("cp2", *AGAIN), "deberta": CP2_ALONE, "xlnet": AGAIN,
        "linformer of an encoder-decoder": CP2_ALONE, "soft experts": (*AGAIN, "ep2 × cp2")},
    4: {"llama": ("cp4 by heads",), "latent, patterns": ("cp4", "cp2 × tp2"), "patterns of decoders": ("cp4",),
        "patterns of encoders": ("cp4, one document",)},
}  # fmt: skip
OBJECTIVES = {
    "t5": SpanCorruptionObjective(), "patterns of encoders": MaskedObjective(), "deberta": MaskedObjective(),
    "bert": SpanBoundaryObjective(), "xlnet": PermutationObjective(), "soft experts": MaskedObjective(),
    "soft experts, rows of 11 tokens": MaskedObjective(),
}  # fmt: skip
OBJECTIVES["linformer of an encoder-decoder"] = SpanCorruptionObjective()


@pytest.mark.parametrize(("ranks", "layouts_by_model"), [
    *(pytest.param(ranks, layouts, id=f"{ranks}") for ranks, layouts in TRAFFIC.items()),
    *(
        pytest.param(ranks, layouts, id=f"{ranks}, extended", marks=EXTENDED)
        for ranks, layouts in EXTENDED_TRAFFIC.items()
    ),
])  # fmt: skip
def test_counted_traffic_is_expected(
    workers: Workers, ranks: int, layouts_by_model: dict[str, tuple[str, ...]]
) -> None:
    configs = {}
    for name, layouts in layouts_by_model.items():
        for layout in layouts:
            layout_name, _, options = layout.partition(", ")
            objective = OBJECTIVES.get(name, CausalObjective())
            parallel = CONTEXT_LAYOUTS[ranks][layout_name]
            parallel = parallel if parallel.ep > 1 else parallel.model_copy(update={"dp_shard": 1})
            model = CONTEXT_MODELS[name].with_changes({"extra_heads": {"boundary": {}} if name == "bert" else {}})
            recompute = "full" if "recomputed" in options else "none"
            config = traffic_config(model, objective, parallel, recompute=recompute)
            full = {"attend_across_documents": "one document" in options}
            configs[f"{name}, {layout}"] = config.model_copy(update={"data": config.data.model_copy(update=full)})
    assert list_traffic_mismatches(workers, ranks, configs) == {}


def compare_compiled(name: str, backend: str, recomputed: str) -> int:
    """Compare with blocks compiled but for their traffic; return how many calls of dynamo made graphs."""
    models = {f"{name}, one block": CONTEXT_MODELS[name].with_changes({"n_layers": 1})}
    with mock.patch.dict(CONTEXT_MODELS, models), compile_blocks_by(backend) as compilation:
        config, batch, model, objective, loss = context_case(f"{name}, one block")
        engine = build_engine(config, ParallelConfig(cp=2), ADAMW, compile_blocks=True, recomputed=recomputed)
        stats = engine.forward_backward(context_microbatches(engine, batch), objective)
        assert stats.loss == pytest.approx(loss, rel=1e-12)
        assert model_gradient_errors(engine, model) == {}
    return len(compilation.graphs)


@pytest.mark.parametrize(("name", "backend", "recomputed"), [
    ("latent", "eager", "none"),
    ("llama", "aot_eager", "full"),  # its first block makes the rotary table, which its recomputation must make again
    pytest.param("llama", "aot_eager", "selective", marks=EXTENDED),
    *(pytest.param("latent", "aot_eager", how, marks=SLOW) for how in ("none", "full", "selective")),
])  # fmt: skip
def test_compiled_blocks_have_the_gradients_of_one_device(
    workers: Workers, name: str, backend: str, recomputed: str
) -> None:
    """Blocks are compiled by a backend that makes no machine code, which would take minutes."""
    assert min(workers.run(compare_compiled, 2, name, backend, recomputed, timeout=180.0)) >= 2


def test_soft_mixtures_share_experts_and_keep_sums(workers: Workers) -> None:
    """Rows are whole or shards, and blocks are recomputed in part; shards without that are among `TRAFFIC`."""
    name, layout = "soft experts", ParallelConfig(dp_shard=2, ep=2)
    assert workers.run(compare_context_layouts, 2, name, {"ep2": layout}, timeout=180.0)[0] == ["ep2"]
    cp2 = CONTEXT_LAYOUTS[2]["cp2"].model_copy(update={"dp_shard": 1})
    configs = {
        f"ep{item.ep}, cp{item.cp}, {recompute}": traffic_config(
            CONTEXT_MODELS[name], MaskedObjective(), item, recompute=recompute
        )
        for item, recompute in (
            (layout, "none"),
            *((item, "selective") for item in (layout, cp2, CONTEXT_LAYOUTS[2]["ep2 × cp2"])),
        )
    }
    assert list_traffic_mismatches(workers, 2, configs) == {}


RATE = 1e-2
BOUND = 1e-9
Step = tuple[float, dict[str, Tensor], dict[str, Tensor]]
"""Loss, gradients, and what is left after the step, with the optimizer's state: whole on every rank."""


def next_step(name: str, folder: Path, source: Path | None) -> Step:
    """State of an engine that takes a step and saves it, or goes on from the saved one."""
    config, batch, _, objective, _ = context_case(name)
    ranks = torch.distributed.get_world_size()
    # Full attention by ring; auto would take heads.
    parallel = ParallelConfig(cp=ranks, cp_method="ring" if ranks > 1 else "auto")
    engine = build_engine(config, parallel, ADAMW)
    batches = context_microbatches(engine, batch)
    if source is None:
        engine.forward_backward(batches, objective)
        engine.step(RATE, clip=1.0)
        checkpoint.save(folder, 1, engine.state_dict(), {})
    else:
        room = engine.empty_state_dict(checkpoint.read_tensor_specs(source))
        checkpoint.load(source, room)
        engine.load_state_dict(room)
    # Other rows than before, which were drawn for dropout with other keys.
    later = [{**item, "keys": item["keys"] + 1, "tokens": item["tokens"].flip(0)} for item in batches]
    loss = engine.forward_backward(later, objective).loss
    weights = engine.weights()
    gradients = gather_shards({key: weights[key].with_tensor(value) for key, value in engine.gradients().items()})
    engine.step(RATE, clip=1.0)
    return loss, gradients, gather_shards(engine.state_dict())


def gather_shards(tensors: Mapping[str, checkpoint.ShardedTensor | Tensor]) -> dict[str, Tensor]:
    """Return the full tensors on each rank. ZeRO shards them over ranks of `cp`, too."""
    sharded = {key: checkpoint.ShardedTensor.from_tensor(tensor) for key, tensor in tensors.items()}
    local_blocks = {
        key: [(block.offsets, block.tensor.clone()) for block in tensor.blocks] for key, tensor in sharded.items()
    }
    blocks_by_rank: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(blocks_by_rank, local_blocks)
    full = {key: tensor.tensor.new_full(tensor.global_shape, torch.nan) for key, tensor in sharded.items()}
    for blocks_by_key in blocks_by_rank:
        for key, blocks in blocks_by_key.items():
            for offsets, block in blocks:
                full[key][tuple(slice(o, o + s) for o, s in zip(offsets, block.shape, strict=True))] = block
    return full


def compute_large_errors(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Tensors beyond the bound of gradients, relative to themselves or a millionth of all."""
    assert actual.keys() == expected.keys()
    floor = 1e-6 * torch.cat([value.flatten() for value in expected.values()]).norm()
    away = {key: float((actual[key] - value).norm() / max(value.norm(), floor)) for key, value in expected.items()}
    return {key: error for key, error in away.items() if not error <= BOUND}


def moments(step: Step) -> dict[str, Tensor]:
    """AdamW's state; weights themselves move by the sign of gradients that are all but 0."""
    actual = {key: value for key, value in step[2].items() if "exp_avg" in key}
    assert actual
    return actual


def is_same_step(first: Step, second: Step) -> bool:
    """To the bit."""
    pairs = [(actual, expected) for actual, expected in zip(first[1:], second[1:], strict=True)]
    assert all(actual.keys() == reference.keys() for actual, reference in pairs)
    return first[0] == second[0] and all(
        torch.equal(value, reference[key]) for actual, reference in pairs for key, value in actual.items()
    )


RESUMED = [
    pytest.param("llama", 4, (4, 2, 1), id="llama from cp4"),
    pytest.param(PATTERN_NAMES[0], 4, (4, 2, 1), id="decoders from cp4", marks=EXTENDED),
    pytest.param(PATTERN_NAMES[1], 4, (4, 2, 1), id="encoders from cp4", marks=EXTENDED),
    pytest.param(PATTERN_NAMES[0], 1, (4, 2), id="decoders from 1", marks=EXTENDED),
    *(
        pytest.param(name, saved, opened, id=f"{name}, from {saved}", marks=SLOW)
        for name, saved, opened in (
            (PATTERN_NAMES[0], 2, (4, 2, 1)),
            (PATTERN_NAMES[1], 2, (4, 2, 1)),
            (PATTERN_NAMES[1], 1, (4, 2)),
            (f"{PATTERN_NAMES[0]}, rows of 11 tokens", 4, (4, 3, 2, 1)),
            ("latent, patterns", 4, (4, 2, 1)),
        )
    ),
]


@pytest.mark.parametrize(("name", "saved", "opened"), RESUMED)
def test_the_next_step_is_that_of_the_run_that_saved(
    workers: Workers, tmp_path: Path, name: str, saved: int, opened: tuple[int, ...]
) -> None:
    assert name in CONTEXT_MODELS
    expected = workers.run(next_step, saved, name, tmp_path, None, timeout=180.0)
    source = checkpoint.find_latest(tmp_path)
    assert source is not None
    for ranks in opened:
        results = workers.run(next_step, ranks, name, tmp_path, source, timeout=180.0)
        if ranks == saved:
            assert all(
                is_same_step(value, expected_value) for value, expected_value in zip(expected, results, strict=True)
            )
            continue
        for value in results:
            assert value[0] == pytest.approx(expected[0][0], rel=1e-12)
            assert compute_large_errors(value[1], expected[0][1]) == {}
            assert compute_large_errors(moments(value), moments(expected[0])) == {}
