"""`megatfm prep`, which prepares corpora, and `megatfm data`, which checks, shows, counts, exports and indexes them."""

import argparse
import io
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from megatfm.commands.arguments import add_config_and_overrides
from megatfm.commands.training import show_log
from megatfm.data_prep.cli import DASK_HELP, TASK_HELP, cli
from megatfm.errors import UsageError
from megatfm.terminal import format_counted

if TYPE_CHECKING:
    from megatfm.tokenizers import Tokenizer


DEFAULT_COUNT = 32
"""Images that `data show --images` draws."""


def add_data_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(required=True, metavar="ACTION", dest="action")
    check = actions.add_parser("check", help="read every sample and verify every hash")
    show = actions.add_parser("show", help="describe a corpus, or print one of its samples")
    show.add_argument("--sample", type=int, metavar="K", help="print this sample, from 0")
    show.add_argument(
        "--images", metavar="FILE", help="draw training images, after all transforms of --config, into this PNG"
    )
    show.add_argument("--config", metavar="CONFIG", help="with --images: the training config or preset that reads them")
    show.add_argument("--count", type=int, metavar="N", help=f"with --images: images to draw ({DEFAULT_COUNT})")
    stats = actions.add_parser("stats", help="count lengths, sources and ids")
    export = actions.add_parser("export", help="convert a corpus for other programs; the name of OUT says the format")
    for action in (show, stats, export):
        action.add_argument("--tokenizer", metavar="FILE", help="tokenizer to decode with (the one in DIR/..)")
    for action in (check, show, stats, export):
        action.add_argument("dir", metavar="DIR", help="a corpus, for example corpora/quickstart/train, or its URL")
    export.add_argument(
        "out",
        metavar="OUT",
        help=".jsonl, .jsonl.zst or .parquet for text, .bin for Megatron-LM's token ids; any other name, or one that "
        "ends in /, for a folder of plain .tar shards",
    )
    index = actions.add_parser("index", help="turn WebDataset shards of token ids or images into a corpus")
    index.add_argument("dir", metavar="DIR", help="a folder of .tar or .tar.zst")
    index.add_argument("--tokenizer", metavar="FILE", help="tokenizer of the token ids")
    index.add_argument(
        "--labels",
        metavar="WHERE",
        help="for shards of images: where the class of an image is stored: cls, txt or json:FIELD",
    )
    index.add_argument("--classes", metavar="FILE", help="names of the classes, one per line (alphabetical order)")
    index.add_argument("--to", metavar="FOLDER", help="copy the samples there, as a megatfm corpus")


@show_log()
def data_command(args: argparse.Namespace) -> int:
    """Verify, show, count, export or index a corpus, and print the result."""
    print(ACTIONS[args.action](args))
    return 0


def _check(args: argparse.Namespace) -> str:
    from megatfm.corpus.inspect import check_corpus

    return str(check_corpus(args.dir))


def _show(args: argparse.Namespace) -> str:
    """Describe a corpus or one of its samples, or draw its images."""
    from megatfm.corpus.corpus import Corpus
    from megatfm.corpus.inspect import describe_corpus
    from megatfm.data.bin_packing import describe_padding
    from megatfm.tasks.answers import describe_example

    if args.images:
        return _draw_images(args)
    for flag in ("config", "count"):
        if getattr(args, flag) is not None:
            raise UsageError(f"--{flag} is for --images: give --images FILE, or leave --{flag} out")
    tokenizer = _load_tokenizer(args)
    if tokenizer is None:
        return str(describe_corpus(args.dir, args.sample, None, describe_padding, None))
    task = Corpus.open(args.dir).manifest.provenance.get("task") or {}
    labels = task.get("labels", []) if isinstance(task, dict) else []
    describe_sample = partial(describe_example, tokenizer=tokenizer, colour=sys.stdout.isatty(), labels=labels)
    return str(describe_corpus(args.dir, args.sample, tokenizer.decode, describe_padding, describe_sample))


def _count(args: argparse.Namespace) -> str:
    from megatfm.corpus.inspect import tabulate_stats

    tokenizer = _load_tokenizer(args)
    return str(tabulate_stats(args.dir, tokenizer.id_to_piece if tokenizer else None))


def _export(args: argparse.Namespace) -> str:
    from megatfm.corpus.export import Detokenizer, export_corpus

    tokenizer = _load_tokenizer(args)
    return str(export_corpus(args.dir, args.out, Detokenizer(tokenizer.decode, tokenizer.eos) if tokenizer else None))


