"""Held-out documents and classes of images, against exact definitions."""

import io
import json
import random
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from megatfm import data_prep
from megatfm.config.prep import LabelsConfig, NearDuplicatesConfig, PrepConfig
from megatfm.corpus.corpus import Corpus
from megatfm.corpus.images import ImageColumns
from megatfm.corpus.webdataset_images import LabelRule
from megatfm.data_prep.documents import Document, StepStats
from megatfm.data_prep.labels import ClassLabels, _read_table
from megatfm.data_prep.readers.images import ImageRecord, make_record
from megatfm.data_prep.split import ValidationNearDuplicates, choose_held_out, plan_by_documents, plan_by_files
from megatfm.errors import MegatfmError, UsageError
from tests.support.images import encode_image
from tests.support.prep_files import write_file

WORDS = [f"w{number}" for number in range(5000)]
sizes = st.dictionaries(st.text(min_size=1, max_size=5), st.integers(0, 1000), max_size=50)


@given(sizes=sizes, share=st.floats(0.01, 0.5), seed=st.integers(0, 5))
def test_the_share_is_at_most_what_was_asked_and_at_least_half(sizes: dict[str, int], share: float, seed: int) -> None:
    held_out = choose_held_out(sizes, share, seed)
    actual, most = sum(sizes[name] for name in held_out), share * sum(sizes.values())
    assert not held_out or most / 2 <= actual <= most
    assert held_out == choose_held_out(dict(reversed(sizes.items())), share, seed)


def test_seeds_choose_differently_and_names_keep_their_side() -> None:
    names = {f"package{number}": 10 for number in range(1000)}
    first, other = choose_held_out(names, 0.1, 0), choose_held_out(names, 0.1, 1)
    assert len(first) == len(other) == 100
    assert len(first & other) < 30
    grown = choose_held_out({**names, **{f"new{number}": 10 for number in range(100)}}, 0.1, 0)
    assert len(first & grown) > 85


def test_a_level_is_left_only_when_it_can_not_give_the_share() -> None:
    packages = {f"p{number}/{name}.py": 100 for number in range(20) for name in "ab"}
    files = {f"p/{number}.py": 100 for number in range(20)}
    parts = {f"p/one.py#{number}": 100 for number in range(20)}
    few = {"record": {"p/one.py": 2000}, "part of a file": parts}
    plans = (
        plan_by_files(packages, 0.1, 0),
        plan_by_files(files, 0.1, 0),
        plan_by_documents({**few, "record": parts}, 0.1, 0),
        plan_by_documents(few, 0.1, 0),
    )
    levels = ("top-level folder", "file", "record", "part of a file")
    for split, selected, level in zip(plans, (packages, files, parts, parts), levels, strict=True):
        assert split is not None
        assert split.level == level
        assert sum(split.holds_out(Document(name, "")) for name in selected) in (2, 4)
    assert plan_by_files({"p/one.py": 2000}, 0.1, 0) is None
    one = {"p/one.py#0": 100}
    assert plan_by_documents({"record": one, "part of a file": one}, 0.1, 0) is None
    assert plan_by_files({}, 0.1, 0) is None


def test_packages_stay_together() -> None:
    selected = {f"p{number % 20}/d/{number}.py": 100 for number in range(400)}
    split = plan_by_files(selected, 0.1, 0)
    assert split is not None
    documents = [Document(name, "") for name in selected]
    sides = {document.top_level: split.holds_out(document) for document in documents}
    assert all(split.holds_out(document) == sides[document.top_level] for document in documents)
    assert sum(sides.values()) == 2


