"""The search over layouts, against every layout estimated in full, and against the rules of configs."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from megatfm.config import Config, ParallelConfig, load_config
from megatfm.errors import UsageError
from megatfm.estimate.devices import GIB, Cluster, load_cluster
from megatfm.estimate.estimator import Estimate, Estimator, open_estimator
from megatfm.estimate.profile import LocalModel
from megatfm.estimate.quick import QuickScores, RankSums
from megatfm.estimate.search import MAX_MEMORY_SHARE, RECOMPUTE, find_refusal, iter_layouts, order_estimates, search
from megatfm.estimate.step_time import StepTime
from megatfm.estimate.text import describe_layout, explain_loss
from megatfm.estimate.traffic import make_axes
from megatfm.verify.shrink import shrink


@pytest.fixture(scope="module")
def cluster() -> Cluster:
    return load_cluster("h100", 4, gpus_per_node=2)


@pytest.fixture(scope="module")
def opened(cluster: Cluster) -> Iterator[Estimator]:
    config = load_config("llama3-8b", ["data.tokenizer=t", "data.train=d"])
    small, _ = shrink(config.model_copy(update={"parallel": ParallelConfig(pp=4, dp_shard=1)}))
    changes = {"train.precision": "bf16", "train.global_batch": 8, "train.micro_batch": 1, "parallel.pp": 1}
    with open_estimator(small.with_changes({**changes, "parallel.dp_shard": -1}), cluster, (1, 2)) as actual:
        yield actual


def test_the_best_of_all_layouts_is_found(opened: Estimator) -> None:
    best = search(opened)
    every = [opened.estimate(config) for config in iter_layouts(opened, Counter())]
    assert len(every) == best.tried - best.refused.total()
    fastest = min(one.time.step for one in every)
    assert best.best[0].time.step == pytest.approx(fastest, rel=0.02)
    assert len({describe_layout(one) for one in every}) == len(every) > 100  # each layout has its own words


def test_of_layouts_as_fast_as_the_model_can_tell_the_roomiest_comes_first(opened: Estimator) -> None:
    plain = opened.estimate(opened.base)

    def make(seconds: float, gib: float, tp: int = 1) -> Estimate:
        memory = [replace(plain.memory[0], activations=int(gib * GIB))]
        config = plain.config.with_changes({"parallel.tp": tp, "parallel.dp_shard": 4 // tp})
        return replace(plain, config=config, memory=memory, time=StepTime(matmul=seconds))

    fastest, roomy, slow = make(1.0, 60), make(1.009, 30), make(1.02, 10)
    on_two_axes = make(1.004, 30.01, tp=2)
    assert order_estimates([slow, fastest, on_two_axes, roomy]) == [roomy, fastest, on_two_axes, slow]
    assert explain_loss(fastest, roomy) == "0.9 % faster, which is within the model's error"
    assert order_estimates([]) == []


def test_scores_are_near_the_estimates_in_full(opened: Estimator) -> None:
    scores, memory, seconds = QuickScores(opened), [], []
    for config in iter_layouts(opened, Counter()):
        full = opened.estimate(config)
        score = scores.score(config, full.microbatches)
        memory.append(score.n_bytes / full.worst.total)
        seconds.append(score.seconds / full.time.step)
    assert len(memory) > 100
    assert 0.97 < min(memory) <= max(memory) < 1.03
    ordered = sorted(seconds)
    assert 0.9 < ordered[len(ordered) // 10] <= ordered[-len(ordered) // 10] < 1.1


def test_traffic_in_float64_has_twice_the_bytes_of_float32(opened: Estimator) -> None:
    scores, sums = QuickScores(opened), RankSums(*([np.array([1e9])] * 8))
    gather_and_reduce = {}
    for precision in ("fp32", "fp64"):
        config = opened.base.with_changes({"train.precision": precision, "parallel.dp_shard": 4})
        seconds = scores._estimate_data_seconds(config, make_axes(config.parallel), sums)
        gather_and_reduce[precision] = np.array(seconds)
    assert gather_and_reduce["fp64"] == pytest.approx(2 * gather_and_reduce["fp32"], rel=1e-3)


def test_a_layout_is_legal_if_and_only_if_its_config_is_valid(opened: Estimator) -> None:
    base: Config = opened.base
    yielded = {config.parallel.model_dump_json() + config.train.recompute for config in iter_layouts(opened, Counter())}
    sections = {config.parallel.model_dump_json(): config.parallel for config in iter_layouts(opened, Counter())}
    n_refused = 0
    for parallel in sections.values():
        for recompute in RECOMPUTE:
            keys = {f"parallel.{key}": value for key, value in parallel}
            try:
                base.with_changes({**keys, "train.recompute": recompute})
                assert parallel.model_dump_json() + recompute in yielded
            except UsageError:
                n_refused += 1
                changed = base.train.model_copy(update={"recompute": recompute})
                assert find_refusal(base.model_copy(update={"parallel": parallel, "train": changed}))
    assert n_refused


def test_the_smallest_layout_is_named_where_none_fits(opened: Estimator) -> None:
    tiny = load_cluster("h100", 4, gpus_per_node=2)
    device = type(tiny.device)(**{**vars(tiny.device), "memory_gib": 0.1})
    best = search(Estimator(opened.base, Cluster(device, tiny.node, 4)))
    assert not best.best
    assert best.smallest is not None
    assert best.smallest.score.n_bytes > MAX_MEMORY_SHARE * device.memory_bytes


@pytest.mark.parametrize(
    "preset",
    ["electra-small", "vit-s16", "xlnet-base", "longformer-base", "spanbert-base", "clip-b32", "llava-1.5-7b"],
)  # fmt: skip
def test_a_model_that_depends_on_values_is_refused_under_cp_alone(preset: str) -> None:
    config = load_config(preset)
    LocalModel.check(config)
    shared = config.model_copy(update={"parallel": config.parallel.model_copy(update={"cp": 2})})
    with pytest.raises(UsageError, match=r"depends? on the values of a batch"):
        LocalModel.check(shared)