def _load_tokenizer(args: argparse.Namespace) -> "Tokenizer | None":
    """Load the tokenizer of --tokenizer, or the one beside the corpus; None if there is none.

    Raises UsageError if --tokenizer is another than the corpus was written with. Another one beside the corpus is not
    used, with a note.
    """
    from megatfm import tokenizers
    from megatfm.corpus.corpus import Corpus
    from megatfm.corpus.manifest import NO_TOKENIZER

    path = args.tokenizer
    if path is None and "://" not in args.dir:
        folder = Path(args.dir).resolve().parent
        # A task's corpora are one folder deeper in their run.
        path = tokenizers.find_tokenizer_file(folder) or tokenizers.find_tokenizer_file(folder.parent)
    tokenizer = tokenizers.load(path) if path else None
    corpus = Corpus.open(args.dir)
    if tokenizer is None or corpus.tokenizer_hash in (NO_TOKENIZER, tokenizer.hash):
        return tokenizer
    if args.tokenizer:
        corpus.check_tokenizer(tokenizer.hash)
    print(f"note: {path}: is not used, for the corpus was written with another tokenizer", file=sys.stderr)
    return None


def _index(args: argparse.Namespace) -> str:
    """Index shards of token ids, or of images."""
    from megatfm import tokenizers
    from megatfm.corpus.webdataset_index import index_folder

    if args.labels:
        return _index_images(args)
    if not args.tokenizer or args.classes:
        raise UsageError(
            "data index: give --tokenizer for shards of token ids, or --labels for images, such as --labels cls"
        )
    tokenizer = tokenizers.load(args.tokenizer)
    return str(index_folder(Path(args.dir), tokenizer.hash, Path(args.to) if args.to else None))


def _index_images(args: argparse.Namespace) -> str:
    """Index tar files of images in place; return a summary."""
    from megatfm.corpus.webdataset_images import LabelRule, index_images

    if args.to or args.tokenizer:
        raise UsageError("--labels: images are indexed in place: leave out --tokenizer and --to, or use `megatfm prep`")
    rule = LabelRule.parse(args.labels)
    return str(index_images(Path(args.dir), rule, Path(args.classes) if args.classes else None))


def _draw_images(args: argparse.Namespace) -> str:
    """Draw the first images of training on a corpus, as the model receives them; return a summary."""
    from megatfm.config import load_config
    from megatfm.corpus.corpus import Corpus
    from megatfm.files import atomic_write, name_write_errors
    from megatfm.train.corpora import open_corpora, open_tokenizer

    if args.sample is not None or args.tokenizer:
        raise UsageError("--images draws what training reads: leave --sample and --tokenizer out")
    count = DEFAULT_COUNT if args.count is None else args.count
    if not args.config:
        raise UsageError("--images needs --config, the training config with the transforms of images")
    if count < 1 or not args.images.endswith(".png"):
        raise UsageError(
            f"--images {args.images} --count {count}: give a name that ends in .png, and a count of at least 1"
        )
    config, tokenizer = open_tokenizer(load_config(args.config, [f"data.train={args.dir}", "data.validation={}"]))
    rows = open_corpora(config, tokenizer).train
    if not {"patches", "encoder_patches"} & (fields := rows.read_rows([0])).keys():
        raise UsageError(
            f"--config {args.config}: its objective reads {', '.join(sorted(fields))}, but no patches of images"
        )
    from megatfm.data.contact_sheet import CaptionedImage, draw_contact_sheet, iter_captioned_images

    names = Corpus.open(args.dir).manifest.class_names
    embedding = config.model.patch_embedding
    patch_size, images, position = embedding.patch_size if embedding else 1, list[CaptionedImage](), 0
    while len(images) < count:
        decode = tokenizer.decode if tokenizer else None
        image_token = config.model.connector.image_token_id if config.model.connector else None
        images += iter_captioned_images(rows.read_rows([position]), patch_size, names, decode, image_token)
        position += 1
        if not images and rows.epoch(position) == 1:  # mixed images have no length
            raise UsageError(
                f"--images: no sample of {args.dir} has an image outside quarantine: name a corpus of images"
            )
    out = io.BytesIO()
    draw_contact_sheet(images[:count]).save(out, "PNG")
    with name_write_errors(Path(args.images)):
        atomic_write(Path(args.images), out.getvalue())
    return f"{args.images}: {format_counted(count, 'image')} of {position} rows of training"


ACTIONS: dict[str, Callable[[argparse.Namespace], str]] = {
    "check": _check,
    "show": _show,
    "stats": _count,
    "export": _export,
    "index": _index,
}
"""Action of `megatfm data` → function that carries it out and returns what is printed."""


def add_prep_arguments(parser: argparse.ArgumentParser) -> None:
    sources = "a TOML file, or the name of a preset, such as quickstart-data"
    add_config_and_overrides(parser, example="read.folder=my-texts", sources=sources)
    parser.add_argument("--task", "--part", dest="task", metavar="I/N", help=TASK_HELP)
    parser.add_argument("--dask", metavar="SCHEDULER", help=DASK_HELP)


def prep_command(args: argparse.Namespace) -> int:
    """Prepare a corpus, like `python -m megatfm.data_prep`."""
    task = ["--task", args.task] if args.task else []
    task += ["--dask", args.dask] if args.dask else []
    return cli([args.config, *args.overrides, *task, *(["--debug"] if args.debug else [])])
