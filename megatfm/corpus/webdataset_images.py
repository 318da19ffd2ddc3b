"""Index foreign tars of images, as webdataset, img2dataset and timm write them, where they are.

A sample is an image (`.jpg`, `.jpeg`, `.png`, `.webp`) with a `.cls`, `.json` or `.txt`. Other members are ignored. Its
class index is the number in the `.cls`, or follows from a rule in the manifest. Each read applies the rule, so that
samples have the same `.cls` as in our own shards.
"""

import codecs
import io
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any, NamedTuple

from megatfm.corpus.files import open_regular_file
from megatfm.corpus.images import PILLOW_FORMATS, read_upright_size
from megatfm.corpus.manifest import NO_TOKENIZER, CorpusShard, Manifest
from megatfm.corpus.safe_tar import group_by_key, iter_tar_members, split_member_name
from megatfm.corpus.shard_format import KEY, PAYLOAD_OFFSET
from megatfm.corpus.shard_index import IMAGE_SIZES, hash_frame
from megatfm.corpus.webdataset_index import IndexReport, iter_raw_frames, list_foreign_shards, write_shard_index
from megatfm.errors import MegatfmError, UsageError
from megatfm.terminal import log_progress

SAMPLE_EXTENSIONS = (*PILLOW_FORMATS, "cls", "json", "txt")
MAX_UNIQUE_LABELS, MAX_UNIQUE_SHARE = 1000, 0.9
"""More labels than both, the number and the share of all images, are captions rather than classes."""
MAX_LABEL_DIGITS = 18
"""Longer numbers are no classes; Python refuses to read those of thousands of digits."""
_CLASS_NUMBER = re.compile(r"[0-9]{1,9}")


class ImageSample(NamedTuple):
    """One sample of a tar: its key, the offset of its first member and of that member's data, files by extension.

    `payload` is `begin` + `PAYLOAD_OFFSET`, as in shards of tokens, so that both have the same index.
    """

    key: str
    begin: int
    payload: int
    files: dict[str, bytes]


@dataclass(frozen=True)
class LabelRule:
    """Source of an image's class: its `.cls`, a field of its `.json`, or its `.txt`.

    by: "cls", "json" or "txt". key: dotted path of the field in the `.json`. names: names of the classes in order of
    their indexes; empty if labels are class indexes.
    """

    by: str = "cls"
    key: str = ""
    names: Sequence[str] = ()

    @classmethod
    def parse(cls, text: str) -> "LabelRule":
        """Read "cls", "txt" or "json:FIELD". Raises UsageError for another."""
        by, _, key = text.partition(":")
        if text not in ("cls", "txt") and (by != "json" or not key):
            raise UsageError(f"--labels {text}: choose cls, txt or json:FIELD, for example json:label")
        return cls(by, key)

    @classmethod
    def from_provenance(cls, provenance: Mapping[str, Any]) -> "LabelRule":
        """Return the rule in a manifest's provenance."""
        rule, names = provenance.get("labels"), provenance.get("classes", [])
        if not isinstance(rule, Mapping):
            return cls()
        return cls(str(rule.get("by")), str(rule.get("key", "")), tuple(map(str, names)))

    def label(self, files: Mapping[str, bytes]) -> str | None:
        """Return the label in a sample's `files` by extension as text, or None if it has none."""
        data = files.get(self.by)
        if data is None:
            return None
        if self.by != "json":
            return data.decode("utf-8-sig", "replace").strip() or None
        try:
            value: Any = json.loads(data)
            for part in self.key.split("."):
                value = value[part]
        except (ValueError, KeyError, TypeError, RecursionError):
            return None
        if value is None or isinstance(value, dict | list | bool):
            return None
        return str(value).encode(errors="backslashreplace").decode()  # a manifest can't have lone surrogates

    def apply(self, files: Mapping[str, bytes]) -> dict[str, bytes]:
        """Return the files with the class index as `.cls`, or without a `.cls` if the rule finds no class."""
        if self.by == "cls":
            return dict(files)
        label = self.label(files)
        class_index = self.find_class_index(label) if label is not None else None
        files_without_class = {extension: data for extension, data in files.items() if extension != "cls"}
        return files_without_class if class_index is None else {**files_without_class, "cls": b"%d" % class_index}

    def find_class_index(self, label: str) -> int | None:
        """Return the class index of a label; None if it is no class."""
        if self.names:
            return self._index_by_name.get(label)
        return int(label) if _CLASS_NUMBER.fullmatch(label) else None

    @cached_property
    def _index_by_name(self) -> dict[str, int]:
        return {name: index for index, name in reversed(list(enumerate(self.names)))}  # of equal names, the first


