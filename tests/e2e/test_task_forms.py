"""Answers in texts, choices, pairs in both orders and texts for texts, from files to predictions, by the commands."""

import json
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import transformers

from megatfm.inference import batched_generation
from megatfm.inference.beam_search import beam_search
from tests.support.files import read_lines, write_lines
from tests.support.finetuning_tasks import TOWNS, WORDS_OF_QUESTIONS, make_questions, save_bert
from tests.support.forked_commands import run_command

CONFIG = """
name = "task"
task = { train = "train.jsonl", validation = "validation.jsonl", test = "test.jsonl", epochs = 6 }
data = { sequence_length = 32 }
optimizer = { name = "adamw", lr = 4e-3 }
train = { global_batch = 8, micro_batch = 8, precision = "fp32" }
checkpoint = { keep = 1 }
log = { sinks = [] }
"""
EXTENDED = pytest.mark.extended
TINY = "model={d_model=32, n_layers=1, attention={n_heads=2}, ffn={d_ff=64}"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "task.toml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def results_of(folder: Path) -> dict:
    return json.loads((folder / "runs/task/task.json").read_text())["sets"]


def check_exported_answers(exported: Path, questions: Sequence[dict], predictions: Sequence[dict]) -> None:
    """In texts of one window, transformers scores the first predicted span highest of all pairs of tokens."""
    model = transformers.AutoModelForQuestionAnswering.from_pretrained(exported).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
    short = [pair for pair in zip(questions, predictions, strict=True) if len(pair[0]["context"].split()) <= 25]
    assert len(short) > 5
    for question, prediction in short:
        inputs = tokenizer(question["question"], question["context"], return_tensors="pt", return_offsets_mapping=True)
        offsets = inputs.pop("offset_mapping")[0].tolist()
        text_start = inputs["input_ids"][0].tolist().index(tokenizer.sep_token_id) + 1
        with torch.no_grad():
            output = model(**inputs)
        spans = {
            (offsets[begin][0], offsets[end][1]): float(output.start_logits[0, begin] + output.end_logits[0, end])
            for begin in range(text_start, len(offsets) - 1)
            for end in range(begin, len(offsets) - 1)
        }
        best = prediction["answers"][0]
        assert spans[best["begin"], best["end"]] == pytest.approx(max(spans.values()), abs=1e-4)


@pytest.mark.parametrize("no_answer", [pytest.param(0.0, marks=EXTENDED), 0.4])
def test_answers_are_extracted(folder: Path, no_answer: float) -> None:
    save_bert(folder / "bert", WORDS_OF_QUESTIONS)
    for name, n, seed in (("train", 160, 1), ("validation", 30, 2), ("test", 30, 3)):
        write_lines(folder / f"{name}.jsonl", make_questions(n, seed, no_answer=no_answer))
    words = [
        "task.form=span_extraction",
        "task.stride=8",
        "task.epochs=2",
        f"task.no_answer={'true' if no_answer else 'false'}",
    ]
    assert run_command("finetune", "task.toml", "--from", "bert", "--export", "exported", *words) == 0
    test = results_of(folder)["test"]
    assert test["examples"] == 30
    assert test["metrics"]["f1"] > 0.9
    assert test["intervals"]["f1"][0] <= test["metrics"]["f1"] <= test["intervals"]["f1"][1]
    rows, truth = (read_lines(folder / "runs/task/predictions/test.jsonl"), make_questions(30, 3, no_answer=no_answer))
    right = [
        row["answer"] == (question["answers"][0]["text"] if question["answers"] else "")
        for row, question in zip(rows, truth, strict=True)
    ]
    assert [row["id"] for row in rows] == [question["id"] for question in truth]
    assert sum(right) / 30 == pytest.approx(test["metrics"]["exact_match"])
    for row, question in zip(rows, truth, strict=True):
        for answer in row["answers"]:
            assert question["context"][answer["begin"] : answer["end"]] == answer["text"]
    if no_answer:
        assert test["threshold"] == results_of(folder)["validation"]["threshold"]
        assert {"no_answer_f1", "has_answer_f1"} <= test["metrics"].keys()
    write_lines(
        folder / "new.jsonl", [{key: question[key] for key in ("id", "question", "context")} for question in truth]
    )
    assert run_command("predict", "runs/task", "new.jsonl", "--out", "new.predictions.jsonl") == 0
    assert read_lines(folder / "new.predictions.jsonl") == rows
    check_exported_answers(folder / "exported", truth, rows)


