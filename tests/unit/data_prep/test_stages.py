"""Steps and searches inside the pipeline: the same bytes for any parts and any moment of death, and honest counts."""

import gzip
import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from megatfm import data_prep
from megatfm.config.prep import PrepConfig
from megatfm.errors import UsageError
from tests.support.killed_preps import KILLED, count_moments, run_killed_at
from tests.support.prep_files import file_hashes, shard_texts, write_file

Make = Callable[..., PrepConfig]


@pytest.fixture
def every_step(config: Make, corpus: Path, tmp_path: Path) -> Callable[..., PrepConfig]:
    """A config with every kind of step and search, and records beside the text."""
    source = (corpus / "json" / "decoder.py").read_text()
    rows = [
        {"text": source.replace("self", f"this{number % 3}", number), "url": "http://good.org"}
        for number in range(4)
    ]
    rows += [{"text": f"from a bad place {number}", "url": "http://bad.com/x"} for number in range(3)]
    write_file(
        corpus / "rows.jsonl.gz",
        gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode(), mtime=0),
    )
    secret = " ".join(f"word{number}" for number in range(20))
    write_file(corpus / "leak.txt", f"Before it. {secret} After it, at a@b.org.".encode())
    listed = {
        "blocked": write_file(tmp_path / "blocked.txt", b"bad.com\n"),
        "set": write_file(tmp_path / "set.txt", secret.encode()),
    }
    steps = [
        {"name": "url_filter", "file": str(listed["blocked"])},
        {"name": "html"},
        {"name": "language"},
        {"name": "pii"},
        {"name": "decontaminate", "files": [str(listed["set"])]},
        {"name": "sample", "rate": 0.95},
    ]
    duplicates = [{"name": "minhash"}, {"name": "lines"}, {"name": "exact_substrings", "min_bytes": 300}]
    return lambda out="out", **settings: config(out, **{"steps": steps, "dedup": duplicates, **settings})


def test_parts_and_memory_and_kills_change_nothing(every_step: Make, tmp_path: Path) -> None:
    summary = data_prep.run(every_step())
    full = file_hashes(summary.out)
    other = every_step("other", task_bytes=9000, dedup_memory_bytes=2**20, tokenizer_threads=1)
    assert file_hashes(data_prep.run(other).out) == full
    small = every_step(task_bytes=60_000)
    moments = count_moments(tmp_path, small)
    lasts = sorted(random.Random(0).sample(range(moments), 3))
    # One folder, killed again and again, and then left to finish.
    statuses = run_killed_at(tmp_path, small, [("again", last) for last in lasts])
    assert KILLED in statuses
    assert file_hashes(data_prep.run(every_step("again", task_bytes=60_000)).out) == full


def test_what_each_step_did_is_told(every_step: Make) -> None:
    summary = data_prep.run(every_step())
    steps = {step["step"]: step for step in summary.result["steps"]}
    assert list(steps) == [
        "read",
        "fix unicode",
        "URL filter",
        "HTML",
        "language",
        "PII",
        "decontamination",
        "sample",
        "exact duplicates",
        "MinHash dedup",
        "repeated lines",
        "exact substrings",
        "split",
    ]
    for before, after in zip([*steps.values()][:-2], [*steps.values()][1:-1], strict=True):
        assert after["documents_in"] == before["documents_out"]
        assert after["bytes_in"] == before["bytes_out"]
    assert steps["URL filter"]["dropped"]["domain"]["documents"] == 3
    assert steps["decontamination"]["dropped"]["contaminated"]["documents"] == 1
    assert steps["PII"]["found"]["e-mail addresses"] >= 1
    assert steps["language"]["found"]["en"] > 10
    assert steps["repeated lines"]["found"]["repeated lines removed"] > 10
    texts = {**shard_texts(summary.out, "train"), **shard_texts(summary.out, "validation")}
    assert len([name for name in texts if name.startswith("rows.jsonl.gz#")]) <= 1
    assert {"resiliparse", "py3langid", "xxhash"} <= set(summary.result["libraries"])


def test_a_list_is_what_it_says(every_step: Make, tmp_path: Path) -> None:
    """Other contents under the same name are another config; the same contents elsewhere are not."""
    data_prep.run(every_step())
    assert data_prep.run(every_step()).already_done
    (tmp_path / "blocked.txt").write_text("other.com\n")
    with pytest.raises(UsageError, match="was prepared with another config"):
        data_prep.run(every_step())
    (tmp_path / "blocked.txt").unlink()
    with pytest.raises(UsageError, match=r"blocked\.txt: can't be read \(No such file"):
        data_prep.run(every_step("new"))


def test_nothing_left_says_why(config: Make) -> None:
    nothing = config(steps=[{"name": "gopher_quality", "min_doc_words": 90_000}])
    with pytest.raises(UsageError, match=r"no document is left: .*gopher_short_doc"):
        data_prep.run(nothing)
