"""`megatfm quickstart [--corpus DIR]`: prepares a corpus, trains, stops, resumes, samples, evaluates and reports.

Each stage is a command that a user could type; this command runs them in turn.
"""

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from megatfm import cli
from megatfm.config import Config, load_config
from megatfm.config.load import get_overridden_keys
from megatfm.errors import EXIT_REQUEUE, MegatfmError, UsageError
from megatfm.launchers.job import MEGATFM_COMMAND, make_python_path

NO_SHARDING = "parallel.zero=0"
"""The model is small enough for every process; sharding it would take a fifth more time."""

console = Console(highlight=False, soft_wrap=True)


def add_quickstart_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--corpus", metavar="DIR", help="a folder of text files, instead of Python's own sources")
    parser.add_argument("--prompt", default="def ", help="prompt of the samples")
    parser.add_argument("--nproc", type=int, default=2, metavar="N", help="number of training processes (2)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="for the training config")


def quickstart_command(args: argparse.Namespace) -> int:
    """Run all stages; return 0. Raises MegatfmError, with the stage's exit code, at the first that fails."""
    if args.nproc < 1:
        raise UsageError(f"--nproc {args.nproc}: choose 1 or more")
    start = time.monotonic()
    prep, overrides = _make_corpus_overrides(args.corpus)
    overridden_keys = get_overridden_keys(args.overrides)
    defaults = [override for override in [NO_SHARDING, *overrides] if override.partition("=")[0] not in overridden_keys]
    overrides = [*defaults, *args.overrides]
    config = load_config("quickstart", overrides)
    run_dir = config.run_folder
    run_path = os.path.relpath(run_dir)
    launch = ["launch", "quickstart", "--nproc", str(args.nproc), *overrides]

    _run_subprocess("Prepare the corpus", ["prep", "quickstart-data", *prep])
    _run_subprocess("Train, and stop half-way by a signal", launch, stop_after=config.train.steps // 2, run_dir=run_dir)
    _run_subprocess("Resume from the checkpoint", launch)
    for seed in ("0", "1"):
        _run_in_process(
            "Sample", ["generate", run_path, "--prompt", args.prompt, "--max-tokens", "120", "--seed", seed]
        )
    _run_in_process("Evaluate on held-out text, beside gzip and xz", ["evaluate", run_path, "--baselines"])
    _run_in_process("Write the report", ["report", run_path])
    _print_summary(config, run_dir, time.monotonic() - start)
    _print_next_commands(config, run_path, overrides)
    return 0


def _make_corpus_overrides(corpus: str | None) -> tuple[list[str], list[str]]:
    """Return the overrides of prep and of training for the user's folder of text: names of corpus and run."""
    if corpus is None:
        return [], []
    folder = Path(corpus).expanduser()
    if not folder.is_dir():
        raise UsageError(f"--corpus {corpus}: no such folder: give a folder of text files")
    name = "quickstart-" + (re.sub(r"[^A-Za-z0-9._-]+", "-", folder.resolve().name).strip("-") or "corpus")
    out = Path("corpora") / name
    return [f"read.folder={folder}", f"out={out}"], [
        f"name={name}",
        f"data.train={out / 'train'}",
        f"data.validation.validation={out / 'validation'}",
        f"data.tokenizer={out / 'tokenizer.model'}",
    ]


def _run_subprocess(
    title: str, argv: Sequence[str], stop_after: int | None = None, run_dir: Path | None = None
) -> None:
    """Print a command as a user would type it, and run it. Raises MegatfmError if it fails.

    stop_after: step of the run in `run_dir` after which it is stopped by SIGTERM.
    """
    _print_command(title, argv)
    process = subprocess.Popen([*MEGATFM_COMMAND[:-1], *argv], env={**os.environ, **make_python_path()})
    try:
        if stop_after is not None and run_dir is not None and _wait_for_step(process, run_dir, stop_after):
            console.print(f"[dim]$ kill -TERM {process.pid}[/dim]")
            process.send_signal(signal.SIGTERM)
        code = process.wait()
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
    if code not in (0, EXIT_REQUEUE if stop_after is not None else 0):
        raise _make_failure(argv, f"failed (exit {code}), see above", code)


def _run_in_process(title: str, argv: Sequence[str]) -> None:
    """Run a short command in this process, which saves the time to import torch again."""
    _print_command(title, argv)
    args = cli.build_parser(argv[0]).parse_args(argv)
    try:
        args.run(args)
    except MegatfmError as error:
        raise _make_failure(argv, f"failed: {error}", error.exit_code) from error


def _print_command(title: str, argv: Sequence[str]) -> None:
    console.print(f"\n[bold]{title}[/bold]\n[dim]$ megatfm {shlex.join(argv)}[/dim]")


def _make_failure(argv: Sequence[str], outcome: str, code: int) -> MegatfmError:
    error = MegatfmError(f"quickstart stopped: `megatfm {shlex.join(argv)}` {outcome}")
    error.exit_code = code
    return error


def _wait_for_step(process: subprocess.Popen[bytes], run_dir: Path, step: int) -> bool:
    """Wait until the run has logged a step; return False if it ended before, or had logged the step earlier."""
    if _read_last_step(run_dir) >= step:
        return False
    while process.poll() is None:
        if _read_last_step(run_dir) >= step:
            return True
        time.sleep(0.2)
    return False


def _read_last_step(run_dir: Path) -> int:
    lines = _read_metrics(run_dir)
    return int(lines[-1]["step"]) if lines else 0


def _read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    path = run_dir / "metrics.jsonl"
    lines = [line for line in path.read_bytes().split(b"\n")[:-1] if line] if path.is_file() else []
    return [json.loads(line) for line in lines]


def _print_summary(config: Config, run_dir: Path, seconds: float) -> None:
    evaluation = json.loads((run_dir / "evaluation.json").read_text(encoding="utf-8"))
    baselines = json.loads((run_dir / "baselines.json").read_text(encoding="utf-8"))
    lines = _read_metrics(run_dir)
    tokens_per_second = sorted(line["tokens_per_second"] for line in lines)[len(lines) // 2]
    table = Table(title="Results", show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, result in evaluation["sets"].items():
        table.add_row(f"{name}: loss", f"{float(result['loss']):.4f} nats per token")
        table.add_row(f"{name}: bits per byte", f"{float(result['bits_per_byte']):.3f}")
        for compressor, bits in baselines[name].items():
            table.add_row(f"  {compressor}", f"{bits:.3f}")
    table.add_row("speed", f"{tokens_per_second:,.0f} tokens/s (median step)")
    table.add_row("total time", f"{seconds / 60:.1f} minutes")
    for label, path in {
        "corpus": Path(config.data.train or "").parent,
        "run": run_dir,
        "checkpoints": run_dir / "checkpoints",
        "report": run_dir / "report.html",
    }.items():
        table.add_row(label, os.path.relpath(path))
    console.print()
    console.print(table)


def _print_next_commands(config: Config, run_path: str, overrides: Sequence[str]) -> None:
    """Print commands to try. The job is of a new run: the one that is finished would be refused."""
    names = ("name", "run_dir")
    job_overrides = [override for override in overrides if override.partition("=")[0].strip() not in names]
    job = ["launch", "quickstart", *job_overrides, f"name={config.name}-2"]
    console.print("\n[bold]Next[/bold]")
    for command in (
        ["generate", run_path, "--prompt", "class ", "--temperature", "0.6"],
        ["verify", "quickstart", "parallel.tp=2"],
        [*job, "--slurm", "--nodes", "2", "--gpus-per-node", "1", "--time", "1:00:00", "--dry-run"],
    ):
        console.print(f"  megatfm {shlex.join(command)}", markup=False)
