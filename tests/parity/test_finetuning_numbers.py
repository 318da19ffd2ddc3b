"""Metrics of fine-tuning are the same on any number of ranks, in any batches, padded and packed, for every form."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist

from megatfm import checkpoint
from megatfm.config import Config
from megatfm.config.task import METRICS, TaskConfig
from megatfm.inference.batched_generation import answer_rows
from megatfm.parallel.mesh import build_mesh
from megatfm.tasks.files import read_rows
from megatfm.train.build import build_engine
from megatfm.train.corpora import open_corpora, open_tokenizer
from megatfm.train.evaluation import evaluate_sets
from megatfm.train.finetuning import resolve_task
from tests.support.files import write_lines
from tests.support.finetuning_tasks import FILLERS, NAMES, TOWNS, save_bert, small_config
from tests.support.parity import one_device
from tests.support.workers import Workers

ROWS = 13
"""Examples: no multiple of 2, 3, 7 or 32."""
BATCHES = {1: (1, 7, 32), 2: (1, 7), 3: (1, 7)}
"""Ranks → batch sizes: of several ranks each has seven examples at most."""
RANKS = [3, pytest.param(2, marks=pytest.mark.slow)]
"""Ranks that are compared with one process; 3 have unequal shares, as 2 have."""
WORDS = (*TOWNS, *NAMES, *FILLERS)
LABELS: Mapping[str, Callable[[int], Any]] = {
    "classification": lambda n: "abc"[n * 5 % 3],
    "multilabel": lambda n: [["a", "b"], [], ["c"], ["a"]][n % 4],
    "regression": lambda n: (n * 37 % 11) / 7 - 0.5,
    "tagging": lambda n: [["B-A", "I-A", "O", "B-B"][(n + place) % 4] for place in range(5 + n % 4)],
    "generation": lambda n: phrase(n, 1 + n % 2),
}
NO_ANSWER = "no_answer"
"""SQuAD 2.0's task, beside the forms: some questions have no answer, and the threshold follows from all scores."""
CHAT_TEMPLATE = "{% for m in messages %}{{ m.content }} [SEP] {% endfor %}"
PADDED_LENGTH = {
    "span_extraction": 16, NO_ANSWER: 16, "multiple_choice": 21, "generation": 11, "preference": 17,
}  # fmt: skip
"""Tokens of rows that hold one example each; 13 in other forms."""
PACKED_LENGTH = 64
FAMILIES = {form: ["decoder"] for form in METRICS} | {
    "classification": ["decoder", "encoder"],
    "tagging": ["encoder", "decoder"],
    "span_extraction": ["encoder", "decoder"],
    "multiple_choice": ["encoder", "decoder"],
    "generation": ["decoder", "encoder_decoder"],
}
EXPECTED_METRICS = METRICS | {
    "classification": (*METRICS["classification"], "calibration_error"),
    NO_ANSWER: ("f1", "exact_match", "has_answer_f1", "no_answer_f1"),
}
TEXT_METRICS = get_args(get_args(TaskConfig.model_fields["text_metrics"].annotation)[0])
CASES = [*((form, family) for form in METRICS for family in FAMILIES[form]), (NO_ANSWER, "encoder")]
EXACT = {"f1", "exact_match", "accuracy", "matthews", "reward_accuracy"}
"""Metrics that are counts of decisions, but for a suffix such as f1_macro: equal to the last bit."""


def phrase(n: int, n_words: int) -> str:
    return " ".join(WORDS[(3 * n + 5 * place) % len(WORDS)] for place in range(n_words))


