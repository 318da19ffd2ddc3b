"""The pipeline of `megatfm prep`: stages, each of which leaves its result committed before the next begins.

What can be divided (cleaning, all duplicates, tokenizing) is done in parts, which depend on the config alone; what
can't (training the tokenizer, writing shards) joins the parts in their order. So the result is the same whoever does
which part, and a part that is committed is never done again.

What a stage depends on is its basis: a stage has that of the one before and what it needs of the config, the last one
all. Its files lie in a folder named by a hash of it, so none is ever read that other settings made.
"""

import platform
from collections.abc import Callable
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path

from megatfm import tokenizers
from megatfm.config.prep import PrepConfig
from megatfm.data_prep.clean import CleanStage
from megatfm.data_prep.encode import TokenizeStage
from megatfm.data_prep.files import InputFiles
from megatfm.data_prep.hold_out import SplitStage
from megatfm.data_prep.progress import Reporter
from megatfm.data_prep.stages import StageResult, StageRunner
from megatfm.data_prep.summary import PrepSummary
from megatfm.data_prep.take_ids import IdFiles
from megatfm.data_prep.take_images import ImageFiles
from megatfm.data_prep.take_over import EMPTY_SPLIT, SPLITS, ImportSource, ImportStage
from megatfm.data_prep.team import FINISH, LocalExecutor, LockExecutor, TaskExecutor
from megatfm.data_prep.thin import DedupStage
from megatfm.data_prep.work import Workspace, config_identity
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
                f"{workspace.out}: no locks on this file system, but --part needs them: use mpirun"
            )
        if not locked:
            reporter.log(f"{workspace.out}: no locks on this file system: let no other prep work here")
        result = members.broadcast_result(lambda: workspace.finished(shared))
        if result is not None:
            return PrepSummary(workspace.place, result, already_done=True)
        result = _prepare(workspace, StageRunner(config, workspace, reporter, members))
        return PrepSummary(workspace.place, result, already_done=False)


def _prepare(workspace: Workspace, stages: StageRunner) -> StageResult:
    """The story: read and clean, thin out, hold out, tokenize, finish."""
    config, values = stages.config, config_identity(stages.config)
    listing = InputFiles(config.read, workspace.folder / "fetched")
    if config.split.files:
        listing.move_to_front(config.split.files)
    basis: StageResult = {
        "files": listing.fingerprint(),
        "part_bytes": config.part_bytes,
        **{name: values[name] for name in ("version", "plugins", "read", "split", "steps") if name in values},
    }
    if isinstance(stages.team, LockExecutor) or stages.team.rank == 1:
        workspace.agree(basis, shared=isinstance(stages.team, LockExecutor))
    if config.read.is_passthrough:
        return _finish(workspace, stages, _take_over(stages, listing, values, basis))
    clean, folder = CleanStage(stages, listing).run(basis), stages.at(basis)
    if "duplicates" in values:
        basis["duplicates"] = values["duplicates"]
    thin, folder = DedupStage(stages, folder, clean).run(basis), stages.at(basis)
    hold_out = SplitStage(stages, folder, thin["name"], clean["parts"])
    plan = hold_out.plan(basis)
    basis["near_duplicates"] = values["near_duplicates"]
    split = hold_out.run(plan, thin["bytes"], basis)
    encode = TokenizeStage(stages, stages.at(basis))
    basis["tokenizer"] = values["tokenizer"]
    facts = encode.make_tokenizer(split, basis)
    provenance = {"config": values, "input_blake3": clean["blake3"], "libraries": _libraries(config, facts)}
    lossy = [] if facts.get("lossless", True) else [LOSSY]
    result = {
        **provenance,
        "notes": clean["notes"] + split["notes"] + lossy,
        "skipped_files": clean["skipped_files"],
        "steps": clean["steps"] + thin["steps"] + split["steps"],
        "held_out": split["held_out"],
        "tokenizer": facts,
    }
    basis.update(values)
    for name in SPLITS:
        empty = name == "validation" and not config.split.has_validation_split
        result[name] = EMPTY_SPLIT if empty else encode.run(name, split[name], provenance, basis)

    return _finish(workspace, stages, result)


def _take_over(
    stages: StageRunner, listing: InputFiles, values: StageResult, basis: StageResult
) -> StageResult:
    """The shorter story of token ids that were made elsewhere, and of images."""
    basis.update(values)
    config = stages.config
    facts = stages.once(
        "tokenizer", basis, TokenizeStage(stages, stages.at(basis)).copy_tokenizer, in_out=True
    )
    known = tokenizers.load(stages.out) if config.tokenizer.file is not None else None
    source: ImportSource
    if config.read.format == "images":
        source = ImageFiles(listing, known, config.part_bytes)
    else:
        assert known is not None  # as the config is checked
        source = IdFiles(listing, known)

    def provenance(digest: str) -> StageResult:
        return {"config": values, "input_blake3": digest, "libraries": _libraries(config, facts)}

    skipped = [f"{bad.where}: {bad.reason}" for bad in listing.bad]
    found = ImportStage(stages, source).run(basis, provenance)
    return {
        **found["provenance"],
        "notes": [source.warning],
        "skipped_files": skipped + found["skipped_files"],
        "steps": found["steps"],
        "held_out": {"level": "document", "names": []},
        "tokenizer": facts,
        **{name: found[name] for name in SPLITS},
    }


def _finish(workspace: Workspace, stages: StageRunner, result: StageResult) -> StageResult:
    """Commit the whole, once."""

    def finish() -> StageResult:
        workspace.finish(result, clean=not isinstance(stages.team, LockExecutor))
        return result

    return stages.team.run_once(FINISH, workspace.result, finish)


def _libraries(config: PrepConfig, tokenizer: StageResult) -> dict[str, str]:
    """The versions of what took part."""
    names = {*LIBRARIES, *(["pillow"] if config.read.format == "images" else [])}
    if not tokenizer["kind"].startswith("sentencepiece"):
        names.add("tokenizers")
    names |= {
        STEP_LIBRARIES[each.name]
        for each in (*config.steps, *config.duplicates)
        if each.name in STEP_LIBRARIES
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
