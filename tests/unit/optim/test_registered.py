"""Optimizers are registered in a process that imports nothing but their table."""

import subprocess
import sys

CODE = "from megatfm.optim.parameters import OPTIMIZERS; print(*OPTIMIZERS.names())"


def test_a_fresh_process_knows_all_optimizers() -> None:
    output = subprocess.run([sys.executable, "-c", CODE], check=True, capture_output=True, text=True).stdout
    assert output.split() == ["adafactor", "adamw", "lamb", "lion", "muon", "schedule_free_adamw", "soap"]