def parse_class_number(data: bytes) -> int | None:
    """Return the number in a `.cls`, which may have space around it and a byte order mark; None if it is no number."""
    text = data.removeprefix(codecs.BOM_UTF8).strip()
    return int(text) if text.isdigit() and len(text) <= MAX_LABEL_DIGITS else None


def iter_images(file: IO[bytes], path: Path, *, require_end_marker: bool) -> Iterator[ImageSample]:
    """Yield the samples of an uncompressed tar, one at a time. Raises a MegatfmError for a duplicate member."""
    for key, members in group_by_key(
        iter_tar_members(file, path, require_end_marker, allow_more=not require_end_marker)
    ):
        files, begin = dict[str, bytes](), -1
        for member, data in members:
            begin = member.offset if begin < 0 else begin
            extension = split_member_name(member.name)[1]
            if extension in files:
                raise MegatfmError(f"{path}: {member.name!r} at byte {member.offset} is there twice")
            if extension in SAMPLE_EXTENSIONS:
                files[extension] = data
        yield ImageSample(key, begin, begin + PAYLOAD_OFFSET, files)


def read_image_files(frame: bytes, begin: int, end: int, path: Path) -> ImageSample:
    """Return the sample in bytes `begin` to `end` of a frame. Raises a MegatfmError unless there is exactly one."""
    samples = list(iter_images(io.BytesIO(frame[begin:end]), path, require_end_marker=False))
    if len(samples) != 1:
        raise MegatfmError(f"{len(samples)} samples lie where the index says one")
    return samples[0]


def index_images(folder: Path, rule: LabelRule, classes: Path | None = None) -> IndexReport:
    """Turn a folder of tars of images into a corpus, by writing indexes and a manifest into it.

    classes: a file with one class name per line, the first of class 0. Without it, labels that aren't numbers get class
    indexes in alphabetical order. Raises a UsageError, or a MegatfmError that names shard and sample.
    """
    paths = list_foreign_shards(folder)
    if compressed := [path for path in paths if not path.name.endswith(".tar")]:
        raise UsageError(
            f"{compressed[0]}: only plain tars of images are read in place: make a corpus with `megatfm prep`"
        )
    names = read_class_names(classes, f"--classes {classes}") if classes else []
    labels, shards = dict[str, str](), []
    for path in log_progress(paths, "indexed", "file"):
        shards.append(_index_shard(path, LabelRule(rule.by, rule.key, names), labels))
    if not names and not all(_CLASS_NUMBER.fullmatch(label) for label in labels):
        _check_no_captions(rule, labels, sum(shard.samples for shard in shards))
        names = sorted(labels)
    if rule.by == "cls" and names and not classes:
        first = next(label for label in labels if not _CLASS_NUMBER.fullmatch(label))
        raise UsageError(f"{labels[first]}: its .cls says {first!r}, no number: give --labels or mend it")
    provenance: dict[str, Any] = {"indexed": "megatfm data index"}
    if rule.by != "cls":
        provenance["labels"] = {"by": rule.by, "key": rule.key}
    if names:
        provenance["classes"] = names
    manifest = Manifest(token_dtype="uint16", tokenizer_hash=NO_TOKENIZER, shards=tuple(shards), provenance=provenance)
    manifest.save(folder)
    return IndexReport(manifest, folder, False)


