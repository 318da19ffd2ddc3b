"""`megatfm finetune` trains a pretrained model on labelled files; `megatfm predict` predicts labels for new ones."""

import argparse
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatfm.commands.arguments import add_config_and_overrides, add_source_argument, add_trust_argument, split_config
from megatfm.commands.training import (
    enable_expandable_segments,
    print_notes,
    remove_on_refusal,
    show_log,
    write_run_config,
)
from megatfm.config import Config, load_config
from megatfm.config.load import get_overridden_keys, read_values
from megatfm.config.sources import ConfigFile, is_stored_by_us, read_files
from megatfm.errors import EXIT_OK, UsageError
from megatfm.files import NewPaths
from megatfm.parallel.startup_watch import start_sentinel
from megatfm.terminal import format_counted, make_table, print_table

if TYPE_CHECKING:
    from megatfm.inference.task_evaluation import TaskResults

RESOLVED_CONFIG = "finetune.toml"
"""File in the run directory with the complete config (corpora, labels, head, steps), for `launch` and `verify`."""
CORPUS_KEYS = ("train", "corpus", "validation", "mixture", "mixture_schedule")
"""Keys of [data] that the task's files replace, and beginnings of such keys."""
DEFAULT_EPOCHS = 3
PLACEHOLDER_STEPS = 2**40
"""Value of train.steps until the examples are counted."""


def add_finetune_arguments(parser: argparse.ArgumentParser) -> None:
    """Add a config with a [task], the model to start from, and the command's options."""
    add_config_and_overrides(parser, "task.epochs=3", optional=True)
    add_source_argument(parser)
    parser.add_argument(
        "--prepare",
        action="store_true",
        help=f"only tokenize, and write RUN/{RESOLVED_CONFIG}, a config for `launch`, `train` and `verify`",
    )
    parser.add_argument("--seeds", type=int, metavar="N", help="train N runs, NAME-seed-0, …; print mean and deviation")
    parser.add_argument(
        "--export", metavar="DIR", help="at the end, export the best checkpoint to DIR in the Hugging Face format"
    )


@show_log()
def finetune_command(args: argparse.Namespace) -> int:
    """Fine-tune or resume, then evaluate the best checkpoint; return an exit code as `megatfm train` does."""
    enable_expandable_segments(os.environ)
    start_sentinel()
    if args.prepare and args.export:
        raise UsageError("--export is for a run that trains: leave it or --prepare out")
    if args.seeds is None:
        return finetune_once(args, args.overrides)[0]
    config, overrides = split_config(args.config, args.overrides)
    values = read_values(Config, config, overrides)
    seeds = check_seeds(args, values)
    name = values.get("name") or f"from-{Path(args.source).absolute().name}"
    results_by_seed: list[TaskResults] = []
    for seed in seeds:
        code, results = finetune_once(args, [*args.overrides, f"name={name}-seed-{seed}", f"train.seed={seed}"])
        if code != EXIT_OK:
            return code
        results_by_seed += [results] if results is not None else []
    if results_by_seed:
        print_spread(results_by_seed)
        print(f"side by side: megatfm compare {' '.join(f'runs/{name}-seed-{seed}' for seed in seeds)}")
    return EXIT_OK


def check_seeds(args: argparse.Namespace, values: Mapping[str, Any]) -> Sequence[int]:
    """Return the seeds of `--seeds`. values: the config's. Raises UsageError for what is only for a single run."""
    overridden_keys = get_overridden_keys([args.config or "", *args.overrides])
    if args.seeds < 2:
        raise UsageError(f"--seeds {args.seeds}: choose 2 or more, or leave it out")
    for key, is_set in (("train.seed", "train.seed" in overridden_keys), ("run_dir", values.get("run_dir"))):
        if is_set:
            raise UsageError(f"--seeds: each run has its own {key}: leave that out")
    if args.export or args.prepare:
        raise UsageError("--seeds: --export and --prepare are for one run: give them with train.seed=0 instead")
    return range(args.seeds)


