"""Differences that are allowed between a checkpoint and the run that resumes from it."""

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from megatfm import checkpoint
from megatfm.checkpoint import Saver
from megatfm.checkpoint.local import NodeTopology
from megatfm.checkpoint.locate import find_best_checkpoint
from megatfm.config import Config, ResilienceConfig
from megatfm.errors import MegatfmError, UsageError
from megatfm.files import to_strict_json
from megatfm.tracking.run_directory import RunDirectory
from megatfm.train import compatibility, resume
from megatfm.train.decision_log import DecisionLog
from megatfm.train.resilience import LossGuard
from megatfm.version import __version__
from tests.support.workers import Workers

PATH = Path("runs/a/checkpoints/step-00000005")
VALUES: dict[str, Any] = {
    "name": "a",
    "model": {"d_model": 8, "n_layers": 1, "attention": {"n_heads": 2}, "ffn": {"d_ff": 16}},
    "data": {"train": "train", "tokenizer": "t.model", "sequence_length": 8},
    "optimizer": {"name": "adamw", "lr": 1e-3},
    "train": {"steps": 10, "global_batch": 4, "micro_batch": 2},
}
HERE = {"kinds": [{"torch": "2", "threads": "1", "instruction sets": "avx avx2 fma"}], "of_rank": [0, 0]}


def change(values: dict[str, Any], key: str, value: object) -> dict[str, Any]:
    values = copy.deepcopy(values)
    *sections, name = key.split(".")
    table = values
    for section in sections:
        table = table.setdefault(section, {})
    table[name] = value
    return values


def state(values: dict[str, Any] = VALUES, **facts: Any) -> dict[str, Any]:
    data = {"position": 20, "epoch": 0, "fingerprint": "f", "sequence_length": 8, "streams": 64, "shuffle": True}
    result = {
        "step": 5, "tokens": 160, "precision": "fp32", "tokenizer": "t", "data": data, "trouble": {},
        "machines": HERE, "config": Config.model_validate(values).model_dump(mode="json"), "megatfm": __version__,
    }  # fmt: skip
    for key, value in facts.items():
        result = change(result, key.replace("__", "."), value)
    return json.loads(json.dumps(result))  # as it comes back from a checkpoint


def check(stored: dict[str, Any], now: dict[str, Any], *allow: str, **options: Any) -> list[str]:
    """The changes that are allowed between a checkpoint's state and a run's."""
    return compatibility.check_compatible(resume.ResumePoint(PATH, stored), now, list(allow), **options)


@pytest.mark.parametrize("values", [
    VALUES,
    change(VALUES, "name", "b"),
    change(VALUES, "parallel.tp", 2),
    change(VALUES, "train.micro_batch", 1),
    change(VALUES, "checkpoint.every", 1),
    change(VALUES, "data.train", "moved/elsewhere"),
    change(VALUES, "log.every", 1),
])  # fmt: skip
def test_settings_that_change_no_number_may_change(values: dict[str, Any]) -> None:
    assert check(state(), state(values)) == []


def test_a_factor_that_was_stored_as_a_number_is_the_word_of_today() -> None:
    word = change(
        change(VALUES, "model.lm_head", {"scale": "d_model^-1/2"}), "model.embedding", {"scale": "d_model^1/2"}
    )
    number = change(change(VALUES, "model.lm_head", {"scale": 8**-0.5}), "model.embedding", {"scale": 8**0.5})
    assert state(word)["config"]["model"]["lm_head"]["scale"] == "d_model^-1/2"
    assert check(state(word), state(number)) == check(state(number), state(word)) == []
    with pytest.raises(UsageError, match=r"model\.lm_head\.scale: 0\.5 → 0\.35"):
        check(state(change(number, "model.lm_head", {"scale": 0.5})), state(word))


CHANGES = {
    "seed": change(VALUES, "train.seed", 1),
    "schedule": change(VALUES, "train.steps", 20),
    "optimizer": change(VALUES, "optimizer.lr", 2e-3),
    "model": change(VALUES, "model.ffn.d_ff", 32),
    "batch": change(VALUES, "train.global_batch", 8),
}
GROUPS = (*CHANGES, "data", "tokenizer")


