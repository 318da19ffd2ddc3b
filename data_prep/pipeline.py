"""The pipeline of `megatfm prep`: stages, each of which leaves its result committed before the next begins.

What can be divided (cleaning, all duplicates, tokenizing) is done in parts, which depend on the config alone; what
can't (training the tokenizer, writing shards) joins the parts in their order. So the result is the same whoever does
which part, and a part that is committed is never done again.

What a stage depends on is its basis: a stage has that of the one before and what it needs of the config, the last one
all. Its files lie in a folder named by a hash of it, so none is ever read that other settings made. Documents are
removed once the next stage has read them; if other settings need them again, their stages run again.
"""

import platform
from collections.abc import Callable
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path

from megatfm import tokenizers
from megatfm.config.prep import PrepConfig
from megatfm.data_prep.builtin import with_builtin_folder
from megatfm.data_prep.clean import CleanStage
from megatfm.data_prep.dedup.runner import DedupStage, pass_names
from megatfm.data_prep.execution.executors import FINISH, LocalExecutor, LockExecutor, TaskExecutor
from megatfm.data_prep.execution.progress import PrepSummary, Reporter
from megatfm.data_prep.execution.stages import StageResult, StageRunner
from megatfm.data_prep.execution.workspace import Workspace, config_identity
from megatfm.data_prep.import_external import (
    EMPTY_SPLIT,
    SPLITS,
    IdFiles,
    ImageFiles,
    ImportSource,
    ImportStage,
)
from megatfm.data_prep.input_files import InputFiles
from megatfm.data_prep.labels import ClassLabels
from megatfm.data_prep.split import SplitStage
from megatfm.data_prep.tokenize import TokenizeStage
from megatfm.errors import UsageError
from megatfm.registry import import_plugins

LIBRARIES = ("blake3", "ftfy", "rensa", "sentencepiece", "zstandard")
STEP_LIBRARIES = {
    "html": "resiliparse",
    "language": "py3langid",
    "lines": "xxhash",
    "paragraphs": "xxhash",
}
LOSSY = "this tokenizer does not keep every text as it is, so there will be no bits per byte"


def run(
    config: PrepConfig, reporter: Reporter | None = None, team: Callable[[Path], TaskExecutor] | None = None
) -> PrepSummary:
    """Prepare a corpus: text → repaired, deduplicated, split, tokenized → shards in `config.out`.

    An interrupted run goes on from its last finished part; a finished one is only reported. `team` makes, of the
    folder for work in progress, those who do it together; each of them calls this. Raises UsageError for a config
    that can't be carried out and MegatfmError for bad input or a full disk.
    """
    reporter = reporter or Reporter()
    import_plugins(config.plugins)
    _check_places(config)
    workspace = Workspace(config)
    members = team(workspace.folder) if team else LocalExecutor()
    shared = isinstance(members, LockExecutor)
    with workspace.lock(shared) if shared or members.rank == 1 else nullcontext(True) as locked:
        if shared and not locked:
            raise UsageError(
                f"{workspace.out}: no locks on this file system, but --task needs them: use mpirun"
            )
        if not locked:
            reporter.log(f"{workspace.out}: no locks on this file system: let no other prep work here")
        result = members.broadcast_result(lambda: workspace.finished(shared))
        if result is not None:
            return PrepSummary(workspace.place, result, already_done=True)
        result = _prepare(workspace, StageRunner(config, workspace, reporter, members))
        return PrepSummary(workspace.place, result, already_done=False)


