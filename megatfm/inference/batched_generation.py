"""Batched generation: continuations of many prompts, each up to its first stop text, and answers to a file's rows.

A fine-tuned model's answers are scored by the metrics of its task.
"""

import logging
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from megatfm.config import Config, TaskConfig
from megatfm.errors import UsageError
from megatfm.inference.beam_search import beam_search, gnmt_penalty
from megatfm.inference.decoding import Prompts, Sampling, check_room, has_encoder, stream
from megatfm.inference.likelihood import BATCH_SIZE, group_by_shape, map_blocks, round_up_length
from megatfm.inference.prompts import PromptOptions, build_prompts, prepare_prompts
from megatfm.inference.text import GrowingText, TextModel
from megatfm.tasks.files import Row, locate_rows, read_row_text
from megatfm.tasks.metrics import compute_text_metric, get_metric_signature
from megatfm.tokenizers import Tokenizer

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
    """A request and its prompt as tokens. number: tells its draws from those of other requests."""

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
    _check_batch_size(batch_size)
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


def generate_each(
    loaded: TextModel,
    texts: Sequence[str],
    sampling: Sampling,
    max_tokens: int,
    options: PromptOptions,
    *,
    batch_size: int = BATCH_SIZE,
) -> list[str]:
    """Return what `generate_text` makes of each prompt alone; prompts of about one length are a batch. Raises
    UsageError.

    Collective if there is a process group, as `generate_texts` is.
    """
    _check_batch_size(batch_size)
    items = []
    for text in texts:
        prompts, n_tokens = prepare_prompts(loaded, text, max_tokens, options)
        items.append(NumberedRequest(0, TextRequest(text, n_tokens, sampling=sampling), prompts))
    return map_blocks(items, lambda item: item.shape, lambda block: _generate_block(loaded, block), batch_size)


