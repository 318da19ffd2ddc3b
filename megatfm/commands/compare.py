"""`megatfm compare RUN RUN …`."""

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The runs, and where the page goes."""
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run directories, for example runs/sweep-*")
    parser.add_argument("--out", default="compare.html", metavar="FILE", help="the page (compare.html)")


def main(args: argparse.Namespace) -> int:
    """Print what differs and what was reached, and write a page of the curves."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from megatfm.report.compare import Comparison, write_comparison

    comparison = Comparison.of(args.runs)
    console, results = Console(highlight=False), comparison.results()
    table = Table("", *comparison.names, box=box.SIMPLE_HEAD, title_justify="left")
    for key, cells in comparison.differences():
        table.add_row(key, *cells)
    table.add_section()
    for place, column in enumerate(results.columns):
        table.add_row(column, *(row[place] for row in results.rows))
    console.print(table)
    print(write_comparison(comparison, args.out))
    return 0
