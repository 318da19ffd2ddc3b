"""`megatfm convert SRC DST --to hf|megatfm`."""

import argparse
import re
import sys

from megatfm.errors import UsageError

UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to convert, where to, and which way."""
    parser.add_argument(
        "source", metavar="SRC", help="a run, a checkpoint, or a folder in the Hugging Face format"
    )
    parser.add_argument("target", metavar="DST", help="a new folder")
    parser.add_argument("--to", choices=("hf", "megatfm"), required=True, help="the format of DST")
    parser.add_argument(
        "--max-shard-size", default="5GB", metavar="SIZE", help="largest file of weights with --to hf (5GB)"
    )


def main(args: argparse.Namespace) -> int:
    """Convert, and say what came of it."""
    from megatfm.convert.convert import convert

    first, *notes = convert(args.source, args.target, args.to, shard_bytes=size(args.max_shard_size))
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    print(f"{args.target}: {first}")
    return 0


def size(text: str) -> int:
    """Bytes of "5GB", "200MB" or a plain number. Raises UsageError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]B)?", text.strip().upper())
    if match is None or (number := int(float(match[1]) * UNITS[match[2] or ""])) < 1:
        raise UsageError(f"--max-shard-size {text}: give bytes, or for example 500MB or 5GB")
    return number
