"""`megatfm data check DIR` and `megatfm data show DIR [--sample K]`."""

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(required=True, metavar="ACTION", dest="action")
    check = actions.add_parser("check", help="read every sample again and compare every hash")
    show = actions.add_parser("show", help="print what a corpus holds, or one sample of it")
    show.add_argument("--sample", type=int, metavar="K", help="print this sample, from 0")
    show.add_argument("--tokenizer", metavar="FILE", help="decode with this (the one in DIR/..)")
    for action in (check, show):
        action.add_argument("dir", metavar="DIR", help="a corpus, for example corpora/quickstart/train")


def main(args: argparse.Namespace) -> int:
    """Verify or show a corpus."""
    from megatfm import tokenizers
    from megatfm.data import check, show

    if args.action == "check":
        print(check(args.dir))
        return 0
    path = args.tokenizer or tokenizers.find(Path(args.dir).resolve().parent)
    decode = tokenizers.load(path).decode if path else None
    print(show(args.dir, args.sample, decode))
    return 0
