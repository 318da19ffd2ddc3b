"""`megatfm verify` says yes to right layouts, and no, by name, to planted faults."""

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import tomli_w

from megatfm.commands.verify import add_verify_arguments, verify_command
from megatfm.config import load_config
from megatfm.config.deepspeed_json import make_deepspeed_json
from megatfm.errors import MegatfmError, UsageError
from megatfm.verify import rank_processes
from megatfm.verify.traffic import CollectiveTraffic
from megatfm.verify.verify import GradientComparison, verify
from tests.support.small_runs import VERIFIED_CONFIG

PLUGIN = """
import multiprocessing, os, time
from dataclasses import replace
import megatfm.engines.base as base
import megatfm.engines.native.fully_sharded as fully_sharded
import megatfm.engines.native.engine as native
import megatfm.engines.pipeline as pipelined
import megatfm.engines.native.replicated as replicated
import megatfm.engines.state as ties
import megatfm.parallel.collectives as collectives
import megatfm.parallel.styles as styles

def norm_row_not_partial():
    styles.STYLES._parts["sequence_parallel"] = replace(styles.SEQUENCE_PARALLEL, gradient="replicated")

def adjoint_dropped():
    collectives._CopyToGroup.backward = staticmethod(lambda ctx, gradient: (gradient, None))

def tie_not_summed():
    ties.TiedParameters.all_reduce_gradients = lambda self, gradients: None

def needless_transfer():
    import torch, torch.distributed as dist
    real = pipelined.PipelineForwardBackward.step
    def step(self, *args):
        found = real(self, *args)
        if self._rank == 0:
            dist.send(torch.zeros(8), group=self._group, group_dst=1)
        else:
            dist.recv(torch.zeros(8), group=self._group, group_src=0)
        return found
    pipelined.PipelineForwardBackward.step = step

def needless_sum():
    real = base.all_reduce_partial_gradients
    def twice(gradients, layout, mesh):
        real(gradients, layout, mesh)
        mesh.all_reduce_(gradients["head.weight"].new_zeros(3), ("tp",))
    base.all_reduce_partial_gradients = twice

def needless_reduction():
    real = fully_sharded.FullySharded.start_microbatch
    fully_sharded.FullySharded.start_microbatch = lambda data, is_last: real(data, True)

def frozen_weights_are_gathered():
    real = replicated.Replicated.sync_weights
    replicated.Replicated.sync_weights = lambda data, frozen=False: real(data, True)

def frozen_gradients_travel():
    real = replicated.Replicated._assign
    def dealt(data, parameters, layout):
        for parameter in parameters.values():
            parameter.requires_grad_(True)
        return real(data, data._parameters if not hasattr(data, "_buckets") else {}, layout)
    replicated.Replicated._assign = dealt

def reach_misses_a_key():
    import megatfm.layers.attention.dot_product as core
    real = core.find_reachable_keys
    def reached(*args):
        found = real(*args)
        return found if found is None else found[1:]
    core.find_reachable_keys = reached

def weights_are_multiplied():
    import torch
    real = torch.optim.AdamW.step
    def step(optimizer, *args):
        real(optimizer, *args)
        with torch.no_grad():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.mul_(-3)
    torch.optim.AdamW.step = step

def nothing_is_banded():
    from megatfm.ops.attention import mask, tile
    tile.BlockAttentionPlan.is_banded = property(
        lambda plan: all(isinstance(visit, mask.Band) for visit in plan.visits), lambda plan, value: None
    )

def on_rank_1(act):
    original = native.NativeEngine.forward_backward
    def patched(engine, *args, **how):
        if engine.mesh.rank("dp_shard") == 1:
            act()
        return original(engine, *args, **how)
    native.NativeEngine.forward_backward = patched

def hang():
    on_rank_1(lambda: time.sleep(600))

def die():
    on_rank_1(lambda: os._exit(3))

if multiprocessing.parent_process():  # only in the ranks, not in the process that compares
    FAULT()
"""