def finetune_once(args: argparse.Namespace, overrides: Sequence[str]) -> "tuple[int, TaskResults | None]":
    """Fine-tune one run; return the exit code and, on rank 0, the results of its best checkpoint."""
    if args.export:
        from megatfm.convert.convert import check_is_new

        check_is_new(Path(args.export))  # before training, not after
    config, notes = make_finetuning_config(args.source, args.config, overrides)
    print_notes(notes)
    if args.export:
        from megatfm.convert.electra_pair import choose_exported_models
        from megatfm.train.corpora import open_tokenizer

        # Raises UsageError now, not after training, if transformers has no class for the model.
        choose_exported_models(open_tokenizer(config)[0].model.model_copy(update={"lora": None}))
    folder, new_paths = config.run_folder, NewPaths()
    write_run_config(config, folder / RESOLVED_CONFIG, new_paths)
    if args.prepare:
        print(folder / RESOLVED_CONFIG)
        return EXIT_OK, None
    from megatfm.describe.description import flops_per_token
    from megatfm.inference.task_evaluation import evaluate_task
    from megatfm.inference.text import PromptSampler
    from megatfm.train.run import train

    with remove_on_refusal(new_paths):
        code = train(config, flops_per_token, PromptSampler(), new_paths)
    if code != EXIT_OK:
        return code, None
    results = evaluate_task(folder, show=print_results)
    if results is not None and args.export:
        from megatfm.convert.convert import convert

        summary, *export_notes = convert(results.checkpoint, args.export, "hf")
        for line in [*export_notes, f"{args.export}: {summary}"]:
            print(line)
    return EXIT_OK, results


def make_finetuning_config(
    source: str | None, path: str | None, overrides: Sequence[str]
) -> tuple[Config, Sequence[str]]:
    """Tokenize the task's files; return the complete config (head, objective, steps, …) and notes for the user.

    source: model to start from. path: config or preset. Raises UsageError.
    """
    path, overrides = split_config(path, overrides)
    if path is None and source is None:
        raise UsageError("a config with a [task] is missing: give a TOML file, and a model to start from as --from")
    if path is not None:
        _check_has_task(path, overrides)
    replaced_notes = _replace_corpora(path, overrides)
    placeholders = [
        "data.train=task",
        "data.mixture=",
        "data.mixture_schedule=",
        *_convert_epochs_to_steps(path, overrides),
    ]
    if source is None:
        assert path is not None
        if "model" not in read_values(Config, path, overrides):
            raise UsageError(
                f"{path}: has no [model]: start from one, --from MODEL, or describe one to train from scratch"
            )
        config, notes = load_config(path, [*placeholders, *overrides]), list[str]()
    else:
        from megatfm.commands.from_model import continue_from_config

        config, messages = continue_from_config(source, path, [*placeholders, *overrides])
        notes = list(messages)
    from megatfm.train.finetuning import resolve_task

    resolved, messages = resolve_task(config)
    return resolved, [*replaced_notes, *notes, *messages]


def _check_has_task(path: str, overrides: Sequence[str]) -> None:
    if not read_values(Config, path, overrides).get("task"):
        raise UsageError(
            f"{path}: has no [task]: name the training file, for example task.train=reviews.csv, or use `megatfm train`"
        )


def _replace_corpora(path: str | None, overrides: Sequence[str]) -> list[str]:
    """Return a note on the corpora of a preset or base (`extends`), which the task's files replace.

    Raises UsageError for corpora in the config itself or in an override.
    """
    refused, inherited = [override for override in overrides if _names_corpus(override)], list[str]()
    for index, file in enumerate(read_files(Config, path) if path is not None else ()):
        data = file.values.get("data", {})
        keys = [f"data.{key}" for key in CORPUS_KEYS if isinstance(data, Mapping) and data.get(key)]
        if keys and not _is_stored_config(file):
            is_inherited = index > 0 or file.is_preset
            (inherited if is_inherited else refused).append(f"{file.label}: {', '.join(keys)}")
    if refused:
        raise UsageError(
            f"{refused[0]}: a task is trained and evaluated on its own files: give them as task.train, "
            "task.validation and task.test, and other corpora to `megatfm evaluate RUN --validation NAME=DIR`"
        )
    return [f"{corpora}: replaced by the task's files" for corpora in inherited]


def _names_corpus(override: str) -> bool:
    key, _, value = (part.strip() for part in override.partition("="))
    return key.startswith(tuple(f"data.{name}" for name in CORPUS_KEYS)) and value not in ("", "{}")


