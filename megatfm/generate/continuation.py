"""A prompt and what a model makes of it, as texts."""

import sys
from collections.abc import Callable

from megatfm.generate.beam import beam_search, gnmt_penalty
from megatfm.generate.decoding import Prompts
from megatfm.generate.generate import stream
from megatfm.generate.load import TextModel
from megatfm.generate.prompt import build_prompts
from megatfm.generate.sampling import Sampling
from megatfm.generate.text import IncrementalDetokenizer


def generate_text(
    loaded: TextModel,
    prompt: str,
    sampling: Sampling,
    max_tokens: int,
    samples: int,
    on_text: Callable[[str], None] = lambda _: None,
    begin: str = "auto",
    sentinel: str = "auto",
) -> list[str]:
    """The continuations of a prompt; `show` receives prompt and first continuation piece by piece.

    The prompt stands where texts stood in training (see `prompt.py`); an id of `loaded.stop` ends a text.
    """
    tokenizer = loaded.tokenizer
    prompts, max_tokens = prepare_prompts(loaded, prompt, max_tokens, samples, begin, sentinel)
    decoders = [IncrementalDetokenizer(tokenizer, prompt_ids=row.tolist()) for row in prompts.tokens]
    texts = [""] * samples
    ended = [False] * samples
    on_text(prompt)
    for tokens in stream(
        loaded.model, prompts, sampling, max_tokens=max_tokens, stop_token=loaded.eos_token_id
    ):
        for row, token in enumerate(tokens.tolist()):
            piece = "" if ended[row] else decoders[row].add([token])
            ended[row] = ended[row] or token in loaded.eos_token_id
            texts[row] += piece
            if row == 0:
                on_text(piece)
    rests = [decoder.end() for decoder in decoders]
    on_text(rests[0])
    return [text + rest for text, rest in zip(texts, rests, strict=True)]


def generate_text_beam(
    loaded: TextModel,
    prompt: str,
    max_tokens: int,
    beams: int,
    length_penalty: float,
    begin: str = "auto",
    sentinel: str = "auto",
) -> str:
    """The continuation of a prompt that beam search finds."""
    tokenizer = loaded.tokenizer
    prompts, max_tokens = prepare_prompts(loaded, prompt, max_tokens, 1, begin, sentinel)
    (found,) = beam_search(
        loaded.model,
        prompts,
        beams=beams,
        max_tokens=max_tokens,
        stop_token=loaded.eos_token_id,
        penalty=gnmt_penalty(length_penalty),
        vocab_size=tokenizer.vocab_size,
    )
    decoder = IncrementalDetokenizer(tokenizer, prompt_ids=prompts.tokens[0].tolist())
    return decoder.add(found.tokens.tolist()) + decoder.end()


def prepare_prompts(
    loaded: TextModel, prompt: str, max_tokens: int, samples: int, begin: str, sentinel: str
) -> tuple[Prompts, int]:
    """The prompts on the model's device, and how many tokens there is room for."""
    prompts = build_prompts(loaded, prompt, samples, begin, sentinel).to(
        next(loaded.model.parameters()).device
    )
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


def _note(text: str) -> None:
    print(f"note: {text}", file=sys.stderr)
