"""Texts that begin with a byte order mark, as some editors write them, are read as those without one."""

import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatfm.checkpoint.locate import read_adapter_base
from megatfm.config import Config
from megatfm.config.prep import LabelsConfig, ReadConfig
from megatfm.config.prep_steps import DecontaminateConfig
from megatfm.config.sources import read_files
from megatfm.convert.hf_checkpoint import read_json_object
from megatfm.corpus.manifest import Manifest
from megatfm.corpus.webdataset_images import LabelRule
from megatfm.data_prep.documents import Document
from megatfm.data_prep.filters.base import StepStats
from megatfm.data_prep.filters.selection import Decontaminate
from megatfm.data_prep.labels import ClassLabels
from megatfm.data_prep.readers.images import ImageRecord, make_record
from megatfm.data_prep.readers.webdataset import read_webdataset
from megatfm.errors import MegatfmError
from megatfm.launchers.status import get_run_status
from megatfm.objectives.images import read_label
from megatfm.report.run import Run
from megatfm.tasks.files import read_rows
from tests.support.images import encode_noise

MARK = b"\xef\xbb\xbf"
LINE = " ".join(f"word{number}" for number in range(40))
PIXEL = encode_noise()
IMAGES = ReadConfig(folder="a", format="images")
PICTURE = ImageRecord("a", {"png": b""}, "")


def name_training_corpora(path: Path) -> str:
    with pytest.raises(MegatfmError) as caught:
        Manifest.load(path.parent)
    return str(caught.value)


def label_by_table(path: Path) -> Any:
    labels = ClassLabels(LabelsConfig(by="table", table=str(path)), ["a.png", "b.png"])
    return labels.names, labels.apply("a.png", PICTURE)


def label_by_text(path: Path) -> Any:
    picture = ImageRecord("a", {"png": b"", "txt": path.read_bytes()}, "")
    return ClassLabels(LabelsConfig(by="txt"), ["a.png"]).apply("a.png", picture).members["cls"]


def import_class(path: Path) -> Any:
    """The reason of a refusal, and the name of the class."""
    record = make_record("a", {"png": PIXEL, "cls": path.read_bytes()}, IMAGES)
    assert isinstance(record, ImageRecord), record
    return ClassLabels(LabelsConfig(), ["a.png"]).get_class_name(record.members)


def read_tar_member(path: Path) -> Any:
    with tarfile.open(path.parent / "a.tar", "w") as archive:
        archive.add(path, path.name)
    return list(read_webdataset(path.parent / "a.tar", ReadConfig(folder=str(path.parent))))


def filter_text(path: Path) -> Any:
    config = DecontaminateConfig(name="decontaminate", files=(str(path),))
    return Decontaminate(config).apply(Document("a", LINE), StepStats("decontaminate"))


READERS: dict[str, tuple[str, str, Callable[[Path], Any]]] = {
    "a run's config, by status": ("config.toml", "train.steps = 7", lambda path: get_run_status(path.parent).steps),
    "a run's config, by the report": ("config.toml", "name = 'a'", lambda path: Run(path.parent).config),
    "a run's config, by corpora": ("config.toml", "data.train = 'corpora/a'", name_training_corpora),
    "a config": ("a.toml", "name = 'a'", lambda path: read_files(Config, path)[0].values),
    "a table of a task": ("a.csv", "text,label\na,b", read_rows),
    "JSON lines of a task": ("a.jsonl", '{"text": "a"}', read_rows),
    "JSON of a model": ("config.json", '{"a": 1}', read_json_object),
    "an adapter": ("adapter_config.json", '{"base_model_name_or_path": "b"}', lambda p: read_adapter_base(p.parent)),
    "a table of labels": ("a.csv", "file,label\na.png,cat\nb.png,dog", label_by_table),
    "a label": ("a.txt", "3", label_by_text),
    "a label in a tar": ("a.txt", "3", lambda path: LabelRule.parse("txt").label({"txt": path.read_bytes()})),
    "a class": ("a.cls", "3", lambda path: read_label({"cls": path.read_bytes()}, 4)),
    "a class of an imported image": ("a.cls", "3", import_class),
    "a text in a tar": ("a.txt", "text", read_tar_member),
    "JSON in a tar": ("a.json", '{"text": "a"}', read_tar_member),
    "a caption": (
        "a.txt",
        "a cat",
        lambda path: make_record("a", {"png": PIXEL, "txt": path.read_bytes()}, IMAGES).text,
    ),
    "an evaluation set in JSON lines": ("a.jsonl", f'{{"text": "{LINE}"}}', filter_text),
}


@pytest.mark.parametrize("name", READERS)
def test_a_byte_order_mark_changes_nothing(tmp_path: Path, name: str) -> None:
    file, content, read = READERS[name]
    (tmp_path / file).write_bytes(content.encode())
    expected = read(tmp_path / file)
    (tmp_path / file).write_bytes(MARK + content.encode())
    assert read(tmp_path / file) == expected
    assert expected