Run = Callable[..., tuple[int, GradientComparison]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """`run("parallel.tp=2", fault="die")`: exit code and comparison of the command, with a fault in the ranks."""
    comparisons: list[GradientComparison] = []
    monkeypatch.setattr(
        "megatfm.verify.verify.verify", lambda *args: comparisons.append(verify(*args)) or comparisons[-1]
    )
    monkeypatch.syspath_prepend(tmp_path)

    def run(*words: str, fault: str = "") -> tuple[int, GradientComparison]:
        (tmp_path / "config.toml").write_text(tomli_w.dumps(VERIFIED_CONFIG), encoding="utf-8")
        if fault:
            name = f"planted_{fault}"
            (tmp_path / f"{name}.py").write_text(PLUGIN.replace("FAULT", fault), encoding="utf-8")
            words = (f'plugins=["{name}"]', *words)
        parser = argparse.ArgumentParser()
        add_verify_arguments(parser)
        code = verify_command(parser.parse_args([str(tmp_path / "config.toml"), *words]))
        return code, comparisons[-1]

    return run


def test_tensor_parallelism_is_the_same_and_moves_what_it_should(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    code, comparison = run("parallel.tp=2", "model.embedding.tied=false", "--all")
    assert code == 0
    printed, said = capsys.readouterr()
    assert "small: a small copy of the model takes one step under this layout, and one on one process\n" in said
    assert "model.n_layers 6 → 2" in printed
    assert all(gradient.name in printed for gradient in comparison.gradients)
    assert len(comparison.gradients) == 21
    assert "Same computation" in printed
    # Korthikanti et al. 2022: 8bsh(t−1)/t elements per layer and micro-batch, and one pair each way at both ends.
    model = comparison.config.model
    residual = 2 * 64 * model.d_model * 8 // 2  # bytes that a ring of two sends of one float64 residual stream
    half = 2 * (4 * model.n_layers + 2) * residual // 1
    flows = {flow.collective: flow for flow in comparison.traffic if flow.axis == "tp"}
    loss = 2 * 3 * (2 * 64) * 8  # in both micro-batches one message of three numbers a token
    assert flows["all_gather"] == CollectiveTraffic("tp", "all_gather", 2 * (4 * model.n_layers + 2) + 2, half + loss)
    assert flows["reduce_scatter"].sent_bytes == half


def test_without_sequence_parallelism(run: Run) -> None:
    assert run("parallel.tp=2", "parallel.sequence_parallel=false")[0] == 0


def test_sharded_data_parallelism_moves_its_gradients_once(run: Run) -> None:
    code, comparison = run()  # dp_shard = −1 becomes 2
    assert code == 0
    parameters = sum(math.prod(gradient.shape) for gradient in comparison.gradients)
    flows = {flow.collective: flow for flow in comparison.traffic if flow.axis == "dp_shard"}
    assert flows["reduce_scatter"].sent_bytes == parameters * 8 // 2


def test_pipelines_are_the_same_and_send_what_they_should(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    code, comparison = run("parallel.pp=2", "parallel.pp_schedule=zbv", "parallel.tp=2", "model.embedding.tied=true")
    assert code == 0
    assert "one step under pp 2 (zbv) × dp_replicate 1 × dp_shard 1 × tp 2 against" in capsys.readouterr().out
    assert comparison.config.model.n_layers == 4
    # Each rank is before one boundary and after another; three micro-batches of two rows.
    sent = 2 * 6 * 64 * comparison.config.model.d_model * 8 // 2
    assert [flow for flow in comparison.traffic if flow.collective == "send"] == [
        CollectiveTraffic("pp", "send", 6, sent)
    ]
    assert comparison.expected_traffic["pp", "send"] == (6, sent)
    assert {axis for axis, _ in comparison.expected_traffic} == {"pp", "tp"}
    assert [(flow.axis, flow.collective) for flow in comparison.traffic] == sorted(comparison.expected_traffic)


def test_an_axis_without_a_closed_form_says_why(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    code, comparison = run("parallel.tp=2", "train.recompute=1 kB")
    assert (code, comparison.expected_traffic) == (0, {})
    output = capsys.readouterr().out
    assert "The traffic over tp is not predicted: train.recompute = '1 kB': blocks are" in output


@pytest.mark.parametrize(("tuned", "expected"), [
    (None, {"reduce_bucket_size": 2**20}),
    ({}, {"reduce_bucket_size": 2**20}),
    ({"reduce_bucket_size": 10**9, "overlap_comm": False}, {"reduce_bucket_size": 2**20, "overlap_comm": False}),
    ({"reduce_bucket_size": "auto"}, {"reduce_bucket_size": 2**20}),
    ({"reduce_bucket_size": 1000}, {"reduce_bucket_size": 1000}),
])  # fmt: skip
def test_deepspeed_is_verified_with_small_buckets(
    tmp_path: Path, tuned: dict[str, object] | None, expected: dict[str, object]
) -> None:
    words = ["parallel.engine=deepspeed", "optimizer.name=adamw", "parallel.zero=2", "parallel.dp_shard=2"]
    if tuned is not None:
        (tmp_path / "mine.json").write_text(json.dumps({"wall_clock_breakdown": True, "zero_optimization": tuned}))
        words.append(f"deepspeed.json_file={tmp_path}/mine.json")
    config = rank_processes.limit_buckets(load_config("quickstart", words), tmp_path)
    values = make_deepspeed_json(config, "fp32")
    assert values["zero_optimization"].items() >= expected.items()
    assert values.get("wall_clock_breakdown", False) == (tuned is not None)


@pytest.mark.parametrize("content", ["{", "[]", '{"zero_optimization": 7}'])
def test_a_damaged_json_of_deepspeed_is_left_to_the_engine_to_refuse(tmp_path: Path, content: str) -> None:
    (tmp_path / "mine.json").write_text(content)
    words = ["parallel.engine=deepspeed", "optimizer.name=adamw", f"deepspeed.json_file={tmp_path}/mine.json"]
    config = load_config("quickstart", words)
    assert rank_processes.limit_buckets(config, tmp_path) == config


@pytest.mark.parametrize(("fault", "layout", "named"), [
    ("tie_not_summed", ["parallel.pp=2", "model.embedding.tied=true"], "embedding.tokens"),
    ("norm_row_not_partial", ["parallel.tp=2"], "norm"),
    ("adjoint_dropped", ["parallel.tp=2", "parallel.sequence_parallel=false"], "decoder.layers."),
])  # fmt: skip
def test_a_planted_fault_is_found(
    run: Run, capsys: pytest.CaptureFixture[str], fault: str, layout: list[str], named: str
) -> None:
    code, comparison = run(*layout, fault=fault)
    assert code == 1
    worst = comparison.gradients[0]
    assert named in worst.name
    assert worst.error > 1e-3
    assert f"the worst is {worst.name}" in capsys.readouterr().out
    if fault == "norm_row_not_partial":
        assert {gradient.name for gradient in comparison.gradients if gradient.is_wrong} == {
            gradient.name for gradient in comparison.gradients if "norm" in gradient.name
        }


FROZEN_BLOCK = ["parallel.dp_shard=2", "parallel.zero=1", 'train.freeze=["decoder.layers.0.*"]']


@pytest.mark.parametrize(("fault", "layout", "flow"), [
    ("needless_transfer", ["parallel.pp=2"], "send over pp"),
    ("needless_sum", ["parallel.tp=2", "train.recompute=full", "model.embedding.tied=false"], "all_reduce over tp"),
    ("needless_reduction", ["parallel.dp_shard=2"], "reduce_scatter over dp_shard"),
    ("frozen_weights_are_gathered", FROZEN_BLOCK, "all_gather over dp_shard"),
    ("frozen_gradients_travel", FROZEN_BLOCK, "reduce_scatter over dp_shard"),
])  # fmt: skip
def test_needless_traffic_is_found(
    run: Run, capsys: pytest.CaptureFixture[str], fault: str, layout: list[str], flow: str
) -> None:
    code, comparison = run(*layout, fault=fault)
    assert code == 1
    assert any(f"rank 0, {flow}: " in mismatch for mismatch in comparison.traffic_mismatches)
    if fault != "frozen_gradients_travel":  # of which nothing else is right either
        assert not comparison.wrong
        assert "DIFFERENT TRAFFIC" in (printed := capsys.readouterr().out)
        assert f"rank 0, {flow}: " in printed


def test_a_window_that_misses_a_key_of_another_rank_is_found(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    layout = ["parallel.cp=2", 'model.attention.pattern={name="window",width=32}', "--documents", "one"]
    assert run(*layout)[0] == 0
    code, comparison = run(*layout, fault="reach_misses_a_key")
    assert code == 1
    assert comparison.traffic_mismatches
    assert any("attn" in gradient.name for gradient in comparison.wrong)
    assert "model.attention.pattern.width 32 → 16" in capsys.readouterr().out


def test_an_optimizer_that_moves_weights_otherwise_is_found(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    layout = ["parallel.dp_shard=2", "parallel.zero=1"]
    assert run(*layout)[0] == 0
    code, comparison = run(*layout, fault="weights_are_multiplied")
    assert code == 1
    assert not any(gradient.is_wrong for gradient in comparison.gradients)
    assert all(gradient.is_wrong for gradient in comparison.updates)
    assert "DIFFERENT UPDATES: " in capsys.readouterr().out


def test_reads_of_unwritten_memory_are_found(run: Run) -> None:
    layout = ["parallel.cp=4", "parallel.cp_method=ring", "--documents", "long"]
    assert run(*layout)[0] == 0
    code, comparison = run(*layout, fault="nothing_is_banded")
    assert code == 1
    assert all(math.isnan(gradient.error) for gradient in comparison.wrong)


def test_a_hanging_rank_is_named(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_processes, "COLLECTIVE_SECONDS", 3.0)
    monkeypatch.setattr(rank_processes, "GRACE_SECONDS", 0.2)
    with pytest.raises(MegatfmError, match="rank 1 hangs: no answer within 3 s"):
        run(fault="hang")


def test_a_dying_rank_is_named(run: Run) -> None:
    with pytest.raises(MegatfmError, match="rank 1 failed: the process exited with 3"):
        run(fault="die")


def test_a_layout_that_cannot_be_is_a_usage_error(run: Run) -> None:
    with pytest.raises(UsageError, match=r"parallel\.tp = 2 does not divide model\.ffn\.d_ff = 61"):
        run("parallel.tp=2", "model.ffn.d_ff=61")
