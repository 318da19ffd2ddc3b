"""The comparison of one device with rows that are cut over ranks."""

from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatfm.config import ModelConfig, ParallelConfig
from megatfm.engines.native.engine import NativeEngine
from megatfm.layers.initialisation import initialise
from megatfm.models import build
from megatfm.ops.attention import block_sparse
from tests.support.batches import family_batch
from tests.support.context_models import CONTEXT_MODELS
from tests.support.parity import backward_on_one_device, build_engine, model_gradient_errors
from tests.support.uninitialized_memory import fill_memory_with_nan

CONTEXT_ROWS = 4


@cache
def context_case(name: str) -> tuple[ModelConfig, dict[str, Tensor], nn.Module, Any, float]:
    """A model with the gradients of one device, the batch and objective that they are of, and the loss.

    A process computes them once: several numbers of ranks are compared with the same.
    """
    config = CONTEXT_MODELS[name]
    batch, model = family_batch(config), build(config).double().train()
    batch = {field: values[1::2] for field, values in batch.items()}
    if "prefix" in name:
        batch["prefix"] = (batch["positions"] < 2) & (batch["documents"] >= 0)
    if "boundary" in config.extra_heads:  # spans of three and of one, also where a row is cut
        for row, at in enumerate((4, 4, 5, 5)):
            batch["span_left"][row, at : at + 3] = torch.tensor([1, 2, 3])
            batch["span_right"][row, at : at + 3] = torch.tensor([3, 2, 1])
    if "11" in name:
        batch = {field: values if field == "keys" else values[:, :11] for field, values in batch.items()}
        batch["positions"] = torch.arange(11).expand(CONTEXT_ROWS, -1)
        del batch["documents"]
    initialise(model, 7)
    return config, batch, model, *backward_on_one_device(config, model, batch)


def context_microbatches(engine: NativeEngine, batch: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """This data rank's rows, one and then the others."""
    rows = CONTEXT_ROWS // engine.mesh.data_ranks
    rows_of_rank = {key: value[engine.mesh.data_rank * rows :][:rows] for key, value in batch.items()}
    return [
        {key: value[:1] for key, value in rows_of_rank.items()},
        {key: value[1:] for key, value in rows_of_rank.items()},
    ]


@fill_memory_with_nan()
def compare_context_layouts(name: str, layouts: dict[str, ParallelConfig]) -> list[str]:
    """Loss and every gradient of these layouts, on memory of NaN; returns the layouts that were compared.

    Kernels have blocks of four tokens, so that a rank's part is several, of which queries see some.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_sparse, "SIZE", 4)
        return _compare(name, layouts)


def _compare(name: str, layouts: dict[str, ParallelConfig]) -> list[str]:
    config, batch, model, objective, loss = context_case(name)
    for layout, parallel in layouts.items():
        engine = build_engine(config, parallel)
        stats = engine.forward_backward(context_microbatches(engine, batch), objective)
        assert stats.loss == pytest.approx(loss, rel=1e-12), layout
        assert model_gradient_errors(engine, model) == {}, layout
    if dist.get_world_size() == 2:  # what differs without gradients, two ranks show
        evaluated = engine.evaluate(context_microbatches(engine, batch), objective)
        assert evaluated.target_counts == stats.target_counts
    return list(layouts)
