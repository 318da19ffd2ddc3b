"""`megatfm describe`, `estimate` and `explain-oom`: the size of a model, whether a run fits, and how fast it is."""

import argparse
import logging
import shlex
import sys
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from megatfm.commands.arguments import add_config_and_overrides, add_trust_argument, check_trust
from megatfm.commands.training import show_log
from megatfm.config import load_config
from megatfm.config.section import list_divisors
from megatfm.errors import UsageError
from megatfm.files import to_strict_json
from megatfm.terminal import print_table

if TYPE_CHECKING:
    from megatfm.config import Config
    from megatfm.estimate.estimator import Estimate, Estimator
    from megatfm.estimate.search import SearchResult

log = logging.getLogger("megatfm")

MAX_LAYOUTS = 10
"""Largest number of layouts that a search lists."""
MAX_CHANGES = 3
"""Largest number of changes that are suggested."""


def add_describe_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the config."""
    add_config_and_overrides(parser, "model.n_layers=8")
    add_trust_argument(parser)


@show_log()
def describe_command(args: argparse.Namespace) -> int:
    """Print the description."""
    config = load_config(args.config, args.overrides)
    check_trust(config, args)
    log.info("%s: counting parameters and FLOPs, without allocating the model", config.name)
    from megatfm.describe import describe, to_lines  # imports torch

    for label, text in to_lines(describe(config)):
        print(f"{label:<16}  {text}".rstrip())
    return 0


def add_estimate_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the config, the cluster and the command's options."""
    add_config_and_overrides(parser, "parallel.tp=8")
    parser.add_argument("--gpus", type=int, metavar="N", help="GPUs of the run (8; with --calibrate 1)")
    parser.add_argument("--device", default="h100", metavar="NAME", help="h100, a100, … or your own (h100)")
    parser.add_argument("--node", metavar="NAME", help="type of node, such as dgx-h100 (by the device)")
    parser.add_argument("--gpus-per-node", type=int, metavar="N", help="GPUs per node (by the type of node)")
    parser.add_argument(
        "--hardware", type=Path, metavar="FILE", help="TOML file that describes your own devices and nodes"
    )
    parser.add_argument(
        "--calibrate",
        type=Path,
        metavar="FILE",
        help="measure this machine first, write its description to FILE, and estimate with it",
    )
    parser.add_argument("--search", action="store_true", help="try all layouts, and estimate the best one")
    parser.add_argument(
        "--write", type=Path, metavar="FILE", help="write the layout as a config, and a SLURM script beside it"
    )
    parser.add_argument(
        "--traced", action="store_true", help="compare the estimate with a traced step of a rank on an imaginary GPU"
    )
    parser.add_argument("--rank", type=int, metavar="R", help="with --traced: the rank to trace (0)")
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="write a page: memory, timeline of the schedule, scaling"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead")
    add_trust_argument(parser)


@show_log()
def estimate_command(args: argparse.Namespace) -> int:
    """Print the estimate; return 0 if the run fits, else 1."""
    from megatfm.estimate.devices import load_cluster

    config = load_config(args.config, args.overrides)
    check_trust(config, args)
    for flag in ("calibrate", "html", "write"):
        _check_new_file(flag, getattr(args, flag))
    if args.rank is not None and not args.traced:
        raise UsageError(f"--rank {args.rank}: an estimate covers all ranks: add --traced, or leave --rank out")
    args.gpus = (1 if args.calibrate else 8) if args.gpus is None else args.gpus
    if args.rank is not None and args.gpus > 0:
        from megatfm.estimate.traced import check_rank

        check_rank(args.rank, args.gpus)
    if args.calibrate:
        _calibrate(args, config)
    cluster = load_cluster(args.device, args.gpus, args.node, args.gpus_per_node, args.hardware)

    log.info("%s: %s on %s", config.name, "trying all layouts" if args.search else "estimating a step", cluster)
    from megatfm.estimate.estimator import open_estimator  # imports torch
    from megatfm.estimate.text import as_dict

    sizes = [size for size in list_divisors(cluster.gpus) if size <= cluster.node.gpus]
    with open_estimator(config, cluster, sizes) as estimator:
        if args.search:
            estimate = _find_best_layout(estimator, args.json)
        else:
            estimate = estimator.estimate(estimator.base)
        if args.json:
            print(to_strict_json(as_dict(estimate), indent=2))
        else:
            _print_estimate(estimator, estimate)
        with redirect_stdout(sys.stderr) if args.json else nullcontext():
            if args.html:
                from megatfm.estimate.export import write_estimate_page

                write_estimate_page(estimator, estimate, args.html)
                print(f"written: {args.html}")
            if args.traced:
                _print_traced_step(args, estimator, estimate)
            if args.write:
                _write_job(args, estimate)
    return 0 if estimate.fits else 1


