"""`megatfm report RUN`."""

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", metavar="RUN", help="a run directory, for example runs/quickstart")


def main(args: argparse.Namespace) -> int:
    """Write RUN/report.html and print where it is."""
    from megatfm.report import write_report

    print(write_report(args.run_dir))
    return 0
