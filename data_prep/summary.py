"""What a prep made, for programs and for people."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table


@dataclass(frozen=True)
class PrepSummary:
    """The folder that a prep made, or its URL, and the contents of `prep.json`; `already_done` if it did nothing."""

    out: Path | str
    result: dict[str, Any]
    already_done: bool

    def table(self) -> Table:
        """What every step kept and dropped, and the two corpora that came out."""
        table = Table(
            "step", "documents", "bytes", "changed", "dropped", title=str(self.out), title_justify="left"
        )
        for column in table.columns[1:4]:
            column.justify = "right"
        for step in self.result["steps"]:
            dropped = "; ".join(
                f"{drop['documents']:,}: {reason}" for reason, drop in step["dropped"].items()
            )
            table.add_row(
                step["step"],
                f"{step['documents_out']:,}",
                _size(step["bytes_out"]),
                f"{step['changed']:,}",
                dropped,
            )
        table.add_section()
        for name in ("train", "validation"):
            made = self.result[name]
            tokens = (
                f"{made['tokens']:,} tokens of {made['bytes_per_token']:.2f} bytes, "
                if made["tokens"]
                else ""
            )
            table.add_row(
                name,
                f"{made['documents']:,}",
                _size(made["text_bytes"]),
                "",
                f"{tokens}{made['shards']} shard(s)",
            )
        return table


def percent(share: float, digits: int = 0) -> str:
    """A share as people read it: `46.9 %`."""
    return f"{100 * share:.{digits}f} %"


def _size(count: int) -> str:
    return f"{count / 1e6:.2f} MB" if count >= 10**5 else f"{count:,} B"
