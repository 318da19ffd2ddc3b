"""Import images as a folder or tars have them, with their classes and captions (`import_external.py`).

The built-in images, scikit-learn's digits, are first written as tars, without a download.
"""

import io
import os
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from blake3 import blake3

from megatfm import rng
from megatfm.config.prep import ReadConfig, SplitConfig
from megatfm.corpus.images import PILLOW_FORMATS
from megatfm.data_prep.documents import StepStats, to_drop_reason
from megatfm.data_prep.execution.progress import UpdateProgress
from megatfm.data_prep.execution.workspace import OTHER, to_folder_name
from megatfm.data_prep.import_external import ImportedDocument
from megatfm.data_prep.input_files import InputFile, InputFiles, chunk_by_bytes
from megatfm.data_prep.labels import ClassLabels
from megatfm.data_prep.readers import FORMATS
from megatfm.data_prep.readers.images import ImageRecord, read_image_record, read_tar
from megatfm.data_prep.readers.record import BadFileError, BadRecord
from megatfm.errors import UsageError
from megatfm.files import atomic_write, name_write_errors
from megatfm.tokenizers import Tokenizer

TARS = FORMATS["webdataset"]


class ImageFiles:
    """A corpus of images, in parts of about `task_bytes`; a tar is never divided.

    Captions become ids if there is a tokenizer. Files are shuffled by `split.seed`, since a folder has one class and a
    block should have many. Samples of a tar keep their order.
    """

    def __init__(
        self, inputs: InputFiles, tokenizer: Tokenizer | None, task_bytes: int, labels: ClassLabels, split: SplitConfig
    ) -> None:
        self.tokenizer, self._labels, self._split = tokenizer, labels, split
        self.bytes = sum(file.size for file in inputs.files)
        self.skipped: list[str] = []
        self._inputs = inputs
        self._groups = sorted(_group_files(inputs.files), key=lambda group: _hash_file_name(group[0], split.seed))
        self._runs = chunk_by_bytes([sum(file.size for file in group) for group in self._groups], task_bytes)
        self.parts = len(self._runs)

    def iter_documents(self, part: int, counts: StepStats, advance: UpdateProgress) -> Iterator[ImportedDocument]:
        for group in self._groups[slice(*self._runs[part])]:
            path, name = group[0].path, group[0].name
            try:
                for source, record in self._read_records(group):
                    labelled = record if isinstance(record, BadRecord) else self._labels.apply(source, record)
                    if isinstance(labelled, BadRecord):
                        where = path.removesuffix(name) + source
                        self._skip(where, labelled.reason, to_drop_reason(labelled.reason), counts)
                    else:
                        yield self._to_document(source, labelled)
            except BadFileError as error:
                self._skip(path, str(error), "unreadable_file", counts)
            advance(sum(file.size for file in group))

    def list_notes(self, counts: StepStats) -> list[str]:
        return ["images were imported as they are: duplicates were not searched for"]

    def _read_records(self, group: list[InputFile]) -> Iterator[tuple[str, ImageRecord | BadRecord]]:
        config = self._inputs.config
        with ExitStack() as stack:
            group_paths = [stack.enter_context(self._inputs.fetch(file)) for file in group]
            if _is_tar(group[0]):
                for record in read_tar(group_paths[0], config):
                    yield f"{group[0].name}#{record.key}", record
                return
            paths: dict[str, Path] = {}
            key = min((_stem(file) for file in group), key=len)
            for file, path in zip(group, group_paths, strict=True):
                extension = file.name[len(key) + 1 :].lower()
                if extension in paths:
                    yield file.name, BadRecord(file.name, f"has a .{extension} twice")
                    return
                paths[extension] = path
            yield group[0].name, read_image_record(group[0].name, paths, config)

    def _to_document(self, source: str, record: ImageRecord) -> ImportedDocument:
        corpus = self._choose_corpus(record.members)
        if self.tokenizer is None or not record.text:
            return ImportedDocument(source, np.empty(0, np.int32), 0, record.members, corpus)
        (ids,) = self.tokenizer.encode_batch([record.text], 1)
        return ImportedDocument(source, ids, len(record.text.encode()), record.members, corpus)

    def _choose_corpus(self, members: Mapping[str, bytes]) -> str:
        """Return the corpus of an image's class; "" if there is only one corpus."""
        if self._split.partition_by is None:
            return ""
        name, values = self._labels.get_class_name(members), self._split.partition_values
        return to_folder_name(name) if name and (not values or name in values) else OTHER

    def _skip(self, path: str, reason: str, drop_reason: str, counts: StepStats) -> None:
        self._inputs.skip_or_refuse(path, reason)
        self.skipped.append(f"{path}: {reason}")
        counts.count_input(0)
        counts.count_dropped(drop_reason, 0, self.skipped[-1])


