"""Jobs that are refused before the queue: hostile fields, numbers of nodes that don't fit, what would fail later."""

import contextlib
import json
import re
import sys
from pathlib import Path

import pytest

from megatfm.config import load_config
from megatfm.config.world_size import check_global_batch, compute_axis_sizes, fit_layout
from megatfm.errors import UsageError
from megatfm.launchers.slurm import Site, SlurmLauncher, load_site
from megatfm.launchers.validation import explain_layout_error, find_max_fitting_nodes
from megatfm.train.corpora import make_batch_schedule
from tests.support.launch_jobs import CLUSTER_FLAGS, FakeSlurm, make_job, run_launch

pytestmark = pytest.mark.usefixtures("folder")


def test_a_run_that_does_not_fit_is_refused_before_the_queue(capsys: pytest.CaptureFixture[str]) -> None:
    reason = r"train\.global_batch = 16 is not a multiple of train\.micro_batch = 8 × 32 data ranks"
    with pytest.raises(UsageError, match=rf"does not fit 32 processes: {reason}"):
        run_launch(*CLUSTER_FLAGS)
    with contextlib.redirect_stderr(sys.stdout):
        run_launch(*CLUSTER_FLAGS, "--dry-run")
    script, note, _ = capsys.readouterr().out.partition("note: this would be refused: the run does not fit 32")
    assert note
    assert "#SBATCH" in script, "the script is longer than a screen, so the note comes after it"
    with pytest.raises(UsageError, match=r"does not fit 3 to 3 nodes.*it would fit on 2 nodes"):
        run_launch("--slurm", "--nodes", "3-3", "--nproc", "1")


HOSTILE = [
    "a\nrm -rf x", "$(touch owned)", "`touch owned`", "it's", 'say "x"', "a;touch owned", "a b", "100%", "-x",
    "--wrap=touch owned", "a\\b", "",
]  # fmt: skip
FLAGS = ("job-name", "partition", "account", "qos", "constraint", "time", "start", "nodes")
AS_GOOD_AS_NONE = [("job-name", ""), ("time", ""), ("nodes", "")]


@pytest.mark.parametrize(("flag", "text"), [(f, t) for f in FLAGS for t in HOSTILE if (f, t) not in AS_GOOD_AS_NONE])
def test_hostile_flags_are_refused(flag: str, text: str, folder: Path) -> None:
    with pytest.raises(UsageError) as error:
        run_launch("--slurm", f"--{flag}={text}", "--dry-run")
    assert "\n" not in str(error.value)
    assert not (folder / "owned").exists()


@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.parametrize("field", [
    "partition = {}", "account = {}", "qos = {}", "constraint = {}", "exclude = {}", "memory = {}",
    "interface = {}", "modules = [{}]", "sbatch = [{}]", "srun = [{}]", "environment = {{ {} = 'x' }}",
])  # fmt: skip
def test_hostile_sites_are_refused(field: str, text: str, folder: Path) -> None:
    (folder / "site.toml").write_text(field.format(json.dumps(text)))
    with pytest.raises(UsageError) as error:
        load_site(folder / "site.toml", {})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["a\nb", "a\x00b", "a\x1bb"])
@pytest.mark.parametrize("field", ["container = [{}]", "python = {}", "setup = [[{}]]", "environment.X = {}"])
def test_control_characters_are_refused_everywhere(field: str, text: str, folder: Path) -> None:
    (folder / "site.toml").write_text(field.format(json.dumps(text)))
    with pytest.raises(UsageError):
        load_site(folder / "site.toml", {})


@pytest.mark.parametrize("name", ["it's", 'say "x"', "100%", "a\nb", "back\\slash", "a:b"])
def test_paths_that_sbatch_would_misread_are_refused(name: str) -> None:
    resolved = load_config("quickstart").model_copy(update={"run_dir": f"/data/{name}"})
    with pytest.raises(UsageError, match="can't write to a path with quotes"):
        SlurmLauncher(Site()).render(make_job(config=resolved))


