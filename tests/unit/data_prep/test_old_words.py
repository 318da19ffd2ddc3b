"""Words of earlier versions: translated where a prep.json holds them, refused with the new ones in a user's config."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from megatfm import data_prep
from megatfm.config import load
from megatfm.config.key_migrations import (
    RENAMED_PREP_KEYS,
    RENAMED_PREP_VALUES,
    find_renamed_prep_words,
    migrate_prep,
)
from megatfm.config.prep import PrepConfig
from megatfm.errors import UsageError

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
    PrepConfig.model_validate(NEW)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[[duplicates]]\nname = 'near'\nbands = 3", "duplicates is dedup now, dedup.bands is dedup.num_buckets now, "
         "dedup.name = 'near' is 'minhash' now"),
        ("[[steps]]\nname = 'where'\nfield = 'n'\nat_least = 1", "steps.at_least is steps.min now, "
         "steps.name = 'where' is 'metadata_filter' now"),
        ("plain_tars = true", r"plain_tars is compress now \(which says the opposite\)"),
        ("", r"read.on_bad is read.on_error now: write these"),
    ],
)  # fmt: skip
def test_a_file_with_old_words_is_refused_with_the_new_ones(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "prep.toml"
    path.write_text(f"out = 'x'\n{text}\n[read]\nfolder = 'y'\n")
    with pytest.raises(UsageError, match=f"words of an earlier version: .*{words}"):
        load(PrepConfig, path, () if text else ("read.on_bad=skip",))


@pytest.mark.parametrize("stored", sorted(STORED.iterdir()), ids=lambda path: path.name)
def test_a_corpus_of_an_earlier_version_is_the_one_that_its_config_asks_for(
    stored: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(stored / "corpus", tmp_path / "out")
    version = json.loads((stored / "corpus" / "prep.json").read_text())["config"]["version"]
    monkeypatch.setattr(
        "megatfm.data_prep.execution.config_identity.VERSION", version
    )  # words alone have changed
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
