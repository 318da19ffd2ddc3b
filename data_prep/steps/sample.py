"""A fixed random part of the documents."""

from fnmatch import fnmatchcase

from blake3 import blake3

from megatfm.config.prep_steps import SampleConfig
from megatfm.data_prep.counts import StepStats
from megatfm.data_prep.documents import Document


class Sample:
    """Keeps documents by a hash of (seed, source): the same ones on any machine, and with a larger share the same
    ones and more. What should come more often than once is for the mixture of the training config."""

    title = "sample"

    def __init__(self, config: SampleConfig) -> None:
        self._config = config
        self._by_path = tuple(config.by_path.items())

    def apply(self, document: Document, counts: StepStats) -> Document | str:
        file = document.file
        keep = next(
            (keep for pattern, keep in self._by_path if fnmatchcase(file, pattern)), self._config.keep
        )
        digest = blake3(f"{self._config.seed}:{document.id}".encode()).digest(8)
        return document if int.from_bytes(digest, "big") < keep * 2**64 else "is not in the sample"
