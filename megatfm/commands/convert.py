"""`megatfm convert SRC DST --to hf|megatfm|moe`."""

import argparse
import re
import sys

from megatfm.commands import trust
from megatfm.errors import UsageError

UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to convert, where to, and which way."""
    parser.add_argument(
        "source", metavar="SRC", help="a run, a checkpoint, or a folder in the Hugging Face format"
    )
    parser.add_argument("target", metavar="DST", help="a new folder")
    parser.add_argument(
        "--to",
        choices=("hf", "megatfm", "moe"),
        required=True,
        help="the format of DST; or a mixture of experts of the dense model SRC, which computes the same",
    )
    parser.add_argument(
        "--max-shard-size", default="5GB", metavar="SIZE", help="largest file of weights with --to hf (5GB)"
    )
    parser.add_argument(
        "--like",
        metavar="FOLDER",
        help="SRC is a universal checkpoint of DeepSpeed's, of the model whose Hugging Face folder this is",
    )
    trust.add_argument(parser)
    experts = parser.add_argument_group("with --to moe")
    experts.add_argument("--experts", type=int, metavar="N", help="copies of each network")
    experts.add_argument("--top-k", type=int, metavar="N", help="copies that a token goes through (2)")
    experts.add_argument("--granularity", type=int, metavar="N", help="experts that a copy is cut into (1)")
    experts.add_argument("--every", type=int, metavar="N", help="every N-th block has experts (1: all)")
    experts.add_argument(
        "--noise",
        type=float,
        metavar="X",
        help="noise on experts' weights, as a multiple of their spread (0)",
    )
    experts.add_argument("--seed", type=int, metavar="N", help="of noise and routers (0)")


def main(args: argparse.Namespace) -> int:
    """Convert, and say what came of it."""
    from megatfm.convert.convert import convert
    from megatfm.convert.upcycle import Upcycling, upcycle

    options = {
        key: getattr(args, key) for key in Upcycling.__dataclass_fields__ if getattr(args, key) is not None
    }
    if args.like:
        from megatfm.convert.universal import from_universal

        if args.to != "megatfm" or options:
            raise UsageError("--like is for --to megatfm alone: a universal checkpoint becomes a run")
        first, *notes = from_universal(args.source, args.target, args.like)
        return _print_result(args.target, first, notes)
    if args.to == "moe":
        if "experts" not in options:
            raise UsageError("--to moe needs --experts: the number of copies, for example --experts 8")
        first, *notes = upcycle(
            args.source, args.target, Upcycling(**options), trust_plugins=args.trust_plugins
        )
        return _print_result(args.target, first, notes)
    if options:
        flag = min(options).replace("_", "-")
        raise UsageError(f"--{flag} is for --to moe: leave it out, or use --to moe")
    first, *notes = convert(
        args.source,
        args.target,
        args.to,
        shard_bytes=size(args.max_shard_size),
        trust_plugins=args.trust_plugins,
    )
    return _print_result(args.target, first, notes)


def _print_result(target: str, first: str, notes: list[str]) -> int:
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    print(f"{target}: {first}")
    return 0


def size(text: str) -> int:
    """Bytes of "5GB", "200MB" or a plain number. Raises UsageError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]B)?", text.strip().upper())
    if match is None or (number := int(float(match[1]) * UNITS[match[2] or ""])) < 1:
        raise UsageError(f"--max-shard-size {text}: give bytes, or for example 500MB or 5GB")
    return number
