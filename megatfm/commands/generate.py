"""`megatfm generate RUN --prompt TEXT`."""

import argparse
import sys
from typing import TYPE_CHECKING

from megatfm.commands import trust
from megatfm.errors import UsageError

if TYPE_CHECKING:
    from megatfm.generate.load import TextModel

SAMPLES = "samples.jsonl"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to open, what to continue, and how tokens are chosen."""
    parser.add_argument(
        "run_dir",
        metavar="RUN",
        help="a run directory or a checkpoint, e.g. runs/quickstart, or a Hugging Face folder",
    )
    parser.add_argument("--prompt", default="", metavar="TEXT", help="the text to continue (none)")
    parser.add_argument("--max-tokens", type=int, default=200, metavar="N", help="at most so many (200)")
    parser.add_argument(
        "--temperature", type=float, default=0.8, metavar="T", help="0: always the likeliest token (0.8)"
    )
    parser.add_argument(
        "--top-k", type=int, default=0, metavar="K", help="only the K likeliest tokens; 0: all (0)"
    )
    parser.add_argument(
        "--top-p",
        type=float,
        default=0.95,
        metavar="P",
        help="the likeliest that hold this probability (0.95)",
    )
    parser.add_argument(
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
        help="with --beams: scores are divided by ((5 + length) / 6)^A (0.6)",
    )
    parser.add_argument(
        "--begin",
        choices=("auto", "bos", "none"),
        default="auto",
        help="before a decoder's prompt: what stood there in its training, the mark that begins a text, nothing (auto)",
    )
    parser.add_argument(
        "--sentinel",
        choices=("auto", "always", "never"),
        default="auto",
        help="add <extra_0> to a prompt of span corruption that has none; auto: of models trained so here (auto)",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="another seed, another text (0)")
    parser.add_argument("--samples", type=int, default=1, metavar="N", help="texts to make (1)")
    trust.add_argument(parser)
    parser.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16", "float16"),
        default="auto",
        help="of the weights; auto: as they are stored (auto)",
    )
    parser.add_argument("--device", default="auto", help="cpu, cuda, or auto: cuda where there is one (auto)")


def main(args: argparse.Namespace) -> int:
    """Print prompt and continuation as they are made, and add them to RUN/samples.jsonl for the report."""
    if args.max_tokens < 1 or args.samples < 1:
        raise UsageError("--max-tokens and --samples: choose 1 or more")
    if args.beams < 0 or (args.beams and args.samples > 1):
        raise UsageError("--beams: choose 1 or more, and no --samples: beam search finds one text")
    from megatfm.convert.folder import is_hf_folder
    from megatfm.convert.load import load_model as load_hf
    from megatfm.convert.load import text_generation_fields
    from megatfm.convert.pair import is_electra_folder
    from megatfm.generate.continuation import generate_text, generate_text_beam
    from megatfm.generate.load import TextModel, load
    from megatfm.generate.sampling import Sampling

    path, device = args.run_dir, _device(args.device)
    if is_hf_folder(path) or is_electra_folder(path):
        loaded = TextModel(load_hf(path, device, dtype=args.dtype), **text_generation_fields(path))
    else:
        loaded = load(path, device, dtype=args.dtype, trust_plugins=args.trust_plugins)
    if args.beams:
        text = generate_text_beam(
            loaded,
            args.prompt,
            args.max_tokens,
            args.beams,
            args.length_penalty,
            args.begin,
            args.sentinel,
        )
        print(f"{args.prompt}{text}")
        _append_samples(loaded, args.prompt, [text])
        return 0
    sampling = Sampling(
        args.temperature, args.top_k, args.top_p, args.seed, vocab_size=loaded.tokenizer.vocab_size
    )
    show = _show if args.samples == 1 else _discard
    texts = generate_text(
        loaded, args.prompt, sampling, args.max_tokens, args.samples, show, args.begin, args.sentinel
    )
    if args.samples > 1:
        for number, text in enumerate(texts, start=1):
            print(f"--- sample {number} of {args.samples}\n{args.prompt}{text}")
    else:
        print()
    _append_samples(loaded, args.prompt, texts)
    return 0


def _append_samples(loaded: "TextModel", prompt: str, texts: list[str]) -> None:
    """Append to the run's samples, in one write. A run that can't be written is no reason to fail."""
    from megatfm.atomic import open_nofollow
    from megatfm.train.record.metrics import to_json_line

    if loaded.run_dir is None:
        return
    path = loaded.run_dir / SAMPLES
    lines = [to_json_line({"prompt": prompt, "text": text, "step": loaded.step}) for text in texts]
    try:
        with open(path, "ab", opener=open_nofollow) as file:
            file.write(b"".join(lines))
    except OSError as error:
        _warn(f"{path}: not written, so the report won't show this: {error.strerror}")


def _device(name: str) -> str:
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(1, device=name)
    except (RuntimeError, AssertionError) as error:  # torch asserts where it was built without CUDA
        reason = str(error).splitlines()[0]
        raise UsageError(f"--device {name}: torch can't use it here ({reason}): choose cpu") from None
    return name


def _show(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _discard(text: str) -> None:
    """Shown later, whole."""


def _warn(text: str) -> None:
    print(f"note: {text}", file=sys.stderr)
