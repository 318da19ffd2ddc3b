"""The command: exit codes, one line for each mistake, nothing half-written, and words of earlier versions."""

import errno
import json
import os
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from megatfm import data_prep, tokenizers
from megatfm.config import load_section, to_toml
from megatfm.config.key_migrations import RENAMED_PREP_KEYS, RENAMED_PREP_VALUES, find_renamed_prep_words, migrate_prep
from megatfm.config.prep import PrepConfig
from megatfm.corpus.corpus import Corpus
from megatfm.corpus.inspect import check_corpus
from megatfm.errors import MegatfmError, UsageError
from tests.support.prep_files import file_hashes, write_file

Make = Callable[..., PrepConfig]
Prep = Callable[..., int]
SETTINGS = ["split.validation=0.1", "tokenizer.vocab_size=700", "tokenizer.sentinels=4"]


@pytest.fixture
def prep(changeable_corpus: Path, monkeypatch: pytest.MonkeyPatch) -> Prep:
    """`prep("key=value", …)`: run the command in `tmp_path` on the corpus, into `out`."""
    monkeypatch.chdir(changeable_corpus.parent)
    return lambda *overrides: data_prep.cli(["quickstart-data", "read.folder=corpus", "out=out", *SETTINGS, *overrides])


def test_finished_prep_is_reported(prep: Prep, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert prep() == 0
    out, output = capfd.readouterr()
    assert out == ""
    for expected in ("clean | done in", "exact duplicates", "exact_duplicate", "validation", "bytes"):
        assert expected in output
    assert prep() == 0
    assert "was already prepared with this config: nothing to do" in capfd.readouterr().err
    assert (tmp_path / "out" / "prep.json").exists()


def test_a_folder_in_the_place_of_a_config(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert data_prep.cli([str(tmp_path)]) == 2
    assert f"`megatfm prep quickstart-data read.folder={tmp_path} out=corpora/NAME`" in error_line(capfd)


def test_nothing_held_out_nothing_mended_and_mostly_copies(
    prep: Prep, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    lines = [f"def number_{i}(self): return 'caf\u00c3\u00a9 {i}' * {i % 7}" for i in range(1000)]
    page = {"text": "\n".join(lines), "url": "https://www.example.org/a"}
    other = {"text": "\n".join(lines[::-1]), "url": "http://b.org:80/"}
    records = [json.dumps(item) for item in (page, page, page, other)]
    write_file(tmp_path / "lines" / "a.jsonl", "\n".join(records).encode())
    words = ["read.folder=lines", "split.validation=0", "read.fix_unicode=false"]
    assert prep(*words, "steps=[{name='language'}]") == 0
    output = capfd.readouterr().err
    assert "note: 2 of 4 documents" not in output, "half of them is not most"
    result = json.loads((tmp_path / "out/prep.json").read_text())
    assert not (tmp_path / "out/validation").exists()
    assert result["validation"]["documents"] == 0
    assert result["train"]["documents"] == 2
    assert [[name, n] for name, n, *_ in result["train"]["domains"]] == [["b.org", 1], ["example.org", 1]]
    assert sum(n for _, n, *_ in result["train"]["languages"]) == 2
    assert "example.org" in (tmp_path / "out/report.html").read_text()
    corpus = Corpus.open(tmp_path / "out/train")
    decode = tokenizers.load(tmp_path / "out").decode
    assert {decode(corpus.read_sample(at).tokens) for at in range(2)} == {page["text"], other["text"]}
    assert prep(*words, "steps=[{name='language'}]") == 0
    assert "nothing to do" in capfd.readouterr().err
    write_file(tmp_path / "lines" / "b.jsonl", "\n".join(records[:3]).encode())
    assert prep(*words, "out=again") == 0
    assert "note: 5 of 7 documents are exact copies of others" in capfd.readouterr().err


def test_skipped_files_are_listed(prep: Prep, changeable_corpus: Path, capfd: pytest.CaptureFixture[str]) -> None:
    corpus = changeable_corpus
    write_file(corpus / "a.png", b"\x89PNG\0")
    (corpus / "loop").symlink_to(".")
    assert prep("read.on_error=skip", "compress=false") == 0
    shards = sorted(path.name for path in (corpus.parent / "out/train").glob("shard-*.tar*"))
    assert shards == ["shard-000000.tar"]
    check_corpus(corpus.parent / "out/train")
    output = capfd.readouterr().err
    assert f"skipped: {corpus}/a.png: is a binary file" in output
    assert f"skipped: {corpus}/loop: is a link that leads back" in output


def test_a_wrong_text_key_that_skips_most_documents_is_noted(
    prep: Prep, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    records = [{"content" if number % 12 else "text": f"{number} words " * 99} for number in range(120)]
    write_file(tmp_path / "in" / "a.jsonl", "\n".join(map(json.dumps, records)).encode())
    words = ["read.folder=in", "read.on_error=skip", "tokenizer.vocab_size=300", "split.validation=0"]
    assert prep(*words) == 0
    note = "note: 110 of 120 documents (92 %) were unreadable, and were left out, most of them for no_field_text (as a."
    assert note in capfd.readouterr().err
    write_file(
        tmp_path / "in" / "a.jsonl", "\n".join(json.dumps({"text": r.popitem()[1]}) for r in records[11:]).encode()
    )
    write_file(tmp_path / "in" / "b.jsonl", b"\n".join([b"{"] * 10))
    assert prep(*words, "out=few") == 0
    assert "were unreadable" not in capfd.readouterr().err, "one in twelve is not many"


USAGE = {
    "missing folder": (["read.folder=nowhere"], "nowhere: no such folder: set read.folder to a folder of text files"),
    "empty folder": (["read.folder=empty"], "empty: no text files here"),
    "only blank files": (["read.folder=blank"], "no document is left: 2 dropped: empty"),
    "one word": (["read.folder=word"], "hold 10 % of it out: documents are held out whole: "),
    "large vocabulary": (["tokenizer.vocab_size=900000"], "too large for this little text, which gives at most"),
    "small vocabulary": (["tokenizer.vocab_size=200"], "too small for the characters"),
    "a folder of an unknown kind": (["read.folder=nonsense://texts"], "nonsense://texts: can't be opened"),
    "an out on the web": (["out=https://example.org/out"], "nothing can be written over HTTP"),
    "a scratch that is a URL": (["scratch=gs://bucket/x"], "is a URL: choose a folder of this machine"),
    "no code of a language": (["steps=[{name='language',languages=['english']}]"],
                              "languages = 'english' is no code of a language (did you mean 'en'?); the codes are"),
    "unknown key": (["read.foldr=x"], "read.foldr: unknown key"),
    "wrong range": (["split.validation=0.9"], "split.validation = 0.9"),
    "wrong choice": (["read.on_error=ignore"], "read.on_error = 'ignore'"),
    "out in the corpus": (["out=corpus/out"], "lies inside read.folder"),
}  # fmt: skip


@pytest.mark.parametrize("name", USAGE)
def test_usage_errors_are_one_line_with_exit_code_2(
    prep: Prep, tmp_path: Path, capfd: pytest.CaptureFixture[str], name: str
) -> None:
    overrides, reason = USAGE[name]
    (tmp_path / "empty").mkdir()
    write_file(tmp_path / "blank" / "a", b"\n")
    write_file(tmp_path / "blank" / "b", b"")
    write_file(tmp_path / "word" / "a.txt", b"word")
    assert prep(*overrides) == 2
    assert error_line(capfd).count(reason) == 1


def test_a_bad_input_file_and_an_out_that_is_a_file_are_named(
    prep: Prep, changeable_corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_file(tmp_path / "file", b"")
    assert prep("out=file") == 1
    assert "choose another out" in error_line(capfd)
    path = write_file(changeable_corpus / "bad.txt", b"caf\xe9")
    assert prep() == 1
    assert f"{path}: is not valid UTF-8 at byte 3" in error_line(capfd)


@pytest.mark.usefixtures("unprivileged")
def test_an_unreadable_corpus(prep: Prep, changeable_corpus: Path, capfd: pytest.CaptureFixture[str]) -> None:
    changeable_corpus.chmod(0)
    try:
        assert prep() == 1
    finally:
        changeable_corpus.chmod(0o755)
    assert "corpus: can't list this folder (Permission denied)" in error_line(capfd)


@pytest.mark.parametrize(("error", "message"), [
    (OSError("the store said no"), "error: the store said no"),
    (OSError(), "error: OSError"),
    (PermissionError(13, "Permission denied", "a.txt"), "error: a.txt: Permission denied"),
])  # fmt: skip
def test_errors_of_the_system_are_said(
    prep: Prep, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, error: OSError, message: str
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("megatfm.data_prep.run", fail)
    assert prep() == 1
    assert error_line(capfd) == message


@contextmanager
def limited_file_size(kilobytes: int) -> Iterator[None]:
    """Files of this process can't grow further: any user can set that, and it stands for a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (kilobytes * 1024, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("kilobytes", [16, 56])
def test_files_that_can_not_grow(
    config: Make, prepared_hashes: dict[str, str], tmp_path: Path, capfd: pytest.CaptureFixture[str], kilobytes: int
) -> None:
    (tmp_path / "prep.toml").write_text(to_toml(config()))
    with limited_file_size(kilobytes):
        assert data_prep.cli([str(tmp_path / "prep.toml")]) == 1
    assert ": File too large: make room" in error_line(capfd)
    assert nothing_half_written(tmp_path / "out", prepared_hashes)
    assert file_hashes(data_prep.run(config()).out) == prepared_hashes


@pytest.mark.parametrize("name", [".work", "????????????????"])
def test_a_folder_that_can_not_be_made_names_the_way_out(
    config: Make, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    make_folder = os.mkdir

    def fail(path: Path, *arguments: Any) -> None:
        if Path(path).match(name):
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        make_folder(path, *arguments)

    monkeypatch.setattr(os, "mkdir", fail)
    with pytest.raises(MegatfmError, match=r"can't write .*/\.work.*: No space left on device: make room or choose"):
        data_prep.run(config())


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 600 KB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("only root may mount a small file system")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_full_disk(prep: Prep, config: Make, small_disk: Path, capfd: pytest.CaptureFixture[str]) -> None:
    ballast = write_file(small_disk / "ballast", bytes(500_000))
    assert prep(f"out={small_disk / 'out'}") == 1
    assert ": No space left on device: make room" in error_line(capfd)
    assert nothing_half_written(small_disk / "out", {})
    ballast.unlink()
    subprocess.run(["mount", "-o", "remount,size=20m", str(small_disk)], check=True)
    assert prep(f"out={small_disk / 'out'}") == 0


def nothing_half_written(out: Path, complete: dict[str, str]) -> bool:
    left = {name: value for name, value in file_hashes(out).items() if "." not in {part[0] for part in name.split("/")}}
    return left.items() <= complete.items() and "prep.json" not in left


def error_line(capfd: pytest.CaptureFixture[str]) -> str:
    """The one line of an error, the last of what was said."""
    output = capfd.readouterr().err
    assert "Traceback" not in output
    *before, last = output.splitlines()
    assert last.startswith("error: ")
    assert not any("error" in line for line in before)
    return last


# ---------------------------------------------------------------------------------- words of earlier versions


STORED = Path(__file__).parents[2] / "golden" / "stored"
SCORE = {"file": "x", "min_score": 0.1, "max_score": 0.9, "save_as": "q"}
OLD_SCORE = {"file": "x", "at_least": 0.1, "at_most": 0.9, "field": "q"}
OLD: dict[str, Any] = {
    "out": "x", "workers": 2, "part_bytes": 4096, "memory_bytes": 2**21, "plain_tars": True,
    "read": {
        "source": "python-stdlib", "on_bad": "skip", "repair_unicode": False, "tokens": {"dtype": "int32", "end": 3},
        "fields": {"text": "body", "url": "at", "keep": ["n"]},
    },
    "split": {"by": "n", "values": ["1"], "files": ["a/*"]},
    "near_duplicates": {"similarity": 0.8, "shingle_words": 3},
    "tokenizer": {"kind": "byte-bpe", "modes": True, "pattern": "llama3"},
    "steps": [
        {"name": "gopher_quality", "words": "space", "min_words": 2, "max_words": 9, "min_mean_word": 1.0,
         "max_mean_word": 5.0, "max_symbols": 0.2, "max_bullet_lines": 0.3, "max_ellipsis_lines": 0.4,
         "min_alphabetic": 0.5},
        {"name": "gopher_repetition", "words": "spacy", "lines": 0.1, "paragraphs": 0.2, "line_characters": 0.3,
         "paragraph_characters": 0.4, "top_ngrams": [0.5], "repeated_ngrams": [0.6]},
        {"name": "c4", "terminal_punctuation": False, "min_line_words": 1, "max_word_characters": 2,
         "min_sentences": 3, "curly_brackets": True},
        {"name": "c4", "curly_brackets": False},
        {"name": "fineweb", "words": "space", "min_punctuated_lines": 0.1, "max_repeated_characters": 0.2,
         "max_short_lines": 0.3, "short_line": 4, "max_lines_per_word": 0.5},
        {"name": "language", "keep": ["en"], "min_probability": 0.1, "characters": 5},
        {"name": "blocked_urls", "file": "x"}, {"name": "blocked_words", "file": "x"}, {"name": "redact", "ip": ""},
        {"name": "decontaminate", "words": 7, "against": ["x"]},
        {"name": "where", "field": "n", "is_in": [1], "is_not": [2], "at_least": 0.0, "at_most": 1.0},
        {"name": "sample", "keep": 0.5, "by_path": {"a/*": 0.1}},
        {"name": "linear", **OLD_SCORE}, {"name": "fasttext", "label": "l", **OLD_SCORE},
        {"name": "classifier", "folder": "x", "tokens": 5, "at_least": 0.1, "at_most": 0.9, "field": "q"},
        {"name": "perplexity", "run": "x", "tokens": 5, "at_least": 1.1, "at_most": 9.0, "field": "q"},
        {"name": "mine", "keep": 1, "words": 2, "at_least": 3},
    ],
    "duplicates": [
        {"name": "near", "shingle_words": 3, "bands": 4, "rows": 5}, {"name": "lines", "loose": False},
        {"name": "paragraphs", "loose": True}, {"name": "substrings", "min_bytes": 30},
    ],
}  # fmt: skip
NEW: dict[str, Any] = {
    "out": "x", "tokenizer_threads": 2, "task_bytes": 4096, "dedup_memory_bytes": 2**21, "compress": False,
    "read": {
        "builtin": "python-stdlib", "on_error": "skip", "fix_unicode": False,
        "tokens": {"dtype": "int32", "eos_id": 3}, "text_key": "body", "url_key": "at", "metadata_keys": ["n"],
    },
    "split": {
        "partition_by": "n", "partition_values": ["1"], "validation_files": ["a/*"],
        "near_duplicates": {"similarity": 0.8, "n_grams": 3},
    },
    "tokenizer": {"kind": "byte-bpe", "ul2_modes": True, "pretokenizer": "llama3"},
    "steps": [
        {"name": "gopher_quality", "word_tokenizer": "space", "min_doc_words": 2, "max_doc_words": 9,
         "min_avg_word_length": 1.0, "max_avg_word_length": 5.0, "max_symbol_word_ratio": 0.2,
         "max_bullet_lines_ratio": 0.3, "max_ellipsis_lines_ratio": 0.4, "min_alpha_words_ratio": 0.5},
        {"name": "gopher_repetition", "word_tokenizer": "spacy", "dup_line_frac": 0.1, "dup_para_frac": 0.2,
         "dup_line_char_frac": 0.3, "dup_para_char_frac": 0.4, "top_n_grams": [0.5], "dup_n_grams": [0.6]},
        {"name": "c4", "filter_no_terminal_punct": False, "min_words_per_line": 1, "max_word_length": 2,
         "min_num_sentences": 3, "filter_curly_bracket": False},
        {"name": "c4", "filter_curly_bracket": True},
        {"name": "fineweb", "word_tokenizer": "space", "line_punct_thr": 0.1, "char_duplicates_ratio": 0.2,
         "short_line_thr": 0.3, "short_line_length": 4, "new_line_ratio": 0.5},
        {"name": "language", "languages": ["en"], "language_threshold": 0.1, "max_characters": 5},
        {"name": "url_filter", "file": "x"}, {"name": "c4_badwords", "file": "x"}, {"name": "pii", "ip": ""},
        {"name": "decontaminate", "n_grams": 7, "files": ["x"]},
        {"name": "metadata_filter", "field": "n", "allowed": [1], "denied": [2], "min": 0.0, "max": 1.0},
        {"name": "sample", "rate": 0.5, "rate_by_path": {"a/*": 0.1}},
        {"name": "linear_classifier", **SCORE}, {"name": "fasttext", "label": "l", **SCORE},
        {"name": "classifier", "folder": "x", "max_tokens": 5, "min_score": 0.1, "max_score": 0.9, "save_as": "q"},
        {"name": "perplexity", "run": "x", "max_tokens": 5, "min_score": 1.1, "max_score": 9.0, "save_as": "q"},
        {"name": "mine", "keep": 1, "words": 2, "at_least": 3},
    ],
    "dedup": [
        {"name": "minhash", "n_grams": 3, "num_buckets": 4, "hashes_per_bucket": 5},
        {"name": "lines", "normalize": False}, {"name": "paragraphs", "normalize": True},
        {"name": "exact_substrings", "min_bytes": 30},
    ],
}  # fmt: skip


def test_every_old_word_is_translated_once() -> None:
    assert migrate_prep(OLD) == NEW
    assert migrate_prep(NEW) == NEW
    assert find_renamed_prep_words(NEW) == []
    assert len(find_renamed_prep_words(OLD)) == len(RENAMED_PREP_KEYS) + len(RENAMED_PREP_VALUES)
    PrepConfig.model_validate(NEW | {"plugins": ["mine"]})


@pytest.mark.parametrize(("text", "words"), [
    ("[[duplicates]]\nname = 'near'\nbands = 3", "duplicates is dedup now, dedup.bands is dedup.num_buckets now, "
     "dedup.name = 'near' is 'minhash' now"),
    ("[[steps]]\nname = 'where'\nfield = 'n'\nat_least = 1", "steps.at_least is steps.min now, "
     "steps.name = 'where' is 'metadata_filter' now"),
    ("plain_tars = true", r"plain_tars is compress now \(which says the opposite\)"),
    ("split = 3\n[near_duplicates]\nsimilarity = 0.7", r"near_duplicates.similarity is split.near_duplicates.sim"),
    ("", r"read.on_bad is read.on_error now: write these"),
])  # fmt: skip
def test_a_file_with_old_words_is_refused_with_the_new_ones(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "prep.toml"
    path.write_text(f"out = 'x'\n{text}\n[read]\nfolder = 'y'\n")
    with pytest.raises(UsageError, match=f"words of an earlier version: .*{words}"):
        load_section(PrepConfig, path, () if text else ("read.on_bad=skip",))


@pytest.mark.parametrize("stored", sorted(STORED.iterdir()), ids=lambda path: path.name)
def test_a_corpus_of_an_earlier_version_is_the_one_that_its_config_asks_for(
    stored: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(stored / "corpus", tmp_path / "out")
    version = json.loads((stored / "corpus" / "prep.json").read_text())["config"]["version"]
    monkeypatch.setattr("megatfm.data_prep.execution.config_identity.VERSION", version)  # words alone have changed
    values = {
        "out": str(tmp_path / "out"),
        "read": {"folder": "/tmp/recorded/texts"},
        "split": {"validation": 0.3},
        "tokenizer": {"kind": "byte-bpe", "vocab_size": 320},
    }
    assert data_prep.run(PrepConfig.model_validate(values)).already_done
    changed = {**values, "split": {"validation": 0.3, "near_duplicates": {"n_grams": 6}}}
    with pytest.raises(UsageError, match=r"split\.near_duplicates\.n_grams was 5, is 6"):
        data_prep.run(PrepConfig.model_validate(changed))
