"""Tasks without training: texts and ranks by hand, the same on any ranks and in any batches."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch

import megatfm
from megatfm.config import EvaluationTaskConfig
from megatfm.errors import UsageError
from megatfm.inference.batched_text import TextRequest, generate_texts
from megatfm.inference.decoding import Sampling
from megatfm.inference.evaluate import measure_compressors
from megatfm.inference.evaluation_tasks import evaluate_questions
from megatfm.inference.text import generate_text, load
from megatfm.tasks.questions import open_evaluation_task
from tests.support.trained_runs import SMALL_DECODER, random_model, write_trained_run
from tests.support.workers import Workers

PROMPTS = [
    "import",
    "",
    "größer 東京 textwrap",
    "def wrap(self, text):" * 3,
    "x",
    "import textwrap as t",
    "y " * 9,
]
CONFIGS = {
    "decoder": (SMALL_DECODER, "causal"),
    "encoder-decoder": (SMALL_DECODER.with_changes({"family": "encoder_decoder"}), "prefix"),
}


def write_run(folder: Path, tokenizer_model: bytes, name: str = "decoder") -> Path:
    config, objective = CONFIGS[name]
    return write_trained_run(folder / "run", tokenizer_model, random_model(config, torch.float32), objective)


@pytest.mark.parametrize("name", CONFIGS)
def test_texts_of_many_prompts_are_those_of_each(tmp_path: Path, tokenizer_model: bytes, name: str) -> None:
    loaded = load(write_run(tmp_path, tokenizer_model, name), dtype="float64")
    vocabulary = loaded.tokenizer.vocab_size
    alone = [
        generate_text(loaded, prompt, Sampling(vocab_size=vocabulary), 8, 1, sentinel="never")[0]
        for prompt in PROMPTS
    ]
    assert len(set(alone)) > 3
    letter = next(letter for letter in alone[0][1:] if letter.isprintable())
    requests = [TextRequest(prompt, 8, sampling=Sampling(vocab_size=vocabulary)) for prompt in PROMPTS]
    stopped = [
        TextRequest(prompt, 8, (letter, "nowhere"), Sampling(vocab_size=vocabulary)) for prompt in PROMPTS
    ]
    for batch_size in (1, 3, 32):
        assert generate_texts(loaded, requests, batch_size=batch_size) == alone
        assert generate_texts(loaded, stopped, batch_size=batch_size) == [
            text.split(letter)[0] for text in alone
        ]


def write_task(folder: Path, kind: str, answers: list[str], more: str = "") -> Path:
    rows = [
        {"ask": prompt or "z", "answer": answer, "key": number % 3}
        for number, (prompt, answer) in enumerate(zip(PROMPTS, answers, strict=True))
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = folder / "task.toml"
    path.write_text(f'kind = "{kind}"\ndata = "rows.jsonl"\nprompt = "{{{{ ask }}}}"\n{more}')
    return path


def evaluated(run: Path, task: Path) -> list[Any]:
    torch.set_num_threads(1)
    loaded, opened = load(run, dtype="float64"), open_evaluation_task(task)
    return [evaluate_questions(loaded, opened, batch_size=batch_size) for batch_size in (1, 7, 32)]


def test_a_text_is_drawn_the_same_in_any_batch(tmp_path: Path, tokenizer_model: bytes) -> None:
    """A draw is numbered by the request, not by its place in a block."""
    loaded = load(write_run(tmp_path, tokenizer_model), dtype="float64")
    sampling = Sampling(temperature=1.0, seed=3, vocab_size=loaded.tokenizer.vocab_size)
    requests = [TextRequest(prompt, 8, sampling=sampling) for prompt in (*PROMPTS, *PROMPTS[:3])]
    alone = generate_texts(loaded, requests, batch_size=1)
    assert alone[:3] != alone[-3:], "equal prompts have draws of their own"
    for batch_size in (3, 32):
        assert generate_texts(loaded, requests, batch_size=batch_size) == alone


KINDS = get_args(EvaluationTaskConfig.model_fields["kind"].annotation)
"""Every kind of task that the config knows."""
OPTIONS = {
    "choice": 'choices = ["{{ answer }}", "import os", "größer"]\nanswer = "key"\nunconditional_prompt = "z"\n',
    "generation": 'max_tokens = 6\nstop = []\ndelimiter = ""\n',
}
METRICS = {
    "choice": {"accuracy", "accuracy_per_token", "accuracy_per_byte", "accuracy_pmi", "bits_per_byte"},
    "cloze": {"accuracy", "bits_per_byte", "perplexity"},
    "generation": {"exact_match", "f1"},
    "retrieval": {"recall_at_1", "recall_at_10", "reciprocal_rank"},
}


@pytest.mark.parametrize(
    ("kind", "shots"),
    [(kind, shots) for kind in KINDS for shots in (0, 2) if (kind, shots) != ("retrieval", 2)],
)
def test_ranks_and_batches_change_no_decision(
    workers: Workers, tmp_path: Path, tokenizer_model: bytes, kind: str, shots: int
) -> None:
    run = write_run(tmp_path, tokenizer_model)
    loaded = load(run, dtype="float64")
    texts = generate_texts(loaded, [TextRequest(prompt or "z", 6) for prompt in PROMPTS])
    answers = [text.strip() or "none" for text in texts[:3]] + ["größer", "東京", "x y", "import"]
    task = write_task(tmp_path, kind, answers, f"{OPTIONS.get(kind, '')}shots = {shots}\n")
    alone = evaluated(run, task)
    for ranks in (2, 3):
        for results in workers.run(evaluated, ranks, run, task):
            assert results == alone, "to the last bit at one batch size"
    first = alone[0].summary["metrics"]
    assert first.keys() == METRICS[kind]
    for result in alone[1:]:
        for metric, value in first.items():
            is_sum = metric in ("bits_per_byte", "perplexity")
            assert result.summary["metrics"][metric] == (
                pytest.approx(value, rel=1e-12, abs=0) if is_sum else value
            )
    if kind == "generation" and not shots:
        expected = [text == answer for text, answer in zip(texts, answers, strict=True)]
        assert first["exact_match"] >= sum(expected) / len(PROMPTS)
        assert [record["text"] for record in alone[0].records] == texts


def test_the_nearest_answer_is_found(tmp_path: Path, tokenizer_model: bytes) -> None:
    """Answers that are the prompts are their own nearest; of shuffled ones the ranks are counted by hand."""
    run = write_run(tmp_path, tokenizer_model)
    same = write_task(tmp_path, "retrieval", [prompt or "z" for prompt in PROMPTS])
    loaded = load(run)
    assert evaluate_questions(loaded, open_evaluation_task(same)).summary["metrics"]["recall_at_1"] == 1
    others = [*PROMPTS[3:], "a", "b", "z"]
    task = open_evaluation_task(write_task(tmp_path, "retrieval", others))
    records = evaluate_questions(loaded, task).records
    model = megatfm.load(run)
    prompts, answers = (model.encode(texts) for texts in ([prompt or "z" for prompt in PROMPTS], others))
    for number, record in enumerate(records):
        similarities = torch.cosine_similarity(prompts[number], answers)
        assert record["rank"] == int(similarities.argsort(descending=True).tolist().index(number)) + 1


def test_a_corpus_without_text_has_nothing_to_compress() -> None:
    empty: Any = SimpleNamespace(folder="corpora/vectors", n_text_bytes=0, n_blocks=0)
    with pytest.raises(UsageError, match="corpora/vectors: has no text that could be compressed: leave out"):
        measure_compressors(empty, tokenizer=None)  # type: ignore[arg-type]
