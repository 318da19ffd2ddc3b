"""Does pretraining help? One task, fine-tuned from a pretrained run and from nothing, over several seeds.

    python benchmarks/finetune_helps.py TASK.toml --from runs/bert --seeds 3 [key=value …]

Prints the test metric of each run, and mean and standard deviation of both. Each run is `megatfm finetune`.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path


def main() -> None:
    """Run all seeds, one after the other."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", type=Path)
    parser.add_argument("--from", dest="source", required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--metric", default="accuracy")
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_intermixed_args()
    figures: dict[str, list[float]] = {"pretrained": [], "from nothing": []}
    for seed in range(args.seeds):
        for start, values in figures.items():
            values.append(run(args, seed, is_pretrained=start == "pretrained"))
            print(f"seed {seed}  {start:<13} {args.metric} {values[-1]:.4f}", flush=True)
    for start, values in figures.items():
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        print(f"{start:<13} {args.metric} {statistics.mean(values):.4f} ± {spread:.4f} ({len(values)} seeds)")


def run(args: argparse.Namespace, seed: int, *, is_pretrained: bool) -> float:
    """Fine-tune once; returns the metric on the test file."""
    name = f"{Path(args.source).name}-{'pretrained' if is_pretrained else 'scratch'}-{seed}"
    folder = Path("runs") / f"helps-{name}"
    words = [f"name=helps-{name}", f"run_dir={folder}", f"train.seed={seed}", *args.overrides]
    words += [] if is_pretrained else ["train.init_from="]
    command = [sys.executable, "-m", "megatfm", "finetune", str(args.config), "--from", args.source, *words]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    results = json.loads((folder / "task.json").read_text())
    return float(results["sets"]["test"]["metrics"][args.metric])


if __name__ == "__main__":
    main()
