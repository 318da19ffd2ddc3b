"""The whole pipeline, its steps and searches: nothing but the config decides what comes out, whoever dies."""

import errno
import gzip
import io
import json
import random
import shutil
import tarfile
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
import zstandard

from megatfm import data_prep
from megatfm.config import load_section
from megatfm.config.prep import PrepConfig
from megatfm.corpus.corpus import Corpus
from megatfm.data_prep.execution.progress import PrepSummary
from megatfm.errors import MegatfmError, UsageError
from tests.support.prep_files import KILLED, count_moments, file_hashes, run_killed_at, write_file

Make = Callable[..., PrepConfig]


def shard_texts(out: Path, split: str) -> dict[str, str]:
    """Source → text of all samples of a split."""
    tokenizer = sentencepiece.SentencePieceProcessor(model_file=str(out / "tokenizer.model"))
    texts: dict[str, str] = {}
    for shard in sorted((out / split).glob("*.tar.zst")):
        stream = zstandard.ZstdDecompressor().stream_reader(shard.read_bytes(), read_across_frames=True)
        with tarfile.open(fileobj=stream, mode="r|") as tar:
            members = {member.name: file.read() for member in tar if (file := tar.extractfile(member))}
        for name, data in members.items():
            if name.endswith(".meta.json"):
                meta = json.loads(data)
                ids = np.load(io.BytesIO(members[name.replace("meta.json", "tokens.npy")]))
                many = "keys" in meta
                parts = np.split(ids, np.cumsum(meta["tokens"])[:-1]) if many else [ids]
                sources = meta["sources"] if many else [meta["source"]]
                sizes = meta["bytes"] if many else [meta["bytes"]]
                for source, size, part in zip(sources, sizes, parts, strict=True):
                    texts[source] = tokenizer.decode(part.tolist())
                    assert len(texts[source].encode()) == size
    return texts


def test_every_document_comes_out_once(prepared: PrepSummary, corpus: Path) -> None:
    """Read the shards with zstd, tar, numpy and sentencepiece alone, and compare with the files."""
    texts = {**shard_texts(prepared.out, "train"), **shard_texts(prepared.out, "validation")}
    files = {str(path.relative_to(corpus)): path for path in corpus.rglob("*") if path.is_file()}
    for left_out in ("zz_copy.py", "empty.txt", ".hidden/secret.txt"):
        del files[left_out]
    files = {name.replace("#", "%23"): path for name, path in files.items() if path.stat().st_size}
    assert texts.pop("mojibake.txt") == "The café is près d'ici.\n" * 20
    del files["mojibake.txt"]
    assert texts == {name: path.read_text() for name, path in files.items()}


def test_the_splits_share_no_package_and_have_the_share(prepared: PrepSummary) -> None:
    train, validation = (shard_texts(prepared.out, name) for name in ("train", "validation"))
    assert not {name.split("/")[0] for name in train} & {name.split("/")[0] for name in validation}
    held_out, remaining = (sum(len(text.encode()) for text in split.values()) for split in (validation, train))
    assert 0.05 <= held_out / (held_out + remaining) <= 0.1
    assert prepared.result["held_out"]["level"] == "top-level folder"
    assert sorted({name.split("/")[0] for name in validation}) == prepared.result["held_out"]["names"]


def test_nothing_in_training_is_near_the_held_out(config: Make, prepared: PrepSummary, changeable_corpus: Path) -> None:
    held_out = shard_texts(prepared.out, "validation")
    # A short one, so that the split stays as it is.
    name = min((name for name in held_out if len(held_out[name]) > 1000), key=lambda name: len(held_out[name]))
    write_file(changeable_corpus / "json" / "twin.py", f"{held_out[name]}# and a few words more\n".encode())
    after = data_prep.run(config(read={"folder": str(changeable_corpus)}))
    assert after.result["held_out"] == prepared.result["held_out"]
    assert "json/twin.py" not in shard_texts(after.out, "train")
    dropped = after.result["steps"][-1]["dropped"]["near_validation_document"]
    assert any(example.startswith(f"json/twin.py ~ {name}") for example in dropped["examples"])


