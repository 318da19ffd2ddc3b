"""Rows that are cut: with blocks that are computed again or compiled, and what ranks send one another."""

import itertools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatfm.config import ParallelConfig
from megatfm.config.objective import (
    CausalObjective,
    MaskedObjective,
    PermutationObjective,
    SpanBoundaryObjective,
    SpanCorruptionObjective,
)
from tests.support.context_models import CONTEXT_LAYOUTS, CONTEXT_MODELS, CP2_ALONE
from tests.support.context_parity import compare_context_layouts, context_case, context_microbatches
from tests.support.grids import SLOW
from tests.support.models import ADAMW
from tests.support.parity import build_engine, model_gradient_errors
from tests.support.traffic import traffic_config, traffic_mismatches
from tests.support.workers import Workers


def compare_recomputed(names: Sequence[str]) -> None:
    """As `compare`, with blocks whose forward pass, and what travels in it, is run again."""
    for name, recomputed in zip(names, itertools.cycle(("full", "selective")), strict=False):
        config, batch, model, objective, loss = context_case(name)
        engine = build_engine(config, ParallelConfig(cp=2), ADAMW, recomputed=recomputed)
        stats = engine.forward_backward(context_microbatches(engine, batch), objective)
        assert stats.loss == pytest.approx(loss, rel=1e-12), name
        assert model_gradient_errors(engine, model) == {}, name


def test_recomputed_blocks_have_the_gradients_of_one_device(workers: Workers) -> None:
    names = (
        "patterns of decoders",
        "patterns of encoders",
        "xlnet",
        "t5 positions, patterns",
        "latent",
        "deberta",
        "soft experts",
    )
    workers.run(compare_recomputed, 2, names, timeout=180.0)


AGAIN = ("cp2", "cp2, recomputed")
TRAFFIC: dict[int, dict[str, tuple[str, ...]]] = {
    2: {
        "llama": (*AGAIN, "cp2 by heads, recomputed"),
        "patterns of decoders": AGAIN,
        "patterns of encoders": ("cp2", "cp2, recomputed, one document"),
        "latent, patterns": (*AGAIN, "cp2 by heads"),
        "alibi, patterns": AGAIN,
        "t5": CP2_ALONE,
        "bert": CP2_ALONE,
        "deberta": AGAIN,
        "xlnet": AGAIN,
        "linformer of an encoder-decoder": CP2_ALONE,
        "soft experts": (*AGAIN, "ep2 × cp2", "ep2 × cp2, recomputed"),
    },
    3: {"soft experts, rows of 11 tokens": ("cp3",)},
    4: {
        "soft experts": ("ep4 of 2 × cp2",),
        "llama": ("cp4 by heads", "cp4 by a ring"),
        "latent, patterns": ("cp4", "cp2 × tp2", "pp2 zbv × cp2"),
        "patterns of decoders": ("cp4",),
        "patterns of encoders": ("cp4, one document",),
    },
}
OBJECTIVES = {
    "t5": SpanCorruptionObjective(),
    "patterns of encoders": MaskedObjective(),
    "deberta": MaskedObjective(),
    "bert": SpanBoundaryObjective(),
    "xlnet": PermutationObjective(),
    "soft experts": MaskedObjective(),
    "soft experts, rows of 11 tokens": MaskedObjective(),
}
OBJECTIVES["linformer of an encoder-decoder"] = SpanCorruptionObjective()


@pytest.mark.parametrize("ranks", TRAFFIC)
def test_counted_traffic_is_expected(workers: Workers, ranks: int) -> None:
    configs = {}
    for name, layouts in TRAFFIC[ranks].items():
        for layout in layouts:
            which, _, again = layout.partition(", ")
            objective = OBJECTIVES.get(name, CausalObjective())
            parallel = CONTEXT_LAYOUTS[ranks][which]
            parallel = parallel if parallel.ep > 1 else parallel.model_copy(update={"dp_shard": 1})
            model = CONTEXT_MODELS[name].with_changes(
                {"extra_heads": {"boundary": {}} if name == "bert" else {}}
            )
            recompute = "full" if "recomputed" in again else "none"
            config = traffic_config(model, objective, parallel, recompute=recompute)
            full = {"attend_across_documents": "one document" in again}
            configs[f"{name}, {layout}"] = config.model_copy(
                update={"data": config.data.model_copy(update=full)}
            )
    assert traffic_mismatches(workers, ranks, configs) == {}


def compare_compiled(names: Sequence[str], name_of_backend: str) -> int:
    """As `compare`, with blocks that are compiled but for what travels; how many calls of dynamo's made graphs."""
    graphs = [0]

    def backend(graph: torch.fx.GraphModule, inputs: Sequence[Tensor]) -> Callable[..., Any]:
        graphs[0] += 1
        return eager(graph, inputs)

    def compile_block(block: nn.Module, **options: Any) -> None:
        block._compiled_call_impl = torch.compile(block._call_impl, backend=backend, **options)  # type: ignore[assignment]

    eager: Callable[..., Any] = torch._dynamo.lookup_backend(name_of_backend)
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own: its tracer looks at .grad of what is no leaf
        patch.setattr(nn.Module, "compile", compile_block)
        for name in names:
            config, batch, model, objective, loss = context_case(name)
            engine = build_engine(config, ParallelConfig(cp=2), ADAMW, compile_blocks=True)
            stats = engine.forward_backward(context_microbatches(engine, batch), objective)
            assert stats.loss == pytest.approx(loss, rel=1e-12), name
            assert model_gradient_errors(engine, model) == {}, name
            torch._dynamo.reset()
    return graphs[0]


@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=SLOW)])
def test_compiled_blocks_have_the_gradients_of_one_device(workers: Workers, backend: str) -> None:
    """Without a backend that makes machine code: that takes minutes."""
    assert min(workers.run(compare_compiled, 2, ["latent"], backend, timeout=180.0)) >= 2


def test_soft_mixtures_share_experts_and_keep_sums(workers: Workers) -> None:
    """Also where rows are whole, and where blocks are computed again in part."""
    name, layout = "soft experts", ParallelConfig(dp_shard=2, ep=2)
    assert workers.run(compare_context_layouts, 2, name, {"ep2": layout}, timeout=180.0)[0] == ["ep2"]
    configs = {
        f"ep{item.ep}, cp{item.cp}, {recompute}": traffic_config(
            CONTEXT_MODELS[name], MaskedObjective(), item, recompute=recompute
        )
        for item in (
            layout,
            CONTEXT_LAYOUTS[2]["cp2"].model_copy(update={"dp_shard": 1}),
            CONTEXT_LAYOUTS[2]["ep2 × cp2"],
        )
        for recompute in ("none", "selective")
    }
    assert traffic_mismatches(workers, 2, configs) == {}
