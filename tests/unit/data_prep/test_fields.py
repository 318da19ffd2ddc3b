"""Fields of one's own: they travel into the shards as they were, are filtered on, mixed by and counted."""

import datetime
import json
import random
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from megatfm import data_prep, tokenizers
from megatfm.config.prep import PrepConfig, ReadConfig
from megatfm.config.prep_steps import MetadataFilterConfig
from megatfm.corpus.corpus import Corpus
from megatfm.corpus.export import Detokenizer, export_corpus
from megatfm.corpus.inspect import check_corpus, describe_corpus, tabulate_stats
from megatfm.data_prep.documents import Document, StepStats
from megatfm.data_prep.execution.workspace import to_folder_name
from megatfm.data_prep.filters.selection import MetadataFilter
from megatfm.data_prep.readers import get_reader
from megatfm.data_prep.readers.record import Record
from megatfm.errors import UsageError
from tests.support.prep_files import make_prep_config, write_file

RECORDS: list[dict[str, Any]] = [
    {
        "text": f"Record number {n} says something of its own, namely {n * n}, and a little more. " * 6,
        "url": f"https://www.site{n % 3}.org/{n}",
        "date": f"2026-0{1 + n % 9}-01",
        "licence": ["mit", "cc-by", None, "../x"][n % 4],
        "scores": {"quality": n / 40, "tags": ["a", {"b": None}]},
        "odd \ud83d": "\ud83d half",
    }
    for n in range(40)
]


def of_file(tmp_path: Path, keep: tuple[str, ...], **more: Any) -> PrepConfig:
    write_file(tmp_path / "in" / "a.jsonl", "\n".join(map(json.dumps, RECORDS)).encode())
    tokenizer = {"kind": "byte-bpe", "vocab_size": 300, "sentinels": 0, "ul2_modes": False}
    settings = {"read": {"metadata_keys": keep}, "split": {"validation": 0.2}, "tokenizer": tokenizer}
    return make_prep_config(tmp_path, tmp_path / "in", **(settings | more))


def fields_of(folder: Path) -> dict[str, Any]:
    corpus = Corpus.open(folder)
    return {s.source: dict(s.metadata) for block in range(corpus.n_blocks) for s in corpus.read_block_samples(block)}


@pytest.mark.parametrize("plain", [False, True])
def test_fields_travel_into_the_shards_and_out_again(tmp_path: Path, plain: bool) -> None:
    out = tmp_path / "out"
    data_prep.run(of_file(tmp_path, ("*",), compress=not plain))
    actual = fields_of(out / "train") | fields_of(out / "validation")
    half = "\ufffd"
    expected = {
        f"a.jsonl#{n}": {
            **{name: record[name] for name in ("url", "date", "scores")},
            **({"licence": record["licence"]} if record["licence"] else {}),
            f"odd {half}": f"{half} half",
        }
        for n, record in enumerate(RECORDS, 1)
    }
    assert actual == expected
    check_corpus(out / "train")
    assert "2026-0" in describe_corpus(out / "train", sample=0)
    output = describe_corpus(out / "train")
    assert "site0.org" in output.partition("licence")[0]
    counted = tabulate_stats(out / "train")
    assert counted.count("site1.org") == 1
    assert "cc-by" in counted
    assert "cc-by" in (out / "report.html").read_text()
    model = tokenizers.load(out)
    export_corpus(out / "train", tmp_path / "x.jsonl.zst", Detokenizer(model.decode, model.eos))
    with zstandard.open(tmp_path / "x.jsonl.zst", "rt") as file:
        exported = {record["source"]: record["fields"] for record in map(json.loads, file)}
    assert exported == fields_of(out / "train")


def test_named_fields_only_and_the_corpus_stays_what_it_was_without(tmp_path: Path) -> None:
    summary = data_prep.run(of_file(tmp_path, ("scores.quality", "licence", "nothing")))
    actual = fields_of(tmp_path / "out" / "train") | fields_of(tmp_path / "out" / "validation")
    assert actual["a.jsonl#1"] == {"scores.quality": 0.0, "licence": "mit"}
    assert actual["a.jsonl#3"] == {"scores.quality": 0.05}
    assert "metadata_keys" in summary.result["config"]["read"]
    plain = data_prep.run(of_file(tmp_path, (), out="plain"))
    assert "metadata_keys" not in plain.result["config"]["read"]
    assert "partition_by" not in plain.result["config"]["split"]
    assert not any(fields_of(tmp_path / "plain" / "train").values())
    assert plain.result["train"]["tokens"] == summary.result["train"]["tokens"]


def test_no_two_values_share_a_folder() -> None:
    """Names of scripts other than Latin are long once they are quoted: nine characters for one."""
    values = ["書" * 40 + end for end in ("", "一", "二")] + ["a" * 300, "a" * 200, "a" * 201]
    names = [to_folder_name(value) for value in values]
    assert len({*names}) == len(values)
    assert all(len(name) <= 200 for name in names)
    assert to_folder_name("a" * 200) == "a" * 200


