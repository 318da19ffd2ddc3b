"""Answers that a fine-tuned model writes to the rows of a file, and their metrics."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from megatfm.config import Config, TaskConfig
from megatfm.errors import UsageError
from megatfm.inference.beam_search import beam_search, gnmt_penalty
from megatfm.inference.decoding import Prompts, generate, has_encoder
from megatfm.tasks.files import Row
from megatfm.tasks.forms import row_text
from megatfm.tasks.text_metrics import corpus_metric, metric_signature
from megatfm.tokenizers import Tokenizer

BATCH = 16
"""Prompts that are answered together, of about the same length."""


@dataclass(frozen=True)
class GeneratedAnswers:
    """Answers to a file's rows, in their order."""

    task: TaskConfig
    answers: Sequence[str]

    def rows(self) -> list[dict[str, Any]]:
        """List them by row of the file, counted from 1."""
        return [{"row": number, "answer": answer} for number, answer in enumerate(self.answers, start=1)]

    def summarise(self, references: Sequence[str]) -> dict[str, Any]:
        """Return the task's metrics, their intervals and what names their settings in papers."""
        results = {name: corpus_metric(name, self.answers, references) for name in self.task.text_metrics}
        return {
            "metrics": {name: value for name, (value, _) in results.items()},
            "intervals": {name: list(interval) for name, (_, interval) in results.items()},
            "signatures": {name: metric_signature(name) for name in results},
        }


def answer_rows(
    model: nn.Module, tokenizer: Tokenizer, config: Config, path: str, rows: Sequence[Row]
) -> GeneratedAnswers:
    """Write an answer to the text of each row, by the likeliest tokens or by beam search. Raises UsageError."""
    task = config.task
    assert task is not None
    texts = [row_text(path, number, row, task.text) for number, row in enumerate(rows, start=1)]
    prompts = [encode_prompt(model, tokenizer, task, text) for text in texts]
    room = config.data.target_length if has_encoder(model) else config.data.sequence_length
    by_length = sorted(range(len(texts)), key=lambda place: (len(prompts[place]), place))
    answers = [""] * len(texts)
    for begin in range(0, len(by_length), BATCH):
        places = by_length[begin : begin + BATCH]
        longest = max(len(prompts[place]) for place in places)
        most = min(
            task.max_new_tokens, (room or task.max_new_tokens) - (0 if has_encoder(model) else longest - 1)
        )
        if most < 1:
            raise UsageError(
                f"{path}, row {places[-1] + 1}: its prompt of {longest} tokens leaves no room for an answer in "
                f"data.sequence_length = {room}: shorten it, or train with longer rows"
            )
        for place, ids in zip(
            places, _continue(model, tokenizer, task, [prompts[p] for p in places], most), strict=True
        ):
            answers[place] = tokenizer.decode(ids).strip()
    return GeneratedAnswers(task, answers)


def encode_prompt(model: nn.Module, tokenizer: Tokenizer, task: TaskConfig, text: str) -> torch.Tensor:
    """Return what the model reads before it answers: prefix and text, in a decoder also BOS and separator."""
    if has_encoder(model):
        return torch.tensor([*tokenizer.encode(f"{task.prefix}{text}").tolist(), tokenizer.eos])
    return torch.tensor([tokenizer.bos, *tokenizer.encode(f"{task.prefix}{text}{task.separator}").tolist()])


@torch.no_grad()
def _continue(
    model: nn.Module, tokenizer: Tokenizer, task: TaskConfig, prompts: Sequence[torch.Tensor], most: int
) -> list[list[int]]:
    """Return the ids of each answer, without its end."""
    starts = [torch.tensor([tokenizer.pad])] * len(prompts)
    asked = Prompts(starts, prompts) if has_encoder(model) else Prompts(prompts)
    asked = asked.to(next(model.parameters()).device)
    if task.beams > 1:
        penalty = gnmt_penalty(task.length_penalty)
        results = beam_search(
            model, asked, beams=task.beams, max_tokens=most, stop_token=tokenizer.eos, penalty=penalty,
            vocab_size=tokenizer.vocab_size,
        )  # fmt: skip
        written = [result.tokens.tolist() for result in results]
    else:
        first = max(map(len, asked.tokens))
        written = generate(model, asked, max_tokens=most, stop_token=tokenizer.eos)[:, first:].tolist()
    return [ids[: ids.index(tokenizer.eos)] if tokenizer.eos in ids else ids for ids in written]
