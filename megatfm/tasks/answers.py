"""Prompts and answers as tokens: conversations and text pairs with the spans that are trained, and preference files.

A row of a preference file is a prompt, a chosen and a rejected answer, as texts or as messages of a conversation.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from megatfm.config import TaskConfig
from megatfm.corpus.shard_format import Sample
from megatfm.errors import UsageError
from megatfm.objectives.supervised import ANNOTATION
from megatfm.tasks.chat import ASSISTANT, ChatTemplate, check_messages, load_chat_template
from megatfm.tasks.examples import THREADS, EncodedExample, ExampleFormat, require_tokens
from megatfm.tasks.files import Row, locate_rows, read_row_text, require_columns
from megatfm.tokenizers import HuggingFaceTokenizer, Tokenizer

Spans = list[tuple[int, int]]


@dataclass(frozen=True)
class AnswerEncoder:
    """Encodes the rows of one file. A decoder's example may have one token more than a row: the last is only a target.

    tokenizer_file: the file beside which a chat template lies.
    """

    path: str
    task: TaskConfig
    tokenizer: Tokenizer
    example_format: ExampleFormat
    tokenizer_file: str = ""

    def encode(self, rows: Sequence[Row]) -> tuple[list[EncodedExample], list[str]]:
        """Return examples and notes for the log. Raises UsageError that names the row."""
        if self.example_format.target_length is not None:
            return self._encode_pairs(rows, self.example_format.target_length)
        length = self.example_format.sequence_length
        encode = self.encode_chats if self.task.form == "chat" else self.encode_prompts
        examples, n_cut, n_closed = [], 0, 0
        for place, (tokens, spans, text_bytes) in locate_rows(self.path, encode(rows)):
            if len(tokens) > length + 1:
                if self.task.too_long == "error":
                    needed = len(tokens) - 1
                    raise UsageError(
                        f"{place}: has {needed} tokens, more than data.sequence_length = {length}: choose {needed} or "
                        "more, or task.too_long = 'truncate'"
                    )
                n_cut += 1
                tokens = tokens[: length + 1]
            # No position predicts the first token.
            trained = [(max(begin, 1), min(end, len(tokens))) for begin, end in spans if begin < len(tokens)]
            trained = [(begin, end) for begin, end in trained if begin < end]
            if not trained:
                raise UsageError(f"{place}: no token is trained: its answer is empty, or beyond data.sequence_length")
            last_answer = tokens[trained[-1][0] : trained[-1][1]]
            n_closed += bool(np.isin(last_answer, list(self.tokenizer.special.reserved)).any())
            examples.append(EncodedExample(tokens, text_bytes, {"trained": [list(span) for span in trained]}))
        return examples, [*self._write_notes(examples, n_cut, n_closed), *self._compare_templates(rows)]

    def _encode_pairs(self, rows: Sequence[Row], target_length: int) -> tuple[list[EncodedExample], list[str]]:
        """Encode prefix and text for the encoder, and the answer for the decoder. The objective adds EOS to both."""
        task, tokenizer, examples, n_cut = self.task, self.tokenizer, list[EncodedExample](), 0
        texts, answers = self._read_columns(rows)
        encoded = [tokenizer.encode_batch([f"{task.prefix}{text}" for text in texts], THREADS)]
        encoded.append(tokenizer.encode_batch(answers, THREADS))
        limits = {
            "data.sequence_length": self.example_format.sequence_length - 1,
            "data.target_length": target_length - 1,
        }
        for row, (place, pair) in enumerate(locate_rows(self.path, zip(*encoded, strict=True))):
            n_cut += self._check_sides(place, pair, limits)
            source, answer = (side[:limit] for side, limit in zip(pair, limits.values(), strict=True))
            tokens = np.concatenate([source, answer]).astype(np.int64)
            n_bytes = len((texts[row] + answers[row]).encode())
            spans = [[len(source), len(tokens)]]
            side_lengths = (len(source), len(answer))
            examples.append(EncodedExample(tokens, n_bytes, {"trained": spans}, side_lengths))
        n_trained = sum(len(example.tokens) - example.annotation["trained"][0][0] + 1 for example in examples)
        notes = [f"{self.path}: {n_trained:,} tokens of answers are trained"]
        if n_cut:
            notes.append(f"{self.path}: {n_cut} of {len(rows)} examples are cut to the rows of their side")
        return examples, notes

    def _check_sides(self, place: str, pair: Sequence[NDArray[np.integer]], limits: Mapping[str, int]) -> bool:
        """Return whether a text or its answer must be cut. Raises UsageError where the task forbids it."""
        is_cut = False
        for side, tokens, (key, limit) in zip(("text", "answer"), pair, limits.items(), strict=True):
            if not len(tokens):
                raise UsageError(f"{place}: its {side} makes no token: take the row out")
            if limit < 1:
                raise UsageError(f"{key} = {limit + 1}: leaves no room for text beside the end token: choose more")
            if len(tokens) > limit and self.task.too_long == "error":
                raise UsageError(
                    f"{place}: its {side} has {len(tokens) + 1} tokens, more than {key} = {limit + 1}: choose "
                    f"{len(tokens) + 1} or more, or task.too_long = 'truncate'"
                )
            is_cut |= len(tokens) > limit
        return is_cut

    def _read_columns(self, rows: Sequence[Row]) -> tuple[list[str], list[str]]:
        """Return texts and answers."""
        columns = {"task.text": self.task.text, "task.label": self.task.label}
        require_columns(self.path, rows, columns)
        texts, answers = (
            [read_row_text(place, row, column) for place, row in locate_rows(self.path, rows)]
            for column in columns.values()
        )
        return texts, answers

    def encode_prompts(self, rows: Sequence[Row]) -> list[tuple[NDArray[np.int64], Spans, int]]:
        """Return tokens, trained spans and bytes of each row: BOS, prefix, text, then the trained answer and EOS."""
        task, tokenizer = self.task, self.tokenizer
        texts, labels = self._read_columns(rows)
        prompts = tokenizer.encode_batch([f"{task.prefix}{text}{task.separator}" for text in texts], THREADS)
        answers = tokenizer.encode_batch(labels, THREADS)
        encoded = list[tuple[NDArray[np.int64], Spans, int]]()
        columns = zip(texts, labels, prompts, answers, strict=True)
        for place, (text, label, prompt, answer) in locate_rows(self.path, columns):
            require_tokens(place, task.label, answer)
            tokens = np.concatenate([[tokenizer.bos], prompt, answer, [tokenizer.eos]]).astype(np.int64)
            n_bytes = len(text.encode()) + len(label.encode())
            encoded.append((tokens, [(1 + len(prompt), len(tokens))], n_bytes))
        return encoded

    def encode_chats(self, rows: Sequence[Row]) -> list[tuple[NDArray[np.int64], Spans, int]]:
        """Return tokens, trained spans (the answers) and bytes of each conversation, by the chat template."""
        tokenizer, column = self.tokenizer, self.task.messages
        require_columns(self.path, rows, {"task.messages": column})
        if not isinstance(tokenizer, HuggingFaceTokenizer):
            raise UsageError(
                "task.form = 'chat' needs a tokenizer.json, whose tokens have offsets into the text: start from a "
                "model with one (in `megatfm prep`, tokenizer.kind=byte-bpe), or use task.form = 'generation'"
            )
        template = load_chat_template(self.tokenizer_file, tokenizer, self.task.chat_template)
        encoded = []
        for place, row in locate_rows(self.path, rows):
            messages: Any = row.get(column)
            if problem := check_messages(messages, tokenizer):
                raise UsageError(f"{place}: {problem}")
            encoded.append(self._encode_chat(place, messages, template, tokenizer))
        return encoded

    def _encode_chat(
        self, place: str, messages: list[Any], template: ChatTemplate, tokenizer: HuggingFaceTokenizer
    ) -> tuple[NDArray[np.int64], Spans, int]:
        try:
            text, answers = template.locate_answers(messages)
        except UsageError as error:
            raise UsageError(f"{place}: {error}") from None
        tokens, offsets = tokenizer.encode_with_offsets(text)
        starts = np.array([start for start, _ in offsets], np.int64)
        spans = [(int(starts.searchsorted(begin)), int(starts.searchsorted(end))) for begin, end in answers]
        return tokens.astype(np.int64), spans, len(text.encode())

    def _compare_templates(self, rows: Sequence[Row]) -> list[str]:
        """Return a note if task.chat_template renders a conversation otherwise than the tokenizer's own template."""
        if self.task.form != "chat" or self.task.chat_template is None:
            return []
        try:
            tokenizer_template = load_chat_template(self.tokenizer_file, self.tokenizer, None)
        except UsageError:
            return []
        task_template = load_chat_template(self.tokenizer_file, self.tokenizer, self.task.chat_template)
        for place, row in locate_rows(self.path, rows):
            messages = row[self.task.messages]
            try:
                is_same = tokenizer_template.render(messages) == task_template.render(messages)
            except UsageError:  # such as roles that the tokenizer's template lacks
                is_same = False
            if not is_same:
                return [
                    f"{place}: task.chat_template renders it otherwise than the tokenizer's own "
                    "template, by which the model may have learnt conversations: leave chat_template out if so"
                ]
        return []

    def _write_notes(self, examples: Sequence[EncodedExample], n_cut: int, n_closed: int) -> list[str]:
        n_tokens, length = sum(len(example.tokens) for example in examples), self.example_format.sequence_length
        n_trained = sum(end - begin for example in examples for begin, end in example.annotation["trained"])
        notes = [f"{self.path}: {n_trained:,} of {n_tokens:,} tokens are trained"]
        if n_cut:
            notes.append(f"{self.path}: {n_cut} of {len(examples)} examples are cut to {length} tokens")
        if n_closed < len(examples):
            notes.append(
                f"{self.path}: the last answer of {len(examples) - n_closed} of {len(examples)} examples has no "
                "special token that ends it, and the model won't learn to stop: have the template close answers with "
                "one"
            )
        return notes


