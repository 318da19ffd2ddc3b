"""Commands about models: `megatfm generate`, `convert` and `describe`."""

import argparse
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from megatfm.commands.arguments import add_config_and_overrides, add_trust_argument, check_trust
from megatfm.config import load_config
from megatfm.errors import MegatfmError, UsageError

if TYPE_CHECKING:
    import torch

    from megatfm.inference.text import TextModel

SAMPLES = "samples.jsonl"


def add_generate_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the model, the prompt, and how tokens are chosen."""
    parser.add_argument(
        "run_dir",
        metavar="RUN",
        help="a run directory or a checkpoint, e.g. runs/quickstart, or a Hugging Face folder",
    )
    parser.add_argument("--prompt", default="", metavar="TEXT", help="the text to continue (none)")
    parser.add_argument(
        "--image",
        action="append",
        default=[],
        metavar="FILE",
        help="image of the prompt, for a vision-language model; once for each of several",
    )
    parser.add_argument("--max-tokens", type=int, default=200, metavar="N", help="most tokens to generate (200)")
    _add_decoding_arguments(parser)
    parser.add_argument(
        "--bos",
        choices=("auto", "bos", "none"),
        default="auto",
        help="token before a decoder's prompt; auto: as in its training; bos: the token that begins a text (auto)",
    )
    parser.add_argument(
        "--chat",
        action="store_true",
        help="the prompt is a user's message, in the model's chat template; the answer follows",
    )
    parser.add_argument(
        "--sentinel",
        choices=("auto", "always", "never"),
        default="auto",
        help="add <extra_0> to a prompt of span corruption that has none; auto: if the model learnt it here (auto)",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="seed of the samples (0)")
    parser.add_argument("--num-samples", type=int, default=1, metavar="N", help="texts to generate (1)")
    add_trust_argument(parser)
    parser.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16", "float16"),
        default="auto",
        help="dtype of the weights; auto: as stored (auto)",
    )
    parser.add_argument("--device", default="auto", help="cpu, cuda, or auto: cuda if available (auto)")


def _add_decoding_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.8,
        metavar="T",
        help="temperature of sampling; 0: always the likeliest token (0.8)",
    )
    parser.add_argument(
        "--top-k",
        type=int,
        default=0,
        metavar="K",
        help="sample from the K likeliest tokens; 0: from all (0)",
    )
    parser.add_argument(
        "--top-p",
        type=float,
        default=0.95,
        metavar="P",
        help="sample from the likeliest tokens that together have probability P (0.95)",
    )
    parser.add_argument(
        "--num-beams",
        "--beams",
        type=int,
        default=0,
        metavar="K",
        help="beam search with K beams, in place of sampling (0: none)",
    )
    parser.add_argument(
        "--length-penalty",
        type=float,
        default=0.6,
        metavar="A",
        help="with --num-beams: scores are divided by ((5 + length) / 6)^A (0.6)",
    )


def load_text_model(path: str | Path, device: "str | torch.device", dtype: str, trust_plugins: bool) -> "TextModel":
    """Load a run, a checkpoint or a Hugging Face folder. dtype: of the weights, "auto" for the stored one."""
    from megatfm.convert.electra_pair import is_electra_folder
    from megatfm.convert.hf_checkpoint import is_hf_folder
    from megatfm.convert.load import load_generation_fields, load_hf_model
    from megatfm.inference.text import TextModel, open_text_model

    if is_hf_folder(path) or is_electra_folder(path):
        return TextModel(load_hf_model(path, device, dtype=dtype), **load_generation_fields(path))
    return open_text_model(path, device, dtype=dtype, trust_plugins=trust_plugins)


def generate_command(args: argparse.Namespace) -> int:
    """Print prompt and continuation as they are made, and add them to RUN/samples.jsonl for the report."""
    if args.max_tokens < 1 or args.num_samples < 1:
        raise UsageError("--max-tokens and --num-samples: choose 1 or more")
    if args.num_beams < 0 or (args.num_beams and args.num_samples > 1):
        raise UsageError("--num-beams: choose 1 or more, and no --num-samples: beam search finds one text")
    if args.chat and args.bos != "auto":
        raise UsageError("--chat: the template decides what stands before the prompt: leave --bos out")
    begin, separator = ("chat", "\n") if args.chat else (args.bos, "")
    from megatfm.inference.decoding import Sampling
    from megatfm.inference.prompts import PromptOptions
    from megatfm.inference.text import generate_text, generate_text_beam

    options = PromptOptions(begin, args.sentinel, args.image)
    loaded = load_text_model(args.run_dir, _choose_device(args.device), args.dtype, args.trust_plugins)
    if args.num_beams:
        text = generate_text_beam(loaded, args.prompt, args.max_tokens, args.num_beams, args.length_penalty, options)
        print(f"{args.prompt}{separator}{text}")
        _append_samples(loaded, args.prompt, [text])
        return 0
    sampling = Sampling(args.temperature, args.top_k, args.top_p, args.seed, vocab_size=loaded.tokenizer.vocab_size)
    show = _print_text if args.num_samples == 1 else _ignore_text
    texts = generate_text(loaded, args.prompt, sampling, args.max_tokens, args.num_samples, options, show)
    if args.num_samples > 1:
        for number, text in enumerate(texts, start=1):
            print(f"--- sample {number} of {args.num_samples}\n{args.prompt}{separator}{text}")
    else:
        print()
    _append_samples(loaded, args.prompt, texts)
    return 0


def _append_samples(loaded: "TextModel", prompt: str, texts: list[str]) -> None:
    """Append to the run's samples, in one write. A run that can't be written is no reason to fail."""
    from megatfm.files import open_nofollow
    from megatfm.tracking.metrics import to_json_line

    if loaded.run_dir is None:
        return
    path = loaded.run_dir / SAMPLES
    lines = [to_json_line({"prompt": prompt, "text": text, "step": loaded.step}) for text in texts]
    try:
        with open(path, "ab", opener=open_nofollow) as file:
            file.write(b"".join(lines))
    except OSError as error:
        _warn(f"{path}: not written, so the report won't show this: {error.strerror}")


def _choose_device(name: str) -> str:
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(1, device=name)
    except (RuntimeError, AssertionError) as error:  # torch asserts where it was built without CUDA
        reason = str(error).splitlines()[0]
        raise UsageError(f"--device {name}: torch can't use it here ({reason}): choose cpu") from None
    return name


def _print_text(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _ignore_text(text: str) -> None:
    """Take a text that is printed later."""


def _warn(text: str) -> None:
    print(f"note: {text}", file=sys.stderr)


UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


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
        "--max-shard-size", default="5GB", metavar="SIZE", help="largest file of weights with --to hf (5GB)"
    )
    parser.add_argument(
        "--hf-config",
        metavar="FOLDER",
        help="read SRC as a DeepSpeed universal checkpoint; this Hugging Face folder describes its model",
    )
    parser.add_argument(
        "--base",
        metavar="FOLDER",
        help="if SRC is a PEFT adapter: the Hugging Face folder of its base model",
    )
    add_trust_argument(parser)
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
    experts.add_argument("--seed", type=int, metavar="N", help="seed of noise and routers (0)")


def convert_command(args: argparse.Namespace) -> int:
    """Convert, and print where the result is."""
    from megatfm.convert.convert import convert
    from megatfm.convert.upcycle import Upcycling, upcycle

    options = {key: getattr(args, key) for key in Upcycling.__dataclass_fields__ if getattr(args, key) is not None}
    if args.hf_config:
        from megatfm.convert.deepspeed_universal import from_universal

        if args.to != "megatfm" or options:
            raise UsageError("--hf-config is for --to megatfm alone: a universal checkpoint becomes a run")
        first, *notes = from_universal(args.source, args.target, args.hf_config)
        return _print_result(args.target, first, notes)
    if args.to == "moe":
        if "experts" not in options:
            raise UsageError("--to moe needs --experts: the number of copies, for example --experts 8")
        first, *notes = upcycle(args.source, args.target, Upcycling(**options), trust_plugins=args.trust_plugins)
        return _print_result(args.target, first, notes)
    if options:
        flag = min(options).replace("_", "-")
        raise UsageError(f"--{flag} is for --to moe: leave it out, or use --to moe")
    if args.to in ("peft", "megatfm") and (lines := _convert_adapters(args)):
        return _print_result(args.target, lines[0], lines[1:])
    if args.base:
        raise UsageError(
            "--base is for an adapter in PEFT's format (adapter_config.json) and --to megatfm: leave it out, or "
            f"convert in two steps, --to megatfm --base {args.base} and then --to {args.to}"
        )
    first, *notes = convert(
        args.source,
        args.target,
        args.to,
        shard_bytes=parse_size(args.max_shard_size),
        trust_plugins=args.trust_plugins,
    )
    return _print_result(args.target, first, notes)


def _convert_adapters(args: argparse.Namespace) -> list[str]:
    """Convert to or from PEFT's format, or merge our adapters; return messages, none for a source without adapters."""
    from megatfm import checkpoint
    from megatfm.checkpoint.directory import is_peft_folder
    from megatfm.convert.convert import read_config
    from megatfm.convert.hf_checkpoint import is_hf_folder
    from megatfm.convert.merge_adapters import merge_adapters
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
        is_adapted = read_config(path, checkpoint.read_state(path)).model.lora is not None
    except MegatfmError:
        return []  # `convert` raises the error that explains it
    return merge_adapters(args.source, args.target, trust_plugins=args.trust_plugins) if is_adapted else []


def _print_result(target: str, first: str, notes: list[str]) -> int:
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    print(f"{target}: {first}")
    return 0


def parse_size(text: str) -> int:
    """Return the bytes of "5GB", "200MB" or a plain number. Raises UsageError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]B)?", text.strip().upper())
    if match is None or (number := int(float(match[1]) * UNITS[match[2] or ""])) < 1:
        raise UsageError(f"--max-shard-size {text}: give bytes, or for example 500MB or 5GB")
    return number


def add_describe_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_and_overrides(parser, "model.n_layers=8")
    add_trust_argument(parser)


def describe_command(args: argparse.Namespace) -> int:
    """Print the description."""
    from megatfm.describe import describe, to_lines

    config = load_config(args.config, args.overrides)
    check_trust(config, args)
    for label, text in to_lines(describe(config)):
        print(f"{label:<16}  {text}".rstrip())
    return 0