@pytest.mark.parametrize("family", ["encoder", "decoder"])
def test_choices_are_chosen(folder: Path, family: str) -> None:
    """The right choice is the one that is a town; a text may have two or three."""
    save_bert(folder / "bert", WORDS_OF_QUESTIONS)
    rows = []
    for number in range(96):
        choices = ["the lamp", f"the {TOWNS[number % 6]}", "old"][: 2 + number % 2]
        place = number % len(choices)
        choices[1], choices[place] = choices[place], choices[1]
        rows.append({"text": "where was Anna ?", "choices": choices, "label": "ABC"[place]})
    write_lines(folder / "train.jsonl", rows)
    write_lines(folder / "validation.jsonl", rows[:20])
    words = [
        "task.form=multiple_choice", 'task.choices=["choices"]', 'task.labels=["A","B","C"]', "task.test=",
        "data.sequence_length=48",
    ]  # fmt: skip
    if family == "decoder":
        start = [f'{TINY}, family="decoder"}}', "data.tokenizer=bert", "task.lm_weight=0.5"]
    else:
        start = ["--from", "bert", "--export", "exported"]
    assert run_command("finetune", "task.toml", *start, *words) == 0
    validation = results_of(folder)["validation"]
    assert validation["examples"] == 20
    assert validation["metrics"]["accuracy"] == 1
    predictions = read_lines(folder / "runs/task/predictions/validation.jsonl")
    assert [row["label"] for row in predictions] == [row["label"] for row in rows[:20]]
    assert [len(row["probabilities"]) for row in predictions] == [len(row["choices"]) for row in rows[:20]]
    assert all(abs(sum(row["probabilities"].values()) - 1) < 1e-5 for row in predictions)
    if family == "decoder":
        return
    model = transformers.AutoModelForMultipleChoice.from_pretrained(folder / "exported").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "exported")
    for row, prediction in zip(rows[:6], predictions, strict=False):
        texts = [row["text"]] * len(row["choices"])
        inputs = tokenizer(texts, row["choices"], return_tensors="pt", padding=True)
        with torch.no_grad():
            shares = model(**{key: value[None] for key, value in inputs.items()}).logits[0].softmax(-1)
        expected = torch.tensor([*prediction["probabilities"].values()])
        torch.testing.assert_close(shares, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("form", ["classification", "regression"])
def test_pairs_are_read_in_both_orders(folder: Path, form: str) -> None:
    """A prediction does not change when the texts change places."""
    save_bert(folder / "bert", WORDS_OF_QUESTIONS)
    texts = [("the lamp", "Anna was red"), ("Emil", "old Dora and"), ("Rome", "Rome .")] * 8
    labels = ["a", "b", "a"] * 8 if form == "classification" else [0.5, -1, 2] * 8
    rows = [{"text": a, "other": b, "label": label} for (a, b), label in zip(texts, labels, strict=True)]
    write_lines(folder / "train.jsonl", rows)
    swapped = [{"text": row["other"], "other": row["text"], "label": row["label"]} for row in rows]
    for name, examples in (("validation", rows[:6]), ("test", swapped[:6])):
        write_lines(folder / f"{name}.jsonl", examples)
    words = [f"task.form={form}", "task.both_orders=true", "task.text_pair=other", "task.epochs=2"]
    model = f'{TINY}, family="decoder"}}'
    assert run_command("finetune", "task.toml", model, "data.tokenizer=bert", *words) == 0
    sets = [read_lines(folder / f"runs/task/predictions/{name}.jsonl") for name in ("validation", "test")]
    for first, second in zip(*sets, strict=True):
        assert first.get("value", first.get("probability")) == pytest.approx(
            second.get("value", second.get("probability")), abs=1e-5
        )
    assert len({json.dumps({k: v for k, v in row.items() if k != "row"}) for row in sets[0]}) > 1


@pytest.mark.parametrize("family", ["encoder_decoder", "decoder"])
def test_texts_are_answered_by_texts(
    folder: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch, family: str,
) -> None:  # fmt: skip
    """Translation of one word each, with and without beams."""
    words = dict(zip(("where", "was", "the", "old", "red", "new"), TOWNS, strict=True))
    save_bert(folder / "bert", WORDS_OF_QUESTIONS)
    rows = [{"source": f"{a} {b}", "target": f"{words[a]} {words[b]}"} for a in words for b in words] * 4
    write_lines(folder / "train.jsonl", rows)
    write_lines(folder / "validation.jsonl", rows[:12])
    task = [
        "task.form=generation", "task.text=source", "task.label=target", 'task.prefix="and "', "task.test=",
        'task.text_metrics=["chrf","exact_match","bleu"]', "task.beams=2", "task.epochs=25", "data.target_length=16",
        'task.separator=" . "', "data.tokenizer=bert",
    ]  # fmt: skip
    if family == "decoder":
        task.remove("data.target_length=16")
    else:
        task.append("task.too_long=truncate")
    assert run_command("finetune", "task.toml", f'{TINY}, family="{family}"}}', *task) == 0
    validation = results_of(folder)["validation"]
    assert validation["metrics"]["exact_match"] > 0.9
    assert validation["metrics"]["chrf"] > 80
    assert validation["signatures"]["bleu"].startswith("nrefs:1|case:mixed")
    predictions = read_lines(folder / "runs/task/predictions/validation.jsonl")
    assert sum(p["answer"] == row["target"] for p, row in zip(predictions, rows[:12], strict=True)) >= 11
    write_lines(folder / "new.jsonl", [{"source": row["source"]} for row in rows[:12]])
    assert run_command("predict", "runs/task", "new.jsonl", "--out", "new.out.jsonl") == 0
    assert read_lines(folder / "new.out.jsonl") == predictions
    searches = []

    def search(*args, beams: int, penalty, **kwargs):
        searches.append((beams, penalty(9)))
        return beam_search(*args, beams=beams, penalty=penalty, **kwargs)

    monkeypatch.setattr(batched_generation, "beam_search", search)
    options = ["--beams", "3", "--length-penalty", "0"]
    assert run_command("predict", "runs/task", "new.jsonl", "--out", "three.jsonl", *options) == 0
    assert set(searches) == {(3, 1.0)}
    assert [row["answer"] for row in read_lines(folder / "three.jsonl")] == [row["answer"] for row in predictions]
    assert run_command("predict", "runs/task", "new.jsonl", "--beams", "0") == 2
    assert "choose 1 or more beams" in capfd.readouterr().err
    if family == "encoder_decoder":
        check_long_texts(folder, capfd, caplog)
    corpus = next(iter(folder.glob("runs/task/task/*/manifest.json"))).parent
    capfd.readouterr()
    assert run_command("data", "show", str(corpus), "--sample", "1") == 0
    assert "and where was" in (output := capfd.readouterr().out)
    assert "⟦Rome Oslo" in output


def check_long_texts(folder: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    """A text of more than a row is answered as what training would read of it, or refused, as the task says."""
    texts = [" ".join(["was", "red", "new"] * 20), " ".join(["was", "red", "new"] * 10)]  # 30 of 32 tokens fit
    write_lines(folder / "long.jsonl", [{"source": text} for text in texts])
    assert run_command("predict", "runs/task", "long.jsonl", "--out", "long.out.jsonl") == 0
    first, second = read_lines(folder / "long.out.jsonl")
    assert first["answer"] == second["answer"]
    assert "long.jsonl: 1 of 2 texts are cut to 32 tokens" in caplog.text
    config = folder / "runs/task/config.toml"
    config.write_text(config.read_text().replace('too_long = "truncate"', 'too_long = "error"'))
    assert run_command("predict", "runs/task", "long.jsonl") == 2
    assert "long.jsonl, row 1: has 62 tokens, more than data.sequence_length = 32" in capfd.readouterr().err


LONG = {
    "longformer": 'name="longformer", pattern={name="longformer", width=8}',
    "bigbird": 'pattern={name="bigbird", block_size=8, n_random_blocks=1}',
}


# The pattern itself is in tests/unit/layers.
@pytest.mark.parametrize("pattern", ["longformer", pytest.param("bigbird", marks=EXTENDED)])
def test_long_documents_are_classified(folder: Path, pattern: str) -> None:
    """Words far behind the first token tell the class; most tokens see a window of 8, or a few blocks of 8, alone."""
    save_bert(folder / "bert", WORDS_OF_QUESTIONS)
    draw = random.Random(5)
    for name, n in (("train", 160), ("validation", 40)):
        rows = []
        for number in range(n):
            words = draw.choices(("the", "old", "lamp", "was", "and"), k=draw.randint(90, 120))
            for place in draw.sample(range(60, len(words)), 10):
                words[place] = TOWNS[number % 2]
            rows.append({"text": " ".join(words), "label": TOWNS[number % 2]})
        write_lines(folder / f"{name}.jsonl", rows)
    sizes = 'd_model=32, n_layers=1, ffn={d_ff=64}, position={name="learned", max_positions=128}'
    model = f'model={{{sizes}, family="encoder", attention={{n_heads=2, {LONG[pattern]}}}}}'
    words = ["data.tokenizer=bert", "data.sequence_length=128", "task.test=", "task.epochs=6"]
    assert run_command("finetune", "task.toml", model, *words) == 0
    assert results_of(folder)["validation"]["metrics"]["accuracy"] > 0.95


LABELS_OF_FORM = {
    "regression": [0.5, -2.0, 1.0],
    "multilabel": [["a", "b"], [], ["b"]],
    "tagging": [["x"], ["y"], ["x"]],
}


def test_each_form_of_task_shows_its_trained_examples(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    save_bert(folder / "bert", WORDS_OF_QUESTIONS)
    forms = {
        "classification": {"text": "the lamp", "label": "good"},
        "multilabel": {"text": "the lamp", "label": ["good"]},
        "tagging": {"text": "the lamp", "label": ["O", "B-A"]},
        "multiple_choice": {"text": "the", "a": "lamp", "b": "red", "label": 1},
        "span_extraction": make_questions(1, 1)[0],
    }
    expected = {
        "classification": ("⟦[CLS]⟧the lamp[SEP]", "label  good"),
        "multilabel": ("⟦[CLS]⟧the lamp[SEP]", "label  good"),
        "tagging": ("[CLS]⟦the⟧⟦lamp⟧[SEP]", "label  O, B-A"),
        "multiple_choice": ("⟦[CLS]⟧the[SEP]lamp[SEP]⟦[CLS]⟧the[SEP]red[SEP]", "label  1"),
        "span_extraction": (f"⟦{forms['span_extraction']['answers'][0]['text']}⟧", "label  an answer"),
    }
    for form, row in forms.items():
        further_rows = [{"text": "red", "label": "bad"}] * (form == "classification")
        write_lines(folder / "train.jsonl", [row, *further_rows])
        words = [
            f"task.form={form}", "task.validation=", "task.test=", f"name={form}", "data.sequence_length=48",
        ]  # fmt: skip
        words += ['task.choices=["a","b"]'] if form == "multiple_choice" else []
        assert run_command("finetune", "task.toml", "--from", "bert", "--prepare", *words) == 0
        (corpus,) = {path.parent for path in folder.glob(f"runs/{form}/task/*/manifest.json")}
        capfd.readouterr()
        assert run_command("data", "show", str(corpus), "--sample", "0", "--tokenizer", "bert/tokenizer.json") == 0
        output = capfd.readouterr().out
        for part in expected[form]:
            assert part in output, form


@pytest.mark.parametrize("form", LABELS_OF_FORM)
def test_exported_heads_predict_the_same(folder: Path, form: str) -> None:
    save_bert(folder / "bert", WORDS_OF_QUESTIONS)
    texts = ["lamp", "red", "Anna"]
    rows = [{"text": text, "label": label} for text, label in zip(texts, LABELS_OF_FORM[form], strict=True)] * 4
    write_lines(folder / "train.jsonl", rows)
    write_lines(folder / "validation.jsonl", rows[:3])
    words = [f"task.form={form}", "task.test=", "task.epochs=1", "--export", "exported"]
    assert run_command("finetune", "task.toml", "--from", "bert", *words) == 0
    described = json.loads((folder / "exported/config.json").read_text())
    kind = "TokenClassification" if form == "tagging" else "SequenceClassification"
    model = getattr(transformers, f"AutoModelFor{kind}").from_pretrained(folder / "exported").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "exported")
    with torch.no_grad():
        logits = model(**tokenizer(texts, return_tensors="pt")).logits
    predictions = read_lines(folder / "runs/task/predictions/validation.jsonl")
    if form == "regression":
        assert described["problem_type"] == "regression"
        assert not {"id2label", "label2id"} & described.keys()
        torch.testing.assert_close(logits[:, 0], torch.tensor([row["value"] for row in predictions]), atol=1e-5, rtol=0)
    elif form == "multilabel":
        assert described["problem_type"] == "multi_label_classification"
        assert described["id2label"] == {"0": "a", "1": "b"}
        shares = torch.tensor([list(row["probabilities"].values()) for row in predictions])
        torch.testing.assert_close(logits.sigmoid(), shares, atol=1e-5, rtol=0)
    else:
        tags = [model.config.id2label[int(number)] for number in logits[:, 1].argmax(-1)]
        assert [[tag] for tag in tags] == [row["labels"] for row in predictions]