def guarded(folder: Path, held_out: Mapping[str, str], texts: Mapping[str, str], **settings: Any) -> StepStats:
    """Outcome of the texts, given what is held out."""
    near, counts = ValidationNearDuplicates(NearDuplicatesConfig(**settings), folder), StepStats("split")
    # In two parts, and one that has none.
    for part, selected in enumerate((dict([*held_out.items()][:1]), {}, dict([*held_out.items()][1:]))):
        near.scan(part, documents(selected))
    assert near.index(3) == len(held_out)
    # Those who look need not be those who wrote.
    left = list(ValidationNearDuplicates(NearDuplicatesConfig(**settings), folder).drop_near(documents(texts), counts))
    assert [document.id for document in left] == [
        name
        for name in texts
        if not any(example.startswith(f"{name} ~ ") for drop in counts.dropped.values() for example in drop.examples)
    ]
    return counts


def documents(texts: Mapping[str, str]) -> Iterator[Document]:
    return (Document(name, text) for name, text in texts.items())


@pytest.mark.parametrize("threshold", [0.6, 0.7, 0.85])
def test_near_duplicates_by_exact_similarity(tmp_path: Path, threshold: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatfm.data_prep.documents.EXAMPLES", 1000)
    monkeypatch.setattr("megatfm.data_prep.dedup.hashing.BATCH_BYTES", 20_000)  # in many batches
    rng = random.Random(0)
    held_out = {f"v{number}\n/é": " ".join(rng.choices(WORDS, k=400)) for number in range(20)}
    texts, similarities = {}, {}
    for number in range(160):
        words = held_out[f"v{number % 20}\n/é"].split()
        for _ in range(rng.randrange(60)):
            words[rng.randrange(len(words))] = rng.choice(WORDS)
        # The other held-out texts are random too: they share next to nothing with this one.
        texts[f"t{number}"] = " ".join(words)
        similarities[f"t{number}"] = jaccard(texts[f"t{number}"], held_out[f"v{number % 20}\n/é"])
    counts = guarded(tmp_path, held_out, texts, similarity=threshold, n_grams=3)
    actual = {}
    for example in counts.dropped["near_validation_document"].examples:
        match = re.fullmatch(r"t(\d+) ~ v(\d+)\n/é \((0\.\d\d|1\.00)\)", example)
        assert match
        assert int(match[1]) % 20 == int(match[2])
        actual[f"t{match[1]}"] = float(match[3])
    # Three standard deviations of an estimate from 128 hashes.
    clear = [name for name, similarity in similarities.items() if abs(similarity - threshold) > 0.12]
    assert len(clear) > 50
    assert sum((name in actual) != (similarities[name] > threshold) for name in clear) <= 1
    assert all(abs(similarities[name] - estimate) < 0.2 for name, estimate in actual.items())


def test_dropped_near_duplicates_are_counted_with_examples(tmp_path: Path) -> None:
    text = " ".join(WORDS[:200])
    texts = {"copy.txt": text.upper(), "other.txt": " ".join(WORDS[300:500])}
    counts = guarded(tmp_path, {"first.txt": "another", "held.txt": text, "same.txt": text + " ."}, texts)
    assert counts.dropped["near_validation_document"].examples == ["copy.txt ~ held.txt (1.00)"]
    assert (counts.documents_in, counts.documents_out) == (2, 1)
    assert (counts.bytes_in, counts.bytes_out) == (len("".join(texts.values())), len(texts["other.txt"]))


@pytest.mark.parametrize("text", ["one", "two words", "!!!", "\n=\n", "東京"])
def test_short_texts_are_near_only_to_themselves(tmp_path: Path, text: str) -> None:
    texts = {"same": text, "other": f"{text} and something else that is different"}
    assert guarded(tmp_path, {"held": text}, texts).documents_out == 1


def jaccard(a: str, b: str) -> float:
    x, y = (set(zip(*(re.findall(r"\w+", text)[at:] for at in range(3)), strict=False)) for text in (a, b))
    return len(x & y) / len(x | y)


# ------------------------------------------------------------------------------------------ classes of images


CLASSES = ("Äpfel", "birne", "猫", "10 Euro")
"""Names that are not in alphabetical order, and not all in Latin letters."""


def png(number: int) -> bytes:
    return encode_image(np.full((3, 4, 3), number, np.uint8))


def write_image_folders(root: Path, companions: Any, names: tuple[str, ...] = CLASSES) -> None:
    """Twelve images whose pixels are their numbers; `beside(number, name)` gives path and contents of files."""
    for number in range(12):
        for path, data in companions(number, names[number % len(names)]).items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_bytes(data)


def labels_of(tmp_path: Path, **labels: Any) -> tuple[dict[int, int], list[str]]:
    """Class by number of the image, and the names of classes that the manifest gives."""
    read = {"folder": str(tmp_path / "in"), "format": "images", "labels": labels}
    values = {"out": str(tmp_path / "out"), "read": read, "split": {"validation": 0.0}, "task_bytes": 1024}
    data_prep.run(PrepConfig.model_validate(values))
    corpus = Corpus.open(tmp_path / "out" / "train")
    assert ImageColumns(corpus, 0, corpus.n_blocks).image_sizes.tolist() == [[3, 4]] * 12  # in the index
    actual = {}
    for number in range(corpus.n_samples):
        members = corpus.read_sample(number).members
        with Image.open(io.BytesIO(members["png"])) as image:
            actual[image.getpixel((0, 0))[0]] = int(members["cls"])
    return actual, corpus.manifest.provenance.get("classes", [])


def test_folders_are_classes_in_alphabetical_order(tmp_path: Path) -> None:
    write_image_folders(tmp_path / "in", lambda n, name: {f"all/{name}/{n}.png": png(n)})
    actual, classes = labels_of(tmp_path, by="folder")
    assert classes == ["10 Euro", "birne", "Äpfel", "猫"]
    assert {n: classes[label] for n, label in actual.items()} == {n: CLASSES[n % 4] for n in range(12)}


@pytest.mark.parametrize("file", [None, "1.gif", "inner/1.bmp"])
def test_a_folder_without_images_would_move_later_classes(tmp_path: Path, file: str | None) -> None:
    write_image_folders(tmp_path / "in", lambda n, name: {f"all/{name}/{n}.png": png(n)})
    empty = tmp_path / "in" / "all" / "Birne #2"
    empty.mkdir()
    if file is not None:
        write_file(empty / file, b"GIF89a")
    with pytest.raises(UsageError, match=r"the folder all/Birne #2 holds no JPEG, PNG or WebP"):
        labels_of(tmp_path, by="folder")
    (tmp_path / "classes.txt").write_text("\n".join(CLASSES), encoding="utf-8")
    assert labels_of(tmp_path, by="folder", classes=str(tmp_path / "classes.txt"))[1] == list(CLASSES)


def test_an_empty_folder_beside_folders_of_numbers_moves_no_class(tmp_path: Path) -> None:
    write_image_folders(tmp_path / "in", lambda n, name: {f"{name}/{n}.png": png(n)}, ("10", "2", "0", "07"))
    (tmp_path / "in" / "5").mkdir()
    assert labels_of(tmp_path, by="folder")[0][0] == 10


def test_folders_of_numbers_are_these_numbers(tmp_path: Path) -> None:
    names = ("10", "2", "0", "07")
    write_image_folders(tmp_path / "in", lambda n, name: {f"{name}/{n}.png": png(n)}, names)
    assert labels_of(tmp_path, by="folder") == ({n: int(names[n % 4]) for n in range(12)}, [])


@pytest.mark.parametrize("kind", ["csv", "tsv", "jsonl"])
def test_tables_give_labels_by_path_name_or_stem(tmp_path: Path, kind: str) -> None:
    write_image_folders(tmp_path / "in", lambda n, name: {f"x/{n}.png": png(n)})
    rows = [((f"x/{n}.png", f"{n}.png", f"{n}")[n % 3], CLASSES[n % 4]) for n in range(12)]
    if kind == "jsonl":
        text = "".join(json.dumps({"image": file, "class": label}) + "\n" for file, label in rows)
    else:
        mark = "," if kind == "csv" else "\t"
        text = "".join(f"{file}{mark}{label}\r\n" for file, label in [("image", "class"), *rows])
    (tmp_path / f"labels.{kind}").write_text(text, encoding="utf-8")
    (tmp_path / "classes.txt").write_text("\n".join(CLASSES) + "\n", encoding="utf-8")
    actual, classes = labels_of(
        tmp_path, by="table", table=str(tmp_path / f"labels.{kind}"), file_key="image", key="class",
        classes=str(tmp_path / "classes.txt"),
    )  # fmt: skip
    assert classes == list(CLASSES)
    assert actual == {n: n % 4 for n in range(12)}


def test_cells_of_a_table_of_labels_hold_any_line_break(tmp_path: Path) -> None:
    """In quotes a line break, and Unicode's own, at which a line of a CSV does not end, anywhere."""
    cells = {"0.png": "two\nlines", "1.png": "a\u2028b", "2\x85.png": "c"}
    rows = "".join(f'"{file}","{label}"\n' for file, label in cells.items())
    (tmp_path / "labels.csv").write_text(f"file,label\n{rows}", encoding="utf-8")
    assert _read_table(LabelsConfig(by="table", table=str(tmp_path / "labels.csv"), key="label")) == cells


@pytest.mark.parametrize("by", ["json", "txt"])
def test_fields_beside_images_give_labels(tmp_path: Path, by: str) -> None:
    def beside(n: int, name: str) -> dict[str, bytes]:
        data = json.dumps({"of": {"kind": name}}).encode() if by == "json" else f" {name}\n".encode()
        return {f"{n}.png": png(n), f"{n}.{by}": data, f"{n}.cls": b"99"}

    write_image_folders(tmp_path / "in", beside)
    (tmp_path / "classes.txt").write_text("\n".join(CLASSES), encoding="utf-8")
    actual, _ = labels_of(tmp_path, by=by, key="of.kind", classes=str(tmp_path / "classes.txt"))
    assert actual == {n: n % 4 for n in range(12)}


def test_texts_of_labels_and_captions_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    files = {"png": png(1), "txt": "birne\n".encode("utf-8-sig")}
    (tmp_path / "classes.txt").write_text("birne\n10 Euro\n", encoding="utf-8")
    record = make_record("a", files, PrepConfig.model_validate({"out": "x", "read": {"folder": "x"}}).read)
    assert isinstance(record, ImageRecord)
    assert record.text == "birne\n"
    labels = ClassLabels(LabelsConfig(by="txt", classes=str(tmp_path / "classes.txt")), ["a.png"])
    labelled = labels.apply("a.png", record)
    assert isinstance(labelled, ImageRecord)
    assert labelled.members["cls"] == b"0"
    assert LabelRule("txt").label(files) == "birne"


def test_a_key_of_an_images_json_that_is_there_twice_is_refused() -> None:
    """Only where it is read: as the label, or as the caption if no `.txt` has that."""
    files = {"png": png(1), "json": b'{"text": "a", "text": "b", "kind": 1, "kind": 2}'}
    for labels, members, repeated in (
        ({}, files, "text"),
        ({}, {**files, "txt": b"a"}, None),
        ({"by": "json", "key": "kind"}, {**files, "txt": b"a"}, "kind"),
    ):
        read = {"folder": "x", "format": "images", "labels": labels}
        read = PrepConfig.model_validate({"out": "x", "read": read}).read
        record = make_record("a", members, read)
        assert getattr(record, "reason", None) == (repeated and f"has a .json with a key twice: {repeated!r}")


def test_images_of_one_folder_lie_apart(tmp_path: Path) -> None:
    """A shard in the folders' order would hold one class a block."""
    write_image_folders(tmp_path / "in", lambda n, name: {f"{n // 3}/{n}.png": png(n)})
    labels = labels_of(tmp_path, by="folder")[0]
    assert sum(a == b for a, b in zip(list(labels.values()), list(labels.values())[1:], strict=False)) < 6


def test_images_without_a_label_are_named(tmp_path: Path) -> None:
    write_image_folders(tmp_path / "in", lambda n, name: {f"{n}.png": png(n)})
    with pytest.raises(UsageError, match="no image lies in a folder of a class"):
        labels_of(tmp_path, by="folder")
    (tmp_path / "labels.csv").write_text("file,label\n" + "".join(f"{n}.png,a\n" for n in range(11)))
    with pytest.raises(MegatfmError, match=r"11\.png.* has no label by the table"):
        labels_of(tmp_path, by="table", table=str(tmp_path / "labels.csv"))
    (tmp_path / "labels.csv").write_text("name,label\n1.png,a\n")
    with pytest.raises(UsageError, match=r"line 2 lacks 'file'.*it has name, label"):
        labels_of(tmp_path, by="table", table=str(tmp_path / "labels.csv"))
    for table, message in (
        ("file,label\n1.png,a\n1.png,b\n", r"'1\.png' has two labels, in line 3"),
        ("file,label,label\n1.png,a,b\n", "has the column 'label' twice"),
        ('file,label\n1.png,"a\n', r"is damaged after line 1 \(unexpected end of data\)"),
    ):
        (tmp_path / "labels.csv").write_text(table)
        with pytest.raises(UsageError, match=message):
            labels_of(tmp_path, by="table", table=str(tmp_path / "labels.csv"))
    (tmp_path / "labels.jsonl").write_text('{"file": "1.png", "label": "a", "label": "b"}\n')
    with pytest.raises(MegatfmError, match="line 1 has a key twice: 'label'"):
        labels_of(tmp_path, by="table", table=str(tmp_path / "labels.jsonl"))
    with pytest.raises(ValueError, match="set both"):
        labels_of(tmp_path, by="table")


def test_each_class_gets_a_corpus_for_a_mixture(tmp_path: Path) -> None:
    write_image_folders(tmp_path / "in", lambda n, name: {f"{name}/{n}.png": png(n)})
    split = {"validation": 0.0, "partition_by": "class", "partition_values": ["猫", "birne", "10 Euro"]}
    read = {"folder": str(tmp_path / "in"), "format": "images", "labels": {"by": "folder"}}
    data_prep.run(PrepConfig.model_validate({"out": str(tmp_path / "out"), "read": read, "split": split}))
    names = {}
    for folder in (tmp_path / "out" / "train").iterdir():
        corpus = Corpus.open(folder)
        names[unquote(folder.name)] = {int(corpus.read_sample(n).members["cls"]) for n in range(corpus.n_samples)}
    assert names == {"10 Euro": {0}, "birne": {1}, "other": {2}, "猫": {3}}
    with pytest.raises(ValueError, match="knows no such field"):
        PrepConfig.model_validate({"out": "x", "read": read, "split": {"partition_by": "language"}})


def test_captions_in_a_table_are_no_classes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatfm.corpus.webdataset_images.MAX_UNIQUE_LABELS", 10)
    table, classes = tmp_path / "labels.csv", tmp_path / "classes.txt"
    captions = [f"a cat of {number} years" for number in range(20)]

    def open_labels(labels: list[str], **values: Any) -> ClassLabels:
        rows = [f"{number}.png,{label}" for number, label in enumerate(labels)]
        table.write_text("\n".join(["file,label", *rows, ""]))
        return ClassLabels(LabelsConfig(by="table", table=str(table), **values), ["0.png"])

    with pytest.raises(UsageError, match=r"labels\.csv': 20 of 20 images have a label of their own, as 'a cat of 0"):
        open_labels(captions)
    assert len(open_labels(captions[:18] + captions[:2]).names) == 18, "nine in ten"
    assert open_labels([str(number) for number in range(20)]).names == [], "numbers are no captions"
    classes.write_text("\n".join(captions))
    assert open_labels(captions, classes=str(classes)).names == captions