def _prepare(workspace: Workspace, stages: StageRunner) -> StageResult:
    """Run the stages in order: read and clean, dedup, split, train the tokenizer, tokenize, commit."""
    config, values = stages.config, config_identity(stages.config)
    read = with_builtin_folder(config.read, workspace.folder / "fetched")
    listing = InputFiles(read, workspace.folder / "fetched")
    if config.split.validation_files:
        listing.move_to_front(config.split.validation_files)
    basis: StageResult = {
        "files": listing.fingerprint(),
        "task_bytes": config.task_bytes,
        **{name: values[name] for name in ("version", "plugins", "read", "split", "steps") if name in values},
    }
    basis["split"] = {key: value for key, value in values["split"].items() if key != "near_duplicates"}
    if isinstance(stages.team, LockExecutor) or stages.team.rank == 1:
        workspace.agree(basis, shared=isinstance(stages.team, LockExecutor))
    if config.read.is_passthrough:
        return _finish(workspace, stages, _import(stages, listing, values, basis))
    of_dedup = {**basis, "dedup": values["dedup"]} if "dedup" in values else basis
    of_split = {**of_dedup, "split": values["split"]}
    stages.renew_if_swept(of_dedup, "split-train", of_split)
    if config.dedup:
        stages.renew_if_swept(basis, pass_names(config)[0], of_dedup)
    clean = CleanStage(stages, listing).run(basis)
    deduplicated = DedupStage(stages, stages.at(basis), clean).run(of_dedup)
    hold_out = SplitStage(stages, stages.at(of_dedup), deduplicated["name"], clean["parts"])
    split = hold_out.run(hold_out.plan(of_dedup), deduplicated["bytes"], of_split)
    basis = {**of_split}
    encode = TokenizeStage(stages, stages.at(basis))
    basis["tokenizer"] = values["tokenizer"]
    facts = encode.make_tokenizer(split, basis)
    provenance = {"config": values, "input_blake3": clean["blake3"], "libraries": _libraries(config, facts)}
    lossy = [] if facts.get("lossless", True) else [LOSSY]
    result = {
        **provenance,
        "notes": clean["notes"] + split["notes"] + lossy,
        "skipped_files": clean["skipped_files"],
        "steps": clean["steps"] + deduplicated["steps"] + split["steps"],
        "held_out": split["held_out"],
        "tokenizer": facts,
    }
    basis.update(values)
    for name in SPLITS:
        empty = name == "validation" and not config.split.has_validation_split
        result[name] = EMPTY_SPLIT if empty else encode.run(name, split[name], provenance, basis)

    return _finish(workspace, stages, result)


def _import(stages: StageRunner, listing: InputFiles, values: StageResult, basis: StageResult) -> StageResult:
    """Run the stages that import token ids or images."""
    basis.update(values)
    config = stages.config
    facts = stages.once(
        "tokenizer", basis, TokenizeStage(stages, stages.at(basis)).copy_tokenizer, in_out=True
    )
    tokenizer = tokenizers.load(stages.out) if config.tokenizer.file is not None else None
    source: ImportSource
    classes: list[str] = []
    if config.read.format == "images":
        labels = ClassLabels(config.read.labels, (file.name for file in listing.files))
        basis["labels"], classes = labels.fingerprint, labels.names
        source = ImageFiles(listing, tokenizer, config.task_bytes, labels, config.split.seed)
    else:
        assert tokenizer is not None  # as the config is checked
        source = IdFiles(listing, tokenizer)

    def provenance(digest: str) -> StageResult:
        named = {"classes": classes} if classes else {}
        return {"config": values, "input_blake3": digest, "libraries": _libraries(config, facts), **named}

    skipped = [f"{bad.where}: {bad.reason}" for bad in listing.bad]
    imported = ImportStage(stages, source).run(basis, provenance)
    return {
        **imported["provenance"],
        "notes": [source.warning],
        "skipped_files": skipped + imported["skipped_files"],
        "steps": imported["steps"],
        "held_out": {"level": "document", "names": []},
        "tokenizer": facts,
        **{name: imported[name] for name in SPLITS},
    }


def _finish(workspace: Workspace, stages: StageRunner, result: StageResult) -> StageResult:
    """Write the result and the report, once."""

    def finish() -> StageResult:
        workspace.finish(result, clean=not isinstance(stages.team, LockExecutor))
        return result

    return stages.team.run_once(FINISH, workspace.result, finish)


def _libraries(config: PrepConfig, tokenizer: StageResult) -> dict[str, str]:
    """Return the versions of the libraries that took part."""
    names = {*LIBRARIES, *(["pillow"] if config.read.format == "images" else [])}
    if not tokenizer["kind"].startswith("sentencepiece"):
        names.add("tokenizers")
    names |= {
        STEP_LIBRARIES[step.name] for step in (*config.steps, *config.dedup) if step.name in STEP_LIBRARIES
    }
    return {"python": platform.python_version(), **{name: version(name) for name in sorted(names)}}


def _check_places(config: PrepConfig) -> None:
    folder = config.read.folder
    if folder is None or ("://" in config.out) != ("://" in folder):
        return
    inside = (
        f"{config.out.rstrip('/')}/".startswith(f"{folder.rstrip('/')}/")
        if "://" in folder
        else Path(config.out).resolve().is_relative_to(Path(folder).resolve())
    )
    if inside:
        raise UsageError(
            f"out = {config.out!r}: lies inside read.folder, whose files are read: choose a place outside"
        )