def describe_example(sample: Sample, tokenizer: Tokenizer, *, colour: bool, labels: Sequence[str] = ()) -> str | None:
    """Return an example's text with its trained tokens marked; None for a sample of another kind.

    Of labelled examples, the tokens that carry labels are marked, and the labels follow. Of span extraction, the
    answer is marked. labels: names of the classes.
    """
    annotation = json.loads(sample.members.get(ANNOTATION, b"{}"))
    if "trained" in annotation:
        return format_trained(sample.tokens, annotation["trained"], tokenizer, colour=colour)
    if "at" not in annotation:
        return None
    trained, shown_labels = [[position, position + 1] for position in annotation["at"]], annotation["labels"]
    if "window" in annotation:  # span extraction
        ((begin, end),) = shown_labels
        trained, shown_labels = [[begin, end + 1]], ["an answer" if begin else "no answer here"]
    elif labels:
        shown_labels = [_label_names(label, labels) for label in shown_labels]
    text = format_trained(sample.tokens, trained, tokenizer, colour=colour)
    return f"{text}\n\nlabel  {', '.join(map(str, shown_labels))}"


def _label_names(label: Any, labels: Sequence[str]) -> str:
    """Return the name of a class; for flags, the joined names of those that are set."""
    if isinstance(label, list):
        return "; ".join(name for name, flag in zip(labels, label, strict=True) if flag) or "none"
    return labels[label]


