"""The pipeline of `megatfm prep`: stages, each of which commits its result before the next begins.

Cleaning, deduplication and tokenizing are divided into parts, which depend on the config alone. Training the tokenizer
and writing shards join the parts in order. So the result does not depend on which process did which part, and a
committed part is never done again.

A stage's basis is everything that it depends on: the basis of the stage before, and the settings that it reads. The
stage's files are in a folder named by a hash of the basis, so files of other settings are never read. Documents are
removed once the next stage has read them; if other settings need them, their stages run again.
"""

import platform
from collections.abc import Callable
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path

from megatfm import tokenizers
from megatfm.config.prep import PrepConfig
from megatfm.data_prep.clean import CleanStage
from megatfm.data_prep.dedup.runner import DedupStage, list_pass_names
from megatfm.data_prep.documents import SPLITS
from megatfm.data_prep.execution.config_identity import identify_config
from megatfm.data_prep.execution.executors import FINISH, Executor, LocalExecutor, LockExecutor, StageResult
from megatfm.data_prep.execution.progress import PrepSummary, Reporter
from megatfm.data_prep.execution.stages import StageRunner
from megatfm.data_prep.execution.workspace import OTHER, Workspace
from megatfm.data_prep.import_external import EMPTY_SPLIT, ImportSource, ImportStage
from megatfm.data_prep.import_images import ImageFiles, fill_builtin_folder
from megatfm.data_prep.import_token_ids import IdFiles
from megatfm.data_prep.input_files import InputFiles
from megatfm.data_prep.labels import ClassLabels
from megatfm.data_prep.split import SplitStage
from megatfm.data_prep.tokenize import TokenizeStage
from megatfm.errors import UsageError
from megatfm.registry import import_plugins

LIBRARIES = ("blake3", "ftfy", "rensa", "sentencepiece", "zstandard")
STEP_LIBRARIES = {"html": "resiliparse", "language": "py3langid", "lines": "xxhash", "paragraphs": "xxhash"}
LOSSY_NOTE = "this tokenizer is not lossless, so there will be no bits per byte"


def run(
    config: PrepConfig, reporter: Reporter | None = None, make_executor: Callable[[Path], Executor] | None = None
) -> PrepSummary:
    """Prepare a corpus: text → repaired, deduplicated, split, tokenized → shards in `config.out`.

    An interrupted run goes on from its last finished part; a finished one is only reported. `make_executor` maps the
    work folder to the executor of this process; all processes that share the work call `run`. Raises UsageError for a
    config that can't be carried out, and MegatfmError for bad input or a full disk.
    """
    reporter = reporter or Reporter()
    import_plugins(config.plugins)
    if error := config.find_unknown_part():
        raise UsageError(error)
    _check_folders(config)
    workspace = Workspace(config)
    executor = make_executor(workspace.folder) if make_executor else LocalExecutor()
    shared = isinstance(executor, LockExecutor)
    lock = workspace.lock(shared) if shared or executor.rank == 1 else nullcontext(True)
    with workspace.name_write_errors(), lock as locked:
        if shared and not locked:
            raise UsageError(f"{workspace.out}: no locks on this file system, but --task needs them: use mpirun")
        if not locked:
            reporter.log(f"{workspace.out}: no locks on this file system: let no other prep work here")
        result = executor.broadcast_result(lambda: workspace.read_finished(shared))
        if result is not None:
            return PrepSummary(workspace.location, result, already_done=True)
        result = _prepare(workspace, StageRunner(config, workspace, reporter, executor))
        return PrepSummary(workspace.location, result, already_done=False)


