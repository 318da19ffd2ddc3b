"""`megatfm verify CONFIG [parallel.tp=2 …]`: checks that a layout is the same computation as one process.

`megatfm verify --presets [NAME,…]` checks presets under common layouts.
"""

import argparse
import atexit
import gc
import itertools
import logging
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, get_args

from megatfm.commands.arguments import add_config_and_overrides, add_trust_argument, check_trust
from megatfm.commands.training import show_log
from megatfm.errors import UsageError
from megatfm.terminal import join_first, make_table, print_table
from megatfm.verify.layouts import LAYOUTS, Documents

if TYPE_CHECKING:
    from rich.table import Table

    from megatfm.verify.verify import Difference, GradientComparison, PresetResult

log = logging.getLogger("megatfm")

MAX_SHOWN = 8


def add_verify_arguments(parser: argparse.ArgumentParser) -> None:
    """Add CONFIG, its overrides, and the options of the check."""
    add_config_and_overrides(parser, "parallel.tp=2", optional=True)
    add_trust_argument(parser)
    parser.add_argument("--engine", metavar="NAME", help="check this engine: short for parallel.engine=NAME")
    parser.add_argument(
        "--documents",
        metavar="KIND",
        choices=get_args(Documents),
        default="mixed",
        help=f"kind of documents in the rows: {', '.join(get_args(Documents))}",
    )
    parser.add_argument("--all", action="store_true", help=f"show every parameter, not the {MAX_SHOWN} worst")
    parser.add_argument(
        "--presets",
        nargs="?",
        const="",
        metavar="NAME,…",
        help="instead of CONFIG: check these presets under common layouts (default: all)",
    )
    parser.add_argument(
        "--layouts", metavar="NAME,…", help="with --presets: only these layouts, as dp2,tp2 (default: all)"
    )


@show_log()
def verify_command(args: argparse.Namespace) -> int:
    """Print the comparison; return 0 if everything agrees, 1 if anything differs."""
    from megatfm.config import Config, load_config
    from megatfm.config.load import read_values

    if args.presets is not None:
        return _verify_presets(args)
    if args.layouts:
        raise UsageError("--layouts is for --presets: name a layout's axes, for example parallel.tp=2")
    if not args.config:
        raise UsageError("verify needs a CONFIG, for example `megatfm verify quickstart parallel.tp=2`, or --presets")
    engine = _override_engine(args.engine, read_values(Config, args.config, args.overrides))
    # Before torch is imported, so that a mistake in the config is reported at once.
    config = load_config(args.config, [*args.overrides, *engine])
    check_trust(config, args)

    from rich.console import Console

    from megatfm.verify import forkserver

    log.info("%s: a small copy of the model takes one step under this layout, and one on one process", config.name)
    forkserver.start_server()
    from megatfm.verify.verify import verify

    comparison = verify(config, args.documents)
    console = Console(highlight=False, soft_wrap=True)
    console.print(_format_heading(comparison), markup=False)
    differences = comparison.gradients if args.all else comparison.gradients[:MAX_SHOWN]
    print_table(_make_gradient_table(comparison, len(differences)))
    print_table(_make_traffic_table(comparison))
    for reason in dict.fromkeys(comparison.axes_without_closed_form.values()):
        axes = {
            flow.axis for flow in comparison.traffic if comparison.axes_without_closed_form.get(flow.axis) == reason
        }
        if axes:
            console.print(f"The traffic over {', '.join(sorted(axes))} is not predicted: {reason}.", markup=False)
    console.print(_format_conclusion(comparison), markup=False)
    return 1 if comparison.wrong or comparison.traffic_mismatches else 0


def _override_engine(engine: str | None, values: Mapping[str, Any]) -> list[str]:
    """Return the override of `--engine`; print a note if it replaces another engine. values: the config's."""
    if engine is None:
        return []
    section = values.get("parallel")
    configured = section.get("engine", engine) if isinstance(section, Mapping) else engine
    if configured != engine:
        print(f"note: --engine {engine} replaces parallel.engine = {configured!r}", file=sys.stderr)
    return [f"parallel.engine={engine}"]


