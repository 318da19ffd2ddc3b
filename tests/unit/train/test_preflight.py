"""Checks before training, a part at a time: config, memory, pipeline stages."""

import errno
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatfm.checkpoint.local import NodeTopology
from megatfm.config import Config, load_config
from megatfm.describe.per_rank import fake_ranks
from megatfm.errors import MegatfmError
from megatfm.estimate.devices import load_cluster
from megatfm.estimate.estimator import open_estimator
from megatfm.parallel.mesh import build_mesh
from megatfm.tracking.run_directory import RunDirectory
from megatfm.train import startup_checks
from megatfm.train.build import build_engine, build_model
from megatfm.train.profiling import StepProfile, explain_out_of_memory, should_record_allocations
from megatfm.train.startup_checks import (
    check_local_disk,
    check_space,
    count_new_checkpoints,
    find_slow,
    get_free_memory,
    probe_disk,
    warn_of_kept_checkpoints,
)
from megatfm.verify.expected_pipeline import divide_into_stages
from megatfm.verify.shrink import shrink


def test_a_probe_leaves_a_file_for_rank_0_to_find(tmp_path: Path) -> None:
    probe_disk(tmp_path, 3)
    assert [path.name for path in tmp_path.iterdir()] == [".probe-3"]


def test_a_probe_that_rank_0_can_not_remove_does_not_end_it_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other ranks wait for its answer."""
    for rank in range(2):
        (tmp_path / f".probe-{rank}").mkdir()
    ranks = SimpleNamespace(barrier=lambda: None, get_world_size=lambda: 2)
    monkeypatch.setattr(startup_checks, "dist", ranks)
    assert startup_checks._find_missing_probes(tmp_path, is_main=True) == []


def test_a_folder_that_can_not_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / ".probe-3").mkdir()  # root may write where permissions forbid it
    with pytest.raises(MegatfmError, match=rf"{tmp_path}: can't write, sync and rename a file there: Is a directory"):
        probe_disk(tmp_path, 3)
    with pytest.raises(MegatfmError, match="No such file"):
        probe_disk(tmp_path / "gone", 3)


@pytest.mark.parametrize(
    ("settings", "n_present", "resume_step", "due"),
    [
        ([], 0, None, 4),  # three are kept while the next is written
        ([], 1, 100, 4),  # besides the newest three, the one that it resumes from
        ([], 3, 300, 2),
        ([], 9, 900, 1),
        (["checkpoint.verify_after_write=true"], 3, 300, 1),  # the newest is verified, so the old one goes
        (["train.steps=250"], 0, None, 3),  # no more are saved than these
        (["train.steps=250"], 1, 100, 2),
        (["train.steps=250"], 3, 250, 0),
        (["train.patience=3", "evaluate.every=100"], 0, None, 5),  # the best one
    ],
)
def test_room_is_needed_for_what_is_kept_and_what_is_written(
    settings: list[str], n_present: int, resume_step: int | None, due: int
) -> None:
    rhythm = ["checkpoint.every=100", "checkpoint.keep=3", "train.steps=1000", 'data.validation={v="v"}']
    config = load_config("quickstart", [*rhythm, *settings])
    assert count_new_checkpoints(config, n_present, resume_step) == due


def test_too_little_space_is_told_with_the_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=4 * 10**9 - (folder == tmp_path)))
    check_space(tmp_path / "large", 10**9, 4, "or else")
    check_space(tmp_path, 10**9, 3, "or else")
    words = f"{tmp_path}: 4 GB are free, but 4 more checkpoints of 1 GB must fit: make room, or else"
    with pytest.raises(MegatfmError, match=f"^{re.escape(words)}$"):
        check_space(tmp_path, 10**9, 4, "or else")


@pytest.mark.parametrize(
    ("settings", "first_step", "free", "due"),
    [
        ("checkpoint.keep_every=200", 0, 4, (5, 1000)),  # 200, 400, 600 and 800 fit
        ("checkpoint.keep_every=200", 0, 5, None),
        ("checkpoint.keep_every=200", 500, 2, (3, 1000)),
        ("checkpoint.keep_every=200", 700, 2, None),
        ("checkpoint.keep_every=150", 0, 2, (3, 900)),  # of the steps that are saved, it divides 300, 600 and 900
        ("checkpoint.keep_every=0", 0, 0, None),
    ],
)
def test_a_disk_that_kept_checkpoints_will_fill_is_told(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    settings: str,
    first_step: int,
    free: int,
    due: tuple[int, int] | None,
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=free * 10**9))
    config = load_config("quickstart", ["checkpoint.every=100", "train.steps=1000", settings])
    warn_of_kept_checkpoints(config, tmp_path, 10**9, first_step)
    expected = due and f"will keep {due[0]} checkpoints of 1 GB until step 1000: make room before step {due[1]}"
    assert caplog.text.endswith(f"{expected}\n") if expected else not caplog.text


def test_the_disk_that_checkpoints_link_to_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    large = tmp_path / "large"
    run = RunDirectory(tmp_path / "run", 0)
    large.mkdir()
    run.folder.mkdir()
    run.checkpoints.symlink_to(large)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=(folder.resolve() != large) * 1e18))
    engine: Any = SimpleNamespace(layout={"w": torch.empty(8)}, precision=SimpleNamespace(param_dtype=torch.float32))
    with pytest.raises(
        MegatfmError, match=rf"{run.checkpoints}: 0 B are free, but 3 more checkpoints of 96 B must fit"
    ):
        startup_checks.preflight(load_config("quickstart", []), run, engine)
    assert not list(large.iterdir()), "no probe is left"


@pytest.mark.parametrize(
    ("node", "rank", "ranks_held"),
    [((0, 0), 0, 2), ((0, 1), 1, 2), ((0, 1, 1), 0, 3), ((0, 1, 1), 1, 3), ((0, 0, 1, 2), 2, 3)],
)
def test_a_node_s_disk_holds_its_share_and_that_of_the_node_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, node: tuple[int, ...], rank: int, ranks_held: int
) -> None:
    nodes = NodeTopology(tmp_path / "local" / "run", rank, node, None)
    needed = 3 * ranks_held * 1000  # the two newest checkpoints and the one being written
    state = 1000 * len(node)
    leftover = nodes.folder / ".step-00000008.partial-0123abcd"
    leftover.mkdir(parents=True)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=needed - leftover.exists()))
    check_local_disk(nodes, state)
    assert list(nodes.folder.iterdir()) == [], "no probe is left, and no leftover of a killed save"
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=needed - 1))
    with pytest.raises(
        MegatfmError, match=rf"^{nodes.folder}: .* are free, but 3 more checkpoints .*checkpoint\.local_dir$"
    ):
        check_local_disk(nodes, state)


def test_a_node_s_disk_that_can_not_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "run"
    with pytest.raises(MegatfmError, match=rf"^{folder}: can't create it \(checkpoint\.local_dir\): Not a directory$"):
        check_local_disk(NodeTopology(folder, 0, (0,), None), 1)


def test_slow_is_far_above_the_median_and_beyond_what_happens() -> None:
    disk, product, total = "writing and syncing a file", "a matmul", "a sum over tp"
    well = {disk: 0.01, product: 0.002, total: 0.01}
    everyone = [("n0", well), ("n0", well), ("n1", well), ("n1", well)]
    assert find_slow(everyone) == []
    everyone[2] = ("n1", well | {disk: 0.4, product: 0.006, total: 0.15})
    assert find_slow(everyone) == [], "many times the median, but that happens"
    everyone[2] = ("n1", well | {disk: 0.9, product: 0.02})
    assert find_slow(everyone) == [
        "rank 2 on n1 is slow: writing and syncing a file took 0.900 s, on most ranks 0.010 s",
        "rank 2 on n1 is slow: a matmul took 0.020 s, on most ranks 0.002 s",
    ]
    assert len(find_slow([("n0", well), ("n1", well | {disk: 0.9})])) == 1, "of two, the slower one"
    slow = {disk: 5.0, product: 1.0, total: 5.0}
    assert find_slow([("n0", slow)] * 4) == [], "alike: nobody stands out"


def test_memory_that_torch_holds_unused_on_a_gpu_counts_as_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver counts it as used, but the allocator gives it to the next tensor."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10, 100))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 40)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 33)
    assert get_free_memory(torch.device("cuda")) == 10 + 40 - 33


def test_free_memory_is_shared_by_the_ranks_of_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = get_free_memory(torch.device("cpu"))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert get_free_memory(torch.device("cpu")) == pytest.approx(alone / 4, rel=0.2)


def write_group(folder: Path, limit: str, usage: str, prefix: str, values: tuple[str, int]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in zip((limit, usage), values, strict=True):
        (folder / name).write_text(f"{value}\n")
    (folder / "memory.stat").write_text(f"{prefix}active_file 300\n{prefix}inactive_file 400\n{prefix}shmem 50\n")


@pytest.mark.parametrize(("own_groups", "root", "limit", "usage", "prefix"), [
    ("0::/job/step\n", "", "memory.max", "memory.current", ""),
    ("3:cpu:/other\n9:memory:/job/step\n", "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
])  # fmt: skip
def test_a_container_and_a_job_limit_memory_and_their_page_cache_is_free(
    tmp_path: Path, own_groups: str, root: str, limit: str, usage: str, prefix: str
) -> None:
    files = limit, usage, prefix
    assert startup_checks.list_cgroup_free_bytes(tmp_path, own_groups) == []
    write_group(tmp_path / root, *files, ("max", 900))
    assert startup_checks.list_cgroup_free_bytes(tmp_path, own_groups) == []
    write_group(tmp_path / root, *files, ("1000", 900))
    assert startup_checks.list_cgroup_free_bytes(tmp_path, own_groups) == [800], "of a container"
    write_group(tmp_path / root / "job", *files, ("900", 850))
    write_group(tmp_path / root / "other", *files, ("800", 800))
    assert startup_checks.list_cgroup_free_bytes(tmp_path, own_groups) == [750, 800], "of a job"
    assert startup_checks.list_cgroup_free_bytes(tmp_path, "") == [800]


def test_a_check_that_fails_leaves_no_probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise MegatfmError("no room")

    monkeypatch.setattr(startup_checks, "estimate_checkpoint_bytes", fails)
    run = SimpleNamespace(folder=tmp_path, rank=0, is_main=True, checkpoints=tmp_path / "checkpoints")
    with pytest.raises(MegatfmError, match=r"the check before training failed: .*no room"):
        startup_checks.preflight(None, run, None)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


CPU, GPU = torch.device("cpu"), torch.device("cuda")


def allocate_an_exabyte() -> None:
    torch.empty(10**18, dtype=torch.uint8)


def fail(error: BaseException) -> None:
    raise error


CUDA_ERROR = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has 79 GiB.")

OUTSIDE_OF_TORCH = (
    "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported",
    "NCCL error in: NCCLUtils.cpp:94, unhandled cuda error\nncclUnhandledCudaError: Call to CUDA function failed.\n"
    "Last error:\nCuda failure 2 'out of memory'",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
)


@pytest.mark.parametrize(("act", "message"), [
    (allocate_an_exabyte, r"^rank 3 is out of memory: it held .* GiB and asked for 9\.31e\+08 GiB more\. Lower "),
    (partial(fail, MemoryError()), "rank 3 is out of memory: it held"),
    (partial(fail, CUDA_ERROR), r"and asked for 2\.50 GiB more"),
    *[(partial(fail, RuntimeError(text)), "GiB in tensors, and CUDA or one of its libraries found no memory")
      for text in OUTSIDE_OF_TORCH],
])  # fmt: skip
def test_an_out_of_memory_error_names_sizes_and_remedies(tmp_path: Path, act: Callable[[], None], message: str) -> None:
    """The allocator's own error, Python's and CUDA's, also where a library asks CUDA for memory; others pass."""
    with pytest.raises(MegatfmError, match=message), explain_out_of_memory(tmp_path, 3, CPU):
        act()
    with pytest.raises(RuntimeError, match="shapes don't match"), explain_out_of_memory(tmp_path, 3, CPU):
        raise RuntimeError("shapes don't match")


