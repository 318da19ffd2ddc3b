"""A real run on a GPU: a corpus, training, a stop by a signal with a save, a resume, and the same run never stopped.

    python benchmarks/gpu_run.py --out benchmarks/results

The commands are those that a user types. Losses and gradient norms of the run that was stopped are compared to the bit
with those of the run that was not. The table is written anew after each stage.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import common
import torch

STEPS, HALF = 120, 60
SHRUNK = ["model.d_model=64", "model.ffn.d_ff=128", "model.n_layers=2", "train.compile=false"]
SIZED = ["model.d_model=768", "model.ffn.d_ff=2048", "model.n_layers=12", "model.attention.n_heads=12"]


class Stages:
    """Runs commands of megatfm in a folder, and writes their outcomes to a page."""

    def __init__(self, folder: Path, result: Path | None) -> None:
        self.folder, self.failed = folder, False
        where = common.get_device_name("cuda" if torch.cuda.is_available() else "cpu")
        self.page = common.Page(
            result,
            f"# A run, a stop, a resume, {common.today()}",
            "",
            f"{where}, torch {torch.__version__}; `python benchmarks/gpu_run.py`.",
            "",
            "| Stage | Expected | Outcome | Seconds |",
            "|---|---|---|---|",
        )

    def add_row(self, stage: str, expected: str, outcome: str, seconds: float, *, right: bool) -> None:
        self.failed = self.failed or not right
        marked = outcome if right else f"**{outcome}**"
        self.page.add(f"| {stage} | {expected} | {marked} | {seconds:.0f} |")

    def run(self, stage: str, words: list[str], expected: int = 0, stop: tuple[Path, int] | None = None) -> None:
        """Run a command. stop: run directory, and the step after which to stop it by SIGTERM."""
        start, last = time.monotonic(), ""
        with open(self.folder / "log.txt", "ab+") as log:
            begin = log.tell()
            process = subprocess.Popen(
                [sys.executable, "-m", "megatfm", *words], cwd=self.folder, stdout=log, stderr=subprocess.STDOUT
            )
            while stop and process.poll() is None:
                if len(read_losses(stop[0])) >= stop[1]:
                    process.send_signal(signal.SIGTERM)
                    break
                time.sleep(0.1)
            code = process.wait()
            log.seek(begin)
            output = log.read().decode(errors="replace").strip().splitlines()
            last = output[-1][:160].replace("|", "/") if output else ""
        right = code == expected
        outcome = f"exit {code}" + ("" if right else f": {last}")
        self.add_row(stage, f"exit {expected}", outcome, time.monotonic() - start, right=right)


def read_losses(run: Path) -> dict[int, str]:
    """Return step → loss and gradient norm, as text, from metrics.jsonl."""
    path = run / "metrics.jsonl"
    complete_lines = path.read_bytes().split(b"\n")[:-1] if path.is_file() else []
    records = (json.loads(line) for line in complete_lines if line)
    return {line["step"]: repr((line["loss"], line["grad_norm"])) for line in records if "loss" in line}


def main(arguments: list[str] | None = None) -> int:
    """Print and write a table; return 1 if a stage failed or a number differs."""
    parser = common.make_parser(__doc__)
    parser.add_argument("--tiny", action="store_true", help="a shrunk model on the CPU: does the script work?")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--text", type=Path, help="a folder of text instead of Python's own sources")
    parser.add_argument("--out", type=common.make_output_folder, help="folder for DATE-gpu-run.md")
    args = parser.parse_args(arguments)
    result = common.make_dated_path(args.out and args.out.resolve(), "gpu-run.md")
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        stages = Stages(folder, result)
        text = [f"read.folder={args.text.resolve()}"] if args.text else ["split.validation=0.02"]
        stages.run("prepare the corpus", ["prep", "quickstart-data", *text])
        size = SHRUNK if args.tiny else SIZED
        settings = [
            *size,
            f"train.steps={args.steps}",
            "log.every=1",
            "lr_schedule.warmup_steps=10",
            "evaluate.every=0",
        ]
        train = ["train", "quickstart", *settings]
        for name in ("whole", "stopped"):
            stop = (folder / "runs" / name, args.steps // 2) if name == "stopped" else None
            words = [*train, f"name={name}"]
            stages.run(f"train: {name}", words, 75 if stop else 0, stop)
            if stop:
                stages.run("resume", words)
        uninterrupted, stopped = read_losses(folder / "runs/whole"), read_losses(folder / "runs/stopped")
        differ = [step for step in range(1, args.steps + 1) if uninterrupted.get(step, 0) != stopped.get(step, 1)]
        outcome = f"all {args.steps} alike" if not differ else f"{len(differ)} differ, from step {differ[0]} on"
        stages.add_row("losses and norms, to the bit", "all alike", outcome, 0, right=not differ)
        stages.run("generate", ["generate", "runs/stopped", "--prompt", "def ", "--max-tokens", "40"])
    return int(stages.failed)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "4")
    sys.exit(main())