def _verify_presets(args: argparse.Namespace) -> int:
    """Print a row for each preset when it is done, then refusals and differences; return 0 if nothing differs."""
    from megatfm.config import Config, list_model_presets
    from megatfm.config.load import read_values
    from megatfm.registry import did_you_mean
    from megatfm.verify import forkserver

    if args.all:
        raise UsageError("--all shows every parameter of one CONFIG: leave it or --presets out")
    first_arguments = [args.presets] if "=" in args.presets else args.presets.split(",")
    arguments = [argument for argument in (*first_arguments, args.config, *args.overrides) if argument]
    overrides = [argument for argument in arguments if "=" in argument]
    overrides += _override_engine(args.engine, read_values(Config, None, overrides))
    presets = [argument for argument in arguments if "=" not in argument]
    layouts = args.layouts.split(",") if args.layouts else list(LAYOUTS)
    for kind, names, known_names in (("preset", presets, list_model_presets()), ("layout", layouts, [*LAYOUTS])):
        for name in names:
            if name not in known_names:
                raise UsageError(
                    f"{name!r}: no such {kind}{did_you_mean(name, known_names)}; there are {', '.join(known_names)}"
                )
    presets = presets or list_model_presets()

    forkserver.start_server()
    from megatfm.verify.verify import verify_presets

    gc.freeze()  # what is imported need not be traversed after each case
    atexit.register(gc.unfreeze)  # or libraries report their objects as leaked
    start, cases = time.monotonic(), []
    width = max(map(len, presets))
    print(f"{'':{width}}  {'  '.join(f'{layout:9}' for layout in layouts)}".rstrip(), flush=True)
    for case in verify_presets(itertools.product(presets, layouts), overrides, args.documents):
        cases.append(case)
        if case.layout == layouts[-1]:
            outcomes = "  ".join(f"{row_case.outcome:9}" for row_case in cases[-len(layouts) :])
            print(f"{case.preset:{width}}  {outcomes}".rstrip(), flush=True)
    return _print_summary(cases, time.monotonic() - start)


def _print_summary(cases: "Sequence[PresetResult]", seconds: float) -> int:
    """Print each reason of refusals once, then all differences; return 1 if there are any, else 0."""
    cases_by_reason: dict[str, list[str]] = {}
    for case in cases:
        if case.outcome == "refused":
            reason = case.text.removeprefix(f"{case.preset}: ")
            cases_by_reason.setdefault(reason, []).append(f"{case.preset} {case.layout}")
    for reason, refused in cases_by_reason.items():
        print(f"refused: {join_first(refused, 1)}: {reason}")
    wrong = [case for case in cases if case.is_wrong]
    for case in wrong:
        print(f"{case.outcome}: {case.preset} {case.layout}: {case.text}")
    n_agreeing = sum(case.outcome == "agrees" for case in cases)
    n_refused = len(cases) - n_agreeing - len(wrong)
    print(f"{n_agreeing} of {len(cases)} cases agree, {n_refused} are refused, {len(wrong)} differ; {seconds:.0f} s")
    return 1 if wrong else 0


def _format_heading(comparison: "GradientComparison") -> str:
    parallel = comparison.config.parallel
    axes = {"dp_replicate": parallel.dp_replicate, "dp_shard": parallel.dp_shard, "tp": parallel.tp}
    if parallel.cp > 1:
        axes["cp"] = parallel.cp
    layout = " × ".join(f"{axis} {size}" for axis, size in axes.items())
    if parallel.pp > 1:
        layout = f"pp {parallel.pp} ({parallel.pp_schedule}) × {layout}"
    if parallel.tp > 1 and not parallel.sequence_parallel:
        layout += " without sequence parallelism"
    if parallel.ep > 1:
        layout += f", experts over {parallel.ep} of the data ranks"
    if parallel.zero_shards > 1:
        layout += f", ZeRO {parallel.zero}"
    engine = comparison.config.parallel.engine
    engine_note = "" if engine == "native" else f", {engine} in {comparison.config.train.precision},"
    shrunk = "\n".join(f"  {change}" for change in comparison.shrunk)
    return (
        f"{comparison.config.name}: one step under {layout}{engine_note} against plain autograd on one process, "
        "in float64\n"
        f"Changed for this test:\n{shrunk}"
    )


