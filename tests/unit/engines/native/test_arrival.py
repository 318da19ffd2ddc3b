"""ZeRO 1: moved weights arrive while the next forward pass runs, and every block has its own before it runs."""

import pytest
import torch
from torch import Tensor

from megatfm.config import ParallelConfig
from megatfm.engines.native import replicated
from megatfm.engines.native.engine import NativeEngine
from megatfm.engines.native.replicated import Replicated
from megatfm.parallel.layout import transformer_blocks
from tests.support.batches import CAUSAL, global_batch
from tests.support.models import ADAMW, TIED_MODEL
from tests.support.parity import build_engine, microbatches
from tests.support.workers import Workers


def trained(engine: NativeEngine) -> list[dict[str, Tensor]]:
    """Gradients of three steps, each of which sees the weights that the one before has moved."""
    actual = []
    for step in range(3):
        engine.forward_backward(microbatches(engine, global_batch(seed=step)), CAUSAL)
        actual.append({name: gradient.clone() for name, gradient in engine.gradients().items()})
        engine.step(1e-2, clip=1.0)
    return actual


def compare() -> None:
    model, parallel = TIED_MODEL.with_changes({"n_layers": 4}), ParallelConfig(dp_shard=2, zero=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replicated, "BUCKET_ELEMENTS", 5000)
        engine = build_engine(model, parallel, ADAMW, precision="fp32")
        data, under_way = engine.data, []
        assert isinstance(data, Replicated)
        for block in transformer_blocks(engine.model):
            block.register_forward_pre_hook(lambda *_: under_way.append(len(data._pending_parameters)))
        arriving = trained(engine)
        first, second = (
            under_way[-8:-4],
            under_way[-4:],
        )  # the last step's micro-batches, before each of four blocks
        assert first[0] > first[1] > first[2] > first[3] == 0, first
        assert not any(second)
        assert len(data._pending_parameters) == len(data._buckets)
        evaluated = engine.evaluate(microbatches(engine, global_batch(seed=9)), CAUSAL).loss
        patch.setattr(Replicated, "_register_parameter_waits", lambda *_: None)
        arrive = Replicated._finish_parameter_sync
        changed = Replicated.weights_changed

        def at_once(self: Replicated, frozen: bool = False) -> None:
            changed(self, frozen)
            arrive(self, range(len(self._buckets)))

        patch.setattr(Replicated, "weights_changed", at_once)
        other = build_engine(model, parallel, ADAMW, precision="fp32")
        for mine, expected in zip(arriving, trained(other), strict=True):
            assert all(torch.equal(mine[name], gradient) for name, gradient in expected.items())
        assert evaluated == other.evaluate(microbatches(other, global_batch(seed=9)), CAUSAL).loss


def read_by_hand() -> None:
    """What an objective, a diagnostic or a notebook does between steps: a part runs alone, or weights are looked at."""
    model = TIED_MODEL.with_changes({"n_layers": 4})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replicated, "BUCKET_ELEMENTS", 5000)
        engine = build_engine(model, ParallelConfig(dp_shard=2, zero=1), ADAMW, precision="fp32")
        data, module = engine.data, engine.model
        assert isinstance(data, Replicated)
        engine.forward_backward(microbatches(engine, global_batch(seed=1)), CAUSAL)
        engine.step(1e-2, clip=1.0)
        assert len(data._pending_parameters) == len(data._buckets) > 4
        attention = list(transformer_blocks(module))[3].attn
        names = [
            name
            for name, p in module.named_parameters()
            if any(p is parameter for parameter in attention.parameters())
        ]
        with torch.no_grad():
            for part in attention.children():
                weight = getattr(part, "weight", None)
                if isinstance(weight, Tensor):
                    part(torch.zeros(1, weight.shape[1]))
        early = {name: module.get_parameter(name).clone() for name in names}
        moved = dict(engine.model.named_parameters())
        assert not data._pending_parameters
        assert names
        for name in names:
            assert torch.equal(early[name], moved[name]), name


def test_parts_that_run_alone_have_the_weights_of_the_last_step(
    workers: Workers,
) -> None:
    workers.run(read_by_hand, 2)


def test_blocks_wait_for_their_own_weights_alone(workers: Workers) -> None:
    workers.run(compare, 2)
