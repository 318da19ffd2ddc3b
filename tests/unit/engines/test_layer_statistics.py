"""Root mean squares by layer, against one device's tensors, under every kind of layout."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megatfm.config import ModelConfig, ParallelConfig
from megatfm.engines.native.engine import NativeEngine
from megatfm.parallel.layout import transformer_blocks
from tests.support.batches import CAUSAL, family_case, global_batch
from tests.support.models import ADAMW, TIED_MODEL, UNTIED_MODEL
from tests.support.parity import (
    build_engine,
    microbatches,
    one_device,
    one_device_gradients,
    one_device_reference,
    uneven_microbatches,
)
from tests.support.workers import Workers

LAYOUTS = [
    ParallelConfig(dp_shard=2, zero=0),
    ParallelConfig(dp_shard=2),
    ParallelConfig(tp=2),
    ParallelConfig(tp=2, sequence_parallel=False),
]
STAGES = {
    2: [ParallelConfig(pp=2), ParallelConfig(pp=2, pp_schedule="zbv")],
    4: [ParallelConfig(pp=2, tp=2), ParallelConfig(pp=2, dp_shard=2)],
}


def expected(config: ModelConfig = UNTIED_MODEL) -> dict[str, dict[str, float]]:
    """By plain tensors: every parameter and gradient of a layer in one vector."""
    model, batch = one_device(config), global_batch(seed=3)
    outputs = {}
    for path, module in model.named_modules():
        if module in set(transformer_blocks(model)):
            module.register_forward_hook(lambda _, __, y, path=path: outputs.update({path: y.detach()}))
    _, gradients = one_device_gradients(model, batch)
    actual: dict[str, dict[str, float]] = {}
    layers = ["decoder.embedding", "decoder.layers.0", "decoder.layers.1", "decoder.norm", "head"]
    for layer in layers:
        names = [name for name, _ in model.named_parameters() if name.startswith(f"{layer}.")]
        if not names:  # a tied head
            continue
        weights = torch.cat([model.get_parameter(name).detach().flatten() for name in names])
        gradient = torch.cat([gradients[name].flatten() for name in names])
        actual[layer] = {"weight": float(weights.square().mean() ** 0.5)}
        actual[layer]["gradient"] = float(gradient.square().mean() ** 0.5)
        if layer in outputs:
            actual[layer]["activation"] = float(outputs[layer].square().mean() ** 0.5)
    return actual


def compare(config: ModelConfig, make: Callable[..., NativeEngine], layouts: list[ParallelConfig]) -> None:
    wanted = expected(config)
    for parallel in layouts:
        engine = make(config, parallel, ADAMW)
        for watches in (True, False):
            engine.forward_backward(
                microbatches(engine, global_batch(seed=3)), CAUSAL, record_activations=watches
            )
            statistics = engine.layer_statistics()
            engine.zero_grad()
            assert statistics.keys() == wanted.keys()
            for layer, kinds in statistics.items():
                assert set(kinds) == set(wanted[layer]) - (set() if watches else {"activation"})
                for kind, value in kinds.items():
                    assert value == pytest.approx(wanted[layer][kind], rel=1e-9), (parallel, layer, kind)


def test_norms_are_those_of_one_device(workers: Workers) -> None:
    workers.run(compare, 2, UNTIED_MODEL, build_engine, LAYOUTS)


@pytest.mark.parametrize("ranks", STAGES)
def test_norms_over_pipeline_stages_are_those_of_one_device(workers: Workers, ranks: int) -> None:
    """Every rank knows all layers by their global names; a tied table, which two stages hold, counts once."""
    workers.run(compare, ranks, TIED_MODEL, build_engine, STAGES[ranks])


def compare_content() -> None:
    """XLNet's blocks give two streams; what the second one is padded with depends on the micro-batch."""
    config, batch = family_case("xlnet", False)
    model, objective, _ = one_device_reference(config, batch)
    outputs: dict[str, Tensor] = {}
    inside = set(transformer_blocks(model))
    for path, module in model.named_modules():
        if module in inside:
            module.register_forward_hook(lambda _, __, streams, path=path: outputs.update({path: streams[0]}))
    with torch.no_grad():
        objective(model, batch)
    engine = build_engine(config, ParallelConfig(dp_shard=2), ADAMW)
    engine.forward_backward(uneven_microbatches(engine, batch), objective, record_activations=True)
    statistics = engine.layer_statistics()
    *earlier, last = outputs
    assert earlier
    for path in earlier:
        assert statistics[path]["activation"] == pytest.approx(
            float(outputs[path].square().mean() ** 0.5), rel=1e-9
        )
    assert outputs[last] is None
    assert "activation" not in statistics[last]


def test_the_content_stream_counts(workers: Workers) -> None:
    workers.run(compare_content, 2)
