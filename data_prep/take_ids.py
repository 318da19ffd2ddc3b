"""Token ids that were made elsewhere: cut into documents; nothing is encoded again."""

from collections.abc import Iterator

import numpy as np

from megatfm.data_prep.counts import StepStats
from megatfm.data_prep.files import InputFile, InputFiles
from megatfm.data_prep.progress import UpdateProgress
from megatfm.data_prep.readers import ids as reader
from megatfm.data_prep.readers.record import BadFileError
from megatfm.data_prep.take_over import ImportedDocument
from megatfm.errors import MegatfmError
from megatfm.tokenizers import Tokenizer


class IdFiles:
    """The files of a listing, one in a part."""

    warning = "token ids were taken over as they are: no text was looked at for duplicates"

    def __init__(self, listing: InputFiles, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.parts = len(listing.files)
        self.bytes = sum(file.size for file in listing.files)
        self.skipped: list[str] = []
        self._listing = listing
        self._lengths = np.array([len(each) for each in tokenizer.token_bytes() or []], np.int64)

    def documents(self, part: int, counts: StepStats, advance: UpdateProgress) -> Iterator[ImportedDocument]:
        file = self._listing.files[part]
        try:
            with self._listing.local(file, companions=(".idx",)) as path:
                for number, ids in enumerate(reader.read(path, self._listing.config)):
                    if len(ids):
                        yield self._taken(file, number, ids)
                    else:
                        counts.count_input(0)
                        counts.count_dropped("is empty", 0, f"{file.name}#{number}")
        except BadFileError as error:
            self._listing.on_bad(file.path, str(error))
            self.skipped.append(f"{file.path}: {error}")
            counts.count_input(0)
            counts.count_dropped("breaks off", 0, f"{file.name}: {error}")
        advance(file.size)

    def _taken(self, file: InputFile, number: int, ids: reader.Ids) -> ImportedDocument:
        size = self.tokenizer.vocab_size
        if ids.min() < 0 or ids.max() >= size:
            wrong = int(ids.max() if ids.max() >= size else ids.min())
            raise MegatfmError(
                f"{file.path}: document {number} has id {wrong}, but the tokenizer has {size:,}: set "
                "tokenizer.file to the one that made it, or mend read.tokens.dtype"
            )
        if len(self._lengths):
            text_bytes = int(self._lengths[ids].sum())
        else:
            text_bytes = len(self.tokenizer.decode(ids.tolist()).encode())
        return ImportedDocument(f"{file.name}#{number}", ids, text_bytes)
