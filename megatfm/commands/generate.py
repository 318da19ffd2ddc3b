"""`megatfm generate RUN --prompt TEXT`."""

import argparse
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from megatfm.errors import UsageError

if TYPE_CHECKING:
    from megatfm.generate.decoding import Prompts
    from megatfm.generate.load import Loaded
    from megatfm.generate.sampling import Sampling

SAMPLES = "samples.jsonl"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to open, what to continue, and how tokens are chosen."""
    parser.add_argument(
        "run_dir", metavar="RUN", help="a run directory or a checkpoint, e.g. runs/quickstart"
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
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="another seed, another text (0)")
    parser.add_argument("--samples", type=int, default=1, metavar="N", help="texts to make (1)")
    parser.add_argument("--device", default="auto", help="cpu, cuda, or auto: cuda where there is one (auto)")


def main(args: argparse.Namespace) -> int:
    """Print prompt and continuation as they are made, and add them to RUN/samples.jsonl for the report."""
    if args.max_tokens < 1 or args.samples < 1:
        raise UsageError("--max-tokens and --samples: choose 1 or more")
    if args.beams < 0 or (args.beams and args.samples > 1):
        raise UsageError("--beams: choose 1 or more, and no --samples: beam search finds one text")
    from megatfm.generate.load import load
    from megatfm.generate.sampling import Sampling

    loaded = load(args.run_dir, _device(args.device))
    if args.beams:
        text = search(loaded, args.prompt, args.max_tokens, args.beams, args.length_penalty, args.begin)
        print(f"{args.prompt}{text}")
        _keep(loaded, args.prompt, [text])
        return 0
    sampling = Sampling(
        args.temperature, args.top_k, args.top_p, args.seed, vocab_size=loaded.tokenizer.vocab_size
    )
    show = _show if args.samples == 1 else _nothing
    texts = sample(loaded, args.prompt, sampling, args.max_tokens, args.samples, show, args.begin)
    if args.samples > 1:
        for number, text in enumerate(texts, start=1):
            print(f"--- sample {number} of {args.samples}\n{args.prompt}{text}")
    else:
        print()
    _keep(loaded, args.prompt, texts)
    return 0


def sample(
    loaded: "Loaded",
    prompt: str,
    sampling: "Sampling",
    max_tokens: int,
    samples: int,
    show: Callable[[str], None],
    begin: str = "auto",
) -> list[str]:
    """The continuations of a prompt; `show` receives prompt and first continuation piece by piece.

    The prompt stands where texts stood in training (see `prompt.py`); `eos` ends a text.
    """
    from megatfm.generate.generate import stream
    from megatfm.generate.text import TextStream

    tokenizer = loaded.tokenizer
    prompts, max_tokens = _prepare(loaded, prompt, max_tokens, samples, begin)
    decoders = [TextStream(tokenizer, before=row.tolist()) for row in prompts.tokens]
    texts = [""] * samples
    show(prompt)
    for tokens in stream(loaded.model, prompts, sampling, max_tokens=max_tokens, stop_token=loaded.stop):
        for row, token in enumerate(tokens.tolist()):
            piece = decoders[row].add([token])
            texts[row] += piece
            if row == 0:
                show(piece)
    rests = [decoder.end() for decoder in decoders]
    show(rests[0])
    return [text + rest for text, rest in zip(texts, rests, strict=True)]


def search(
    loaded: "Loaded", prompt: str, max_tokens: int, beams: int, length_penalty: float, begin: str = "auto"
) -> str:
    """The continuation of a prompt that beam search finds."""
    from megatfm.generate.beam import beam_search, gnmt_penalty
    from megatfm.generate.text import TextStream

    tokenizer = loaded.tokenizer
    prompts, max_tokens = _prepare(loaded, prompt, max_tokens, 1, begin)
    (found,) = beam_search(
        loaded.model,
        prompts,
        beams=beams,
        max_tokens=max_tokens,
        stop_token=loaded.stop,
        penalty=gnmt_penalty(length_penalty),
        vocab_size=tokenizer.vocab_size,
    )
    decoder = TextStream(tokenizer, before=prompts.tokens[0].tolist())
    return decoder.add(found.tokens.tolist()) + decoder.end()


def _prepare(
    loaded: "Loaded", prompt: str, max_tokens: int, samples: int, begin: str
) -> tuple["Prompts", int]:
    """The prompts on the model's device, and how many tokens there is room for."""
    from megatfm.generate.prompt import prompts_of

    prompts = prompts_of(loaded, prompt, samples, begin).to(next(loaded.model.parameters()).device)
    length, model, data = len(prompts.tokens[0]), loaded.config.model, loaded.config.data
    trained = (
        data.target_length if prompts.encoder is not None and data.target_length else data.sequence_length
    )
    if length + max_tokens > trained:
        _note(f"up to {length + max_tokens} tokens, while this model was trained on {trained} at a time")
    if model.position.limit is not None and length + max_tokens - 1 > model.position.limit >= length:
        max_tokens = model.position.limit + 1 - length
        _note(f"at most {max_tokens} tokens are made: model.position.max_positions = {model.position.limit}")
    return prompts, max_tokens


def _keep(loaded: "Loaded", prompt: str, texts: list[str]) -> None:
    """Append to the run's samples, in one write. A run that can't be written is no reason to fail."""
    from megatfm.train.record.metrics import to_line

    if loaded.folder is None:
        return
    path = loaded.folder / SAMPLES
    lines = [to_line({"prompt": prompt, "text": text, "step": loaded.step}) for text in texts]
    try:
        with path.open("ab") as file:
            file.write(b"".join(lines))
    except OSError as error:
        _note(f"{path}: not written, so the report won't show this: {error.strerror}")


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


def _nothing(text: str) -> None:
    """Shown later, whole."""


def _note(text: str) -> None:
    print(f"note: {text}", file=sys.stderr)