def test_a_finished_run_is_not_queued(folder: Path, fake_slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]) -> None:
    fake_slurm.answer("sbatch", "12\n")
    run = folder / "runs" / "quickstart"
    (run / "checkpoints" / "step-00000720").mkdir(parents=True)
    (run / "events.jsonl").write_text('{"event": "finished", "step": 720}\n')
    with pytest.raises(UsageError, match=r"the run is finished: .* another name, as name=quickstart-2, or"):
        run_launch("--slurm")
    assert run_launch("--slurm", "--dry-run") == 0
    assert "note: this would be refused" in capsys.readouterr().err
    assert run_launch("--slurm", "train.steps=800") == 0


UP = "PartitionName={name} Default=YES State={state} MaxTime={longest} DefaultTime={usual} MaxNodes=UNLIMITED\n"


def partition(fake_slurm: FakeSlurm, longest: str = "1-00:00:00", usual: str = "NONE", state: str = "UP") -> None:
    fake_slurm.answer("scontrol-show", UP.format(name="gpu", state=state, longest=longest, usual=usual))
    fake_slurm.answer("sbatch", "12\n")


REFUSED = {
    "above the partition's limit": ({"longest": "12:00:00"}, ["--time", "24:00:00"],
                                    "--time 24:00:00 is above the limit of partition gpu, 720 min"),
    "no time to work": ({}, ["--time", "5"], "--time 5 leaves no time to work: the job is told to save 300 s ahead"),
    "nor by default": ({"usual": "00:04:00"}, [],
                       "the time limit of partition gpu for jobs without --time, 4 min, leaves no time to work"),
    "no tokenizer": ({}, ["data.tokenizer=no.model"], "data.tokenizer = '.*/no.model': there is no such file"),
    "no corpus": ({}, ["data.train=nowhere"], "data.train = '.*/nowhere': there is no such file or folder"),
    "something else": ({}, ["data.train=corpora"], "data.train = '.*/corpora': not a corpus of .*manifest"),
    "no validation": ({}, ["data.validation.more=x"], "data.validation.more = '.*/x': there is no such file"),
    "no weights": ({}, ["train.init_from=x"], "train.init_from = '.*/x': there is no such file or folder"),
    "no tasks": ({}, ["evaluate.tasks.a=x.toml"], "evaluate.tasks.a = '.*/x.toml': there is no such file or folder"),
    "no source": ({}, ["data.train=", "data.mixture.a.path=x", "data.mixture.a.weight=1"],
                  "data.mixture.a.path = '.*/x': there is no such file or folder"),
    "no step to branch off": ({}, ["train.branch_from=old"], "train.branch_from = '.*/old': give RUN@STEP, .* 4, 12$"),
    "nor that step": ({}, ["train.branch_from=old@5"], "train.branch_from = '.*/old@5': give RUN@STEP, .* 4, 12$"),
    "nor that run": ({}, ["train.branch_from=x@4"], "train.branch_from = '.*/x@4': give RUN@STEP, .* there are: none"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_jobs_that_would_fail_after_the_wait_are_refused_before(
    fake_slurm: FakeSlurm, case: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings, words, reason = REFUSED[case]
    for step in (4, 12):
        (folder / f"old/checkpoints/step-{step:08d}").mkdir(parents=True)
    partition(fake_slurm, **settings)
    with pytest.raises(UsageError, match=reason):
        run_launch("--slurm", *words)
    assert not any(call.startswith("sbatch") for call in fake_slurm.calls)
    assert not (folder / "runs").exists()
    assert run_launch("--slurm", "--dry-run", *words) == 0
    assert re.search(f"^note: this would be refused: {reason}", capsys.readouterr().err, re.MULTILINE)


@pytest.mark.parametrize("words", [["train.init_from=gone"], ["train.branch_from=gone@7"]])
def test_a_run_that_resumes_does_not_look_for_its_start(fake_slurm: FakeSlurm, folder: Path, words: list[str]) -> None:
    partition(fake_slurm)
    (folder / "runs/quickstart/checkpoints/step-00000002").mkdir(parents=True)
    assert run_launch("--slurm", *words) == 0


@pytest.mark.parametrize(("key", "words"), [
    ("read.folder", ["read.folder=nowhere"]),
    ("tokenizer.file", ["tokenizer.file=nowhere"]),
    ("steps[0].files", ['steps=[{name="decontaminate", files=["nowhere"]}]']),
    ("steps[0].file", ['steps=[{name="url_filter", file="nowhere"}]']),
    ("read.labels.table", ["read.format=images", "read.labels={by='table', table='nowhere'}"]),
])  # fmt: skip
def test_a_preparation_looks_for_its_files(fake_slurm: FakeSlurm, folder: Path, key: str, words: list[str]) -> None:
    with pytest.raises(UsageError, match=rf"{re.escape(key)} = '.*/nowhere': there is no such file"):
        run_launch("--slurm", "--prep", f"read.folder={folder}", *words, config="quickstart-data")


NORM = """
from torch import nn
from megatfm.layers.norm import NORMS

@NORMS.register("norm_of_this_test")
class Norm(nn.Module):
    pass
"""
STEP = """
from megatfm.data_prep.filters.base import STEPS

@STEPS.register("step_of_this_test")
class Step:
    pass
"""


@pytest.mark.parametrize(("code", "config", "names", "message"), [
    (NORM, "quickstart", ["model.norm.name=norm_of_this_test", "model.norm.name=norm_of_this_tset"],
     r"model\.norm\.name = 'norm_of_this_tset': unknown \(did you mean 'norm_of_this_test'\?\); there are: rms_norm, "),
    (STEP, "quickstart-data", ["steps=[{name='step_of_this_test'}]", "steps=[{name='step_of_this_tset'}]"],
     r"steps\[0\]\.name = 'step_of_this_tset': unknown \(did you mean 'step_of_this_test'\?\); there are: normalize, "),
], ids=["train", "prep"])  # fmt: skip
def test_a_name_that_no_plugin_registers_is_refused(
    fake_slurm: FakeSlurm, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    code: str, config: str, names: list[str], message: str,
) -> None:  # fmt: skip
    """The plugin is imported for it; one that can't be imported here may be on the nodes."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    (folder / "texts").mkdir()
    kind = ["--prep", "read.folder=texts"] if config == "quickstart-data" else []
    plugin = f"parts_of_{config.replace('-', '_')}"
    (folder / f"{plugin}.py").write_text(code)
    fake_slurm.answer("sbatch", "12\n")
    right, wrong = names
    with pytest.raises(UsageError, match=f"^{message}.*; others need the package .* plugins, where {plugin} is named$"):
        run_launch("--slurm", *kind, f"plugins=[{plugin}]", wrong, config=config)
    assert not any(call.startswith("sbatch") for call in fake_slurm.calls)
    assert run_launch("--slurm", *kind, f"plugins=[{plugin}]", right, config=config) == 0
    capsys.readouterr()
    (folder / f"far_{plugin}.py").write_text("import a_library_of_the_nodes\n")
    assert run_launch("--slurm", *kind, f"plugins=[far_{plugin}]", wrong, config=config) == 0
    note = (
        f"note: plugins: 'far_{plugin}' stopped at .* No module named 'a_library_of_the_nodes'.*names of parts are not"
    )
    assert re.search(note, capsys.readouterr().err)


@pytest.mark.parametrize(("tp", "is_noted"), [(2, False), (4, True)])
def test_tensor_parallelism_across_nodes_is_a_note(tp: int, is_noted: bool, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--nodes", "2", "--nproc", "2", f"parallel.tp={tp}", "model.attention.n_heads=4")
    assert run_launch("--slurm", *words, "--dry-run") == 0
    note = "note: parallel.tp = 4 does not divide a node's 2 processes, so that traffic of every block crosses"
    assert (note in capsys.readouterr().err) == is_noted


def test_a_closed_partition_is_a_note(fake_slurm: FakeSlurm, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    partition(fake_slurm, longest="UNLIMITED", state="DOWN")
    assert run_launch("--slurm", "--time", "6") == 0
    output = capsys.readouterr().err
    assert "note: partition gpu is closed (DOWN): the job waits until it opens" in output
    assert "so it has only 60 s to start and to train" in output
    (folder / "site.toml").write_text("container = ['apptainer', 'exec', 'a.sif']\n")
    assert run_launch("--slurm", "--site", "site.toml", "name=other", "data.train=/in/the/image") == 0
    assert "note: data.train = '/in/the/image': there is no such file or folder; make sure that it exists" in (
        capsys.readouterr().err
    )


def test_nothing_is_refused_while_slurm_does_not_answer(fake_slurm: FakeSlurm) -> None:
    fake_slurm.fail("scontrol-show", "slurm_load_partitions error: Unable to contact slurm controller\n")
    fake_slurm.answer("sbatch", "12\n")
    assert run_launch("--slurm", "--time", "30-00") == 0


@pytest.mark.parametrize(("words", "reason"), [
    (["--begin", "$(touch owned)"], "not an option of sbatch"),
    (["--sbatch=mail-type=FAIL"], "not an option of sbatch"),
    (["--sbatch=--comment=a b"], "not an option of sbatch"),
    (["--sbatch=--x\n#SBATCH --wrap=y"], "not an option of sbatch"),
    (["--sbatch=--signal=B:USR1@5"], "`megatfm launch` sets this itself"),
    (["--sbatch=--time=5"], "`megatfm launch` sets this itself"),
    (["--sbatch=--outp=/x"], "--outp=/x: sbatch would take this for --output: write the full name"),
    (["--sbatch=--job=other"], "for --job-name"),
    (["--sbatch=--nodel=n1"], "for --nodelist"),
    (["--sbatch=--depend=singleton"], "for --dependency"),
    (["--mem", "lots"], "memory = 'lots'"),
])  # fmt: skip
def test_options_that_can_not_be(words: list[str], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        run_launch("--slurm", "--dry-run", *words)
    with pytest.raises(UsageError, match="only with --slurm"):
        run_launch("--nproc", "1", *words)


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


@pytest.mark.parametrize("elastic", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_validation_says_what_training_would_say(layout: list[str], elastic: bool) -> None:
    words = ["train.global_batch=24", "train.micro_batch=2", f"resilience.elastic={str(elastic).lower()}", *layout]
    config = load_config("quickstart", words)
    fits = []
    for processes in range(1, 33):
        try:
            fitted = fit_layout(config, processes)[0] if elastic else config
            sizes = compute_axis_sizes(fitted.parallel, processes)
            for batch in make_batch_schedule(fitted).batches:
                check_global_batch(batch, fitted.train.micro_batch, sizes["dp_replicate"] * sizes["dp_shard"])
            fits.append(processes)
        except UsageError:
            pass
    assert fits, "else this test tests nothing"
    assert [n for n in range(1, 33) if explain_layout_error(config, n) is None] == fits


def test_the_most_nodes_on_which_it_fits() -> None:
    config = load_config("quickstart", ["train.global_batch=8", "train.micro_batch=1"])
    assert find_max_fitting_nodes(config, range(2, 5), 1) == 4
    assert find_max_fitting_nodes(config, range(2, 4), 1) == 2, "three do not divide eight"
    assert find_max_fitting_nodes(config, range(3, 4), 1) is None
    assert find_max_fitting_nodes(config, range(5, 4), 1) is None
    huge = load_config("quickstart", ["train.global_batch=2147483646", "train.micro_batch=2147483646"])
    assert "or choose train.micro_batch = 1073741823" in str(explain_layout_error(huge, 2)), "at once"
    assert "is not a multiple of train.micro_batch = 1 × 3 data ranks" in str(explain_layout_error(config, 3))


@pytest.mark.parametrize("name", ["quickstart", "quickstart-moe"])
def test_small_presets_fit_the_processes_that_their_commands_start(name: str) -> None:
    config = load_config(name, [])
    assert explain_layout_error(config, 1) is None
    assert explain_layout_error(config, 2) is None