def _index_shard(path: Path, rule: LabelRule, labels: dict[str, str]) -> CorpusShard:
    """Write the index of a tar; return its entry in a manifest. labels: label → its first sample; extended here."""
    frames: list[tuple[int, int, int]] = []
    rows: list[tuple[int, int, int, bytes, int, int]] = []
    hashes: list[int] = []
    keys = set[str]()
    with open_regular_file(path) as file:
        for data, samples in iter_raw_frames(path, iter_images(file, path, require_end_marker=True)):
            for sample in samples:
                where = f"{path}: sample {sample.key!r}"
                if sample.key in keys:
                    raise MegatfmError(f"{where} is there twice: refused")
                keys.add(sample.key)
                height, width = _find_image_size(sample.files, where)
                _record_label(rule, sample.files, labels, where)
                key = sample.key if KEY.fullmatch(sample.key) else f"{len(rows):09d}"
                rows.append((sample.payload, 0, 0, key.encode(), height, width))
            frames.append((len(data), len(data), len(samples)))
            hashes.append(hash_frame(data))
    if not rows:
        raise UsageError(f"{path}: holds no samples")
    return write_shard_index(path, frames, rows, hashes, IMAGE_SIZES, files_only=True)


def _find_image_size(files: Mapping[str, bytes], where: str) -> tuple[int, int]:
    """Return height and width of a sample's only image. Raises a MegatfmError if it has none, or several."""
    size, n_images = read_upright_size(files), sum(extension in PILLOW_FORMATS for extension in files)
    if size is not None:
        return size
    listed = ", ".join(f".{extension}" for extension in files) or "none that is known"
    fault = "an image whose header can't be read" if n_images == 1 else f"{n_images} images (files: {listed}), not one"
    raise MegatfmError(
        f"{where} has {fault}: make a corpus without such samples by `megatfm prep … read.on_error=skip`"
    )


def _record_label(rule: LabelRule, files: Mapping[str, bytes], labels: dict[str, str], where: str) -> None:
    """Add a sample's label to `labels`. Raises a UsageError if it has none, or one that is no class."""
    label = rule.label(files)
    if label is None:
        if rule.by == "cls":
            return  # as for masked autoencoders; a classifier says which sample has none
        label_location = f"the field {rule.key!r} of its .json" if rule.by == "json" else "its .txt"
        raise UsageError(f"{where} has no label in {label_location}: mend it, or choose other --labels")
    if rule.by != "cls" and rule.names and rule.find_class_index(label) is None:
        raise UsageError(f"{where} has the label {label!r}, which is none of the {len(rule.names)} of --classes")
    labels.setdefault(label, where)


def are_captions(n_labels: int, n_samples: int) -> bool:
    """Return whether so many distinct labels of so many images must be captions."""
    return n_labels > MAX_UNIQUE_LABELS and n_labels > MAX_UNIQUE_SHARE * n_samples


def _check_no_captions(rule: LabelRule, labels: Mapping[str, str], n_samples: int) -> None:
    """Raise a UsageError if nearly every image has a label of its own."""
    if are_captions(len(labels), n_samples):
        label = next(iter(labels))
        source = f"json:{rule.key}" if rule.by == "json" else rule.by
        raise UsageError(
            f"{labels[label]}: --labels {source}: nearly every image has a label of its own, as {label[:60]!r} here "
            f"({len(labels):,} labels of {n_samples:,} images): these are captions: prepare images and texts with "
            '`megatfm prep` (read.format = "images" and a tokenizer), or list the classes by --classes'
        )


def read_class_names(path: Path, setting: str) -> list[str]:
    """Read the names of classes, one a line. setting: names the file in errors. Raises UsageError."""
    try:
        names = [line.strip() for line in path.read_text(encoding="utf-8-sig").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{setting}: can't be read ({error})") from error
    while names and not names[-1]:
        names.pop()
    if not names or len(set(names)) < len(names) or "" in names:
        raise UsageError(f"{setting}: give one name a line, none twice; the first is class 0")
    return names