def test_the_numbers_add_up(prepared: PrepSummary) -> None:
    result = json.loads((prepared.out / "prep.json").read_text())
    assert result == prepared.result
    steps = {step["step"]: step for step in result["steps"]}
    for step in steps.values():
        dropped = sum(drop["documents"] for drop in step["dropped"].values())
        assert step["documents_in"] == step["documents_out"] + dropped
    for before, step in pairwise(result["steps"]):
        assert (before["documents_out"], before["bytes_out"]) == (step["documents_in"], step["bytes_in"])
    for name in ("train", "validation"):
        corpus = Corpus.open(prepared.out / name)
        totals = [result[name][key] for key in ("documents", "tokens", "text_bytes", "fingerprint")]
        assert [corpus.n_samples, corpus.n_tokens, corpus.n_text_bytes, corpus.fingerprint] == totals
        assert corpus.tokenizer_hash == result["tokenizer"]["blake3"]
    assert steps["split"]["documents_out"] == result["train"]["documents"]
    assert steps["split"]["bytes_out"] == result["train"]["text_bytes"]
    held_out = steps["split"]["dropped"]["held_out"]
    assert held_out["documents"] == result["validation"]["documents"] > 0
    assert held_out["bytes"] == result["validation"]["text_bytes"]
    assert json.loads((prepared.out / "tokenizer.json").read_text()) == result["tokenizer"]


