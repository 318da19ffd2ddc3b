"""Steps on the imaginary GPU: against executed ranks, the modelled estimate, the budget of waits; owners of memory."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from megatfm.config import Config, ParallelConfig, load_config, to_toml
from megatfm.describe.per_rank import fake_ranks
from megatfm.errors import MegatfmError, UsageError
from megatfm.estimate.devices import load_cluster
from megatfm.estimate.estimator import open_estimator
from megatfm.estimate.traced import Traced, compare_with_trace, name_traced_axis, run_trace
from megatfm.estimate.traffic import make_axes
from megatfm.imaginary.guard import build_guard, load_guard
from megatfm.imaginary.ledger import Ledger
from megatfm.imaginary.step import make_batches
from megatfm.parallel.expert_parallel import dispatch_and_combine
from megatfm.parallel.mesh import CONTEXT, EXPERT, SHARD, build_mesh
from megatfm.parallel.parallelize import DataRing
from megatfm.verify.shrink import shrink
from tests.support.layouts import EXTENDED, count_sent_bytes, extend
from tests.support.workers import Workers


def small(preset: str, parallel: ParallelConfig) -> Config:
    config = load_config(preset, ["data.tokenizer=t", "data.train=d"])
    config, _ = shrink(config.model_copy(update={"parallel": parallel}))
    return config.with_changes({"train.precision": "bf16", "train.device": "auto"})


def traced(config: Config, folder: Path, world: int, rank: int) -> Traced:
    path = folder / "config.toml"
    path.write_text(to_toml(config), encoding="utf-8")
    return run_trace(str(path), [], world, rank)


@pytest.mark.usefixtures("forked_traces")
@pytest.mark.parametrize(
    ("preset", "parallel"),
    [
        ("llama3-8b", ParallelConfig(dp_shard=2, tp=2)),
        ("mixtral-8x7b", ParallelConfig(dp_shard=2, pp=2, ep=2, zero=1)),
        pytest.param("albert-base", ParallelConfig(dp_shard=2, tp=2, zero=1), marks=EXTENDED),
    ],
    ids=["llama zero3 × tp2", "mixtral zero1 × pp2 × ep2", "albert lamb zero1 × tp2"],
)
def test_an_imaginary_rank_sends_what_a_real_one_does(
    workers: Workers, tmp_path: Path, preset: str, parallel: ParallelConfig
) -> None:
    config = small(preset, parallel)
    real = workers.run(count_sent_bytes, 4, config, 4)[3]
    trace = traced(config, tmp_path, 4, 3)
    imaginary = trace.sent
    # In dense layers none; in a mixture one for each micro-batch, as rows that arrive need room.
    places = {where.rpartition(" at ")[2].partition(":")[0] for where in trace.facts["waits"]}
    assert places <= {"parallel/expert_parallel.py"}
    n_mixtures = config.model.n_layers // parallel.pp if parallel.ep > 1 else 0
    assert sum(trace.facts["waits"].values()) <= n_mixtures * trace.facts["microbatches"]
    # Rows that travel to experts depend on values; whole tensors that travel to their owners do not.
    exchanged = {key: imaginary[key] for key in real if key[1] == "all_to_all" and parallel.ep > 1}
    assert imaginary == real | exchanged


@pytest.mark.usefixtures("forked_traces")
@pytest.mark.parametrize(
    "preset", extend(["swin-t", "mvitv2-t", "xlnet-base", "t5-base"], kept=["swin-t", "xlnet-base", "t5-base"])
)
def test_the_host_waits_nowhere_in_a_step(preset: str, tmp_path: Path) -> None:
    """Smaller maps and the order of prediction are known to the host; Adafactor's norms stay on the device."""
    config = small(preset, ParallelConfig(dp_shard=2, zero=1))
    changes: dict[str, object] = {"train.global_batch": 2 * config.train.micro_batch}
    if config.model.stages is not None:
        heads = config.model.stages.n_heads[:2]
        changes |= {"model.n_layers": 3, "model.stages.n_layers": (1, 2), "model.stages.n_heads": heads}
    if config.model.n_encoder_layers:
        changes |= {"model.n_layers": 1, "model.n_encoder_layers": 1}
    trace = traced(config.with_changes(changes), tmp_path, 2, 1)
    assert trace.facts["microbatches"] == 1
    assert not trace.facts["waits"]


