"""Blocks that are compiled, in pipeline stages: the gradients of one device."""

import warnings
from collections.abc import Sequence

import pytest
import torch
from torch import nn

from megatfm.config import ParallelConfig
from tests.support.batches import family_case
from tests.support.models import ADAMW
from tests.support.parity import (
    build_engine,
    model_gradient_errors,
    one_device_reference,
    uneven_microbatches,
)
from tests.support.workers import Workers


def compare(names: Sequence[str], layouts: Sequence[ParallelConfig], backend: str) -> int:
    """Without a backend that makes machine code: that takes minutes."""
    compiled = [0]

    def compile_block(block: nn.Module, *, fullgraph: bool, dynamic: bool) -> None:
        compiled[0] += 1
        block._compiled_call_impl = torch.compile(
            block._call_impl, fullgraph=fullgraph, dynamic=dynamic, backend=backend
        )

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own: its tracer looks at .grad of what is no leaf
        patch.setattr(nn.Module, "compile", compile_block)
        for name in names:
            config, batch = family_case(name, deep=False)
            model, objective, loss = one_device_reference(config, batch)
            for parallel in layouts:
                engine = build_engine(config, parallel, ADAMW, compile_blocks=True)
                stats = engine.forward_backward(uneven_microbatches(engine, batch), objective)
                assert stats.loss == pytest.approx(loss, rel=1e-12)
                assert model_gradient_errors(engine, model) == {}
                torch._dynamo.reset()
    return compiled[0]


@pytest.mark.parametrize(
    ("schedules", "backend"),
    [
        (["1f1b"], "eager"),
        pytest.param(["gpipe", "1f1b", "interleaved"], "aot_eager", marks=pytest.mark.slow),
    ],
    ids=["as dynamo has it", "through autograd's graphs"],
)
def test_compiled_blocks_in_stages_have_the_gradients_of_one_device(
    workers: Workers, schedules: list[str], backend: str
) -> None:
    layouts = [ParallelConfig(pp=2, pp_schedule=schedule) for schedule in schedules]
    blocks = workers.run(compare, 2, ["llama"], layouts, backend, timeout=280.0)
    assert sum(blocks) == 2 * len(layouts)