def _is_stored_config(file: ConfigFile) -> bool:
    """Return whether a fine-tuning run stored the config, whose corpora are those of its task."""
    return file.path.name == RESOLVED_CONFIG or is_stored_by_us(file.path)


def _convert_epochs_to_steps(path: str | None, overrides: Sequence[str]) -> list[str]:
    """Return overrides so that epochs decide train.steps; none if the config sets the steps."""
    values = read_values(Config, path, overrides)
    task, train = values.get("task"), values.get("train")
    if isinstance(task, Mapping) and task.get("epochs"):
        return [f"train.steps={PLACEHOLDER_STEPS}"]
    if isinstance(train, Mapping) and "steps" in train:
        return []
    return [f"train.steps={PLACEHOLDER_STEPS}", f"task.epochs={DEFAULT_EPOCHS}"]


def print_results(results: "TaskResults") -> None:
    """Print a table of metrics with their confidence intervals; nothing without a validation or test file."""
    if not results.sets:
        return
    names = list(next(iter(results.sets.values()))["metrics"])
    title = f"{results.checkpoint.parents[1].name}, step {results.step}"
    table = make_table(("set", "examples", "loss", *names), ("set",), title)
    for name, result in results.sets.items():
        cells = []
        for metric, value in result["metrics"].items():
            interval = result["intervals"].get(metric)
            cells.append(f"{value:.4f}" + (f" [{interval[0]:.3f}, {interval[1]:.3f}]" if interval else ""))
        table.add_row(name, f"{result['examples']:,}", f"{result['loss']:.4f}", *cells)
    print_table(table)
    for name, result in results.sets.items():
        if "predictions" in result:
            print(f"{name}: predictions in {result['predictions']}")


def print_spread(results_by_seed: "Sequence[TaskResults]") -> None:
    """Print mean and standard deviation of each metric over runs; nothing without a validation or test file."""
    if not results_by_seed[0].sets:
        return
    names = list(next(iter(results_by_seed[0].sets.values()))["metrics"])
    title = f"mean ± standard deviation of {len(results_by_seed)} seeds"
    table = make_table(("set", "loss", *names), ("set",), title)
    for name in results_by_seed[0].sets:
        columns = [[results.sets[name]["loss"] for results in results_by_seed]]
        columns += [[results.sets[name]["metrics"][metric] for results in results_by_seed] for metric in names]
        cells = [f"{statistics.mean(values):.4f} ± {_compute_deviation(values):.4f}" for values in columns]
        table.add_row(name, *cells)
    print_table(table)


def _compute_deviation(values: Sequence[float]) -> float:
    """Return the standard deviation; NaN if a value is not finite, at which `statistics` fails."""
    return statistics.stdev(values) if all(map(math.isfinite, values)) else math.nan


def add_predict_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the run, the input file and the output file."""
    parser.add_argument("run_dir", metavar="RUN", help="a run of `megatfm finetune`")
    parser.add_argument("file", metavar="FILE", help="a file with the columns of the task's texts")
    parser.add_argument("--out", metavar="FILE", help="output file, a .jsonl (RUN/predictions/NAME.jsonl)")
    parser.add_argument(
        "--num-beams",
        "--beams",
        type=int,
        metavar="K",
        dest="beams",
        help="beam search with K beams, for tasks that generate answers (task.beams)",
    )
    parser.add_argument(
        "--length-penalty",
        type=float,
        metavar="A",
        help="length penalty of the beam search, as for `megatfm generate` (task.length_penalty)",
    )
    add_trust_argument(parser)


@show_log()
def predict_command(args: argparse.Namespace) -> int:
    """Write the predicted label and probabilities of each row of a file."""
    from megatfm.inference.task_evaluation import predict_file

    options = {"beams": args.beams, "length_penalty": args.length_penalty}
    search = {key: value for key, value in options.items() if value is not None}
    if search.get("beams", 1) < 1 or search.get("length_penalty", 0) < 0:
        raise UsageError("--beams, --length-penalty: choose 1 or more beams, and a penalty of 0 or more")
    result = predict_file(Path(args.run_dir), args.file, args.out, search=search, trust_plugins=args.trust_plugins)
    if result is not None:
        print(f"{result[0]}: {format_counted(result[1], 'prediction')}")
    return EXIT_OK