def format_trained(
    tokens: NDArray[Any], trained: Sequence[Sequence[int]], tokenizer: Tokenizer, *, colour: bool
) -> str:
    """Return an example's text, with trained tokens in green, or between ⟦ and ⟧."""
    opening, closing = ("\033[32m", "\033[0m") if colour else ("⟦", "⟧")
    texts, position = [], 0
    for begin, end in [*trained, (len(tokens), len(tokens))]:
        texts.append(_spell_tokens(tokens[position:begin], tokenizer))
        if begin < end:
            texts.append(f"{opening}{_spell_tokens(tokens[begin:end], tokenizer)}{closing}")
        position = end
    return "".join(texts)


def _spell_tokens(tokens: NDArray[Any], tokenizer: Tokenizer) -> str:
    """Return the text of tokens. Special tokens, which decoding drops, are spelled by their names."""
    reserved, texts, run = tokenizer.special.reserved, list[str](), list[int]()
    for token in [*tokens.tolist(), None]:
        if token is None or token in reserved:
            texts += [tokenizer.decode(run)] if run else []
            run = []
            texts += [] if token is None else [tokenizer.id_to_piece(token)]
        else:
            run.append(token)
    return "".join(texts)


SIDES = ("chosen", "rejected")
LogProbabilities = Callable[[Sequence[tuple[NDArray[np.int64], tuple[int, int]]]], Sequence[float]]
"""(tokens [T], [begin, end) of the answer) of each sequence → log-probabilities of the answers, in nats."""


class ReferenceScorer(Protocol):
    """Scores answers by the model at the start. identity: of that model; another one makes another corpus."""

    @property
    def identity(self) -> str: ...

    def __call__(self, sequences: Sequence[tuple[NDArray[np.int64], tuple[int, int]]]) -> Sequence[float]: ...


