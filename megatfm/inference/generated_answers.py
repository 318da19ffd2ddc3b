"""Answers that a fine-tuned model generates to the rows of a file, and their metrics."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from megatfm.config import Config, TaskConfig
from megatfm.errors import UsageError
from megatfm.inference.beam_search import beam_search, gnmt_penalty
from megatfm.inference.decoding import Prompts, Sampling, has_encoder, stream
from megatfm.inference.likelihood import BATCH_SIZE, group_by_shape, round_up_length
from megatfm.tasks.files import Row, locate_rows, read_row_text
from megatfm.tasks.metrics import compute_text_metric, get_metric_signature
from megatfm.tokenizers import Tokenizer

log = logging.getLogger("megatfm")


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


def _cut_prompts(config: Config, path: str, prompts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
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


def _limit_answer(model: nn.Module, config: Config, place: str, prompt: torch.Tensor) -> int:
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


def encode_prompt(model: nn.Module, tokenizer: Tokenizer, task: TaskConfig, text: str) -> torch.Tensor:
    """Return a prompt's ids [n]: prefix and text, then EOS for an encoder; a decoder also has BOS and separator."""
    if has_encoder(model):
        return torch.tensor([*tokenizer.encode(f"{task.prefix}{text}").tolist(), tokenizer.eos])
    return torch.tensor([tokenizer.bos, *tokenizer.encode(f"{task.prefix}{text}{task.separator}").tolist()])


@torch.no_grad()
def _generate_answers(
    model: nn.Module, tokenizer: Tokenizer, task: TaskConfig, prompts: Sequence[torch.Tensor], limit: int
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
