"""Buffers for what goes to files: as many and as large as a step can have in use at once."""

import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from megatfm.config import load_config
from megatfm.config.deepspeed_json import derive
from megatfm.engines.deepspeed.nvme_offload import add_buffers, buffers_in_use
from megatfm.errors import UsageError
from megatfm.models import build
from megatfm.parallel.layout import TensorLayout
from megatfm.parallel.mesh import SHARD

BASE = ["data.tokenizer=t", "data.train=d", "optimizer.name=adamw", "parallel.engine=deepspeed"]
DISK = ["deepspeed.nvme_path=/disk", "deepspeed.offload_parameters=nvme", "deepspeed.offload_optimizer=nvme"]


def model_of(*overrides: str) -> nn.Module:
    with torch.device("meta"):
        return build(
            load_config("quickstart", [*BASE, "model.vocab_size=1000", "model.n_layers=4", *overrides]).model
        )


def matrices(model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.dim() > 1}


def test_two_blocks_and_what_is_outside_of_blocks_can_be_in_use() -> None:
    model = model_of()
    names = matrices(model)
    outside = {name for name in names if ".layers." not in name}
    of_one = {name for name in names if ".layers.0." in name}
    assert len(of_one) >= 6
    assert buffers_in_use(model, names) == len(outside) + 2 * len(of_one) < len(names)
    assert buffers_in_use(model, outside) == len(outside)
    assert buffers_in_use(model, set()) == 1


def test_of_a_model_with_frozen_weights_all_can_be() -> None:
    model = model_of()
    next(model.parameters()).requires_grad_(False)
    assert buffers_in_use(model, matrices(model)) == len(matrices(model))


@pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed: make deepspeed"
)
def test_a_json_may_ask_for_more_buffers_and_never_has_fewer() -> None:
    config = load_config("quickstart", [*BASE, *DISK, "model.vocab_size=30000"])
    model = build(config.model)
    layout = {name: TensorLayout(name, tuple(p.shape)) for name, p in model.named_parameters()}
    mesh = SimpleNamespace(size=lambda axis: 2 if axis == SHARD else 1)
    setup: Any = SimpleNamespace(model=model, layout=layout, mesh=mesh, precision="fp32")
    largest = max(p.numel() for p in model.parameters()) // 2
    derived = derive(config, "fp32")
    add_buffers(derived, setup)
    place = derived["zero_optimization"]["offload_param"]
    kept = {name for name, p in model.named_parameters() if p.numel() * 4 / 2 >= 2**20}
    assert kept
    assert (place["buffer_count"], place["buffer_size"]) == (buffers_in_use(model, kept), largest)
    assert derived["zero_optimization"]["offload_optimizer"]["buffer_count"] == 4
    mesh.size = lambda axis: 1
    with pytest.raises(UsageError, match="weights that one data rank holds whole"):
        add_buffers(derived, setup)
    mesh.size = lambda axis: 2 if axis == SHARD else 1
    place |= {"buffer_count": 1, "buffer_size": 10 * largest}
    derived["zero_optimization"]["offload_optimizer"]["buffer_count"] = 9
    add_buffers(derived, setup)
    assert (place["buffer_count"], place["buffer_size"]) == (buffers_in_use(model, kept), 10 * largest)
    assert derived["zero_optimization"]["offload_optimizer"]["buffer_count"] == 9