@pytest.mark.usefixtures("forked_traces")
def test_a_ring_of_ranks_runs_fused_kernels_alone(tmp_path: Path) -> None:
    """One for each pair of a chunk of queries and a chunk of keys: rank 0 has chunks 0 and 3 of 4, which see chunk 0,
    chunks 0 and 3, and then chunks 1 and 2 at once."""
    config = small("llama3-8b", ParallelConfig(dp_shard=1, cp=2, cp_method="ring"))
    config = config.with_changes({"model.n_layers": 2, "model.attention.head_dim": 16, "train.micro_batch": 1})
    facts = traced(config, tmp_path, 2, 0).facts
    kernels = {name: count for name, count in facts["kernels"].items() if "dot" in name or "bmm" in name}
    flash = "passes: _scaled_dot_product_flash_attention"
    assert kernels == dict.fromkeys((flash, f"{flash}_backward"), 4 * 2 * facts["microbatches"])


def test_one_of_1024_ranks_is_as_modelled() -> None:
    """Two blocks of Llama 3 70B at full width: bytes, traffic, and no tensor of all pairs of tokens."""
    overrides = [
        "model.n_layers=2", "parallel.tp=8", "parallel.dp_shard=128", "train.global_batch=256", "train.compile=false",
    ]  # fmt: skip
    traced_rank = run_trace("llama3-70b", overrides, 1024, 517)
    config = load_config("llama3-70b", overrides)
    with open_estimator(config, load_cluster("h100", 1024)) as opened:
        pairs = compare_with_trace(opened.estimate(opened.base), traced_rank)
    assert len(pairs) == 7
    for name, modelled, measured in pairs:
        assert modelled == pytest.approx(measured, rel=0.04 if name == "peak" else 0.002), name
    assert not traced_rank.facts["all_pairs"]
    assert not traced_rank.facts["waits"], "the host never waits for the device but to read the loss"
    assert any("attention by" in name for name in traced_rank.facts["kernels"])


@pytest.mark.usefixtures("forked_traces")
def test_what_can_not_be_traced() -> None:
    with pytest.raises(UsageError, match="ranks 0 to 3"):
        run_trace("gpt2-124m", [], 4, 4)
    with pytest.raises(MegatfmError, match="does not fit 3 processes"):
        run_trace("gpt2-124m", ["parallel.tp=2"], 3, 0)


def test_the_guard_is_built_once_and_says_what_it_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(MegatfmError, match=r"no g\+\+: install it, or leave --traced out"):
        build_guard(tmp_path)
    monkeypatch.setenv("CXX", "/bin/false")
    with pytest.raises(MegatfmError, match="does not build"):
        build_guard(tmp_path)
    monkeypatch.setenv("CXX", f"{tmp_path}/no-compiler -m64")
    with pytest.raises(MegatfmError, match=r"can't be built with .*no-compiler -m64 .*No such file.*set CXX or"):
        build_guard(tmp_path)
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").touch()
    with pytest.raises(MegatfmError, match=r"can't be built .* in .*/file/folder: Not a directory: set CXX or"):
        build_guard(tmp_path / "file" / "folder")


def test_a_guard_that_can_not_be_loaded_is_one_line(tmp_path: Path) -> None:
    """A shared cache may hold that of another architecture, and a power loss an empty one."""
    code = (
        "from megatfm.imaginary import guard; from megatfm.errors import MegatfmError\n"
        "from pathlib import Path; guard.build_guard = lambda: Path('guard.so').absolute()\n"
        "try: guard.load_guard()\n"
        "except MegatfmError as error: print(error)"
    )
    (tmp_path / "guard.so").touch()
    completed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert completed.stderr == ""
    assert re.match(r"the imaginary GPU's guard can't be loaded \(.*\): remove /.*/guard\.so, or set", completed.stdout)


