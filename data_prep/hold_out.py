"""The stage that holds documents out for validation, and leaves none in training that is nearly the same."""

from collections.abc import Iterable

from data_prep.counts import Counts, why
from data_prep.documents import DocumentWriter, PartsWriter, part_path, read_documents, read_parts
from data_prep.guard import NearDuplicates
from data_prep.progress import advancing
from data_prep.split import Split, plan_split
from data_prep.stages import Facts, Stages
from megatfm.errors import UsageError


class HoldOut:
    """Splits the documents that wait in the parts of `name`."""

    def __init__(self, stages: Stages, name: str, parts: int) -> None:
        self._stages = stages
        self._config = stages.config
        self._folder = stages.folder
        self._name, self._parts = name, parts
        self._near = NearDuplicates(self._config.near_duplicates, self._folder)

    def plan(self) -> Facts:
        """Choose what is held out, and set it aside."""
        config = self._config.split
        split = plan_split(
            lambda: read_parts(self._folder, self._name, self._parts), config.validation, config.seed
        )
        if split is None:
            raise UsageError(
                f"too little text to hold {config.validation:.0%} of it out: add text, or change split.validation"
            )
        with PartsWriter(self._folder, "validation", self._config.part_bytes) as writer:
            for document in read_parts(self._folder, self._name, self._parts):
                if split.holds_out(document):
                    writer.add(document)
            writer.commit()
        return {
            "level": split.level,
            "names": sorted(split.held_out),
            "bytes": writer.bytes,
            "parts": writer.parts,
        }

    def run(self, plan: Facts, size: int, basis: Facts) -> Facts:
        """The rest, without near duplicates of what is held out, is for training."""
        split = Split(plan["level"], frozenset(plan["names"]))
        self._stages.once("held-out", basis, lambda: self._index(plan))
        with self._stages.reporter.stage("split", size) as advance:

            def work(number: int) -> Facts:
                counts = Counts(NearDuplicates.title)
                documents = advancing(read_documents(part_path(self._folder, self._name, number)), advance)
                rest = (document for document in documents if not split.holds_out(document))
                with DocumentWriter(part_path(self._folder, "train", number)) as writer:
                    for document in self._near.without(rest, counts):
                        writer.add(document)
                    writer.commit()
                return {"steps": [counts.as_json()]}

            def join(parts: Iterable[Facts]) -> Facts:
                counts = Counts.joined([part["steps"][0] for part in parts])
                if not counts.documents_out:
                    raise UsageError(f"no training document is left: {why([counts])}")
                notes = f"split by {split.level}: too few larger units"
                return {
                    "train": {"bytes": counts.bytes_out, "parts": self._parts},
                    "validation": {"bytes": plan["bytes"], "parts": plan["parts"]},
                    "held_out": {"level": plan["level"], "names": plan["names"]},
                    "notes": [] if split.level == "top-level package" else [notes],
                    "steps": [counts.as_json()],
                }

            return self._stages.parts("split", basis, self._parts, work, join)

    def _index(self, plan: Facts) -> Facts:
        """What is held out can be looked for."""
        return {"documents": self._near.hold_out(read_parts(self._folder, "validation", plan["parts"]))}
