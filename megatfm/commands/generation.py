"""`megatfm generate`: continues a prompt by a run, a checkpoint or a Hugging Face model."""

import argparse
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from megatfm.commands.arguments import add_trust_argument
from megatfm.errors import UsageError

if TYPE_CHECKING:
    import torch

    from megatfm.inference.text import TextModel

SAMPLES = "samples.jsonl"
SAMPLING_DEFAULTS = {"temperature": 0.8, "top_k": 0, "top_p": 0.95, "seed": 0}
"""Options that choose tokens at random → default. Beam search chooses none so."""
BEAM_DEFAULTS = {"length_penalty": 0.6}


def add_generate_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the model, the prompt, and how tokens are chosen."""
    parser.add_argument(
        "run_dir", metavar="RUN", help="a run directory or a checkpoint, e.g. runs/quickstart, or a Hugging Face folder"
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
    parser.add_argument(
        "--seed", type=int, default=SAMPLING_DEFAULTS["seed"], metavar="S", help="seed of the samples (0)"
    )
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
        default=SAMPLING_DEFAULTS["temperature"],
        metavar="T",
        help="temperature of sampling; 0: always the likeliest token (0.8)",
    )
    parser.add_argument(
        "--top-k",
        type=int,
        default=SAMPLING_DEFAULTS["top_k"],
        metavar="K",
        help="sample from the K likeliest tokens; 0: from all (0)",
    )
    parser.add_argument(
        "--top-p",
        type=float,
        default=SAMPLING_DEFAULTS["top_p"],
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
        default=BEAM_DEFAULTS["length_penalty"],
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


def _refuse_ignored_options(args: argparse.Namespace) -> None:
    """Raise UsageError for options of sampling beside a beam search, and of beam search without one."""
    ignored: Mapping[str, float] = SAMPLING_DEFAULTS if args.num_beams else BEAM_DEFAULTS
    if changed := [name for name, default in ignored.items() if getattr(args, name) != default]:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in changed)
        reason = "beam search draws nothing: leave this or --num-beams out"
        raise UsageError(f"{flags}: {reason if args.num_beams else 'is for --num-beams: give that, or leave this out'}")


def generate_command(args: argparse.Namespace) -> int:
    """Print prompt and continuation as they are made, and add them to RUN/samples.jsonl for the report."""
    if args.max_tokens < 1 or args.num_samples < 1:
        raise UsageError("--max-tokens and --num-samples: choose 1 or more")
    if args.num_beams < 0 or (args.num_beams and args.num_samples > 1):
        raise UsageError("--num-beams: choose 1 or more, and no --num-samples: beam search finds one text")
    _refuse_ignored_options(args)
    from megatfm.inference.decoding import Sampling
    from megatfm.inference.prompts import PromptOptions, choose_separator
    from megatfm.inference.text import generate_text, generate_text_beam

    options = PromptOptions(args.bos, args.sentinel, args.image, args.chat)
    model = load_text_model(args.run_dir, _choose_device(args.device), args.dtype, args.trust_plugins)
    shown_prompt = f"{args.prompt}{choose_separator(model, options)}"
    if args.num_beams:
        text = generate_text_beam(model, args.prompt, args.max_tokens, args.num_beams, args.length_penalty, options)
        print(f"{shown_prompt}{text}")
        _append_samples(model, args.prompt, [text])
        return 0
    sampling = Sampling(args.temperature, args.top_k, args.top_p, args.seed, vocab_size=model.tokenizer.vocab_size)
    on_text = partial(print, end="", flush=True) if args.num_samples == 1 else lambda text: None
    texts = generate_text(model, args.prompt, sampling, args.max_tokens, args.num_samples, options, on_text)
    if args.num_samples > 1:
        for number, text in enumerate(texts, start=1):
            print(f"--- sample {number} of {args.num_samples}\n{shown_prompt}{text}")
    else:
        print()
    _append_samples(model, args.prompt, texts)
    return 0


def _append_samples(model: "TextModel", prompt: str, texts: list[str]) -> None:
    """Append to the run's samples, in one write. A run that can't be written is no reason to fail."""
    from megatfm.files import open_nofollow
    from megatfm.tracking.metrics import to_json_line

    if model.run_dir is None:
        return
    path = model.run_dir / SAMPLES
    lines = [to_json_line({"prompt": prompt, "text": text, "step": model.step}) for text in texts]
    try:
        with open(path, "ab", opener=open_nofollow) as file:
            file.write(b"".join(lines))
    except OSError as error:
        print(f"note: {path}: not written, so the report won't show this: {error.strerror}", file=sys.stderr)


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