@pytest.mark.parametrize(("options", "code", "line"), [
    (["--steps", "0"], 2, "error: --steps must be 1 or more, and --rank one of 0 to 0"),
    (["--world", "4", "--rank", "4"], 2, "and --rank one of 0 to 3, as --world is 4"),
    ([], 1, "error: the imaginary GPU needs a C++ compiler"),
])  # fmt: skip
def test_mistakes_on_the_command_line_need_no_compiler(
    options: list[str], code: int, line: str, tmp_path: Path
) -> None:
    environment = {**os.environ, "PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    environment.pop("CXX", None)
    command = [sys.executable, "-m", "megatfm.imaginary", "gpt2-124m", *options]
    completed = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert completed.returncode == code
    assert line in completed.stderr
    assert "Traceback" not in completed.stderr


def test_the_guard_must_come_before_torch() -> None:
    with pytest.raises(MegatfmError, match="must be loaded before torch"):
        load_guard()  # this process has imported torch


@pytest.mark.parametrize(
    ("preset", "documents"),
    [("gpt2-124m", set()), ("bert-base", set()), ("t5-base", {"encoder_documents", "documents"})],
    ids=["rows of one document", "masks and segments", "rows that end with padding"],
)
def test_batches_are_as_the_loader_gives_them(preset: str, documents: set[str]) -> None:
    """Documents remain only where a row has several, or padding."""
    config = load_config(preset, ["train.global_batch=8", "train.micro_batch=2"])
    batches = make_batches(config, data_ranks=2, microbatches=None)
    assert len(batches) == 2
    for batch in batches:
        assert batch["tokens"].shape[0] == 2
        assert {name for name in batch if name.endswith("documents")} == documents


def test_fake_blocks_of_a_ring_are_as_large_as_this_ranks() -> None:
    with fake_ranks(3), FakeTensorMode():
        ring = DataRing(dist.group.WORLD)
        assert ring.lengths(5, torch.device("cpu")) == [5, 5, 5]


def test_fake_rows_for_experts_of_other_groups_stay_here() -> None:
    """Half of 24 rows chose the 8 experts of two ranks; the others belong to those of other tensor-parallel ranks."""
    seen: list[int] = []

    def run_experts(rows_RD: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
        seen.append(len(rows_RD))
        return rows_RD

    with fake_ranks(2), FakeTensorMode():
        exchange = dispatch_and_combine(run_experts, dist.group.WORLD, reached_share=0.5)
        outputs = exchange(torch.zeros(24, 3), torch.zeros(8, dtype=torch.int32))
    assert (seen, outputs.shape) == ([12], (24, 3))


@pytest.mark.usefixtures("forked_traces")
@pytest.mark.parametrize(
    ("preset", "rank", "tolerance", "layout"),
    [
        ("llama3-8b", 0, 0.015,
         "parallel.pp=4 parallel.zero=1 train.recompute=full train.global_batch=8 model.n_layers=4"),
        ("llama3-8b", 0, 0.015, "train.global_batch=16"),
        ("bert-base", 0, 0.03, "parallel.zero=1 train.micro_batch=32 train.global_batch=256"),
        ("gpt2-124m", 0, 0.01, "parallel.zero=1 train.global_batch=8 model.n_layers=5"),
        ("t5-base", 0, 0.01,
         "parallel.zero=1 train.micro_batch=8 train.global_batch=128 model.n_encoder_layers=1 model.n_layers=1"),
        ("mistral-7b", 0, 0.005, "parallel.grad_accumulation=sharded train.global_batch=16"),
        pytest.param("gpt3-13b", 0, 0.003,
         "parallel.zero=2 parallel.tp=2 parallel.grad_accumulation=sharded train.global_batch=8", marks=EXTENDED),
        ("gpt2-124m", 0, 0.001, "parallel.zero=2 train.global_batch=8 model.n_layers=3"),
        ("gpt2-124m", 0, 0.001, "parallel.zero=3 train.global_batch=8 model.n_layers=3"),
        pytest.param("llama3-8b", 0, 0.001, "parallel.zero=2 train.global_batch=16", marks=EXTENDED),
        ("t5-base", 0, 0.005, "parallel.pp=2 parallel.zero=3 train.global_batch=16 model.n_encoder_layers=2"),
        ("llama3-8b", 7, 0.01,
         "parallel.pp=2 parallel.zero=2 parallel.pp_schedule=interleaved train.global_batch=24 model.n_layers=4"),
        ("llama3-8b", 0, 0.001,
         "parallel.pp=2 parallel.zero=2 parallel.pp_schedule=zbv train.global_batch=24 model.n_layers=4"),
        pytest.param("llama3-8b", 7, 0.02,
         "parallel.pp=2 parallel.zero=2 parallel.pp_schedule=zbv train.global_batch=24 model.n_layers=4",
         marks=EXTENDED),
        pytest.param("olmoe-1b-7b", 0, 0.002, "parallel.ep=4 train.global_batch=24 model.vocab_size=5030",
         marks=EXTENDED),
        ("olmoe-1b-7b", 0, 0.002,
         "parallel.ep=4 train.global_batch=16 model.vocab_size=5030 parallel.grad_accumulation=sharded"),
    ],
    ids=["pipeline zero1", "zero3", "tied, one micro-batch", "zero1, one micro-batch", "whole tensors", "zero3 sharded",
         "zero2 × tp2", "zero2, one micro-batch", "zero3, one micro-batch", "zero2, two micro-batches",
         "pipeline zero3", "interleaved", "the loss on the first rank", "split backward", "experts", "experts sharded"],
)  # fmt: skip
def test_every_phase_is_as_full_as_modelled(preset: str, rank: int, tolerance: float, layout: str) -> None:
    """A pipeline's first rank keeps what it sent until the backward pass; of several stages each may be the fullest,
    and a split backward pass keeps what its second half needs; a tied table's gradient is complete at its
    first use; a single pass reduces each bucket under ZeRO 1; optimizers see reduced gradients, and ZeRO 1 gathers the
    new weights after them; experts are gathered and reduced by themselves, and hold the rows that they exchange."""
    overrides = ["train.compile=false", "train.micro_batch=1", "model.n_layers=2", *layout.split()]
    trace = run_trace(preset, overrides, 8, rank)
    config = load_config(preset, overrides)
    with open_estimator(config, load_cluster("h100", 8)) as opened:
        memory = opened.estimate(config).memory[rank * config.parallel.pp // 8]
    passes = max(memory.by_phase["forward"], memory.by_phase["backward"]) - memory.reserved
    assert passes == pytest.approx(trace.facts["passes"], rel=tolerance)
    assert memory.by_phase["optimizer"] - memory.reserved == pytest.approx(trace.facts["optimizer"], rel=0.02)


@pytest.mark.parametrize(("parallel", "name"), [
    (ParallelConfig(dp_shard=4, ep=4), "dp_shard"),
    (ParallelConfig(dp_shard=4, ep=2), "ep"),
    (ParallelConfig(dp_shard=1, cp=4, ep=4), "cp"),
    (ParallelConfig(dp_shard=2, cp=2, ep=4), "ep"),
    (ParallelConfig(dp_shard=2, tp=2, ep=4, expert_tp="folded"), "ep"),
])  # fmt: skip
def test_an_axis_is_named_as_its_process_group_is(parallel: ParallelConfig, name: str) -> None:
    axes, ranks = make_axes(parallel), parallel.dp_shard * parallel.cp * parallel.tp
    with fake_ranks(ranks):
        mesh = build_mesh(parallel, ranks, "cpu")
        names = mesh.group_names(mesh.shard_axes, mesh.batch_axes)
        assert names[str(mesh.group(EXPERT).group_name)] == name_traced_axis(EXPERT, axes) == name
        if parallel.dp_shard > 1 and parallel.cp > 1:
            joint = str(mesh.flat_group((SHARD, CONTEXT)).group_name)
            assert names[joint] == name_traced_axis("dp_shard × cp", axes)


def test_owners_at_the_fullest_moment() -> None:
    """Two blocks' tensors grow to 90 bytes, then one is freed and a smaller one made."""
    ledger = Ledger()
    ledger.add(1, 40, None)
    ledger.begin("passes")
    for key, layer, n_bytes in ((2, "layers.0", 20), (3, "layers.1", 30)):
        ledger.layer = layer
        ledger.add(key, n_bytes, None)
    ledger.remove(2)
    ledger.resize(3, 10)
    ledger.add(4, 35, None)
    assert (ledger.live_bytes, ledger.peak) == (85, 90)
    bytes_by_owner = {tuple(owner.split()[:2]): n_bytes for owner, n_bytes in ledger.at_peak().items()}
    assert bytes_by_owner == {("build", "-"): 40, ("passes", "layers.1"): 30, ("passes", "layers.0"): 20}
    ledger.begin("optimizer")
    assert ledger.peak == sum(ledger.at_peak().values()) == 85


def test_a_storage_that_the_ledger_does_not_know_is_no_loss() -> None:
    ledger = Ledger()
    ledger.remove(7)
    assert ledger.live_bytes == 0
    assert 7 not in ledger