def _check_new_file(flag: str, path: Path | None) -> None:
    """Raise UsageError for a file that exists, or whose folder does not, before anything is computed."""
    if path is not None and path.exists():
        advice = ", or use it by --hardware" * (flag == "calibrate")
        raise UsageError(f"--{flag} {path}: the file exists: give another name{advice}")
    if path is not None and not path.parent.is_dir():
        raise UsageError(f"--{flag} {path}: there is no folder {path.parent}: make it, or give another name")
    for sibling in _list_job_files(path) if path is not None and flag == "write" else ():
        if sibling.exists():
            raise UsageError(f"--write {path}: the file {sibling} exists: give another name")


def _list_job_files(path: Path) -> list[Path]:
    """Return the files that are written beside a config: the SLURM script, and the config that it runs."""
    return [path.with_name(f"{path.stem}.{suffix}") for suffix in ("sbatch", "config.toml")]


TRIAL_PRESET = "llama3-8b"
"""Preset whose steps are measured where the config's own model can't be made small."""

SLOW_BF16 = (
    "warning: this device multiplies in bfloat16 no faster than in float32, and at a rate that jumps from shape to "
    "shape: estimates of single steps may be off by half; train.precision = 'fp32' is measured faster and better"
)


def _calibrate(args: argparse.Namespace, config: "Config") -> None:
    """Measure this machine, write its description, and set the arguments to use it. Raises UsageError."""
    import torch

    from megatfm.estimate.calibrate import DTYPES, measure_device, write_table
    from megatfm.estimate.clock import MIN_ROUNDS, ROUNDS, Clock
    from megatfm.estimate.devices import NODE
    from megatfm.estimate.trial_configs import list_trials
    from megatfm.train.build import is_bf16_faster

    if args.hardware:
        raise UsageError("--calibrate writes a table and --hardware reads one: give one of them")
    notes = sys.stderr if args.json else sys.stdout
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    precision, has_fast_bf16 = config.train.precision, is_bf16_faster(device)
    if precision == "auto":
        precision = "bf16" if has_fast_bf16 else "fp32"
    if precision not in DTYPES:
        raise UsageError(
            f"--calibrate measures in {' or '.join(DTYPES)}, but train.precision = {precision!r}: set one of them"
        )
    try:
        trials = list_trials(config, device.type, precision)
    except UsageError as error:
        print(f"{error}; operators are measured in trials of {TRIAL_PRESET}", file=notes)
        trials = list_trials(load_config(TRIAL_PRESET), device.type, precision)
    if precision == "bf16" and not has_fast_bf16:
        print(SLOW_BF16, file=notes)
    steps = f"{len(trials)} trial steps"
    print(f"measuring matrix products and {steps} in {MIN_ROUNDS} to {ROUNDS} rounds: some minutes", file=notes)
    table, _ = measure_device(Clock(device), precision, trials)
    write_table(table, args.calibrate)
    print(f"written: {args.calibrate}; use it with --hardware {args.calibrate} --device {NODE}", file=notes)
    args.hardware, args.device = args.calibrate, NODE


def _find_best_layout(estimator: "Estimator", is_quiet: bool) -> "Estimate":
    """Search for the best layout, print a table, and return the best estimate. Raises UsageError if nothing fits."""
    from megatfm.estimate.search import search
    from megatfm.estimate.text import describe_search, make_search_table

    result = search(estimator)
    if not result.best:
        raise UsageError(_describe_failed_search(estimator, result))
    if not is_quiet:
        for line in describe_search(result):
            print(line)
        print_table(make_search_table(result, MAX_LAYOUTS))
    return result.best[0]


def _describe_failed_search(estimator: "Estimator", result: "SearchResult") -> str:
    """Return the error message of a search without a result: the memory of the smallest layout."""
    cluster = estimator.cluster
    if result.smallest is None:
        reasons = "; ".join(reason for reason, _ in result.refused.most_common(2))
        return f"--search: no layout of {estimator.base.name} is possible on {cluster.gpus} GPUs: {reasons}"
    smallest_gib = result.smallest.score.n_bytes / 2**30
    return (
        f"--search: none of {result.tried:,} layouts of {estimator.base.name} fits {cluster}: the smallest "
        f"takes {smallest_gib:.0f} GiB of {cluster.device.memory_gib:.0f}: use more GPUs, or shorter rows"
    )


