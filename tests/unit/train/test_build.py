"""Stages of a built engine under tensor parallelism, against the cheapest division of the whole model."""

import pytest
import torch

from megatfm.config import Config, load_config
from megatfm.estimate.devices import load_cluster
from megatfm.estimate.estimator import estimator
from megatfm.estimate.profile import fake_ranks
from megatfm.parallel.mesh import build_mesh
from megatfm.train.build import build_engine, build_model
from megatfm.verify.expected_pipeline import divide_into_stages
from megatfm.verify.shrink import shrink


def wide_head(tp: int) -> Config:
    """Rows whose attention costs as much as the blocks' products, and a vocabulary that costs several blocks."""
    config, _ = shrink(
        load_config("llama3-8b", [f"parallel.tp={tp}", "parallel.pp=3", "parallel.dp_shard=1"])
    )
    model = config.model.with_changes({"n_layers": 9, "vocab_size": 4096})
    data = config.data.model_copy(update={"sequence_length": 512})
    return config.model_copy(update={"model": model, "data": data})


@pytest.mark.parametrize("tp", [2, 4])
def test_stages_are_those_of_the_whole_model(tp: int) -> None:
    config = wide_head(tp)
    expected = [len(stage.split_points) for stage in divide_into_stages(config, build_model(config)).stages]
    with fake_ranks(3 * tp):
        mesh = build_mesh(config.parallel, 3 * tp, "cpu")
        engine = build_engine(config, mesh, torch.device("cpu"), "fp64")
    assert engine.pipeline is not None
    assert [len(stage.split_points) for stage in engine.pipeline.stages] == expected
    with estimator(config, load_cluster("h100", 3 * tp)) as opened:
        estimated = opened.pipeline(config)
    assert [len(stage.split_points) for stage in estimated.stages] == expected
