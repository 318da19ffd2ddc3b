"""The stage between cleaning and splitting: what the whole corpus has more than once is thinned out."""

from collections.abc import Iterable
from pathlib import Path

from data_prep import duplicates
from data_prep.counts import Counts, why
from data_prep.documents import DocumentWriter, part_path, read_documents
from data_prep.duplicates.index import Rows, RowsWriter
from data_prep.progress import advancing
from data_prep.stages import Facts, Stages
from megatfm.errors import UsageError


class Thin:
    """Runs the searches of the config one after the other, from the documents that wait as `clean`."""

    def __init__(self, stages: Stages, clean: Facts) -> None:
        self._stages = stages
        self._folder = stages.folder
        self._parts: int = clean["parts"]
        self._clean = clean

    def run(self, basis: Facts) -> Facts:
        """Under which name the documents wait now, their bytes, and the counts of all searches."""
        name, size, counts = "clean", self._clean["bytes"], []
        for number, config in enumerate(self._stages.config.duplicates):
            search = duplicates.make(config)
            self._scan(number, search, name, size, basis)
            found = self._thin(number, search, name, size, basis)
            name, size = f"thin-{number}", found["bytes"]
            counts.append(found["step"])
        return {"name": name, "bytes": size, "steps": counts}

    def _scan(self, number: int, search: duplicates.Search, name: str, size: int, basis: Facts) -> Facts:
        """The rows of all parts, and the decision."""
        with self._stages.reporter.stage(f"look for {search.title}", size) as advance:

            def work(part: int) -> Facts:
                documents = advancing(read_documents(part_path(self._folder, name, part)), advance)
                writer = RowsWriter(self._rows(number, part))
                return {"rows": writer.write(search.scan(documents))}

            def join(parts: Iterable[Facts]) -> Facts:
                files = [self._rows(number, part) for part in range(self._parts)]
                memory = self._stages.config.memory_bytes
                search.decide(Rows(files, *search.row), self._decision(number), memory)
                return {"rows": [each["rows"] for each in parts]}

            return self._stages.parts(f"scan-{number}", basis, self._parts, work, join)

    def _thin(self, number: int, search: duplicates.Search, name: str, size: int, basis: Facts) -> Facts:
        """What is left of all parts."""
        with self._stages.reporter.stage(f"remove {search.title}", size) as advance:

            def work(part: int) -> Facts:
                files = [self._rows(number, each) for each in range(self._parts)]
                rows = Rows(files, *search.row)
                counts = Counts(search.title)
                documents = advancing(read_documents(part_path(self._folder, name, part)), advance)
                decision = duplicates.load_decision(self._decision(number))
                decision = decision[rows.begins[part] : rows.begins[part + 1]]
                with DocumentWriter(part_path(self._folder, f"thin-{number}", part)) as writer:
                    for document in search.thin(documents, int(rows.begins[part]), decision, counts):
                        writer.add(document)
                    writer.commit()
                return {"step": counts.as_json()}

            def join(parts: Iterable[Facts]) -> Facts:
                counts = Counts.joined([part["step"] for part in parts])
                if not counts.documents_out:
                    raise UsageError(f"no document is left: {why([counts])}")
                return {"bytes": counts.bytes_out, "step": counts.as_json()}

            return self._stages.parts(f"thin-{number}", basis, self._parts, work, join)

    def _rows(self, number: int, part: int) -> Path:
        return self._folder / f"rows-{number}.{part:05d}"

    def _decision(self, number: int) -> Path:
        return self._folder / f"decision-{number}.npy"