def _prepare(workspace: Workspace, stages: StageRunner) -> StageResult:
    """Run the stages in order: read and clean, dedup, split, train the tokenizer, tokenize, commit."""
    config, values = stages.config, identify_config(stages.config)
    read_config = fill_builtin_folder(config.read, workspace.folder / "fetched")
    inputs = InputFiles(read_config, workspace.folder / "fetched")
    if config.split.validation_files:
        inputs.move_to_front(config.split.validation_files)
    basis: StageResult = {
        "files": inputs.compute_fingerprint(),
        "task_bytes": config.task_bytes,
        **{name: values[name] for name in ("version", "plugins", "read", "split", "steps") if name in values},
    }
    basis["split"] = {key: value for key, value in values["split"].items() if key != "near_duplicates"}
    if isinstance(stages.executor, LockExecutor) or stages.executor.rank == 1:
        workspace.check_settings(basis, shared=isinstance(stages.executor, LockExecutor))
    if config.read.is_passthrough:
        return _finish(workspace, stages, _import(stages, inputs, values, basis))
    dedup_basis = {**basis, "dedup": values["dedup"]} if "dedup" in values else basis
    split_basis = {**dedup_basis, "split": values["split"]}
    stages.renew_if_swept(dedup_basis, "split-train", split_basis)
    if config.dedup:
        stages.renew_if_swept(basis, list_pass_names(config)[0], dedup_basis)
    clean = CleanStage(stages, inputs).run(basis)
    deduplicated = DedupStage(stages, stages.get_folder(basis), clean).run(dedup_basis)
    split_stage = SplitStage(stages, stages.get_folder(dedup_basis), deduplicated["name"], clean["parts"])
    split = split_stage.run(split_stage.plan(dedup_basis), deduplicated["bytes"], split_basis)
    basis = {**split_basis}
    tokenize_stage = TokenizeStage(stages, stages.get_folder(basis))
    basis["tokenizer"] = values["tokenizer"]
    tokenizer_facts = tokenize_stage.make_tokenizer(split, basis)
    provenance = {
        "config": values,
        "input_blake3": clean["blake3"],
        "libraries": _get_library_versions(config, tokenizer_facts),
    }
    lossy = [] if tokenizer_facts.get("lossless", True) else [LOSSY_NOTE]
    result = {
        **provenance,
        "notes": clean["notes"] + split["notes"] + lossy,
        "skipped_files": clean["skipped_files"],
        "steps": clean["steps"] + deduplicated["steps"] + split["steps"],
        "held_out": split["held_out"],
        "tokenizer": tokenizer_facts,
    }
    basis.update(values)
    for name in SPLITS:
        empty = name == "validation" and not config.split.has_validation_split
        result[name] = EMPTY_SPLIT if empty else tokenize_stage.run(name, split[name], provenance, basis)
    if list(result["train"].get("corpora", ())) == [OTHER]:
        result["notes"].append(
            f"split.partition_by = {config.split.partition_by!r}: no document has such a field, or none of "
            "split.partition_values, so all are in train/other: check both"
        )
    return _finish(workspace, stages, result)


def _import(stages: StageRunner, inputs: InputFiles, values: StageResult, basis: StageResult) -> StageResult:
    """Run the stages that import token ids or images."""
    basis.update(values)
    config = stages.config
    tokenizer_facts = stages.run_once(
        "tokenizer", basis, TokenizeStage(stages, stages.get_folder(basis)).copy_tokenizer, in_out=True
    )
    tokenizer = tokenizers.load(stages.out) if config.tokenizer.file is not None else None
    source: ImportSource
    classes: list[str] = []
    if config.read.format == "images":
        labels = ClassLabels(config.read.labels, [file.name for file in inputs.files], inputs.folders)
        basis["labels"], classes = labels.fingerprint, labels.names
        source = ImageFiles(inputs, tokenizer, config.task_bytes, labels, config.split)
    else:
        assert tokenizer is not None  # as the config is checked
        source = IdFiles(inputs, tokenizer)

    def provenance(digest: str) -> StageResult:
        class_names = {"classes": classes} if classes else {}
        return {
            "config": values,
            "input_blake3": digest,
            "libraries": _get_library_versions(config, tokenizer_facts),
            **class_names,
        }

    skipped = [f"{bad.where}: {bad.reason}" for bad in inputs.bad]
    imported = ImportStage(stages, source).run(basis, provenance)
    return {
        **imported["provenance"],
        "notes": [*imported["notes"], *inputs.notes],
        "skipped_files": skipped + imported["skipped_files"],
        "steps": imported["steps"],
        "held_out": {"level": "document", "names": []},
        "tokenizer": tokenizer_facts,
        **{name: imported[name] for name in SPLITS},
    }


def _finish(workspace: Workspace, stages: StageRunner, result: StageResult) -> StageResult:
    """Write the result and the report, once."""

    def finish() -> StageResult:
        is_alone = not isinstance(stages.executor, LockExecutor)
        workspace.finish(result, clean=is_alone)
        if is_alone and workspace.folder.exists():
            stages.reporter.log(f"{workspace.folder}: can't be removed yet: delete it, or run the same command again")
        return result

    return stages.executor.run_once(FINISH, workspace.read_result, finish)


def _get_library_versions(config: PrepConfig, tokenizer: StageResult) -> dict[str, str]:
    """Return the versions of the libraries that the result depends on."""
    names = {*LIBRARIES, *(["pillow"] if config.read.format == "images" else [])}
    if not tokenizer["kind"].startswith("sentencepiece"):
        names.add("tokenizers")
    names |= {STEP_LIBRARIES[step.name] for step in (*config.steps, *config.dedup) if step.name in STEP_LIBRARIES}
    return {"python": platform.python_version(), **{name: version(name) for name in sorted(names)}}


def _check_folders(config: PrepConfig) -> None:
    folder = config.read.folder
    if folder is None or ("://" in config.out) != ("://" in folder):
        return
    is_inside = (
        f"{config.out.rstrip('/')}/".startswith(f"{folder.rstrip('/')}/")
        if "://" in folder
        else Path(config.out).resolve().is_relative_to(Path(folder).resolve())
    )
    if is_inside:
        raise UsageError(f"out = {config.out!r}: lies inside read.folder, whose files are read: choose a place outside")
