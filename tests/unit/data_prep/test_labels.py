"""Classes of images from folders, tables and fields, against the labels that each image was drawn with."""

import io
import json
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import pytest
from PIL import Image

from megatfm import data_prep
from megatfm.config.prep import PrepConfig
from megatfm.corpus.corpus import Corpus
from megatfm.corpus.image_columns import ImageColumns
from megatfm.errors import MegatfmError, UsageError

CLASSES = ("Äpfel", "birne", "猫", "10 Euro")
"""Not in alphabetical order, and not Latin alone."""


def png(number: int) -> bytes:
    out = io.BytesIO()
    Image.fromarray(np.full((3, 4, 3), number, np.uint8)).save(out, "PNG")
    return out.getvalue()


def lay(root: Path, beside: Any, names: tuple[str, ...] = CLASSES) -> None:
    """Twelve images whose pixels are their numbers; `beside(number, name)` gives path and contents of files."""
    for number in range(12):
        for path, data in beside(number, names[number % len(names)]).items():
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
    lay(tmp_path / "in", lambda n, name: {f"all/{name}/{n}.png": png(n)})
    actual, classes = labels_of(tmp_path, by="folder")
    assert classes == ["10 Euro", "birne", "Äpfel", "猫"]
    assert {n: classes[label] for n, label in actual.items()} == {n: CLASSES[n % 4] for n in range(12)}


def test_folders_of_numbers_are_these_numbers(tmp_path: Path) -> None:
    names = ("10", "2", "0", "07")
    lay(tmp_path / "in", lambda n, name: {f"{name}/{n}.png": png(n)}, names)
    assert labels_of(tmp_path, by="folder") == ({n: int(names[n % 4]) for n in range(12)}, [])


@pytest.mark.parametrize("kind", ["csv", "tsv", "jsonl"])
def test_tables_give_labels_by_path_name_or_stem(tmp_path: Path, kind: str) -> None:
    lay(tmp_path / "in", lambda n, name: {f"x/{n}.png": png(n)})
    rows = [((f"x/{n}.png", f"{n}.png", f"{n}")[n % 3], CLASSES[n % 4]) for n in range(12)]
    if kind == "jsonl":
        text = "".join(json.dumps({"image": file, "class": label}) + "\n" for file, label in rows)
    else:
        mark = "," if kind == "csv" else "\t"
        text = "".join(f"{file}{mark}{label}\r\n" for file, label in [("image", "class"), *rows])
    (tmp_path / f"labels.{kind}").write_text(text, encoding="utf-8")
    (tmp_path / "classes.txt").write_text("\n".join(CLASSES) + "\n", encoding="utf-8")
    actual, classes = labels_of(
        tmp_path,
        by="table",
        table=str(tmp_path / f"labels.{kind}"),
        file_key="image",
        key="class",
        classes=str(tmp_path / "classes.txt"),
    )
    assert classes == list(CLASSES)
    assert actual == {n: n % 4 for n in range(12)}


@pytest.mark.parametrize("by", ["json", "txt"])
def test_fields_beside_images_give_labels(tmp_path: Path, by: str) -> None:
    def beside(n: int, name: str) -> dict[str, bytes]:
        data = json.dumps({"of": {"kind": name}}).encode() if by == "json" else f" {name}\n".encode()
        return {f"{n}.png": png(n), f"{n}.{by}": data, f"{n}.cls": b"99"}

    lay(tmp_path / "in", beside)
    (tmp_path / "classes.txt").write_text("\n".join(CLASSES), encoding="utf-8")
    actual, _ = labels_of(tmp_path, by=by, key="of.kind", classes=str(tmp_path / "classes.txt"))
    assert actual == {n: n % 4 for n in range(12)}


def test_images_of_one_folder_lie_apart(tmp_path: Path) -> None:
    """A shard in the folders' order would hold one class a block."""
    lay(tmp_path / "in", lambda n, name: {f"{n // 3}/{n}.png": png(n)})
    labels = labels_of(tmp_path, by="folder")[0]
    assert sum(a == b for a, b in zip(list(labels.values()), list(labels.values())[1:], strict=False)) < 6


def test_what_gives_no_label_is_named(tmp_path: Path) -> None:
    lay(tmp_path / "in", lambda n, name: {f"{n}.png": png(n)})
    with pytest.raises(UsageError, match="no image lies in a folder of a class"):
        labels_of(tmp_path, by="folder")
    (tmp_path / "labels.csv").write_text("file,label\n" + "".join(f"{n}.png,a\n" for n in range(11)))
    with pytest.raises(MegatfmError, match=r"11\.png.* has no label by the table"):
        labels_of(tmp_path, by="table", table=str(tmp_path / "labels.csv"))
    (tmp_path / "labels.csv").write_text("name,label\n1.png,a\n")
    with pytest.raises(UsageError, match=r"line 2 lacks 'file'.*it has name, label"):
        labels_of(tmp_path, by="table", table=str(tmp_path / "labels.csv"))
    (tmp_path / "labels.csv").write_text("file,label\n1.png,a\n1.png,b\n")
    with pytest.raises(UsageError, match=r"'1\.png' has two labels, in line 3"):
        labels_of(tmp_path, by="table", table=str(tmp_path / "labels.csv"))
    with pytest.raises(ValueError, match="set both"):
        labels_of(tmp_path, by="table")


def test_each_class_gets_a_corpus_for_a_mixture(tmp_path: Path) -> None:
    lay(tmp_path / "in", lambda n, name: {f"{name}/{n}.png": png(n)})
    split = {"validation": 0.0, "partition_by": "class", "partition_values": ["猫", "birne", "10 Euro"]}
    read = {"folder": str(tmp_path / "in"), "format": "images", "labels": {"by": "folder"}}
    data_prep.run(PrepConfig.model_validate({"out": str(tmp_path / "out"), "read": read, "split": split}))
    names = {}
    for folder in (tmp_path / "out" / "train").iterdir():
        corpus = Corpus.open(folder)
        names[unquote(folder.name)] = {
            int(corpus.read_sample(n).members["cls"]) for n in range(corpus.n_samples)
        }
    assert names == {"10 Euro": {0}, "birne": {1}, "other": {2}, "猫": {3}}
    with pytest.raises(ValueError, match="knows no such field"):
        PrepConfig.model_validate({"out": "x", "read": read, "split": {"partition_by": "language"}})