def test_a_corpus_for_each_value_to_be_mixed(tmp_path: Path) -> None:
    summary = data_prep.run(of_file(tmp_path, ("licence",), split={"validation": 0.2, "partition_by": "licence"}))
    train = tmp_path / "out" / "train"
    assert {path.name for path in train.iterdir()} == {"mit", "cc-by", "other", "%2E.%2Fx"}
    for name in ("mit", "cc-by"):
        assert {value["licence"] for value in fields_of(train / name).values()} == {name}
    of_all = summary.result["train"]
    assert sum(value["tokens"] for value in of_all["corpora"].values()) == of_all["tokens"]
    assert sum(Corpus.open(train / name).n_tokens for name in of_all["corpora"]) == of_all["tokens"]
    split = {"validation": 0.2, "partition_by": "licence"}
    assert data_prep.run(of_file(tmp_path, ("licence",), split=split)).already_done
    with pytest.raises(UsageError, match=r"holds a corpus for each of .*mit.*data\.mixture\.NAME\.path"):
        Corpus.open(train)
    selected = {"validation": 0.2, "partition_by": "domain", "partition_values": ["site1.org"]}
    data_prep.run(of_file(tmp_path, (), out="some", split=selected))
    assert {path.name for path in (tmp_path / "some" / "train").iterdir()} == {"site1.org", "other"}
    split["partition_by"] = "license"
    misspelt = data_prep.run(of_file(tmp_path, ("license",), out="misspelt", split=split))
    assert "split.partition_by = 'license': no document has such a field" in "".join(misspelt.result["notes"])
    alone = data_prep.run(of_file(tmp_path, (), out="alone"))
    together = [tmp_path / "some" / "train" / name for name in ("site1.org", "other")]
    assert sum(Corpus.open(item).n_samples for item in together) == alone.result["train"]["documents"]


@pytest.mark.parametrize(("settings", "expected"), [
    ({"field": "n", "min": 2}, [2, 2.5]),
    ({"field": "n", "max": 2.2}, [1, 2]),
    ({"field": "date", "min": "2026-02", "max": "2026-03-31"}, ["2026-02-01"]),
    ({"field": "domain", "allowed": ["b.org"]}, ["b.org"]),
    ({"field": "licence", "denied": ["mit"], "missing": "keep"}, [None, "gpl"]),
    ({"field": "licence", "allowed": ["mit"]}, ["mit"]),
    ({"field": "n", "min": "x"}, []),
])  # fmt: skip
def test_metadata_filter_keeps_matching_documents(settings: dict[str, Any], expected: list[Any]) -> None:
    documents = [
        Document("1", "x", "https://b.org/1", fields={"n": 1, "date": "2026-01-01"}),
        Document("2", "x", "https://c.org/1", fields={"n": 2, "date": "2026-02-01", "licence": "mit"}),
        Document("3", "x", fields={"n": 2.5, "date": "2026-04-01", "licence": "gpl"}),
    ]
    rule = MetadataFilter(MetadataFilterConfig.model_validate({"name": "metadata_filter", **settings}))
    actual = [document for document in documents if isinstance(rule.apply(document, StepStats("")), Document)]
    assert [item.get(settings["field"]) for item in actual] == expected


def test_every_format_keeps_fields(tmp_path: Path) -> None:
    moment = datetime.datetime(2026, 1, 2, 3, 4)
    table = pyarrow.table({"text": ["a text"], "when": [moment], "raw": [b"\x00"], "n": [{"m": [1, None]}]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pyarrow.ipc.new_file(str(tmp_path / "a.arrow"), table.schema) as file:
        file.write_table(table)
    config = ReadConfig.model_validate({"folder": "x", "metadata_keys": ["when", "n.m"]})
    for name in ("parquet", "arrow"):
        (record,) = get_reader(name)(tmp_path / f"a.{name}", config)
        assert isinstance(record, Record)
        assert record.fields == {"when": "2026-01-02T03:04:00", "n.m": [1, None]}


def test_files_of_ones_own_are_held_out(tmp_path: Path) -> None:
    """All of theirs and nothing else, though a training file that comes first by name has some of it, too."""
    draw = random.Random(0)
    records = [{"url": f"{n}", "text": " ".join(f"w{draw.randrange(3000)}" for _ in range(200))} for n in range(40)]
    training, inputs = records[:8], records[8:]
    near = {**training[3], "text": training[3]["text"] + " One more word."}
    folder = tmp_path / "in"
    write_file(folder / "a" / "train.jsonl", "\n".join(map(json.dumps, [training[2], near, *inputs])).encode())
    write_file(folder / "b" / "held.jsonl", "\n".join(map(json.dumps, training)).encode())
    values: dict[str, Any] = {
        "out": str(tmp_path / "out"),
        "read": {"folder": str(folder), "metadata_keys": ["url"]},
        "split": {"validation_files": ["b/*"], "validation": 0},
        "tokenizer": {"kind": "byte-bpe", "vocab_size": 300, "sentinels": 0, "ul2_modes": False},
    }
    summary = data_prep.run(PrepConfig.model_validate(values))
    assert summary.result["held_out"]["names"] == ["b/held.jsonl"]
    assert summary.result["notes"] == []
    rows = {name: fields_of(tmp_path / "out" / name).values() for name in ("train", "validation")}
    urls = {name: {fields["url"] for fields in of_split} for name, of_split in rows.items()}
    assert urls["validation"] == {item["url"] for item in training}
    assert urls["train"] == {item["url"] for item in inputs}
    assert data_prep.run(PrepConfig.model_validate(values)).already_done
    for patterns, message in (
        (["c/*"], r"'c/\*' matches no file below .*, where there are a/train.jsonl, b/held.jsonl"),
        (["*"], "all files would be held out: leave some for training"),
    ):
        repeated = {**values, "out": str(tmp_path / "other"), "split": {"validation_files": patterns}}
        with pytest.raises(UsageError, match=message):
            data_prep.run(PrepConfig.model_validate(repeated))
    dropped = {**values, "out": str(tmp_path / "none")}
    dropped["steps"] = [{"name": "metadata_filter", "field": "url", "denied": [item["url"] for item in training]}]
    with pytest.raises(UsageError, match=r"of b/\* no document is left to hold out"):
        data_prep.run(PrepConfig.model_validate(dropped))
