"""How far a preparation is, from what it leaves in the corpus that it makes. No torch."""

import re
from dataclasses import replace
from pathlib import Path

from megatfm.launchers.files import read_launch_record
from megatfm.launchers.job import JobState

_PART = re.compile(r"([a-z-]+)\.\d{5}\.json")


def is_prep_run(run: Path) -> bool:
    """Whether a folder is of `megatfm launch` for a corpus; False for one that nothing launched."""
    return read_launch_record(run).get("kind") == "prep"


def corpus_dir(run: Path) -> Path:
    """What a preparation makes: its own folder lies beside that, as NAME.jobs."""
    return run.with_name(run.name.removesuffix(".jobs"))


def prep_job_state(run: Path, state: JobState) -> JobState:
    """The state of a preparation's jobs, or what the corpus says: only its prep.json tells that all is done."""
    if (corpus_dir(run) / "prep.json").is_file():
        return replace(state, name="DONE") if state.is_over else state
    if state.is_over and state.name in ("COMPLETED", "DONE", "GONE"):
        return JobState("FAILED", f"{state.reason}; the corpus is not finished: start the same command again")
    return state


def prep_progress(run: Path) -> str:
    """The stage at which a preparation is, and how many of its parts are done; nothing where there is none."""
    if (corpus_dir(run) / "prep.json").is_file():
        return "the corpus is finished"
    parts: dict[str, int] = {}
    newest = 0.0, ""
    try:
        for path in (corpus_dir(run) / ".work").rglob("*.json"):  # below a folder for each set of settings
            if match := _PART.fullmatch(path.name):
                parts[match[1]] = parts.get(match[1], 0) + 1
                newest = max(newest, (path.stat().st_mtime, match[1]))
    except OSError:  # not begun, or finished at this moment
        return ""
    return f"{newest[1]}: {parts[newest[1]]} parts done" if newest[1] else ""
