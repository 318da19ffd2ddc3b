"""`megatfm evaluate RUN`: loss and bits per byte on the run's validation sets, or on others."""

import argparse
from pathlib import Path

from megatfm.errors import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", metavar="RUN", help="a run directory, for example runs/quickstart")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=DIR", help="a corpus to use besides the run's own"
    )
    parser.add_argument(
        "--compressors", action="store_true", help="also what gzip -9 and xz -9 need for the same text"
    )


def main(args: argparse.Namespace) -> int:
    """Evaluate the newest checkpoint; prints a table, and leaves RUN/evaluation.json (and baselines.json)."""
    from rich.console import Console
    from rich.table import Table

    from megatfm.evaluate.evaluate import evaluate_run

    found = evaluate_run(Path(args.run_dir), _sets(args.set), args.compressors)
    if found is None:
        return 0
    results, baselines = found
    table = Table(title=f"{args.run_dir}, step {results['step']}")
    terms = sorted({term for result in results["sets"].values() for term in result.get("terms", {})})
    for heading in ("set", "loss (nats per token)", *terms, "bits per byte", "bytes"):
        table.add_column(heading, justify="left" if heading == "set" else "right")
    for name, result in results["sets"].items():
        parts = [f"{result['terms'][term]:.4f}" for term in terms]
        # Only where the loss is the text's likelihood can it be compared with a compressor's.
        bits = (
            (f"{result['bits_per_byte']:.3f}", f"{result['bytes']:,}")
            if "bits_per_byte" in result
            else ("–", "–")
        )
        table.add_row(name, f"{result['loss']:.4f}", *parts, *bits)
        for compressor, needed in baselines.get(name, {}).items():
            table.add_row(f"  {compressor}", *[""] * (1 + len(terms)), f"{needed:.3f}", "")
    Console().print(table)
    return 0


def _sets(given: list[str]) -> dict[str, str]:
    pairs = [item.partition("=") for item in given]
    for name, _, folder in pairs:
        if not name or not folder:
            raise UsageError(
                f"--set {name}{folder}: expected NAME=DIR, for example --set code=corpora/code/validation"
            )
    return {name: folder for name, _, folder in pairs}