@dataclass(frozen=True)
class PreferenceEncoder:
    """Encodes the rows of one file as pairs: the chosen sequence, then the rejected one, each prompt and answer.

    A pair must fit a row; the last token of each sequence is only a target. reference: log-probabilities of answers by
    the model at the start.
    """

    path: str
    task: TaskConfig
    tokenizer: Tokenizer
    example_format: ExampleFormat
    tokenizer_file: str
    reference: LogProbabilities

    def encode(self, rows: Sequence[Row]) -> tuple[list[EncodedExample], list[str]]:
        """Return pairs and notes for the log. Raises UsageError that names the row."""
        task = self.task
        require_columns(self.path, rows, {"task.chosen": task.chosen, "task.rejected": task.rejected})
        if any(isinstance(row.get(getattr(task, side)), list) for row in rows for side in SIDES):
            self._check_prompts(rows)
        encoded = {side: self._encode_side(rows, side) for side in SIDES}
        examples = []
        pairs = zip(encoded["chosen"], encoded["rejected"], strict=True)
        for place, pair in locate_rows(self.path, pairs):
            (chosen, (begin, end), n_chosen), (rejected, (rejected_begin, rejected_end), n_rejected) = pair
            if np.array_equal(chosen, rejected):
                raise UsageError(f"{place}: both answers are the same: take the row out")
            needed = len(chosen) + len(rejected) - 2
            if needed > self.example_format.sequence_length:
                raise UsageError(
                    f"{place}: has {needed} tokens in both sequences, more than data.sequence_length = "
                    f"{self.example_format.sequence_length}: choose {needed} or more, or take the row out; pairs are "
                    "not cut"
                )
            rejected_start = len(chosen)
            spans = [[begin, end], [rejected_start + rejected_begin, rejected_start + rejected_end]]
            tokens = np.concatenate([chosen, rejected])
            examples.append(EncodedExample(tokens, n_chosen + n_rejected, {"trained": spans, "second": rejected_start}))
        sequences = [(tokens, span) for side in SIDES for tokens, span, _ in encoded[side]]
        scores = np.array(self.reference(sequences)).reshape(2, len(rows))
        ratios = (scores[0] - scores[1]).tolist()
        annotated = [
            replace(example, annotation={**example.annotation, "reference": ratio})
            for example, ratio in zip(examples, ratios, strict=True)
        ]
        share = float(np.mean(np.array(ratios) > 0)) if ratios else 0.0
        return annotated, [
            f"{self.path}: {100 * share:.0f} % of {len(rows)} chosen answers are the likelier at the start"
        ]

    def _encode_side(self, rows: Sequence[Row], side: str) -> list[tuple[NDArray[np.int64], tuple[int, int], int]]:
        """Return tokens, the answer's span and bytes of each row's chosen or rejected sequence."""
        column, prompt = getattr(self.task, side), self.task.prompt
        is_chat = any(isinstance(row.get(column), list) for row in rows)
        encoder = AnswerEncoder(self.path, self.task, self.tokenizer, self.example_format, self.tokenizer_file)
        if is_chat:
            messages = [
                {encoder.task.messages: self._make_conversation(place, row, column)}
                for place, row in locate_rows(self.path, rows)
            ]
            encoded = encoder.encode_chats(messages)
        else:
            require_columns(self.path, rows, {"task.prompt": prompt})
            task = encoder.task.model_copy(update={"text": prompt, "label": column})
            encoded = replace(encoder, task=task).encode_prompts(rows)
        return [(tokens, _get_last_span(spans, len(tokens)), n_bytes) for tokens, spans, n_bytes in encoded]

    def _check_prompts(self, rows: Sequence[Row]) -> None:
        """Raise UsageError for a row whose answers, as messages, are to different conversations."""
        for place, row in locate_rows(self.path, rows):
            chosen, rejected = (
                [
                    (message.get("role"), message.get("content")) if isinstance(message, dict) else message
                    for message in self._make_conversation(place, row, getattr(self.task, side))[:-1]
                ]
                for side in SIDES
            )
            if chosen != rejected:
                raise UsageError(
                    f"{place}: columns {self.task.chosen!r} and {self.task.rejected!r} differ before their last "
                    "messages, and only answers to one prompt are compared: mend the row, or take it out"
                )

    def _make_conversation(self, place: str, row: Row, column: str) -> list[Any]:
        """Return the conversation of a row that ends in the answer of a column."""
        prompt, answer = row.get(self.task.prompt), row.get(column)
        if not isinstance(answer, list) or not answer:
            raise UsageError(f"{place}: column {column!r} is no list of messages, as in other rows: give one")
        if isinstance(prompt, str) and prompt.strip() and len(answer) == 1:
            raise UsageError(
                f"{place}: column {self.task.prompt!r} is a text, and column {column!r} a list with the answer alone, "
                "so that the prompt would be left out: give the prompt as a list of messages, or both answers as texts"
            )
        if isinstance(prompt, list) and prompt and answer[: len(prompt)] == prompt:
            raise UsageError(
                f"{place}: column {column!r} begins with the messages of column {self.task.prompt!r}, which would be "
                "read twice: take them out of one of the two"
            )
        messages = [*(prompt if isinstance(prompt, list) else []), *answer]
        if not isinstance(messages[-1], dict) or messages[-1].get("role") != ASSISTANT:
            raise UsageError(
                f"{place}: the last message of column {column!r} is not the assistant's: end with the answer"
            )
        return messages


def _get_last_span(spans: Spans, n_tokens: int) -> tuple[int, int]:
    """Return the last answer's span. The first token is left out: no position predicts it."""
    begin, end = spans[-1]
    return max(begin, 1), min(end, n_tokens)