def test_the_tokenizer_never_sees_held_out_text(config: Make, prepared: PrepSummary, changeable_corpus: Path) -> None:
    name = prepared.result["held_out"]["names"][0]
    path = next(path for path in sorted((changeable_corpus / name).rglob("*.py")) if path.stat().st_size > 500)
    # As many bytes as before, so that the split stays as it is.
    path.write_bytes(b"zqxj" * (path.stat().st_size // 4) + b"." * (path.stat().st_size % 4))
    after = data_prep.run(config(read={"folder": str(changeable_corpus)}))
    assert after.result["held_out"] == prepared.result["held_out"]
    assert after.result["validation"] != prepared.result["validation"]
    assert after.result["tokenizer"] == prepared.result["tokenizer"]


def test_workers_and_place_change_no_byte(config: Make, prepared_hashes: dict[str, str]) -> None:
    for workers in (1, 5):
        summary = data_prep.run(config(f"out{workers}", tokenizer_threads=workers))
        assert file_hashes(summary.out) == prepared_hashes
    assert set(prepared_hashes) >= {"tokenizer.model", "tokenizer.json", "prep.json", "train/manifest.json"}
    assert not any(name.startswith(".") or "/." in name for name in prepared_hashes)


def test_prep_runs_without_cpu_affinity(config: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """macOS, for example, has none."""
    monkeypatch.delattr("os.sched_getaffinity")
    assert data_prep.run(config()).result["train"]["documents"]


def test_a_sample_of_a_large_corpus_trains_the_tokenizer(config: Make, prepared: PrepSummary) -> None:
    part = data_prep.run(config(tokenizer={"train_bytes": 100_000}))
    assert part.result["tokenizer"] != prepared.result["tokenizer"]
    assert part.result["train"]["text_bytes"] == prepared.result["train"]["text_bytes"]


@pytest.mark.parametrize(("files", "level"), [(1, "part of a file"), (40, "file")])
def test_a_corpus_without_packages_is_split_more_finely(config: Make, tmp_path: Path, files: int, level: str) -> None:
    text = (Path(json.__path__[0]) / "decoder.py").read_text().splitlines(keepends=True)
    for number in range(files):
        write_file(tmp_path / "flat" / "only" / f"{number}.py", "".join(text[number::files]).encode())
    summary = data_prep.run(config(read={"folder": str(tmp_path / "flat")}, tokenizer={"vocab_size": 400}))
    assert summary.result["held_out"]["level"] == level
    assert any(level in note for note in summary.result["notes"])
    assert summary.result["validation"]["text_bytes"] > 0
    everything = {**shard_texts(summary.out, "train"), **shard_texts(summary.out, "validation")}
    if files == 1:
        parts = sorted(everything, key=lambda name: int(name.partition("#")[2]))
        assert "".join(everything[part] for part in parts) == "".join(text)


def test_a_second_run_does_nothing(config: Make) -> None:
    first = data_prep.run(config())
    times = {path: path.stat().st_mtime_ns for path in first.out.rglob("*")}
    second = data_prep.run(config(tokenizer_threads=1))
    assert (first.already_done, second.already_done) == (False, True)
    assert second.result == first.result
    assert {path: path.stat().st_mtime_ns for path in first.out.rglob("*")} == times


@pytest.fixture
def finished(prepared: PrepSummary, tmp_path: Path) -> Path:
    """The corpus that `config()` makes, in its place."""
    return shutil.copytree(prepared.out, tmp_path / "out")


def test_another_config_is_refused_unless_it_may_overwrite(
    config: Make, finished: Path, prepared_hashes: dict[str, str]
) -> None:
    with pytest.raises(UsageError, match=r"tokenizer.vocab_size was 700, is 800.*overwrite=true"):
        data_prep.run(config(tokenizer={"vocab_size": 800}))
    assert file_hashes(finished) == prepared_hashes
    data_prep.run(config(tokenizer={"vocab_size": 800}, overwrite=True))
    assert file_hashes(finished) != prepared_hashes
    data_prep.run(config(overwrite=True))
    assert file_hashes(finished) == prepared_hashes


def test_a_corpus_of_another_version_or_with_a_file_gone_is_not_overwritten_unasked(
    config: Make, finished: Path, prepared_hashes: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("megatfm.data_prep.execution.config_identity.VERSION", 99)
        with pytest.raises(UsageError, match=r"by another version of megatfm.*overwrite=true"):
            data_prep.run(config())
    assert file_hashes(finished) == prepared_hashes
    (finished / "train" / "manifest.json").unlink()
    with pytest.raises(MegatfmError, match=r"train/manifest.json: is missing.*overwrite=true"):
        data_prep.run(config())


def test_a_folder_with_other_things_is_left_alone(config: Make, tmp_path: Path) -> None:
    write_file(tmp_path / "out" / "train" / "precious.txt", b"mine")
    for settings in ({}, {"overwrite": True}):
        with pytest.raises(UsageError, match="holds 'train', which no prep made"):
            data_prep.run(config(**settings))
    assert file_hashes(tmp_path / "out").keys() == {"train/precious.txt"}


def test_a_mistake_in_the_last_stage_costs_only_that_stage(
    config: Make, prepared_hashes: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match=r"tokenizer\.vocab_size = 900000: too large"):
        data_prep.run(config(tokenizer={"vocab_size": 900_000}))
    monkeypatch.setattr("megatfm.data_prep.clean.DocumentReader", None)  # reading again would fail
    assert file_hashes(data_prep.run(config()).out) == prepared_hashes


def test_text_that_was_added_after_a_mistake_is_read(config: Make, changeable_corpus: Path) -> None:
    read = {"folder": str(changeable_corpus)}
    with pytest.raises(UsageError, match="or add text"):
        data_prep.run(config(read=read, tokenizer={"vocab_size": 900_000}))
    write_file(changeable_corpus / "more.txt", b"a few more words, which no other file has\n" * 100)
    summary = data_prep.run(config(read=read))
    assert "more.txt" in shard_texts(summary.out, "train") | shard_texts(summary.out, "validation")


def test_a_file_system_without_locks_is_reported(
    config: Make, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def flock(*_: int) -> None:
        raise OSError(errno.EBADF, "Bad file descriptor")

    monkeypatch.setattr("fcntl.flock", flock)
    data_prep.run(config())
    assert "no locks on this file system" in capfd.readouterr().err


def test_the_preset_reads_the_standard_library() -> None:
    config = load_section(PrepConfig, "quickstart-data")
    assert config.read.builtin == "python-stdlib"
    assert config.out == str(Path.cwd() / "corpora" / "quickstart")
    assert load_section(PrepConfig, "quickstart-data", ["read.folder=texts"]).read.folder == str(Path.cwd() / "texts")


@pytest.mark.parametrize("many", [10**6, 10])
def test_no_record_is_on_both_sides(config: Make, tmp_path: Path, many: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long records, cut into pieces, in a single file: halves of a record stay together, be they named or too many."""
    monkeypatch.setattr("megatfm.data_prep.split.MAX_NAMES", many)
    line = "Piece {} of article {}, which is one of many words that fill a line of it.\n\n"
    records = [{"text": "".join(line.format(piece, article) for piece in range(40))} for article in range(30)]
    write_file(tmp_path / "flat" / "all.jsonl", "".join(json.dumps(record) + "\n" for record in records).encode())
    summary = data_prep.run(
        config(read={"folder": str(tmp_path / "flat"), "max_document_bytes": 1024}, tokenizer={"vocab_size": 400})
    )
    train, validation = (shard_texts(summary.out, name) for name in ("train", "validation"))
    assert summary.result["held_out"]["level"] == "record"
    assert (len(summary.result["held_out"]["names"]) > 0) == (many > 10)
    sides = [{name.rpartition(".")[0] for name in split} for split in (train, validation)]
    assert len(sides[0]) + len(sides[1]) == 30
    assert not sides[0] & sides[1]
    assert len(validation) > len(sides[1]) > 0, "they were cut"


@pytest.fixture
def every_step(config: Make, changeable_corpus: Path, tmp_path: Path) -> Callable[..., PrepConfig]:
    """A config with every kind of step and search, and records beside the text."""
    source = (changeable_corpus / "json" / "decoder.py").read_text()
    rows = [
        {"text": source.replace("self", f"this{number % 3}", number), "url": "http://good.org"} for number in range(4)
    ]
    rows += [{"text": f"from a bad place {number}", "url": "http://bad.com/x"} for number in range(3)]
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    write_file(changeable_corpus / "rows.jsonl.gz", gzip.compress(lines, mtime=0))
    secret = " ".join(f"word{number}" for number in range(20))
    write_file(changeable_corpus / "leak.txt", f"Before it. {secret} After it, at a@b.org.".encode())
    blocked = write_file(tmp_path / "blocked.txt", b"bad.com\n")
    leaked = write_file(tmp_path / "set.txt", secret.encode())
    steps = [
        {"name": "url_filter", "file": str(blocked)}, {"name": "html"}, {"name": "language"}, {"name": "pii"},
        {"name": "decontaminate", "files": [str(leaked)]}, {"name": "sample", "rate": 0.95},
    ]  # fmt: skip
    duplicates = [{"name": "minhash"}, {"name": "lines"}, {"name": "exact_substrings", "min_bytes": 300}]
    return partial(config, read={"folder": str(changeable_corpus)}, steps=steps, dedup=duplicates)


def test_parts_and_memory_change_nothing(every_step: Make) -> None:
    full = file_hashes(data_prep.run(every_step()).out)
    other = every_step("other", task_bytes=9000, dedup_memory_bytes=2**20, tokenizer_threads=1)
    assert file_hashes(data_prep.run(other).out) == full


@pytest.mark.extended
def test_kills_change_nothing(every_step: Make) -> None:
    full = file_hashes(data_prep.run(every_step()).out)
    small = every_step(task_bytes=60_000)
    moments = count_moments(small)
    # One folder, killed again and again, and then left to finish.
    again = every_step("again", task_bytes=60_000)
    assert KILLED in [run_killed_at(again, last) for last in sorted(random.Random(0).sample(range(moments), 3))]
    assert file_hashes(data_prep.run(again).out) == full


def test_the_summary_counts_each_step(every_step: Make) -> None:
    summary = data_prep.run(every_step())
    steps = {step["step"]: step for step in summary.result["steps"]}
    assert list(steps) == [
        "read", "fix unicode", "URL filter", "HTML", "language", "PII", "decontamination", "sample",
        "exact duplicates", "MinHash dedup", "repeated lines", "exact substrings", "split",
    ]  # fmt: skip
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