def _make_gradient_table(comparison: "GradientComparison", n_rows: int) -> "Table":
    from rich.table import Table

    hidden = len(comparison.gradients) - n_rows
    table = Table()
    for heading in ("gradient of", "shape", "norm", "error"):
        table.add_column(heading, justify="left" if heading == "gradient of" else "right", no_wrap=True)

    def add(difference: "Difference") -> None:
        shape = "×".join(map(str, difference.shape))
        style = "bold red" if difference.is_wrong else None
        table.add_row(difference.name, shape, f"{difference.norm:.4g}", f"{difference.error:.1e}", style=style)

    for gradient in comparison.gradients[:n_rows]:
        add(gradient)
    if hidden:
        table.add_row(f"… {hidden} more, with smaller errors (--all)")
    table.add_section()
    add(comparison.grad_norm)
    add(comparison.loss)
    table.add_section()
    wrong_updates = [update for update in comparison.updates if update.is_wrong]
    for update in wrong_updates[:MAX_SHOWN] or comparison.updates[:1]:
        add(update)
    return table


def _make_traffic_table(comparison: "GradientComparison") -> "Table":
    headings = ("axis", "collective", "calls", "bytes sent", "expected")
    title = "Counted in this step, for the rank that sends most"
    table = make_table(headings, ("axis", "collective"), title, title_justify="left")
    flows = {(flow.axis, flow.collective): flow for flow in comparison.traffic}
    for key in sorted(flows.keys() | comparison.expected_traffic.keys()):
        flow, (_, expected_bytes) = flows.get(key), comparison.expected_traffic.get(key, (0, 0))
        sent_bytes = flow.sent_bytes if flow else 0
        has_expectation = key[0] not in comparison.axes_without_closed_form
        row = (
            *key,
            f"{flow.calls if flow else 0:,}",
            f"{sent_bytes:,}",
            f"{expected_bytes:,}" if has_expectation else "–",
        )
        table.add_row(*row, style="bold red" if has_expectation and sent_bytes != expected_bytes else None)
    return table


def _format_conclusion(comparison: "GradientComparison") -> str:
    bound, n_gradients = comparison.bound, len(comparison.gradients)
    if not comparison.wrong and comparison.traffic_mismatches:
        more = f" (and {len(comparison.traffic_mismatches) - 1} more)" if len(comparison.traffic_mismatches) > 1 else ""
        agreement = f"loss, norm, {n_gradients} gradients and all updates agree within {bound:g}"
        return f"DIFFERENT TRAFFIC: {agreement}, but {comparison.traffic_mismatches[0]}{more}"
    if not comparison.wrong:
        return f"Same computation: loss, norm, {n_gradients} gradients and all updates agree within {bound:g}."
    updates = [difference for difference in comparison.updates if difference.is_wrong]
    # Wrong gradients cause wrong updates, so gradients are reported first.
    wrong_before_updates = [difference for difference in comparison.wrong if difference not in updates]
    # NaN counts as the worst error.
    worst = max(wrong_before_updates or updates, key=lambda wrong: (wrong.error != wrong.error, wrong.error))
    gradients = sum(difference.is_wrong for difference in comparison.gradients)
    if not wrong_before_updates:
        return (
            f"DIFFERENT UPDATES: {n_gradients} gradients agree within {bound:g}, but the optimizer moves "
            f"{len(updates)} of {len(comparison.updates)} weights differently than on one process, from the same "
            f"gradients; the worst is the {worst.name}, by {worst.error:.1e}"
        )
    return (
        f"DIFFERENT: {gradients} of {n_gradients} gradients are off by more than {bound:g}; "
        f"the worst is {worst.name}, by {worst.error:.1e}"
    )