def example(form: str, n: int) -> dict[str, Any]:
    """Row n of a form's file: texts of 5 to 8 words."""
    text = phrase(n, 5 + n % 4)
    if form in ("span_extraction", NO_ANSWER):
        first = text.split()[n % 5]
        answers = [{"text": first, "answer_start": text.index(first)}]
        has_answer = form == "span_extraction" or n % 3
        return {"question": phrase(n + 1, 2), "context": text, "answers": answers if has_answer else []}
    if form == "multiple_choice":
        return {"text": phrase(n, 2), "choices": [phrase(n + k, 1 + k % 2) for k in range(2 + n % 2)], "label": n % 2}
    if form == "chat":
        turns = [
            ("user", phrase(n, 2)),
            ("assistant", phrase(n + 1, 1)),
            ("user", "was ?"),
            ("assistant", phrase(n, 1 + n % 2)),
        ]
        return {"messages": [{"role": role, "content": content} for role, content in turns]}
    if form == "preference":
        return {"prompt": phrase(n, 2), "chosen": phrase(n + 1, 1 + n % 3), "rejected": phrase(n + 2, 3 - n % 2)}
    text = phrase(n, 5 + n % 3) if form == "generation" else text
    return {"text": text.split() if form == "tagging" else text, "label": LABELS[form](n)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of whole words, a file for each form, and a checkpoint that preferences are compared with."""
    folder = tmp_path_factory.mktemp("forms")
    save_bert(folder / "bert", (*WORDS, "?"))
    (folder / "chat.jinja").write_text(CHAT_TEMPLATE)
    for form in (*METRICS, NO_ANSWER):
        write_lines(folder / f"{form}.jsonl", [example(form, n) for n in range(ROWS)])
    config, _ = open_tokenizer(form_config(folder, "classification", "decoder"))
    tensors = {
        f"model.{name}": weight.detach().float() for name, weight in one_device(config.model, seed=6).named_parameters()
    }
    checkpoint.save(folder / "start" / "checkpoints", 1, tensors, {"step": 1, "config": config.model_dump(mode="json")})
    return folder


def form_config(folder: Path, form: str, family: str, **changes: Any) -> Config:
    file = str(folder / f"{form}.jsonl")
    task: dict[str, Any] = {"form": form, "train": file, "validation": file}
    task |= {
        "multiple_choice": {"choices": ["choices"]},
        "chat": {"chat_template": str(folder / "chat.jinja")},
        NO_ANSWER: {"form": "span_extraction", "no_answer": True},
    }.get(form, {})
    more = {"train.init_from": str(folder / "start")} if form == "preference" else {}
    return small_config(folder).with_changes(
        {"task": task, "model.family": family, "data.tokenizer": str(folder / "bert"), **more, **changes}
    )


def evaluate_form(folder: Path, form: str, family: str) -> list[dict[str, Any]]:
    """Evaluate an untrained model with one example in a row, then with several, each in batches of all sizes."""
    torch.set_num_threads(1)
    results = []
    for length in (PADDED_LENGTH.get(form, 13), PACKED_LENGTH):
        config = form_config(
            folder, form, family,
            **{"data.sequence_length": length,
               **({"data.target_length": length} if family == "encoder_decoder" else {}),
               "train.global_batch": 32 * 7 * 6,
               "run_dir": str(folder / f"run-{dist.get_rank()}-of-{dist.get_world_size()}")},
        )  # fmt: skip
        config, tokenizer = open_tokenizer(resolve_task(config)[0])
        mesh = build_mesh(config.parallel, dist.get_world_size(), "cpu")
        engine = build_engine(config, mesh, torch.device("cpu"), "fp64")
        for micro_batch in BATCHES[dist.get_world_size()]:
            config = config.with_changes({"train.micro_batch": micro_batch})
            result = evaluate_sets(engine, open_corpora(config, tokenizer), config, 0, lambda: None)["validation"]
            metrics = result.get("metrics", {})
            results.append({"rows": result["rows"], "loss": result["loss"], **metrics})
    return results


def check(result: Mapping[str, float], expected: Mapping[str, float]) -> None:
    """Counts of decisions are equal; sums of float64 agree to 1e-12, for other rows and batches round otherwise."""
    assert result.keys() == expected.keys()
    for metric, value in expected.items():
        if any(metric.startswith(name) or metric.endswith(f"_{name}") for name in EXACT):
            assert result[metric] == value, metric
        elif metric != "rows":
            assert math.isclose(result[metric], value, rel_tol=1e-12), metric


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize(
    ("form", "family"),
    [
        pytest.param(form, family, marks=() if family == FAMILIES.get(form, [family])[0] else pytest.mark.extended)
        for form, family in CASES
    ],
)
def test_every_form_has_the_same_metrics(workers: Workers, folder: Path, form: str, family: str, ranks: int) -> None:
    (alone,) = workers.run(evaluate_form, 1, folder, form, family)
    expected = alone[0]
    assert set(EXPECTED_METRICS[form]) <= expected.keys(), "every metric of the form is compared"
    assert len({value for metric, value in expected.items() if metric != "rows"} - {0.0, 1.0}) >= 1
    for results in (alone, *workers.run(evaluate_form, ranks, folder, form, family)):
        for number, result in enumerate(results):
            is_packed = number >= len(results) // 2
            assert result["rows"] <= ROWS // 2 if is_packed else result["rows"] == ROWS
            check(result, expected)


def answer_form(folder: Path, family: str, beams: int) -> list[tuple[list[str], dict[str, float]]]:
    """Answer the rows of a file in batches of all sizes."""
    torch.set_num_threads(1)
    config, tokenizer = open_tokenizer(form_config(folder, "generation", family, **{"data.target_length": 16}))
    task = {"task.beams": beams, "task.max_new_tokens": 7, "task.text_metrics": list(TEXT_METRICS)}
    config = config.with_changes(task)
    assert tokenizer is not None
    assert config.task is not None
    engine = build_engine(
        config, build_mesh(config.parallel, dist.get_world_size(), "cpu"), torch.device("cpu"), "fp64"
    )
    rows = read_rows(config.task.train)
    results = []
    for batch_size in BATCHES[dist.get_world_size()]:
        answers = engine.run_model(
            lambda model, size=batch_size: answer_rows(model, tokenizer, config, "rows", rows, batch_size=size)
        )
        results.append(answers)
    references = [row["label"] for row in rows]
    return [(list(answers.answers), answers.summarise(references)["metrics"]) for answers in results]


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize(
    ("family", "beams", "distinct"),
    [("decoder", 1, 6), pytest.param("decoder", 3, 6, marks=pytest.mark.extended), ("encoder_decoder", 2, 3)],
)
def test_generated_answers_and_their_metrics_are_the_same(
    workers: Workers, folder: Path, family: str, beams: int, distinct: int, ranks: int
) -> None:
    """BLEU, chrF and exact match follow from the texts, so all are equal to the last bit.

    distinct: least number of different answers, since a model that always says the same would show nothing.
    """
    (alone,) = workers.run(answer_form, 1, folder, family, beams)
    answers, metrics = alone[0]
    assert len(set(answers)) >= distinct
    assert metrics.keys() == set(TEXT_METRICS)
    for results in (alone, *workers.run(answer_form, ranks, folder, family, beams)):
        assert results == [alone[0]] * len(results)
