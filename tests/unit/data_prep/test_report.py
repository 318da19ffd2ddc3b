"""The corpus report: its numbers are those of the shards, it needs nothing from outside, and names can't break it."""

import copy
import re
from collections import Counter
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import numpy as np

from megatfm import data_prep, tokenizers
from megatfm.config.prep import PrepConfig, TokenizerConfig
from megatfm.corpus.corpus import Corpus
from megatfm.data_prep.report.page import bars, number, render, size
from megatfm.data_prep.shards import Statistics
from megatfm.data_prep.tokenize import make_tokenizer_files, write_tokenizer
from tests.support.prep_files import write_file

Make = Callable[..., PrepConfig]


def test_the_statistics_are_those_of_the_shards(config: Make) -> None:
    summary = data_prep.run(config(steps=[{"name": "language"}]))
    made_with = tokenizers.load(summary.out)
    for name in ("train", "validation"):
        corpus, result = Corpus.open(summary.out / name), summary.result[name]
        ids = [np.asarray(sample.tokens) for sample in map(corpus.read_sample, range(corpus.n_samples))]
        uses = Counter(np.concatenate(ids).tolist())
        assert result["vocabulary"]["used"] == len(uses)
        assert result["vocabulary"]["used_100_times"] == sum(count >= 100 for count in uses.values())
        assert result["vocabulary"]["size"] == made_with.vocab_size
        assert [times for _, times in result["vocabulary"]["common"]] == [
            times for _, times in uses.most_common(12)
        ]
        lengths = Counter(2 ** int(np.ceil(np.log2(max(1, len(item))))) for item in ids)
        assert dict(result["lengths"]) == lengths
        assert sum(documents for _, documents, _, _ in result["sources"]) <= corpus.n_samples
        if not result["more_sources"]:
            assert sum(tokens for *_, tokens in result["sources"]) == corpus.n_tokens


def test_lengths_and_sources_by_hand(tmp_path: Path) -> None:
    config = TokenizerConfig(kind="byte-bpe", vocab_size=270, sentinels=2, ul2_modes=False)
    statistics = Statistics(write_tokenizer(tmp_path, make_tokenizer_files(config, ["some text " * 50])))
    lengths = zip("aabbb", (1, 2, 4, 5, 8), strict=True)
    documents = [(f"{name}/{tokens}", tokens, 10 * tokens) for name, tokens in lengths]
    statistics.add(np.zeros(20, np.int32), documents)
    facts = statistics.as_json()
    assert facts["lengths"] == [[1, 1], [2, 1], [4, 1], [8, 2]]
    assert facts["sources"] == [["b", 3, 170, 17], ["a", 2, 30, 3]]
    assert facts["vocabulary"]["used"] == 1


def test_the_page_is_whole_and_harmless(config: Make, corpus: Path) -> None:
    write_file(corpus / "<script>alert(1)</script>.txt", b"<script>alert(2)</script> is empty? \n")
    write_file(corpus / "again.txt", b"<script>alert(2)</script> is empty? \n")
    summary = data_prep.run(config())
    page = (summary.out / "report.html").read_text()
    assert page == render(summary.result)
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)" in page
    assert not re.search(r"(?:src|href)=\"(?!data:)", page)
    assert "default-src 'none'" in page
    check = _Balanced()
    check.feed(page)
    assert check.open == []
    for step in summary.result["steps"]:
        assert step["step"] in page
        for reason, dropped in step["dropped"].items():
            assert f"<summary>{reason} <small>{dropped['documents']:,} document" in page


def test_a_result_of_an_older_version_has_a_page(config: Make) -> None:
    result = copy.deepcopy(data_prep.run(config()).result)
    for name in ("train", "validation"):
        for key in ("lengths", "sources", "more_sources", "vocabulary"):
            del result[name][key]
    assert "Training split" in render(result)


def test_report_formats_numbers_and_bars() -> None:
    assert [number(value) for value in (0, 12_345, 3_214_000, 2e9)] == ["0", "12,345", "3.21 M", "2 B"]
    assert [size(value) for value in (12, 12_345, 3_214_000)] == ["12 B", "12.3 KB", "3.21 MB"]
    assert [bar.percent for bar in bars([("a", 5), ("b", 20)])] == [25.0, 100.0]
    assert bars([("a", 0)])[0].percent == 0


class _Balanced(HTMLParser):
    """Elements that were opened and not closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in ("meta", "link"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
