"""On how many nodes a run fits, against what the run itself would say."""

import pytest

from megatfm.config import load_config
from megatfm.data.loader import check_global_batch
from megatfm.errors import UsageError
from megatfm.launchers.validation import layout_error, max_fitting_nodes
from megatfm.parallel.mesh import axis_sizes
from megatfm.train.corpora import batch_schedule
from megatfm.train.startup_checks import fit_layout

EXPERTS = ("model.ffn.name=moe", "model.ffn.n_experts=8", "model.ffn.top_k=2")
LAYOUTS = [
    [],
    ["data.rampup=[{steps=2, global_batch=4}, {steps=2, global_batch=16, sequence_length=64}]"],
    ["data.rampup=[{steps=2, sequence_length=64}]", "parallel.dp_replicate=2"],
    ["parallel.tp=2"],
    ["parallel.dp_replicate=2"],
    ["parallel.dp_shard=4"],
    ["parallel.pp=2", "parallel.tp=2"],
    ["parallel.dp_replicate=2", "parallel.dp_shard=2", "parallel.tp=2"],
    [*EXPERTS, "parallel.ep=2", "parallel.dp_replicate=2"],
    [*EXPERTS, "parallel.ep=4", "parallel.cp=2"],
    [*EXPERTS, "parallel.ep=4", "parallel.dp_shard=2", "parallel.tp=2", "parallel.expert_tp=folded"],
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_validation_says_what_training_would_say(layout: list[str]) -> None:
    config = load_config("quickstart", ["train.global_batch=24", "train.micro_batch=2", *layout])
    fits = []
    for processes in range(1, 33):
        try:
            sizes = axis_sizes(config.parallel, processes)
            for batch in batch_schedule(config).batches:
                check_global_batch(batch, 2, sizes["dp_replicate"] * sizes["dp_shard"])
            fits.append(processes)
        except UsageError:
            pass
    assert fits, "else this test tests nothing"
    assert [n for n in range(1, 33) if layout_error(config, n) is None] == fits


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_elastic_run_is_checked_for_the_nodes_that_it_may_have(layout: list[str]) -> None:
    words = ["train.global_batch=24", "train.micro_batch=2", "resilience.elastic=true", *layout]
    config = load_config("quickstart", words)
    fits = []
    for processes in range(1, 33):
        try:
            fitted, _ = fit_layout(config, processes)
            sizes = axis_sizes(fitted.parallel, processes)
            for batch in batch_schedule(fitted).batches:
                check_global_batch(batch, fitted.train.micro_batch, sizes["dp_replicate"] * sizes["dp_shard"])
            fits.append(processes)
        except UsageError:
            pass
    assert fits
    assert [n for n in range(1, 33) if layout_error(config, n) is None] == fits


def test_the_most_nodes_on_which_it_fits() -> None:
    config = load_config("quickstart", ["train.global_batch=8", "train.micro_batch=1"])
    assert max_fitting_nodes(config, range(2, 5), 1) == 4
    assert max_fitting_nodes(config, range(2, 4), 1) == 2, "three do not divide eight"
    assert max_fitting_nodes(config, range(3, 4), 1) is None
    assert max_fitting_nodes(config, range(5, 4), 1) is None
    huge = load_config("quickstart", ["train.global_batch=2147483646", "train.micro_batch=2147483646"])
    assert "(train.micro_batch = 1073741823 would)" in str(layout_error(huge, 2)), "at once"
    assert "is not a multiple of train.micro_batch = 1 on 3 data ranks" in str(layout_error(config, 3))


def test_a_micro_batch_that_would_fit_is_told() -> None:
    config = load_config("quickstart", ["train.global_batch=16", "train.micro_batch=16"])
    assert str(layout_error(config, 2)).endswith("on 2 data ranks (train.micro_batch = 8 would)")


@pytest.mark.parametrize("name", ["quickstart", "quickstart-moe"])
def test_small_presets_fit_the_processes_that_their_commands_start(name: str) -> None:
    config = load_config(name, [])
    assert layout_error(config, 1) is None
    assert layout_error(config, 2) is None
