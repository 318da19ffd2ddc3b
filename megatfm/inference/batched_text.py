"""Batched generation: continuations of many prompts, each up to its first stop text."""

import logging
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import torch

from megatfm.errors import UsageError
from megatfm.inference.decoding import Prompts, Sampling, check_room, stream
from megatfm.inference.detokenizer import GrowingText
from megatfm.inference.likelihood import BATCH_SIZE, map_blocks, round_up_length
from megatfm.inference.prompts import PromptOptions, build_prompts
from megatfm.inference.text import TextModel

log = logging.getLogger("megatfm")

GREEDY = Sampling()


@dataclass(frozen=True)
class TextRequest:
    """A prompt, the maximal number of new tokens, and stop texts: the continuation ends before the first of them.

    prompt: a text, which is framed as in training, or token ids, which are read as they are. place: of the prompt, for
    errors.
    """

    prompt: str | Sequence[int]
    max_tokens: int
    stop: tuple[str, ...] = ()
    sampling: Sampling = GREEDY
    place: str = ""


@dataclass(frozen=True)
class NumberedRequest:
    """A request with its number among all, by which its draws are told apart, and its prompt as tokens."""

    number: int
    request: TextRequest
    prompts: Prompts

    @property
    def shape(self) -> Hashable:
        """Padded lengths and options that requests of one block share."""
        request, encoder = self.request, self.prompts.encoder
        n_encoder = round_up_length(len(encoder[0])) if encoder else 0
        n_tokens = round_up_length(len(self.prompts.tokens[0]))
        return n_tokens, n_encoder, request.max_tokens, request.stop, str(request.sampling)


def generate_texts(
    loaded: TextModel, requests: Sequence[TextRequest], *, batch_size: int = BATCH_SIZE, cut_prompts: bool = False
) -> list[str]:
    """Return the continuation of each prompt, in their order, without the stop text.

    A batch has prompts of about one length and equal options, and draws follow from a request's number. Collective if
    there is a process group: all ranks pass the same requests, and each computes a share. cut_prompts: cut prompts at
    their start to fit the model's positions, with a warning; else raise UsageError for one that does not fit.
    """
    if batch_size < 1:
        raise UsageError(f"batch = {batch_size}: choose 1 or more prompts at a time, e.g. {BATCH_SIZE}")
    device = next(loaded.model.parameters()).device
    limit, n_cut = loaded.config.model.position.limit, 0
    items = []
    for number, request in enumerate(requests):
        prompts = _make_prompts(loaded, request.prompt).to(device)
        if cut_prompts and limit is not None:
            room = limit + 1 - request.max_tokens
            n_cut += len(prompts.tokens[0]) > room
            prompts = _cut_start(prompts, room)
        elif request.place:
            _check_room(loaded, request, prompts)
        items.append(NumberedRequest(number, request, prompts))
    if n_cut:
        log.warning("%d of %d prompts are cut at their start, for positions end at %d", n_cut, len(items), limit)
    return map_blocks(items, lambda item: item.shape, lambda block: _generate_block(loaded, block), batch_size)


def _make_prompts(loaded: TextModel, prompt: str | Sequence[int]) -> Prompts:
    if isinstance(prompt, str):
        return build_prompts(loaded, prompt, PromptOptions(sentinel="never"))
    return Prompts([torch.tensor(prompt)])


def _check_room(loaded: TextModel, request: TextRequest, prompts: Prompts) -> None:
    """Raise UsageError that names the place of a prompt whose continuation exceeds the model's positions."""
    try:
        check_room(loaded.config.model, len(prompts.tokens[0]), request.max_tokens)
    except UsageError as error:
        raise UsageError(f"{request.place}: {error}") from None


def _cut_start(prompts: Prompts, room: int) -> Prompts:
    """Keep the last `room` tokens of a decoder's prompt, at least one."""
    if len(prompts.tokens[0]) <= room:
        return prompts
    return replace(prompts, tokens=[prompts.tokens[0][-max(room, 1) :]])


def _generate_block(loaded: TextModel, block: Sequence[NumberedRequest]) -> list[str]:
    """Continue prompts together until all are done."""
    request, first = block[0].request, block[0].prompts
    rows = [
        GrowingText(loaded.tokenizer, item.prompts.tokens[0].tolist(), loaded.eos_token_id, request.stop)
        for item in block
    ]
    encoder = None if first.encoder is None else [(item.prompts.encoder or ())[0] for item in block]
    steps = stream(
        loaded.model,
        Prompts([item.prompts.tokens[0] for item in block], encoder, first.prefix),
        replace(
            request.sampling,
            vocab_size=loaded.tokenizer.vocab_size,  # the model may have more rows
            row_numbers=tuple(item.number for item in block),
        ),
        max_tokens=request.max_tokens,
        stop_token=loaded.eos_token_id,
    )
    for tokens in steps:
        for row, token in zip(rows, tokens.tolist(), strict=True):
            row.add(token)
        if all(row.is_done for row in rows):
            break
    return [row.end() for row in rows]
