"""Answers that a fine-tuned model generates to the rows of a file, and their metrics."""

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
"""Number of prompts in a batch, of about the same length."""


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
        results = {name: corpus_metric(name, self.answers, references) for name in self.task.text_metrics}
        return {
            "metrics": {name: value for name, (value, _) in results.items()},
            "intervals": {name: list(interval) for name, (_, interval) in results.items()},
            "signatures": {name: metric_signature(name) for name in results},
        }


def answer_rows(
    model: nn.Module, tokenizer: Tokenizer, config: Config, path: str, rows: Sequence[Row]
) -> GeneratedAnswers:
    """Generate an answer to the text of each row, greedily or by beam search. Raises UsageError."""
    task = config.task
    assert task is not None
    texts = [row_text(path, number, row, task.text) for number, row in enumerate(rows, start=1)]
    prompts = [encode_prompt(model, tokenizer, task, text) for text in texts]
    room = config.data.target_length if has_encoder(model) else config.data.sequence_length
    by_length = sorted(range(len(texts)), key=lambda index: (len(prompts[index]), index))
    answers = [""] * len(texts)
    for begin in range(0, len(by_length), BATCH):
        block = by_length[begin : begin + BATCH]
        max_prompt = max(len(prompts[index]) for index in block)
        max_new_tokens = min(
            task.max_new_tokens, (room or task.max_new_tokens) - (0 if has_encoder(model) else max_prompt - 1)
        )
        if max_new_tokens < 1:
            raise UsageError(
                f"{path}, row {block[-1] + 1}: its prompt of {max_prompt} tokens leaves no room for an answer in "
                f"data.sequence_length = {room}: shorten it, or train with longer rows"
            )
        for index, ids in zip(
            block,
            _continue(model, tokenizer, task, [prompts[index] for index in block], max_new_tokens),
            strict=True,
        ):
            answers[index] = tokenizer.decode(ids).strip()
    return GeneratedAnswers(task, answers)


def encode_prompt(model: nn.Module, tokenizer: Tokenizer, task: TaskConfig, text: str) -> torch.Tensor:
    """Return a prompt's ids [n]: prefix and text, then EOS for an encoder; a decoder also has BOS and separator."""
    if has_encoder(model):
        return torch.tensor([*tokenizer.encode(f"{task.prefix}{text}").tolist(), tokenizer.eos])
    return torch.tensor([tokenizer.bos, *tokenizer.encode(f"{task.prefix}{text}{task.separator}").tolist()])


@torch.no_grad()
def _continue(
    model: nn.Module,
    tokenizer: Tokenizer,
    task: TaskConfig,
    prompts: Sequence[torch.Tensor],
    max_new_tokens: int,
) -> list[list[int]]:
    """Return the ids of each answer, without EOS."""
    starts = [torch.tensor([tokenizer.pad])] * len(prompts)
    batch = Prompts(starts, prompts) if has_encoder(model) else Prompts(prompts)
    batch = batch.to(next(model.parameters()).device)
    if task.beams > 1:
        penalty = gnmt_penalty(task.length_penalty)
        results = beam_search(
            model, batch, beams=task.beams, max_tokens=max_new_tokens, stop_token=tokenizer.eos, penalty=penalty,
            vocab_size=tokenizer.vocab_size,
        )  # fmt: skip
        token_ids = [result.tokens.tolist() for result in results]
    else:
        n_prompt = max(map(len, batch.tokens))
        token_ids = generate(model, batch, max_tokens=max_new_tokens, stop_token=tokenizer.eos)[
            :, n_prompt:
        ].tolist()
    return [ids[: ids.index(tokenizer.eos)] if tokenizer.eos in ids else ids for ids in token_ids]
