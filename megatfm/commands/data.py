"""`megatfm data check DIR`, `megatfm data show DIR [--sample K]` and `megatfm data index DIR`."""

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(required=True, metavar="ACTION", dest="action")
    check = actions.add_parser("check", help="read every sample again and compare every hash")
    show = actions.add_parser("show", help="print what a corpus holds, or one sample of it")
    show.add_argument("--sample", type=int, metavar="K", help="print this sample, from 0")
    show.add_argument("--tokenizer", metavar="FILE", help="decode with this (the one in DIR/..)")
    for action in (check, show):
        action.add_argument(
            "dir", metavar="DIR", help="a corpus, for example corpora/quickstart/train, or its URL"
        )
    index = actions.add_parser("index", help="make WebDataset shards of token ids a corpus")
    index.add_argument("dir", metavar="DIR", help="a folder of .tar or .tar.zst")
    index.add_argument("--tokenizer", metavar="FILE", required=True, help="the one that made the ids")
    index.add_argument("--to", metavar="FOLDER", help="write the samples again there, as a corpus of our own")


def main(args: argparse.Namespace) -> int:
    """Verify, show or index a corpus."""
    from megatfm import tokenizers
    from megatfm.data import check, index_folder, show

    if args.action == "check":
        print(check(args.dir))
        return 0
    if args.action == "index":
        tokenizer = tokenizers.load(args.tokenizer)
        print(index_folder(Path(args.dir), tokenizer.hash, Path(args.to) if args.to else None))
        return 0
    path = args.tokenizer
    if path is None and "://" not in args.dir:
        path = tokenizers.find(Path(args.dir).resolve().parent)
    decode = tokenizers.load(path).decode if path else None
    print(show(args.dir, args.sample, decode))
    return 0
