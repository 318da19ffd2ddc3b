"""The stage that holds documents out for validation, and leaves none in training that is nearly the same."""

from data_prep.counts import Counts, why
from data_prep.documents import DocumentWriter, PartsWriter, part_path, read_documents, read_parts
from data_prep.progress import advancing
from data_prep.split import NearDuplicates, Split, plan_split
from data_prep.stages import Facts, Stages
from data_prep.steps import pass_through
from megatfm.errors import UsageError


class HoldOut:
    """Splits the documents that wait in the parts of `name`."""

    def __init__(self, stages: Stages, name: str, parts: int) -> None:
        self._stages = stages
        self._config = stages.config
        self._folder = stages.folder
        self._name, self._parts = name, parts
        self._near: NearDuplicates | None = None

    def plan(self) -> Facts:
        """Choose what is held out, and set it aside."""
        config = self._config.split
        split = plan_split(read_parts(self._folder, self._name, self._parts), config.validation, config.seed)
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
        with self._stages.reporter.stage("split", size) as advance:

            def work(number: int) -> Facts:
                near = self._near_duplicates(plan)
                documents = advancing(read_documents(part_path(self._folder, self._name, number)), advance)
                with DocumentWriter(part_path(self._folder, "train", number)) as writer:
                    for document in pass_through(
                        [near], (each for each in documents if not split.holds_out(each))
                    ):
                        writer.add(document)
                    writer.commit()
                return {"steps": [near.counts.as_json()]}

            def join(parts: list[Facts]) -> Facts:
                counts = Counts.joined([part["steps"][0] for part in parts])
                if not counts.documents_out:
                    raise UsageError(f"no training document is left: {why([counts])}")
                notes = f"split by {split.level}: too few larger units"
                return {
                    "train": {"bytes": counts.bytes_out, "parts": len(parts)},
                    "validation": {"bytes": plan["bytes"], "parts": plan["parts"]},
                    "held_out": {"level": plan["level"], "names": plan["names"]},
                    "notes": [] if split.level == "top-level package" else [notes],
                    "steps": [counts.as_json()],
                }

            return self._stages.parts("split", basis, self._parts, work, join)

    def _near_duplicates(self, plan: Facts) -> NearDuplicates:
        """The step, with all that is held out and fresh counts; each process reads that once."""
        if self._near is None:
            self._near = NearDuplicates(self._config.near_duplicates)
            for document in read_parts(self._folder, "validation", plan["parts"]):
                self._near.hold_out(document)
        self._near.counts = Counts(self._near.counts.step)
        return self._near