def _check_batch_size(batch_size: int) -> None:
    if batch_size < 1:
        raise UsageError(f"batch = {batch_size}: choose 1 or more prompts at a time, e.g. {BATCH_SIZE}")


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
    request = block[0].request
    rows = [
        GrowingText(loaded.tokenizer, item.prompts.tokens[0].tolist(), loaded.eos_token_id, request.stop)
        for item in block
    ]
    steps = stream(
        loaded.model,
        Prompts.join([item.prompts for item in block]),
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


@dataclass(frozen=True)
class GeneratedAnswers:
    """Answers to the rows of a file, in their order."""

    task: TaskConfig
    answers: Sequence[str]

    def rows(self) -> list[dict[str, Any]]:
        """Return the lines of the predictions file. `row` counts the file's rows from 1."""
        return [{"row": number, "answer": answer} for number, answer in enumerate(self.answers, start=1)]

    def summarise(self, references: Sequence[str]) -> dict[str, Any]:
        """Return the task's metrics, their intervals and signatures. references: one for each row."""
        results = {name: compute_text_metric(name, self.answers, references) for name in self.task.text_metrics}
        return {
            "metrics": {name: value for name, (value, _) in results.items()},
            "intervals": {name: list(interval) for name, (_, interval) in results.items()},
            "signatures": {name: get_metric_signature(name) for name in results},
        }


def answer_rows(
    model: nn.Module,
    tokenizer: Tokenizer,
    config: Config,
    path: str,
    rows: Sequence[Row],
    *,
    batch_size: int = BATCH_SIZE,
) -> GeneratedAnswers:
    """Generate an answer to the text of each row, greedily or by beam search. Raises UsageError.

    Prompts of one padded length are answered together, so that neither the other rows nor the batch size changes an
    answer. All ranks generate all answers, since a fully sharded model gathers its weights on every rank at once.
    """
    task = config.task
    assert task is not None
    texts = [read_row_text(place, row, task.text) for place, row in locate_rows(path, rows)]
    prompts = [encode_prompt(model, tokenizer, task, text) for text in texts]
    if has_encoder(model):
        prompts = _cut_prompts(config, path, prompts)
    limits = [_limit_answer(model, config, place, prompt) for place, prompt in locate_rows(path, prompts)]
    shapes = [(round_up_length(len(prompt)), limit) for prompt, limit in zip(prompts, limits, strict=True)]
    answers = [""] * len(texts)
    for block in group_by_shape(shapes, batch_size):
        limit = limits[block[0]]
        for row, ids in zip(
            block, _generate_answers(model, tokenizer, task, [prompts[r] for r in block], limit), strict=True
        ):
            answers[row] = tokenizer.decode(ids).strip()
    return GeneratedAnswers(task, answers)


def _cut_prompts(config: Config, path: str, prompts: Sequence[Tensor]) -> list[Tensor]:
    """Cut an encoder's prompts to a row, as in training; they keep EOS. Raises UsageError where the task forbids it."""
    assert config.task is not None
    length = config.data.sequence_length
    cut = [number for number, prompt in enumerate(prompts, start=1) if len(prompt) > length]
    if cut and config.task.too_long == "error":
        raise UsageError(
            f"{path}, row {cut[0]}: has {len(prompts[cut[0] - 1])} tokens, more than data.sequence_length = {length}: "
            "shorten it, or train with longer rows or task.too_long = 'truncate'"
        )
    if cut:
        log.warning("%s: %d of %d texts are cut to %d tokens", path, len(cut), len(prompts), length)
    return [torch.cat([prompt[:-1][: length - 1], prompt[-1:]]) for prompt in prompts]


def _limit_answer(model: nn.Module, config: Config, place: str, prompt: Tensor) -> int:
    """Return how many tokens may follow a prompt. Raises UsageError that names its place where there is no room."""
    task, data = config.task, config.data
    assert task is not None
    if has_encoder(model):
        return min(task.max_new_tokens, data.target_length or task.max_new_tokens)
    room = data.sequence_length - (len(prompt) - 1)
    if room < 1:
        raise UsageError(
            f"{place}: its prompt of {len(prompt)} tokens leaves no room for an answer in data.sequence_length = "
            f"{data.sequence_length}: shorten it, or train with longer rows"
        )
    return min(task.max_new_tokens, room)


def encode_prompt(model: nn.Module, tokenizer: Tokenizer, task: TaskConfig, text: str) -> Tensor:
    """Return a prompt's ids [n]: prefix and text, then EOS for an encoder; a decoder also has BOS and separator."""
    if has_encoder(model):
        return torch.tensor([*tokenizer.encode(f"{task.prefix}{text}").tolist(), tokenizer.eos])
    return torch.tensor([tokenizer.bos, *tokenizer.encode(f"{task.prefix}{text}{task.separator}").tolist()])


@torch.no_grad()
def _generate_answers(
    model: nn.Module, tokenizer: Tokenizer, task: TaskConfig, prompts: Sequence[Tensor], limit: int
) -> list[list[int]]:
    """Return the ids of each answer, without EOS."""
    starts = [torch.tensor([tokenizer.pad])] * len(prompts)
    batch = Prompts(starts, prompts) if has_encoder(model) else Prompts(prompts)
    batch = batch.to(next(model.parameters()).device)
    if task.beams > 1:
        penalty = gnmt_penalty(task.length_penalty)
        results = beam_search(
            model, batch, beams=task.beams, max_tokens=limit, stop_token=tokenizer.eos, penalty=penalty,
            vocab_size=tokenizer.vocab_size,
        )  # fmt: skip
        token_ids = [result.tokens.tolist() for result in results]
    else:
        greedy = Sampling(vocab_size=tokenizer.vocab_size)
        steps = stream(model, batch, greedy, max_tokens=limit, stop_token=tokenizer.eos)
        token_ids = torch.stack([*steps], dim=1).tolist()
    return [ids[: ids.index(tokenizer.eos)] if tokenizer.eos in ids else ids for ids in token_ids]