@pytest.fixture
def gpu_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU of which 3 GiB were in use."""
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 3 * 2**30)
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda path: Path(path).write_bytes(b"snapshot"))


@pytest.mark.usefixtures("gpu_memory")
def test_a_gpu_leaves_a_snapshot_and_the_next_run_records_stacks(tmp_path: Path) -> None:
    assert should_record_allocations(tmp_path, requested=True)
    assert not should_record_allocations(tmp_path, requested=False)
    place = tmp_path / "memory" / "rank-2.pickle"
    message = f"it held 3 GiB.*; memory snapshot: {place}"
    with pytest.raises(MegatfmError, match=message), explain_out_of_memory(tmp_path, 2, GPU):
        raise CUDA_ERROR
    assert place.read_bytes() == b"snapshot"
    assert should_record_allocations(tmp_path, requested=False)
    (tmp_path / "memory").rename(tmp_path / "elsewhere")
    (tmp_path / "memory").write_text("a file where the folder should be")
    with pytest.raises(MegatfmError, match="could not be written to"), explain_out_of_memory(tmp_path, 2, GPU):
        raise CUDA_ERROR


def test_a_run_on_cpus_asks_no_gpu_of_its_host_what_it_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU would show 0 GiB, and leave a snapshot, though the run does not use it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 0)
    with (
        pytest.raises(MegatfmError, match=r"it held 0\.[0-9]+ GiB\. Lower|it held [1-9][0-9.]* GiB\. Lower"),
        explain_out_of_memory(tmp_path, 0, CPU),
    ):
        raise MemoryError
    assert not list(tmp_path.iterdir())


def wide_head(tp: int) -> Config:
    """Rows whose attention costs as much as the blocks' products, and a vocabulary that costs several blocks."""
    config, _ = shrink(load_config("llama3-8b", [f"parallel.tp={tp}", "parallel.pp=3", "parallel.dp_shard=1"]))
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
    with open_estimator(config, load_cluster("h100", 3 * tp)) as opened:
        estimated = opened.plan_pipeline(config)
    assert [len(stage.split_points) for stage in estimated.stages] == expected


def test_a_profile_that_can_not_be_written_leaves_nothing_and_does_not_end_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_half(_: Any, path: str) -> None:
        Path(path).write_text('{"traceEvents": [')
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", write_half)
    run: Any = SimpleNamespace(folder=tmp_path, rank=0)
    with StepProfile("1:2", run, torch.device("cpu")) as step_profile:
        step_profile.before_step(1)
        step_profile.before_step(2)
    assert list((tmp_path / "profile").iterdir()) == []
    assert "rank-0-steps-1-2.json: [Errno 28] No space left on device" in caplog.text
