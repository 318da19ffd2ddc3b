"""Images with their captions and classes, in folders or in tars: checked, and written byte for byte as they are."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from megatfm.data_prep.counts import StepStats
from megatfm.data_prep.files import InputFile, InputFiles, chunk_by_bytes
from megatfm.data_prep.progress import UpdateProgress
from megatfm.data_prep.readers import FORMATS, images
from megatfm.data_prep.readers.record import Bad, BadFileError
from megatfm.data_prep.take_over import ImportedDocument
from megatfm.tokenizers import Tokenizer

TARS = FORMATS["webdataset"]


class ImageFiles:
    """The images of a listing, in parts of about `part_bytes`; a tar is never divided. Captions become ids if there is
    a tokenizer."""

    warning = "images were taken over as they are: nothing was looked at for duplicates"

    def __init__(self, listing: InputFiles, tokenizer: Tokenizer | None, part_bytes: int) -> None:
        self.tokenizer = tokenizer
        self.bytes = sum(file.size for file in listing.files)
        self.skipped: list[str] = []
        self._listing = listing
        self._units = _units(listing.files)
        self._runs = chunk_by_bytes([sum(file.size for file in unit) for unit in self._units], part_bytes)
        self.parts = len(self._runs)

    def documents(self, part: int, counts: StepStats, advance: UpdateProgress) -> Iterator[ImportedDocument]:
        for unit in self._units[slice(*self._runs[part])]:
            where = unit[0].path
            try:
                for source, found in self._records(unit):
                    if isinstance(found, Bad):
                        self._skip(where, f"{source} {found.reason}", found.reason.partition(":")[0], counts)
                    else:
                        yield self._taken(source, found)
            except BadFileError as error:
                self._skip(where, str(error), "breaks off", counts)
            advance(sum(file.size for file in unit))

    def _records(self, unit: list[InputFile]) -> Iterator[tuple[str, images.ImageRecord | Bad]]:
        config = self._listing.config
        with ExitStack() as stack:
            found = [stack.enter_context(self._listing.local(file)) for file in unit]
            if _is_tar(unit[0]):
                for record in images.read_tar(found[0], config):
                    yield f"{unit[0].name}#{record.key}", record
                return
            paths: dict[str, Path] = {}
            for file, path in zip(unit, found, strict=True):
                extension = path.suffix[1:].lower()
                if extension in paths:
                    yield file.name, Bad(file.name, f"has a .{extension} twice")
                    return
                paths[extension] = path
            yield unit[0].name, images.read_files(unit[0].name, paths, config)

    def _taken(self, source: str, found: images.ImageRecord) -> ImportedDocument:
        if self.tokenizer is None or not found.text:
            return ImportedDocument(source, np.empty(0, np.int32), 0, found.members)
        (ids,) = self.tokenizer.encode_batch([found.text], 1)
        return ImportedDocument(source, ids, len(found.text.encode()), found.members)

    def _skip(self, where: str, reason: str, kind: str, counts: StepStats) -> None:
        self._listing.on_bad(where, reason)
        self.skipped.append(f"{where}: {reason}")
        counts.count_input(0)
        counts.count_dropped(kind, 0, reason)


def _units(files: list[InputFile]) -> list[list[InputFile]]:
    """Tars, and files that have all but the last suffix in common, in the order of the listing."""
    units: dict[str, list[InputFile]] = {}
    for file in files:
        key = file.name if _is_tar(file) else file.name.rpartition(".")[0]
        units.setdefault(key, []).append(file)
    return list(units.values())


def _is_tar(file: InputFile) -> bool:
    return file.name.lower().endswith(TARS)
