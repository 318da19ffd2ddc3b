"""Texts that are scored after others: their tokens, and the likelihoods of the answers of an evaluation task."""

from collections.abc import Mapping
from dataclasses import dataclass

from megatfm.tasks.question_scores import Likelihood, QuestionResult, score_choices, score_cloze
from megatfm.tasks.questions import EvaluationTask, Question
from megatfm.tokenizers import Tokenizer


@dataclass(frozen=True)
class TextPair:
    """A prompt and an answer after it."""

    prompt: str
    answer: str


def split_pair(tokenizer: Tokenizer, pair: TextPair) -> tuple[str, list[int]]:
    """Return the prompt without its trailing spaces, which go to the answer, and the answer's tokens.

    Both are tokenized as one text, and cut where the prompt alone ends, as in lm-evaluation-harness; if a token reaches
    over the cut, they are tokenized apart. The tokens are empty where the answer makes none.
    """
    prompt = pair.prompt.rstrip()
    answer = pair.prompt[len(prompt) :] + pair.answer
    joined, before = tokenizer.encode(prompt + answer).tolist(), tokenizer.encode(prompt).tolist()
    if joined[: len(before)] == before and len(joined) > len(before):
        return prompt, joined[len(before) :]
    return prompt, tokenizer.encode(answer).tolist()


def scored_pairs(task: EvaluationTask) -> list[TextPair]:
    """Return all that has to be scored for a task, each once: answers after prompts, and after unconditional ones."""
    return list(dict.fromkeys(pair for question in task.questions for pair in _pairs_of(question)))


def _pairs_of(question: Question) -> list[TextPair]:
    prompts = [question.prompt] + ([] if question.unconditional is None else [question.unconditional])
    return [TextPair(prompt, answer) for prompt in prompts for answer in question.choices]


def judge_answers(task: EvaluationTask, scored: Mapping[TextPair, Likelihood]) -> list[QuestionResult]:
    """Return the results of a task's questions, from the likelihoods of its pairs."""
    results, delimiter = [], task.config.delimiter
    for question in task.questions:
        likelihoods = [scored[pair] for pair in _pairs_of(question)]
        n_answers = len(question.choices)
        answers, unconditional = likelihoods[:n_answers], likelihoods[n_answers:]
        if task.config.kind == "cloze":
            results.append(score_cloze(question, answers[0], delimiter))
        else:
            results.append(score_choices(question, answers, delimiter, unconditional))
    return results
