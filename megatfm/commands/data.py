"""`megatfm prep`, which makes corpora, and `megatfm data`, which checks, shows, counts, exports and indexes them."""

import argparse
from pathlib import Path

from megatfm.commands.arguments import add_config_and_overrides
from megatfm.data_prep.cli import DASK_HELP, TASK_HELP, cli


def add_data_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(required=True, metavar="ACTION", dest="action")
    check = actions.add_parser("check", help="read every sample again and compare every hash")
    show = actions.add_parser("show", help="print what a corpus holds, or one sample of it")
    show.add_argument("--sample", type=int, metavar="K", help="print this sample, from 0")
    stats = actions.add_parser("stats", help="count lengths, sources and ids")
    export = actions.add_parser(
        "export", help="write it for other programs, in the format that OUT's name says"
    )
    for action in (show, stats, export):
        action.add_argument("--tokenizer", metavar="FILE", help="decode with this (the one in DIR/..)")
    for action in (check, show, stats, export):
        action.add_argument(
            "dir", metavar="DIR", help="a corpus, for example corpora/quickstart/train, or its URL"
        )
    export.add_argument(
        "out",
        metavar="OUT",
        help="text: .jsonl, .jsonl.zst, .parquet; Megatron-LM's ids: .bin; else, or with a / at its end: a folder of "
        "plain .tar shards",
    )
    index = actions.add_parser("index", help="make WebDataset shards of token ids a corpus")
    index.add_argument("dir", metavar="DIR", help="a folder of .tar or .tar.zst")
    index.add_argument("--tokenizer", metavar="FILE", required=True, help="the one that made the ids")
    index.add_argument("--to", metavar="FOLDER", help="write the samples again there, as a corpus of our own")


def data_command(args: argparse.Namespace) -> int:
    """Verify, show, count, export or index a corpus."""
    from megatfm import tokenizers
    from megatfm.corpus.export import Detokenizer, export
    from megatfm.corpus.inspect import check, show, stats
    from megatfm.corpus.webdataset_index import index_folder
    from megatfm.data.bin_packing import describe_padding

    if args.action == "check":
        print(check(args.dir))
        return 0
    if args.action == "index":
        tokenizer = tokenizers.load(args.tokenizer)
        print(index_folder(Path(args.dir), tokenizer.hash, Path(args.to) if args.to else None))
        return 0
    path = args.tokenizer
    if path is None and "://" not in args.dir:
        path = tokenizers.find_tokenizer_file(Path(args.dir).resolve().parent)
    of_text = tokenizers.load(path) if path else None
    if args.action == "export":
        codec = Detokenizer(of_text.decode, of_text.eos) if of_text else None
        print(export(args.dir, args.out, codec))
    elif args.action == "stats":
        print(stats(args.dir, of_text.id_to_piece if of_text else None))
    else:
        print(show(args.dir, args.sample, of_text.decode if of_text else None, describe_padding))
    return 0


def add_prep_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_and_overrides(parser, example="read.folder=my-texts")
    parser.add_argument("--task", "--part", dest="task", metavar="I/N", help=TASK_HELP)
    parser.add_argument("--dask", metavar="SCHEDULER", help=DASK_HELP)


def prep_command(args: argparse.Namespace) -> int:
    """Prepare a corpus; the same as `python -m megatfm.data_prep`."""
    task = ["--task", args.task] if args.task else []
    task += ["--dask", args.dask] if args.dask else []
    return cli([args.config, *args.overrides, *task, *(["--debug"] if args.debug else [])])