def _print_traced_step(args: argparse.Namespace, estimator: "Estimator", estimate: "Estimate") -> None:
    """Trace a step with few micro-batches, and print it beside the estimate of that step."""
    from megatfm.estimate.export import write_layout
    from megatfm.estimate.text import describe_trace, make_traced_table
    from megatfm.estimate.traced import compare_with_trace, count_traced_microbatches, make_trace_overrides, run_trace

    overrides = make_trace_overrides(estimate.config, count_traced_microbatches(estimate))
    with TemporaryDirectory() as folder:
        layout = Path(folder, "layout.toml")
        write_layout(args.config, estimate, layout)
        traced = run_trace(str(layout), overrides, args.gpus, args.rank or 0)
        config = load_config(str(layout), overrides)
    if config.train.precision == "auto":  # the imaginary GPU's
        config = config.with_changes({"train.precision": "bf16"})
    print_table(make_traced_table(compare_with_trace(estimator.estimate(config), traced), traced))
    for line in describe_trace(traced):
        print(line)


def _write_job(args: argparse.Namespace, estimate: "Estimate") -> None:
    """Write config and job script, and print the command that starts them."""
    from megatfm.estimate.export import make_launch_arguments, write_layout
    from megatfm.files import atomic_write, name_write_errors
    from megatfm.launchers import cli

    launch_arguments = make_launch_arguments(args.write, estimate.cluster)
    write_layout(args.config, estimate, args.write)
    parser = argparse.ArgumentParser()
    add_config_and_overrides(parser)
    cli.add_arguments(parser)
    launcher, job, notes = cli.build_launch(parser.parse_args([*launch_arguments, "--dry-run"]))
    cli.print_launch_notes(notes)
    script, job_config = _list_job_files(args.write)
    for name, text in launcher.render(job).items():
        path = job_config if name == "config.toml" else script
        with name_write_errors(path):
            atomic_write(path, text)
    names = ", ".join(map(str, (args.write, script, job_config)))
    print(f"written: {names}; start it with: megatfm launch {shlex.join(launch_arguments)}")


def _print_estimate(estimator: "Estimator", estimate: "Estimate") -> None:
    """Print whether the run fits, and tables of its memory, time and traffic."""
    from megatfm.estimate.stalls import describe_failures
    from megatfm.estimate.text import (
        describe_fit,
        describe_run,
        describe_speed,
        make_memory_table,
        make_time_table,
        make_traffic_table,
    )

    lines = [*describe_run(estimate), describe_fit(estimate), *describe_speed(estimate), describe_failures(estimate)]
    print("\n".join(lines))
    print()
    for table in (make_memory_table(estimate), make_time_table(estimate), make_traffic_table(estimate)):
        if table.rows:
            print_table(table)
    _print_advice(estimator, estimate)


def _print_advice(estimator: "Estimator", estimate: "Estimate", needs_less: bool = False) -> None:
    """Print a larger micro-batch that fits, too; or, if the run doesn't fit or needs less memory, what to change."""
    from megatfm.estimate.search import find_fitting_changes, find_largest_micro_batch

    if estimate.fits and not needs_less:
        largest = find_largest_micro_batch(estimator, estimate)
        if largest and largest > estimate.config.train.micro_batch:
            print(f"train.micro_batch={largest} fits as well")
        return
    changes = find_fitting_changes(estimator, estimate)
    if not changes:
        print("none of the common changes makes it fit: use more GPUs, or shorter rows")
    for change in changes[:MAX_CHANGES]:
        worst = change.estimate.worst.total / 2**30
        print(f"fits with {change}: {worst:.1f} GiB, {change.estimate.time.step:.3g} s a step")


def add_explain_oom_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the run, and options to describe its device."""
    parser.add_argument("folder", type=Path, metavar="RUN", help="run directory")
    parser.add_argument("--device", metavar="NAME", help="h100, a100, … or your own (that of the run)")
    parser.add_argument(
        "--hardware", type=Path, metavar="FILE", help="TOML file that describes your own devices and nodes"
    )


@show_log()
def explain_oom_command(args: argparse.Namespace) -> int:
    """Print a run's predicted memory by phase and owner, what it recorded, and which settings to change."""
    from megatfm.launchers.status import resolve_run_dir

    folder = resolve_run_dir(args.folder)
    log.info("%s: estimating the memory of a step", folder)
    from megatfm.estimate.recorded import read_recorded, run_estimator  # imports torch
    from megatfm.estimate.text import (
        describe_fit,
        describe_recorded,
        describe_run,
        make_memory_table,
        make_phases_table,
    )

    recorded = read_recorded(folder)
    with run_estimator(folder, recorded, args.device, args.hardware) as estimator:
        estimate = estimator.estimate(estimator.base)
        for line in (*describe_run(estimate), describe_fit(estimate), *describe_recorded(estimate, recorded)):
            print(line)
        print_table(make_memory_table(estimate))
        print_table(make_phases_table(estimate))
        _print_advice(estimator, estimate, needs_less=bool(recorded.failures))
    return 0
