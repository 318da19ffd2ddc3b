"""The command `megatfm evaluate`: a run on validation sets, or a model on tasks without training it."""

import argparse
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from megatfm.commands.arguments import add_trust_argument
from megatfm.errors import UsageError
from megatfm.terminal import print_table

if TYPE_CHECKING:
    from megatfm.inference.evaluation_tasks import EvaluatedTask

TASK_OPTIONS = {"batch": None, "limit": 0, "dtype": "float32", "device": "auto", "out": None}
HARNESS_OPTIONS = {"harness_path": None, "shots": None}
"""Options that belong to tasks, and to those of the harness, with their defaults."""


def add_evaluate_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the model, and validation sets or tasks."""
    parser.add_argument(
        "run_dir",
        metavar="RUN",
        help="a run directory, for example runs/quickstart; with --task also a checkpoint or a Hugging Face folder",
    )
    parser.add_argument(
        "--validation",
        action="append",
        default=[],
        metavar="NAME=DIR",
        help="a corpus (or its URL) to use besides the run's own",
    )
    parser.add_argument(
        "--baselines", action="store_true", help="also what gzip -9 and xz -9 need for the same text"
    )
    parser.add_argument(
        "--images",
        type=int,
        nargs="?",
        const=12,
        default=0,
        metavar="N",
        help="of a run on images, also draw what the model does with N examples (12), for `megatfm report`",
    )
    add_trust_argument(parser)
    tasks = parser.add_argument_group("tasks, without training")
    tasks.add_argument(
        "--task",
        action="append",
        default=[],
        metavar="[NAME=]FILE",
        help="a task's TOML file, in place of the validation sets; may be given several times",
    )
    tasks.add_argument(
        "--harness",
        action="append",
        default=[],
        metavar="NAME",
        help="a task of lm-evaluation-harness by its name; may be given several times",
    )
    tasks.add_argument(
        "--harness-path", metavar="FOLDER", help="YAML files of further tasks of the harness (none)"
    )
    tasks.add_argument(
        "--shots",
        type=int,
        metavar="N",
        help="with --harness: solved examples before a question (as its task says)",
    )
    tasks.add_argument("--batch", type=int, metavar="N", help="rows at a time (16)")
    tasks.add_argument(
        "--limit",
        type=int,
        default=0,
        metavar="N",
        help="only the first N questions of each task; 0: all (0)",
    )
    tasks.add_argument(
        "--dtype",
        choices=("auto", "float64", "float32", "bfloat16", "float16"),
        default="float32",
        help="of the weights; auto: as they are stored (float32)",
    )
    tasks.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="auto: cuda where there is one (auto)",
    )
    tasks.add_argument("--out", metavar="FOLDER", help="where results go (RUN, if that is a run directory)")


def evaluate_command(args: argparse.Namespace) -> int:
    """Evaluate, print a table, and leave the results in the run directory."""
    if not args.harness:
        _refuse_options(
            args, HARNESS_OPTIONS, "are for tasks of the harness: give --harness NAME, or leave them out"
        )
    if not (args.task or args.harness):
        _refuse_options(
            args, TASK_OPTIONS, "are for tasks: give --task FILE or --harness NAME, or leave them out"
        )
        return _evaluate_sets(args)
    if args.validation or args.baselines or args.images:
        raise UsageError(
            "--task, --harness: evaluate tasks alone: evaluate validation sets by a second command"
        )
    return _evaluate_tasks(args)


def _refuse_options(args: argparse.Namespace, options: Mapping[str, object], reason: str) -> None:
    changed = [
        f"--{name.replace('_', '-')}" for name, default in options.items() if getattr(args, name) != default
    ]
    if changed:
        raise UsageError(f"{', '.join(changed)}: {reason}")


def _evaluate_tasks(args: argparse.Namespace) -> int:
    """Evaluate a model on tasks; leaves evaluation_tasks.json and the records of all questions."""
    import torch

    from megatfm.convert.electra_pair import is_electra_folder
    from megatfm.convert.hf_checkpoint import is_hf_folder
    from megatfm.convert.load import load_model as load_hf
    from megatfm.convert.load import sentence_transformer_options, text_generation_fields
    from megatfm.inference.evaluation_tasks import HarnessTasks, evaluate_task_files
    from megatfm.inference.likelihood import BATCH_SIZE
    from megatfm.inference.text import TextModel, load
    from megatfm.tasks.questions import named_task_files

    path = Path(args.run_dir)

    from_elsewhere = is_hf_folder(path) or is_electra_folder(path)

    def open_model(device: torch.device) -> TextModel:
        if from_elsewhere:
            return TextModel(load_hf(path, device, dtype=args.dtype), **text_generation_fields(path))
        return load(path, device, dtype=args.dtype, trust_plugins=args.trust_plugins)

    is_run = (path / "config.toml").is_file()
    evaluated = evaluate_task_files(
        open_model,
        named_task_files(args.task),
        HarnessTasks(args.harness, args.harness_path, args.shots),
        batch_size=BATCH_SIZE if args.batch is None else args.batch,
        limit=args.limit,
        device=args.device,
        embedding_options=partial(sentence_transformer_options, path) if from_elsewhere else None,
        out_dir=Path(args.out) if args.out else path if is_run else None,
    )
    if evaluated is not None:
        _print_tasks(args.run_dir, evaluated)
    return 0


def _print_tasks(title: str, evaluated: "Mapping[str, EvaluatedTask]") -> None:
    from rich.table import Table

    table = Table(title=title)
    for heading in ("task", "questions", "metric", "value", "95 % interval"):
        table.add_column(heading, justify="right" if heading in ("questions", "value") else "left")
    for name, task in evaluated.items():
        for number, (metric, value) in enumerate(task.summary["metrics"].items()):
            interval = task.summary["intervals"].get(metric)
            spread = f"{interval[0]:.4f} … {interval[1]:.4f}" if interval else ""
            first = (name, f"{task.summary['questions']:,}") if number == 0 else ("", "")
            table.add_row(*first, metric, f"{value:.4f}", spread)
    print_table(table)


def _evaluate_sets(args: argparse.Namespace) -> int:
    """Evaluate the newest checkpoint on validation sets; leaves RUN/evaluation.json (and baselines.json, of images
    confusion.json and pictures.json)."""
    from rich.table import Table

    from megatfm.inference.evaluate import evaluate_run
    from megatfm.report.units import LOSS_UNITS

    if args.images < 0:
        raise UsageError(f"--images {args.images}: give a number of examples, at least 1")
    evaluated = evaluate_run(
        Path(args.run_dir),
        _sets(args.validation),
        args.baselines,
        trust_plugins=args.trust_plugins,
        n_images=args.images,
    )
    if evaluated is None:
        return 0
    results, baselines = evaluated
    table = Table(title=f"{args.run_dir}, step {results['step']}")
    terms = sorted({term for result in results["sets"].values() for term in result.get("terms", {})})
    metrics = sorted({name for result in results["sets"].values() for name in result.get("metrics", {})})
    unit = LOSS_UNITS.get(results["objective"], "" if metrics else "nats per token")
    text = [] if metrics or results["objective"] in LOSS_UNITS else ["bits per byte", "bytes"]
    for heading in ("set", f"loss ({unit})" if unit else "loss", *terms, *metrics, *text):
        table.add_column(heading, justify="left" if heading == "set" else "right")
    for name, result in results["sets"].items():
        parts = [f"{result['terms'][term]:.4f}" for term in terms]
        parts += [f"{100 * result['metrics'][name]:.2f} %" for name in metrics]
        # Only where the loss is the text's likelihood can it be compared with a compressor's.
        bits = (
            (f"{result['bits_per_byte']:.3f}", f"{result['bytes']:,}")
            if "bits_per_byte" in result
            else ("–", "–")
        )
        table.add_row(name, f"{result['loss']:.4f}", *parts, *bits[: len(text)])
        for compressor, needed in baselines.get(name, {}).items():
            table.add_row(f"  {compressor}", *[""] * (1 + len(terms) + len(metrics)), f"{needed:.3f}", "")
    print_table(table)
    return 0


def _sets(words: list[str]) -> dict[str, str]:
    pairs = [word.partition("=") for word in words]
    for name, _, place in pairs:
        if not name or not place:
            raise UsageError(
                f"--validation {name}{place}: expected NAME=DIR, for example --validation code=corpora/code/validation"
            )
    return {name: place for name, _, place in pairs}
