"""Examples of prompts and answers for decoders: conversations and texts, with the tokens that are trained."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatfm.config import TaskConfig
from megatfm.corpus.shard_format import Sample
from megatfm.errors import UsageError
from megatfm.objectives.supervised import ANNOTATION
from megatfm.tasks.chat import ChatTemplate, check_messages, load_chat_template
from megatfm.tasks.files import Row, require_columns
from megatfm.tasks.forms import THREADS, EncodedExample
from megatfm.tokenizers import HuggingFaceTokenizer, Tokenizer

Spans = list[tuple[int, int]]


@dataclass(frozen=True)
class AnswerEncoder:
    """Encodes the rows of one file. length: tokens of a row, which has room for one more, since the last is only a
    target."""

    path: str
    task: TaskConfig
    tokenizer: Tokenizer
    tokenizer_file: str
    length: int

    def encode(self, rows: Sequence[Row]) -> tuple[list[EncodedExample], list[str]]:
        """Return examples, and what to say of them. Raises UsageError that names the row."""
        encode = self.encode_chats if self.task.form == "chat" else self.encode_prompts
        examples, n_cut, n_ended = [], 0, 0
        for number, (tokens, spans, text_bytes) in enumerate(encode(rows), start=1):
            if len(tokens) > self.length + 1:
                if self.task.too_long == "error":
                    needed = len(tokens) - 1
                    self.refuse(
                        number,
                        f"has {needed} tokens, more than data.sequence_length = {self.length}: choose {needed} or "
                        "more, or task.too_long = 'truncate'",
                    )
                n_cut += 1
                tokens = tokens[: self.length + 1]
            # The first token is predicted by none.
            trained = [(max(begin, 1), min(end, len(tokens))) for begin, end in spans if begin < len(tokens)]
            trained = [(begin, end) for begin, end in trained if begin < end]
            if not trained:
                self.refuse(
                    number, "no token is trained: its answer is empty, or beyond data.sequence_length"
                )
            last = tokens[trained[-1][0] : trained[-1][1]]
            n_ended += bool(np.isin(last, list(self.tokenizer.special.reserved)).any())
            examples.append(EncodedExample(tokens, text_bytes, {"trained": [list(span) for span in trained]}))
        return examples, self._notes(examples, n_cut, n_ended)

    def encode_prompts(self, rows: Sequence[Row]) -> list[tuple[NDArray[np.int64], Spans, int]]:
        """[BOS] prefix and text, then the answer and EOS, which are trained."""
        task, tokenizer = self.task, self.tokenizer
        require_columns(self.path, rows, {"task.text": task.text, "task.label": task.label})
        texts: dict[str, list[str]] = {task.text: [], task.label: []}
        for column, values in texts.items():
            for number, row in enumerate(rows, start=1):
                value = row.get(column)
                if not isinstance(value, str) or not value.strip():
                    self.refuse(number, f"column {column!r} is empty: give a text, or take the row out")
                values.append(str(value))
        prompts = tokenizer.encode_batch(
            [f"{task.prefix}{text}{task.separator}" for text in texts[task.text]], THREADS
        )
        answers = tokenizer.encode_batch(texts[task.label], THREADS)
        encoded = []
        for place, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            tokens = np.concatenate([[tokenizer.bos], prompt, answer, [tokenizer.eos]]).astype(np.int64)
            n_bytes = sum(len(values[place].encode()) for values in texts.values())
            encoded.append((tokens, [(1 + len(prompt), len(tokens))], n_bytes))
        return encoded

    def encode_chats(self, rows: Sequence[Row]) -> list[tuple[NDArray[np.int64], Spans, int]]:
        """Conversations as the chat template renders them; answers are trained."""
        tokenizer, column = self.tokenizer, self.task.messages
        require_columns(self.path, rows, {"task.messages": column})
        if not isinstance(tokenizer, HuggingFaceTokenizer):
            raise UsageError(
                "task.form = 'chat' needs a tokenizer.json, whose tokens tell their places in the text: use such a "
                "tokenizer, or task.form = 'generation'"
            )
        template = load_chat_template(self.tokenizer_file, tokenizer, self.task.chat_template)
        encoded = []
        for number, row in enumerate(rows, start=1):
            messages = row[column]
            if problem := check_messages(messages, tokenizer):
                self.refuse(number, problem)
            encoded.append(self._encode_chat(number, messages, template, tokenizer))
        return encoded

    def _encode_chat(
        self, number: int, messages: list[Any], template: ChatTemplate, tokenizer: HuggingFaceTokenizer
    ) -> tuple[NDArray[np.int64], Spans, int]:
        try:
            text, answers = template.answer_spans(messages)
        except UsageError as error:
            raise UsageError(f"{self.path}, row {number}: {error}") from None
        tokens, offsets = tokenizer.encode_with_offsets(text)
        starts = np.array([start for start, _ in offsets], np.int64)
        spans = [(int(starts.searchsorted(begin)), int(starts.searchsorted(end))) for begin, end in answers]
        return tokens.astype(np.int64), spans, len(text.encode())

    def _notes(self, examples: Sequence[EncodedExample], n_cut: int, n_ended: int) -> list[str]:
        n_tokens = sum(len(example.tokens) for example in examples)
        n_trained = sum(end - begin for example in examples for begin, end in example.annotation["trained"])
        notes = [f"{self.path}: {n_trained:,} of {n_tokens:,} tokens are trained"]
        if n_cut:
            notes.append(f"{self.path}: {n_cut} of {len(examples)} examples cut to {self.length} tokens")
        if n_ended < len(examples):
            notes.append(
                f"{self.path}: the last answer of {len(examples) - n_ended} of {len(examples)} examples has no special "
                "token that ends it, and the model won't learn to stop: have the template close answers with one"
            )
        return notes

    def refuse(self, number: int, reason: str) -> None:
        """Raise a UsageError that names the file and the row."""
        raise UsageError(f"{self.path}, row {number}: {reason}")


def spell_trained(sample: Sample, tokenizer: Tokenizer, *, colour: bool) -> str | None:
    """Return the text of an example with its trained tokens marked; None for a sample that is no such example."""
    stored = sample.members.get(ANNOTATION)
    trained = json.loads(stored).get("trained") if stored else None
    return format_trained(sample.tokens, trained, tokenizer, colour=colour) if trained else None


def format_trained(
    tokens: NDArray[Any], trained: Sequence[Sequence[int]], tokenizer: Tokenizer, *, colour: bool
) -> str:
    """Return an example's text piece by piece; trained tokens in green, or between ⟦ and ⟧."""
    opening, closing = ("\033[32m", "\033[0m") if colour else ("⟦", "⟧")
    parts, at = [], 0
    for begin, end in [*trained, (len(tokens), len(tokens))]:
        parts.append(_spell(tokens[at:begin], tokenizer))
        if begin < end:
            parts.append(f"{opening}{_spell(tokens[begin:end], tokenizer)}{closing}")
        at = end
    return "".join(parts)


def _spell(tokens: NDArray[Any], tokenizer: Tokenizer) -> str:
    """Return the text of tokens, with special ones by their names, which decoding leaves out."""
    reserved, parts, run = tokenizer.special.reserved, list[str](), list[int]()
    for token in [*tokens.tolist(), None]:
        if token is None or token in reserved:
            parts += [tokenizer.decode(run)] if run else []
            run = []
            parts += [] if token is None else [tokenizer.id_to_piece(token)]
        else:
            run.append(token)
    return "".join(parts)
