"""Stand-ins for SLURM's commands."""

from dataclasses import dataclass
from pathlib import Path

COMMANDS = ("sbatch", "scontrol", "scancel", "squeue", "sinfo", "sacct", "srun")
STAND_IN = """#!/bin/bash
name=${0##*/}
printf '%s' "$name" >>"$SLURM_FAKE/calls"
printf ' %q' "$@" >>"$SLURM_FAKE/calls"
echo >>"$SLURM_FAKE/calls"
key=$name
[ "$name" != scontrol ] || { [ "$1" = -o ] && key=$name-$2 || key=$name-$1; }
[ ! -e "$SLURM_FAKE/$key.fails" ] || { cat "$SLURM_FAKE/$key.fails" >&2; exit 1; }
[ ! -e "$SLURM_FAKE/$key" ] || cat "$SLURM_FAKE/$key"
"""


@dataclass
class FakeSlurm:
    """Stand-ins: what commands print and whether they fail, by name (`scontrol-show` for `scontrol show`)."""

    folder: Path

    def answer(self, command: str, text: str) -> None:
        (self.folder / command).write_text(text)

    def fail(self, command: str, text: str) -> None:
        (self.folder / f"{command}.fails").write_text(text)

    @property
    def calls(self) -> list[str]:
        """The commands so far, quoted as a shell would."""
        file = self.folder / "calls"
        return file.read_text().splitlines() if file.exists() else []
