"""`megatfm convert`: to and from Hugging Face's and PEFT's formats, and to a mixture of experts."""

import argparse
import re
import sys

from megatfm.commands.arguments import add_trust_argument
from megatfm.commands.training import show_log
from megatfm.errors import MegatfmError, UsageError

UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
"""Units of --max-shard-size."""
DEFAULT_SHARD_SIZE = "5GB"


def add_convert_arguments(parser: argparse.ArgumentParser) -> None:
    """Add source, target and direction of a conversion."""
    parser.add_argument("source", metavar="SRC", help="a run, a checkpoint, or a folder in the Hugging Face format")
    parser.add_argument("target", metavar="DST", help="a new folder")
    parser.add_argument(
        "--to",
        choices=("hf", "megatfm", "peft", "moe"),
        required=True,
        help="the format of DST; peft: only the adapters of SRC; moe: a mixture of experts of the dense model SRC, "
        "which computes the same",
    )
    parser.add_argument(
        "--max-shard-size", metavar="SIZE", help=f"largest file of weights with --to hf ({DEFAULT_SHARD_SIZE})"
    )
    parser.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16", "float16"),
        help="dtype of the weights with --to hf; auto: as stored (auto)",
    )
    parser.add_argument(
        "--hf-config",
        metavar="FOLDER",
        help="read SRC as a DeepSpeed universal checkpoint; this Hugging Face folder describes its model",
    )
    parser.add_argument(
        "--base", metavar="FOLDER", help="if SRC is a PEFT adapter: the Hugging Face folder of its base model"
    )
    add_trust_argument(parser)
    experts = parser.add_argument_group("with --to moe")
    experts.add_argument("--experts", type=int, metavar="N", help="copies of each network")
    experts.add_argument("--top-k", type=int, metavar="N", help="copies that a token goes through (2)")
    experts.add_argument("--granularity", type=int, metavar="N", help="experts that a copy is cut into (1)")
    experts.add_argument("--every", type=int, metavar="N", help="every N-th block has experts (1: all)")
    experts.add_argument(
        "--noise", type=float, metavar="X", help="noise on experts' weights, as a multiple of their spread (0)"
    )
    experts.add_argument("--seed", type=int, metavar="N", help="seed of noise and routers (0)")


@show_log()
def convert_command(args: argparse.Namespace) -> int:
    """Convert, and print where the result is."""
    from megatfm.convert.convert import convert
    from megatfm.convert.upcycle import Upcycling, upcycle
    from megatfm.models.dtypes import DTYPES

    for flag, value in (("--max-shard-size", args.max_shard_size), ("--dtype", args.dtype)):
        if value is not None and args.to != "hf":
            raise UsageError(f"{flag} is for --to hf: leave it out with --to {args.to}")
    if args.base and (args.hf_config or args.to == "moe"):
        flag = "--hf-config" if args.hf_config else "--to moe"
        raise UsageError(f"--base is for an adapter in PEFT's format and --to megatfm: leave it out with {flag}")
    options = {key: getattr(args, key) for key in Upcycling.__dataclass_fields__ if getattr(args, key) is not None}
    if args.hf_config:
        from megatfm.convert.deepspeed_universal import from_universal

        if args.to != "megatfm" or options:
            raise UsageError("--hf-config is for --to megatfm alone: a universal checkpoint becomes a run")
        summary, *notes = from_universal(args.source, args.target, args.hf_config)
        return _print_result(args.target, summary, notes)
    if args.to == "moe":
        if "experts" not in options:
            raise UsageError("--to moe needs --experts: the number of copies, for example --experts 8")
        summary, *notes = upcycle(args.source, args.target, Upcycling(**options), trust_plugins=args.trust_plugins)
        return _print_result(args.target, summary, notes)
    if options:
        flag = min(options).replace("_", "-")
        raise UsageError(f"--{flag} is for --to moe: leave it out, or use --to moe")
    if args.to in ("peft", "megatfm") and (messages := _convert_adapters(args)):
        return _print_result(args.target, messages[0], messages[1:])
    if args.base:
        raise UsageError(
            "--base is for an adapter in PEFT's format (adapter_config.json) and --to megatfm: leave it out, or "
            f"convert in two steps, --to megatfm --base {args.base} and then --to {args.to}"
        )
    summary, *notes = convert(
        args.source,
        args.target,
        args.to,
        shard_bytes=parse_size(args.max_shard_size or DEFAULT_SHARD_SIZE),
        dtype=None if args.dtype in (None, "auto") else DTYPES[args.dtype],
        trust_plugins=args.trust_plugins,
    )
    return _print_result(args.target, summary, notes)


def _convert_adapters(args: argparse.Namespace) -> list[str]:
    """Convert to or from PEFT's format, or merge our adapters; return messages, none for a source without adapters."""
    from megatfm import checkpoint
    from megatfm.checkpoint.locate import is_peft_folder
    from megatfm.config.load import parse_stored_config
    from megatfm.convert.convert import merge_adapters
    from megatfm.convert.hf_checkpoint import is_hf_folder
    from megatfm.convert.peft import to_peft
    from megatfm.convert.peft_import import from_peft

    if is_peft_folder(args.source):
        if args.to == "peft":
            raise UsageError(f"{args.source}: is in that format already: use --to megatfm, or copy it")
        return from_peft(args.source, args.target, args.base)
    if args.base or (args.to == "megatfm" and is_hf_folder(args.source)):
        return []
    if args.to == "peft":
        return to_peft(args.source, args.target, trust_plugins=args.trust_plugins)
    try:
        path = checkpoint.find_checkpoint(args.source)
        is_adapted = parse_stored_config(path, checkpoint.read_state(path)).model.lora is not None
    except MegatfmError:
        return []  # `convert` raises the error that explains it
    return merge_adapters(args.source, args.target, trust_plugins=args.trust_plugins) if is_adapted else []


def _print_result(target: str, summary: str, notes: list[str]) -> int:
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    print(f"{target}: {summary}")
    return 0


def parse_size(text: str) -> int:
    """Return the bytes of "5GB", "200MB" or a plain number. Raises UsageError."""
    match = re.fullmatch(r"(\d{1,18}(?:\.\d{1,18})?) ?([KMGT]B)?", text.strip().upper())
    if match is None or (number := int(float(match[1]) * UNITS[match[2] or ""])) < 1:
        raise UsageError(f"--max-shard-size {text}: give bytes, or for example 500MB or 5GB")
    return number