@pytest.mark.parametrize(("group", "now"), [
    *((group, state(values)) for group, values in CHANGES.items()),
    ("data", state(data__fingerprint="g")), ("data", state(data__streams=8)), ("tokenizer", state(tokenizer="u")),
])  # fmt: skip
def test_a_change_is_refused_with_a_diff_and_can_be_allowed(group: str, now: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as caught:
        check(state(), now)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"{PATH}: was saved by a run that differs: ")
    assert message.endswith(f"ccept the change with resume.allow={group}")
    (line,) = check(state(), now, group)
    assert line in message
    assert " → " in line
    with pytest.raises(UsageError):
        check(state(), now, *(name for name in GROUPS if name != group))


def mixture(*phases: tuple[int, dict[str, float]]) -> dict[str, Any]:
    return state(data__mixture=json.dumps(phases))


@pytest.mark.parametrize(("phases", "is_told"), [
    ([(0, {"a": 1, "b": 3})], True),
    ([(0, {"a": 3, "b": 1, "c": 1})], True),
    ([(0, {"b": 1, "a": 3})], True),
    ([(0, {"a": 3, "b": 1}), (19, {"a": 1, "b": 1})], True),
    ([(0, {"a": 3, "b": 1}), (20, {"a": 1, "b": 1})], False),
    ([(0, {"a": 3, "c": 0, "b": 1}), (20, {"a": 1, "c": 1, "b": 0})], False),
])  # fmt: skip
def test_rows_that_a_new_mixture_repeats_are_told(phases: list[tuple[int, dict[str, float]]], is_told: bool) -> None:
    """The checkpoint is at row 20."""
    before, now = mixture((0, {"a": 3, "b": 1})), mixture(*phases)
    lines = check(before, now, "data")
    assert lines[0].startswith("data.mixture: [[0, ")
    assert any("some rows are read again and others never" in line for line in lines) == is_told
    with pytest.raises(UsageError, match="read again" if is_told else r"data\.mixture: .*accept the change"):
        check(before, now)
    assert "read again" not in str(check(state(), now, "data"))