def _group_files(files: list[InputFile]) -> list[list[InputFile]]:
    """Return tars, and groups of files that are a sample, in the order of the files.

    Files of a sample differ only in their last suffix. Numbered images, `a.0.jpg` and `a.1.jpg`, belong to the `a.txt`
    or `a.json` beside them, unless they have a file of their own beside them.
    """
    suffixes: dict[str, set[str]] = {}
    for file in files:
        suffixes.setdefault(_stem(file), set()).add(file.name.rpartition(".")[2].lower())
    texts = {
        stem for stem, endings in suffixes.items() if endings & {"txt", "json"} and not endings & PILLOW_FORMATS.keys()
    }
    groups: dict[str, list[InputFile]] = {}
    for file in files:
        stem = file.name if _is_tar(file) else _stem(file)
        key, _, number = stem.rpartition(".")
        is_numbered = key in texts and number.isdecimal() and suffixes[stem] <= PILLOW_FORMATS.keys()
        groups.setdefault(key if is_numbered else stem, []).append(file)
    return list(groups.values())


def _stem(file: InputFile) -> str:
    return file.name.rpartition(".")[0]


def _hash_file_name(file: InputFile, seed: int) -> bytes:
    return blake3(f"{seed}:order:{file.name}".encode()).digest(16)


def _is_tar(file: InputFile) -> bool:
    return file.name.lower().endswith(TARS)


TRAIN_SHARE = (2, 3)
"""Share of the digits for training, as numerator and denominator: the first ones; other people wrote the last ones."""


def fill_builtin_folder(config: ReadConfig, scratch: Path) -> ReadConfig:
    """Return the config with the folder of its built-in images, written to `scratch` unless it exists."""
    if config.builtin != "digits" or config.folder is not None:
        return config
    folder = scratch / "digits"
    write_digits(folder)
    return config.model_copy(update={"folder": str(folder)})


def write_digits(folder: Path) -> None:
    """Write 1,797 handwritten digits of 8 × 8 grey pixels (Alpaydin & Kaynak 1998) as train.tar and validation.tar.

    Files have fixed times, so that prep can resume. Raises UsageError without scikit-learn or Pillow.
    """
    try:
        from PIL import Image
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise UsageError(
            f"read.builtin = 'digits' needs scikit-learn and Pillow ({error}): pip install 'megatfm[vision]', or set "
            "read.folder to a folder of images"
        ) from error
    digits = load_digits()
    n_train = len(digits.images) * TRAIN_SHARE[0] // TRAIN_SHARE[1]
    splits = {"train": rng.permutation(n_train, 0, "digits"), "validation": np.arange(n_train, len(digits.images))}
    with name_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    for split, indices in splits.items():
        path = folder / f"{split}.tar"
        if path.exists():
            continue
        content = io.BytesIO()
        with tarfile.open(fileobj=content, mode="w") as tar:
            for index in indices.tolist():
                png = io.BytesIO()
                pixels = np.round(digits.images[index] * (255 / 16)).astype(np.uint8)
                Image.fromarray(pixels).save(png, "PNG")
                _add_member(tar, f"{index:04d}.png", png.getvalue())
                _add_member(tar, f"{index:04d}.cls", str(digits.target[index]).encode())
        with name_write_errors(path):
            atomic_write(path, content.getvalue())
            os.utime(path, (0, 0))


def _add_member(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    tar.addfile(member, io.BytesIO(data))
