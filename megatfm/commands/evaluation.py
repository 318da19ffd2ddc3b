"""`megatfm evaluate`: evaluates a run on validation sets, or a model on tasks."""

import argparse
import shlex
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatfm.commands.arguments import add_trust_argument
from megatfm.commands.generation import load_text_model
from megatfm.commands.training import show_log
from megatfm.errors import UsageError
from megatfm.terminal import make_table, print_table

if TYPE_CHECKING:
    from megatfm.inference.evaluation_tasks import EvaluatedTask

TASK_OPTIONS = {"batch": None, "limit": 0, "dtype": "float32", "device": "auto", "out": None}
"""Options that need --task or --harness → default."""
HARNESS_OPTIONS = {"harness_path": None, "shots": None, "chat_template": False}
"""Options that need --harness → default."""


def add_evaluate_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the model, and the options for validation sets and for tasks."""
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
        help="a further corpus (or its URL), besides the run's own; repeatable",
    )
    parser.add_argument("--baselines", action="store_true", help="also show the bits per byte of gzip -9 and xz -9")
    parser.add_argument(
        "--images",
        type=int,
        nargs="?",
        const=12,
        default=0,
        metavar="N",
        help="for a run on images: also draw N examples with the model's output (12), for `megatfm report`",
    )
    add_trust_argument(parser)
    _add_task_arguments(parser)


def _add_task_arguments(parser: argparse.ArgumentParser) -> None:
    tasks = parser.add_argument_group("tasks, without training")
    tasks.add_argument(
        "--task",
        action="append",
        default=[],
        metavar="[NAME=]FILE",
        help="a task's TOML file, instead of the validation sets; repeatable",
    )
    tasks.add_argument(
        "--harness",
        action="append",
        default=[],
        metavar="NAME",
        help="name of a task of lm-evaluation-harness; repeatable",
    )
    tasks.add_argument("--harness-path", metavar="FOLDER", help="YAML files of further tasks of the harness (none)")
    tasks.add_argument(
        "--shots",
        type=int,
        metavar="N",
        help="with --harness: number of solved examples before each question (the task's own)",
    )
    tasks.add_argument(
        "--chat-template",
        action="store_true",
        help="with --harness: render questions by the model's chat template, solved examples as earlier turns",
    )
    tasks.add_argument("--batch", type=int, metavar="N", help="rows per batch (16)")
    tasks.add_argument(
        "--limit", type=int, default=0, metavar="N", help="only the first N questions of each task; 0: all (0)"
    )
    tasks.add_argument(
        "--dtype",
        choices=("auto", "float64", "float32", "bfloat16", "float16"),
        default="float32",
        help="dtype of the weights; auto: as stored (float32)",
    )
    tasks.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: cuda if available (auto)"
    )
    tasks.add_argument("--out", metavar="FOLDER", help="folder for results (RUN, if that is a run directory)")


@show_log()
def evaluate_command(args: argparse.Namespace) -> int:
    """Evaluate, print a table, and write the results into the run directory."""
    if not args.harness:
        _refuse_options(args, HARNESS_OPTIONS, "for tasks of the harness: give --harness NAME, or leave them out")
    if not (args.task or args.harness):
        _refuse_options(args, TASK_OPTIONS, "for tasks: give --task FILE or --harness NAME, or leave them out")
        return _evaluate_sets(args)
    if args.validation or args.baselines or args.images:
        raise UsageError("--task, --harness: these evaluate tasks only: evaluate validation sets by a second command")
    return _evaluate_tasks(args)


def _refuse_options(args: argparse.Namespace, options: Mapping[str, object], reason: str) -> None:
    """Raise UsageError if any of the options (name → default) differs from its default."""
    changed = [f"--{name.replace('_', '-')}" for name, default in options.items() if getattr(args, name) != default]
    if changed:
        raise UsageError(f"{', '.join(changed)} {'is' if len(changed) == 1 else 'are'} {reason}")


def _evaluate_tasks(args: argparse.Namespace) -> int:
    """Evaluate a model on tasks; write evaluation_tasks.json and the records of all questions."""
    from megatfm.convert.electra_pair import is_electra_folder
    from megatfm.convert.hf_checkpoint import is_hf_folder
    from megatfm.convert.load import read_sentence_transformer_options
    from megatfm.inference.evaluation_tasks import HarnessTasks, evaluate_task_files
    from megatfm.inference.likelihood import BATCH_SIZE
    from megatfm.tasks.questions import parse_task_files

    path = Path(args.run_dir)
    is_hf = is_hf_folder(path) or is_electra_folder(path)
    is_run = (path / "config.toml").is_file()
    evaluate_task_files(
        lambda device: load_text_model(path, device, args.dtype, args.trust_plugins),
        parse_task_files(args.task),
        HarnessTasks(args.harness, args.harness_path, args.shots, args.chat_template),
        batch_size=BATCH_SIZE if args.batch is None else args.batch,
        limit=args.limit,
        device=args.device,
        embedding_options=partial(read_sentence_transformer_options, path) if is_hf else None,
        out_dir=Path(args.out) if args.out else path if is_run else None,
        show=partial(_print_tasks, args.run_dir),
    )
    return 0


def _print_tasks(title: str, evaluated: "Mapping[str, EvaluatedTask]") -> None:
    headings = ("task", "questions", "metric", "value", "95 % interval")
    table = make_table(headings, ("task", "metric", "95 % interval"), title)
    for name, task in evaluated.items():
        first_cells = (name, f"{task.summary['questions']:,}")
        for metric, value in task.summary["metrics"].items():
            interval = task.summary["intervals"].get(metric)
            interval_text = f"{interval[0]:.4f} … {interval[1]:.4f}" if interval else ""
            table.add_row(*first_cells, metric, f"{value:.4f}", interval_text)
            first_cells = ("", "")
    print_table(table)


def _evaluate_sets(args: argparse.Namespace) -> int:
    """Evaluate the newest checkpoint on validation sets; write RUN/evaluation.json, and where they apply,
    baselines.json, confusion.json and pictures.json."""
    from megatfm.convert.hf_checkpoint import is_hf_folder
    from megatfm.inference.evaluate import evaluate_run

    if args.images < 0:
        raise UsageError(f"--images {args.images}: give a number of examples, at least 1")
    if is_hf_folder(args.run_dir):
        raise UsageError(
            f"{args.run_dir}: a model in the Hugging Face format has no validation sets: give --task FILE or "
            f"--harness NAME, or `megatfm convert {args.run_dir} NEW --to megatfm` and NEW with --validation NAME=DIR"
        )
    evaluated = evaluate_run(
        Path(args.run_dir),
        _parse_sets(args.validation),
        args.baselines,
        trust_plugins=args.trust_plugins,
        n_images=args.images,
        show=partial(_print_sets, args.run_dir),
    )
    if evaluated is not None and args.images:
        from megatfm.inference.pictures import FOLDER

        print(f"pictures in {Path(args.run_dir) / FOLDER}; `megatfm report {shlex.quote(args.run_dir)}` shows them")
    return 0


def _print_sets(run_dir: str, results: Mapping[str, Any], baselines: Mapping[str, Mapping[str, float]]) -> None:
    from megatfm.report.run_charts import LOSS_UNITS

    terms = sorted({term for result in results["sets"].values() for term in result.get("terms", {})})
    metrics = sorted({name for result in results["sets"].values() for name in result.get("metrics", {})})
    unit = LOSS_UNITS.get(results["objective"], "" if metrics else "nats per token")
    # Only a loss that is the text's likelihood is comparable with a compressor.
    has_likelihood = bool(baselines) or any("bits_per_byte" in result for result in results["sets"].values())
    text_columns = ["bits per byte", "bytes"] if has_likelihood else []
    headings = ("set", f"loss ({unit})" if unit else "loss", *terms, *metrics, *text_columns)
    table = make_table(headings, ("set",), f"{run_dir}, step {results['step']}")
    for name, result in results["sets"].items():
        cells = [f"{result['terms'][term]:.4f}" for term in terms]
        cells += [f"{100 * result['metrics'][metric]:.2f} %" for metric in metrics]
        text_cells = (
            (f"{result['bits_per_byte']:.3f}", f"{result['bytes']:,}") if "bits_per_byte" in result else ("–", "–")
        )
        table.add_row(name, f"{result['loss']:.4f}", *cells, *text_cells[: len(text_columns)])
        for compressor, bits_per_byte in baselines.get(name, {}).items():
            padding = [""] * (1 + len(terms) + len(metrics))
            table.add_row(f"  {compressor}", *padding, f"{bits_per_byte:.3f}", "")
    print_table(table)


def _parse_sets(arguments: list[str]) -> dict[str, str]:
    """Parse values NAME=DIR of --validation. Raises UsageError."""
    folders: dict[str, str] = {}
    for argument in arguments:
        name, _, folder = argument.partition("=")
        if not name or not folder:
            raise UsageError(
                f"--validation {argument}: expected NAME=DIR, for example --validation code=corpora/code/validation"
            )
        if name in folders:
            raise UsageError(f"--validation {argument}: {name} is {folders[name]} already: give another name")
        folders[name] = folder
    return folders