@pytest.mark.parametrize(("before", "now", "allow", "message"), [
    (state(), state(change(VALUES, "optimizer.name", "lion")), ["optimizer"],
     r"optimizer\.name = 'adamw', which 'lion' can't use.*init_from"),
    (change(state(), "config.model", {"d_model": 8, "n_layers": 1, "n_heads": 2, "d_ff": 16}), state(), ["model"],
     r"d_ff is model\.ffn\.d_ff now\): .* train\.init_from=.*step-00000005$"),
    (state(), state(change(CHANGES["seed"], "model.ffn.d_ff", 32), tokenizer="u"), ["model"],
     r"train\.seed: 0 → 1.*resume\.allow=model,seed,tokenizer$"),
    (change(state(), "config.optimizer.gone", 3), state(), [],
     r"optimizer\.gone: 3 → None\. .*resume\.allow=optimizer$"),
    (state(precision="fp64"), state(precision="fp32"), ["model"],
     r"'fp64', whose .* are float64; those of 'fp32' are float32: continue with"),
], ids=["another optimizer", "flat section", "several groups", "unreadable config", "less precision"])  # fmt: skip
def test_a_refused_resume_is_an_error_with_a_remedy(
    before: dict[str, Any], now: dict[str, Any], allow: list[str], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        check(before, now, *allow)


def test_a_branch_is_not_told_to_take_another_name() -> None:
    for now, expected in (
        (state(CHANGES["seed"]), r"train\.seed: 0 → 1\. Accept the change with resume\.allow=seed$"),
        (state(change(VALUES, "optimizer.name", "lion")), r"can't use: leave train\.branch_from out, and start"),
    ):
        with pytest.raises(UsageError, match=expected) as caught:
            check(state(), now, same_run=False)
        assert "another name" not in str(caught.value)


def test_another_precision_is_logged() -> None:
    allowed = check(state(), state(precision="bf16"))
    assert allowed == ["precision: fp32 → bf16"]
    assert compatibility.find_changes_that_may_fix_skips(allowed) == allowed


def test_a_precision_of_a_later_version_is_refused_by_name() -> None:
    """A config with "auto" takes the checkpoint's own."""
    values = change(VALUES, "train.precision", "auto")
    later = resume.ResumePoint(PATH, state(precision="mxfp4"))
    with pytest.raises(
        UsageError, match=r"step-00000005: was saved with train\.precision = 'mxfp4', .*one of fp64, fp32"
    ):
        resume.choose_stored_precision(Config.model_validate(values), later)
    point = resume.ResumePoint(PATH, state(precision="bf16"))
    assert resume.choose_stored_precision(Config.model_validate(values), point) == "bf16"


def test_an_allowed_change_is_logged_with_both_values() -> None:
    assert check(state(), state(CHANGES["optimizer"]), "optimizer") == ["optimizer.lr: 0.001 → 0.002"]


def test_positions_move_and_facts_of_no_group_are_left_alone() -> None:
    now = state(data__position=99, data__epoch=3, megatfm="9.9", later__fact=1)
    assert check(state(), now) == check(now, state()) == []


def test_state_that_a_converted_checkpoint_lacks_is_logged_once() -> None:
    converted = state()
    converted["data"], converted["tokenizer"] = {"position": 0}, None
    assert check(converted, state(), "data", "tokenizer") == ["data: none there", "tokenizer: none there"]
    with pytest.raises(UsageError, match=r"differs: data: none there; tokenizer: none there\. .*allow=data,tokenizer$"):
        check(converted, state())


@pytest.mark.parametrize("key", [
    "optimizer.max_grad_norm", "model.norm.eps", "objective.name", "lr_schedule.warmup_steps",
])  # fmt: skip
def test_a_key_that_an_older_version_did_not_have_counts_as_its_default(key: str) -> None:
    older = state()
    table = older["config"]
    *sections, name = key.split(".")
    for section in sections:
        table = table[section]
    del table[name]
    now = state(change(VALUES, "optimizer.max_grad_norm", 2.0))
    assert check(older, state()) == []
    assert check(older, now, "optimizer") == ["optimizer.max_grad_norm: 1.0 → 2.0"]


# ------------------------------------------------------------------------------------------------------- finding


def find(folder: Path) -> str:
    try:
        resume_point = resume.find_resume_point(folder)
    except MegatfmError as error:
        return f"error: {error}"
    return f"{resume_point.path.name} at {resume_point.step}" if resume_point else "nothing"


def save(folder: Path, step: int) -> Path:
    return checkpoint.save(folder, step, {"w": torch.ones(2)}, {**state(), "step": step})


def test_all_ranks_find_the_same(workers: Workers, tmp_path: Path) -> None:
    assert workers.run(find, 2, tmp_path / "none") == ["nothing"] * 2
    for step in (3, 5):
        workers.run(save, 1, tmp_path, step)
    assert workers.run(find, 2, tmp_path) == ["step-00000005 at 5"] * 2


def test_all_ranks_hear_that_nothing_can_be_read(workers: Workers, tmp_path: Path) -> None:
    metadata = workers.run(save, 1, tmp_path, 3)[0] / "metadata.json"
    metadata.write_bytes(metadata.read_bytes()[:-20])
    first, second = workers.run(find, 2, tmp_path)
    assert first == second
    assert first.startswith("error: ")


@pytest.mark.parametrize("branch_from", ["old", "old@5", "old@latest"])
def test_a_branch_point_is_a_step_of_a_run(tmp_path: Path, branch_from: str) -> None:
    for step in (4, 12):
        save(tmp_path / "old" / "checkpoints", step)
    assert resume.find_branch_point(f"{tmp_path}/old@4").step == 4
    with pytest.raises(UsageError, match=f"branch_from = '.*/{branch_from}': give RUN@STEP, .*; there are: 4, 12$"):
        resume.find_branch_point(f"{tmp_path}/{branch_from}")
    for file in (tmp_path / "old/checkpoints/step-00000012").glob("*.safetensors"):
        file.unlink()
    with pytest.raises(MegatfmError, match=r"branch_from = .*: step-00000012 can't be used: .*\.safetensors"):
        resume.find_branch_point(f"{tmp_path}/old@12")


def test_node_local_checkpoints_are_asked_for_as_a_whole() -> None:
    for key, value in (("checkpoint.local_dir", "/local"), ("checkpoint.local_every", 5)):
        with pytest.raises(ValueError, match="local_dir and local_every go together"):
            Config.model_validate(change(VALUES, key, value))


@pytest.mark.parametrize("local", ["$MEGATFM_NOT_SET/x", "relative/folder"])
def test_a_node_local_folder_is_an_absolute_path(tmp_path: Path, local: str) -> None:
    values = change(change(VALUES, "checkpoint.local_dir", local), "checkpoint.local_every", 5)
    with pytest.raises(UsageError, match=r"checkpoint\.local_dir = '.*' is .* here: give an absolute path"):
        resume.discover_nodes(Config.model_validate(values), RunDirectory(tmp_path, 0))


def test_a_node_local_folder_is_named_once_per_run_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATFM_LOCAL", str(tmp_path / "disk"))
    values = change(change(VALUES, "checkpoint.local_dir", "$MEGATFM_LOCAL"), "checkpoint.local_every", 5)
    config = Config.model_validate(values)
    for name in "ab":
        (tmp_path / name).mkdir()
    first, second, other = (resume.discover_nodes(config, RunDirectory(tmp_path / name, 0)) for name in "aab")
    assert first is not None
    assert first.folder.parent == tmp_path / "disk"
    assert second == first
    assert other != first
    for planted in (b"../../elsewhere", b"\x80\x04}.", b""):
        (tmp_path / "a" / resume.LOCAL_ID).write_bytes(planted)
        with pytest.raises(MegatfmError, match=r"a/local-id: can't be read, or is damaged: remove it"):
            resume.discover_nodes(config, RunDirectory(tmp_path / "a", 0))
    assert resume.discover_nodes(Config.model_validate(VALUES), RunDirectory(tmp_path / "a", 0)) is None


def test_a_resume_on_another_machine_is_logged() -> None:
    kind = {"torch": "2", "threads": "4", "instruction sets": "avx avx2 avx512f fma"}
    before, now = state(machines={"kinds": [kind], "of_rank": [0, 0]}), state()
    assert check(before, now) == []
    (line,) = compatibility.describe_hardware_changes(resume.ResumePoint(PATH, before), HERE)
    assert "threads: 4 → 1; instruction sets: without avx512f" in line
    assert "will not be bit-identical" in line
    assert compatibility.describe_hardware_changes(resume.ResumePoint(PATH, now), HERE) == []
    del before["machines"]  # of an earlier version
    assert compatibility.describe_hardware_changes(resume.ResumePoint(PATH, before), HERE) == []


@pytest.mark.parametrize(("key", "value"), [
    ("step", "five"), ("step", None), ("step", -1), ("step", 2**63), ("tokens", 1.5), ("tokens", True),
    ("data.position", []), ("data.position", 10**30), ("precision", 3),
    ("config", None), ("config", "gpt"), ("config", {}), ("config.model", []),
    ("trouble", None), ("trouble", []), ("trouble.losses", 1), ("trouble.losses", ["1"]), ("trouble.in_a_row", "x"),
    ("trouble.skipped", -1), ("best", []), ("best", {}), ("best", {"step": None, "value": 1.0}),
    ("best", {"step": 1}), ("best", {"step": 1, "value": "x"}),
    ("best", {"step": 1, "value": 1, "evaluations_since": []}), ("unevaluated", [5]), ("unevaluated", {"step": 4}),
])  # fmt: skip
def test_a_state_that_no_run_has_written_is_named(key: str, value: object) -> None:
    with pytest.raises(
        MegatfmError, match=rf"step-00000005: not a checkpoint of a run: .*({'|'.join(key.split('.'))})"
    ):
        resume.ResumePoint(PATH, change(state(), key, value))


def test_the_best_checkpoint_is_the_recorded_one_if_it_is_intact_else_the_newest(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = (save(tmp_path / "checkpoints", step) for step in (1, 2))
    assert find_best_checkpoint(tmp_path) == second
    for step, best in ((3, 1), (4, 9)):
        facts = {**state(), "step": step, "best": {"step": best, "metric": "loss", "value": 1.0}}
        newest = checkpoint.save(tmp_path / "checkpoints", step, {"w": torch.ones(2)}, facts)
        assert find_best_checkpoint(tmp_path) == (first if best == 1 else newest)
        assert ("of step 9, is not here or not intact: step-00000004 is used" in caplog.text) == (best == 9)
    assert find_best_checkpoint(first) == first
    checkpoint.save(tmp_path / "checkpoints", 5, {"w": torch.ones(2)}, {**state(), "best": {"step": "../1"}})
    with pytest.raises(MegatfmError, match=r"step-00000005: damaged: the step of the best checkpoint is '\.\./1'"):
        find_best_checkpoint(tmp_path)


def test_losses_that_are_not_finite_are_read_back(tmp_path: Path) -> None:
    """JSON has no NaN: they are stored as words."""
    guard, loaded = (LossGuard(ResilienceConfig(), 1.0, DecisionLog(tmp_path, is_writer=False)) for _ in range(2))
    guard.losses.extend([1.5, math.inf, -math.inf, math.nan])
    stored = json.loads(to_strict_json(state(trouble=guard.state_dict())))
    loaded.load_state_dict(resume.ResumePoint(PATH, stored).state["trouble"])
    assert list(loaded.losses)[:3] == [1.5, math.inf, -math.inf]
    assert math.isnan(loaded.losses[3])


@pytest.mark.parametrize(("stored", "expected", "message"), [
    ({"a": [2, 3]}, {"a": (2, 3)}, ""),
    ({"a": [2, 3]}, {"a": (2, 4)}, "a is [2, 3] there and [2, 4] here"),
    ({"a": [2]}, {"a": (2,), "b": (3,)}, "b is [3] here alone"),
    ({"a": [2], "b": [3]}, {"a": (2,)}, "b is [3] there alone"),
])  # fmt: skip
def test_misfit_shapes_are_named(stored: dict[str, list[int]], expected: dict[str, list[int]], message: str) -> None:
    assert compatibility.find_shape_mismatch(stored, expected) == message


@pytest.mark.parametrize("allow", [[], ["model"]])
def test_an_allowance_that_would_fail_is_not_offered(allow: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        check(state(), state(CHANGES["model"]), *allow, shape_mismatch="a is [2] there alone")
    assert str(caught.value) == (
        f"{PATH}: was saved by a run that differs: model.ffn.d_ff: 16 → 32. Its weights don't fit "
        "(a is [2] there alone), and resume.allow can't change that: give the run another name"
    )


def saved_on_nodes_around_a_rollback(folder: Path) -> list[str]:
    """A run saves steps 4 and 6 on the nodes, goes back to 3, and dies before it has removed them."""
    run = RunDirectory(folder / "run", 0)
    nodes = NodeTopology.discover(folder / "node", None)
    with Saver(folder / "shared", local_dir=folder / "node") as saver:
        for step in (4, 6):
            facts = state(step=step, tokens=1, data__position=4 * step)
            saver.save(step, {"w": torch.ones(2)}, facts, local=True)
    run.folder.mkdir()
    decisions = DecisionLog.from_run(run)
    before = resume.find_resume_point(folder / "shared", nodes, decisions)
    decisions.record_rollback(6, 3, 24)
    after = resume.find_resume_point(folder / "shared", nodes, decisions)
    with Saver(folder / "shared", local_dir=folder / "node") as saver:
        saver.save(4, {"w": torch.ones(2)}, state(step=4, tokens=1, data__position=28), local=True)
    repeated = resume.find_resume_point(folder / "shared", nodes, decisions)
    return [
        f"{actual.step} at {actual.state['data']['position']}" if actual else "none"
        for actual in (before, after, repeated)
    ]


def test_local_checkpoints_of_an_abandoned_future_are_not_used(workers: Workers, tmp_path: Path) -> None:
    assert workers.run(saved_on_nodes_around_a_rollback, 1, tmp_path) == [["6 at 24", "none", "4 at 28"]]
