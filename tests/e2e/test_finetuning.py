"""From a Hugging Face folder and a CSV to a fine-tuned, evaluated and exported model, by the commands of a user."""

import csv
import json
import random
import re
import signal
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from megatfm.checkpoint.directory import list_checkpoints
from megatfm.config import load_config
from megatfm.engines.native.engine import NativeEngine
from megatfm.errors import EXIT_REQUEUE
from megatfm.inference.task_evaluation import predict_file
from tests.support.files import read_lines, write_lines
from tests.support.finetuning_tasks import ANIMALS, OTHER, TOOLS, save_bert
from tests.support.forked_commands import run_command
from tests.support.training_runs import run_training, training_curve
from tests.support.workers import Workers

SHARP = ("saw", "rasp", "plane")
CONFIG = """
name = "things"
data = { sequence_length = 32 }
optimizer = { name = "adamw", lr = 5e-3 }
train = { global_batch = 4, micro_batch = 4, precision = "fp32" }
checkpoint = { keep = 1 }
log = { sinks = [] }
[task]
train = "train.csv"
validation = "validation.csv"
test = "test.jsonl"
text = "first"
text_pair = "second"
label = "kind"
epochs = 6
"""


def pairs(n: int, seed: int) -> list[dict[str, str]]:
    """Pairs of phrases that end in an animal or a tool; the label says what the second ends in, or that it is sharp."""
    draw, rows = random.Random(seed), []
    for _ in range(n):
        words = [draw.choice(ANIMALS + TOOLS) for _ in range(2)]
        first, second = (" ".join([*draw.sample(OTHER, draw.randint(1, 4)), word]) for word in words)
        label = "animal" if words[1] in ANIMALS else "sharp" if words[1] in SHARP else "tool"
        rows.append({"first": first, "second": second, "kind": label})
    return rows


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Hugging Face folder `bert`, and the files of a task."""
    save_bert(tmp_path / "bert", [*ANIMALS, *TOOLS, *OTHER])
    for name, n, seed in (("train", 240, 1), ("validation", 30, 2)):
        with open(tmp_path / f"{name}.csv", "w", newline="") as file:
            writer = csv.DictWriter(file, ["first", "second", "kind"])
            writer.writeheader()
            writer.writerows(pairs(n, seed))
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs(21, 3)))
    (tmp_path / "task.toml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def their_probabilities(exported: Path, rows: Sequence[dict[str, str]]) -> torch.Tensor:
    model = transformers.AutoModelForSequenceClassification.from_pretrained(exported).eval()
    assert type(model).__name__ == "BertForSequenceClassification"
    assert model.config.id2label == {0: "animal", 1: "sharp", 2: "tool"}
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
    firsts, seconds = ([row[key] for row in rows] for key in ("first", "second"))
    with torch.no_grad():
        return model(**tokenizer(firsts, seconds, padding=True, return_tensors="pt")).logits.softmax(-1)


def test_from_a_csv_to_an_exported_model(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run_command("finetune", "task.toml", "--from", "bert", "--export", "exported") == 0
    output = capfd.readouterr()
    assert "sentence.classifier.weight [3, 32]" in output.err + output.out  # drawn; the pooler was taken over
    assert "sentence.pooler.weight" not in output.err + output.out

    results = json.loads((folder / "runs/things/task.json").read_text())
    test = results["sets"]["test"]
    assert results["labels"] == ["animal", "sharp", "tool"]
    assert test["examples"] == 21
    shares = Counter(row["kind"] for row in pairs(21, 3))
    assert test["metrics"]["accuracy"] > max(shares.values()) / 21 + 0.1, "better than the largest class"

    metrics = [row for row in read_lines(folder / "runs/things/metrics.jsonl") if "evaluation" in row]
    by_step = {row["step"]: row["evaluation"]["validation"]["metrics"]["accuracy"] for row in metrics}
    best = max(by_step, key=lambda step: (by_step[step], -step))
    assert results["checkpoint"] == f"step-{best:08d}"
    assert len(by_step) >= 6
    checkpoints = [path.name for path in list_checkpoints(folder / "runs/things/checkpoints")]
    assert checkpoints == sorted({results["checkpoint"], f"step-{max(by_step):08d}"})

    rows = pairs(21, 3)
    predictions = read_lines(folder / "runs/things/predictions/test.jsonl")
    probabilities = their_probabilities(folder / "exported", rows)
    actual = torch.tensor([list(row["probabilities"].values()) for row in predictions])
    torch.testing.assert_close(actual, probabilities, rtol=0, atol=2e-6)
    hits = [row["label"] == truth["kind"] for row, truth in zip(predictions, rows, strict=True)]
    assert sum(hits) / len(hits) == pytest.approx(test["metrics"]["accuracy"])

    # Once more: nothing is left to train. Labels of a file without any: the same predictions.
    assert run_command("finetune", "task.toml", "--from", "bert") == 0
    (folder / "new.jsonl").write_text(
        "".join(json.dumps({key: row[key] for key in ("first", "second")}) + "\n" for row in rows)
    )
    assert run_command("predict", "runs/things", "new.jsonl", "--out", "new.predictions.jsonl") == 0
    assert read_lines(folder / "new.predictions.jsonl") == predictions


def test_training_starts_from_a_head_for_the_same_labels(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """From a folder of transformers and from a run. For as many other labels the head is drawn anew."""
    labels = {0: "animal", 1: "sharp", 2: "tool"}
    base = transformers.BertForPreTraining.from_pretrained("bert")
    torch.manual_seed(1)
    classifier = transformers.BertForSequenceClassification(
        transformers.BertConfig.from_dict(base.config.to_dict() | {"id2label": labels, "num_labels": 3})
    )
    classifier.save_pretrained("classifier")
    transformers.AutoTokenizer.from_pretrained("bert").save_pretrained("classifier")
    no_steps = ["optimizer.lr=1e-30", "task.epochs=1", "task.test=", "--export"]

    assert run_command("finetune", "task.toml", "--from", "classifier", "name=same", *no_steps, "same") == 0
    assert run_command("finetune", "task.toml", "--from", "runs/same", "name=again", *no_steps, "again") == 0
    for exported in ("same", "again"):
        same = transformers.BertForSequenceClassification.from_pretrained(exported)
        assert torch.equal(same.classifier.weight, classifier.classifier.weight)

    for name in ("train", "validation"):
        text = (folder / f"{name}.csv").read_text()
        (folder / f"{name}.csv").write_text(re.sub("tool(?=[\r\n])", "zeug", text))
    assert run_command("finetune", "task.toml", "--from", "classifier", "name=other", *no_steps, "other") == 0
    other = transformers.BertForSequenceClassification.from_pretrained("other")
    assert not torch.equal(other.classifier.weight, classifier.classifier.weight)
    assert torch.equal(other.bert.pooler.dense.weight, classifier.bert.pooler.dense.weight)
    assert other.config.id2label == {0: "animal", 1: "sharp", 2: "zeug"}, "not those of the folder it began from"


def test_a_rare_label_is_predicted_more_often_if_labels_are_balanced(folder: Path) -> None:
    """And the weights are stored with the run, but not with the exported model."""
    rows = [row | {"kind": "common" if number % 12 else "rare"} for number, row in enumerate(pairs(60, 1))]
    write_lines(folder / "train.jsonl", rows)
    files = ["task.train=train.jsonl", "task.validation=train.jsonl", "task.test="]
    command, shares = ["finetune", "task.toml", "--from", "bert", *files, "evaluate.every=30"], {}
    balanced = ["task.class_weights=balanced", "--export", "out"]
    for name, words in (("plain", []), ("balanced", balanced)):
        assert run_command(*command, f"name={name}", *words) == 0
        predicted = read_lines(folder / f"runs/{name}/predictions/validation.jsonl")
        shares[name] = sum(row["probabilities"]["rare"] for row in predicted) / len(predicted)
    assert shares["plain"] < 0.25 < 0.4 < shares["balanced"]
    saved = load_config(folder / "runs/balanced/config.toml")
    assert saved.task is not None
    assert saved.task.class_weights == pytest.approx([60 / (2 * 55), 60 / (2 * 5)])
    transformers.AutoModelForSequenceClassification.from_pretrained("out")


@pytest.mark.parametrize(("words", "message"), [
    (["task.train=nowhere.csv"], "task.train = .*nowhere.csv: there is no such file"),
    (["task.text=words"], "has no column 'words', which task.text names; there are: first, second, kind"),
    (['task.labels=["animal","tool"]'], "label 'sharp' is none of the task's"),
    (["data.sequence_length=8"], "more than data.sequence_length = 8: choose"),
    (["task.metric=bleu"], "form = 'classification' has accuracy, f1, f1_macro, matthews"),
    (["lr_schedule={name='linear', warmup_steps=9999}"], "warmup_steps = 9999 is longer than the run, train.steps = "),
    (["~task"], "has no .task.: name the training file"),
    (["task.test=bad.jsonl"], "bad.jsonl, row 2: label 'plant' is none of the task's"),
])  # fmt: skip
def test_a_wrong_task_is_refused_and_leaves_no_run(
    folder: Path, capfd: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    write_lines(folder / "bad.jsonl", [pairs(1, 3)[0] | {"kind": kind} for kind in ("tool", "plant")])
    assert run_command("finetune", "task.toml", "--from", "bert", *words) == 2
    assert re.search(message, capfd.readouterr().err)
    assert not (folder / "runs/things/config.toml").exists()


def test_corpora_of_a_base_are_replaced(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """By the task's files, with a note; the run's stored config is no base."""
    corpora = 'validation = { web = "web" }\nmixture = { web = { path = "web", weight = 1.0 } }\n'
    (folder / "base.toml").write_text(f"[data]\n{corpora}sequence_length = 32\n")
    (folder / "further.toml").write_text(f'extends = "base.toml"\n{CONFIG}')
    assert run_command("finetune", "further.toml", "--from", "bert", "task.epochs=0.1") == 0
    replaced = "base.toml: data.validation, data.mixture: replaced by the task's files"
    output = "".join(capfd.readouterr())
    assert output.count("replaced by the task's files") == 1
    assert replaced in output
    for stored in ("runs/things/finetune.toml", "runs/things"):
        assert run_command("finetune", stored) == 0
        assert "replaced by" not in "".join(capfd.readouterr())


def test_a_config_without_a_model_needs_one_to_start_from(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run_command("finetune", "task.toml") == 2
    assert "task.toml: has no [model]: start from one, --from MODEL" in capfd.readouterr().err


TINY = "model={d_model=16, n_layers=2, attention={n_heads=2}, ffn={d_ff=32}"
FORMS = {
    "classification": ([*"ab"], {"task.lm_weight": "0.5"}, "decoder",
                       {"row", "label", "probability", "probabilities"}),
    "multilabel": ([["a", "b"], []], {}, "decoder", {"row", "labels", "probabilities"}),
    "regression": ([0.5, -2], {}, "encoder", {"row", "value"}),
    "tagging": ([["B-A", "I-A", "O"], ["O", "O", "O"]], {}, "encoder", {"row", "labels"}),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_every_form_trains_from_nothing_and_predicts(folder: Path, form: str) -> None:
    labels, more, family, fields = FORMS[form]
    rows = [{"first": "the old cat", "kind": labels[i % 2]} for i in range(8)]
    for name in ("train", "validation"):
        write_lines(folder / f"{name}.jsonl", rows)
    words = {
        "task.form": form, "task.train": "train.jsonl", "task.validation": "validation.jsonl",
        "task.text_pair": "", "task.test": "", "task.epochs": "1", "data.tokenizer": "bert", **more,
    }  # fmt: skip
    model = f'{TINY}, family="{family}"}}'
    assert run_command("finetune", "task.toml", model, *(f"{key}={value}" for key, value in words.items())) == 0
    predictions = read_lines(folder / "runs/things/predictions/validation.jsonl")
    assert [row["row"] for row in predictions] == list(range(1, 9))
    assert all(row.keys() == fields for row in predictions)
    assert form != "tagging" or all(len(row["labels"]) == 3 for row in predictions)
    results = json.loads((folder / "runs/things/task.json").read_text())["sets"]["validation"]
    assert results["examples"] == 8
    if form == "classification":
        first = json.loads((folder / "runs/things/metrics.jsonl").read_text().splitlines()[0])
        assert first["terms"].keys() == {"sentence", "causal"}


TEMPLATE = (
    "{% for message in messages %}{{ '[CLS]' if message['role'] == 'user' else '[SEP]' }}{{ message['content'] }}"
    "{{ '[MASK]' }}{% endfor %}{% if add_generation_prompt %}{{ '[SEP]' }}{% endif %}"
)


def test_conversations_train_their_answers_alone(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    rows = [
        {"messages": [{"role": "user", "content": f"the {word}"}, {"role": "assistant", "content": f"a {word}"}]}
        for word in ANIMALS + TOOLS
    ]
    for name in ("train", "validation"):
        write_lines(folder / f"{name}.jsonl", rows)
    words = {
        "task.form": "chat", "task.train": "train.jsonl", "task.validation": "validation.jsonl", "task.test": "",
        "task.text_pair": "", "data.tokenizer": "bert", "task.epochs": "40", "optimizer.lr": "1e-2",
        "task.chat_template": "chat.jinja",
    }  # fmt: skip
    command = [
        "finetune", "task.toml", f'{TINY}, family="decoder"}}', *(f"{k}={v}" for k, v in words.items()),
    ]  # fmt: skip
    (folder / "chat.jinja").write_text(TEMPLATE)
    assert run_command(*command) == 0
    validation = json.loads((folder / "runs/things/task.json").read_text())["sets"]["validation"]
    assert validation["examples"] == 12
    assert validation["loss"] < 2.5, "less than ln 24, of which nothing was learnt"
    (corpus,) = {path.parent for path in folder.glob("runs/things/task/*/manifest.json")}
    capfd.readouterr()
    assert run_command("data", "show", str(corpus), "--sample", "0") == 0
    assert "[CLS]the cat[MASK][SEP]⟦a cat[MASK]⟧" in capfd.readouterr().out


def test_several_seeds_are_summed_up(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["task.epochs=1", "task.test="]
    assert run_command("finetune", "task.toml", "--from", "bert", "--seeds", "2", *words) == 0
    losses = [
        json.loads((folder / f"runs/things-seed-{seed}/task.json").read_text())["sets"]["validation"]["loss"]
        for seed in (0, 1)
    ]
    assert losses[0] != losses[1]
    mean, deviation = sum(losses) / 2, abs(losses[0] - losses[1]) / 2**0.5
    output = capfd.readouterr().out
    assert f"{mean:.4f} ± {deviation:.4f}" in output
    (line,) = (line for line in output.splitlines() if line.startswith("side by side: "))
    assert run_command(*line.removeprefix("side by side: megatfm ").split()) == 0
    assert {f"{loss:.4f}" for loss in losses} <= set(capfd.readouterr().out.split())
    assert run_command("finetune", "task.toml", "--from", "bert", "--seeds", "2", "train.seed=3") == 2
    assert "each run has its own train.seed: leave that out" in capfd.readouterr().err
    (folder / "task.toml").write_text('run_dir = "one"' + CONFIG)
    assert run_command("finetune", "task.toml", "--from", "bert", "--seeds", "2", *words) == 2
    assert "each run has its own run_dir: leave that out" in capfd.readouterr().err


def test_another_task_in_a_run_s_folder_is_refused_and_leaves_the_run(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Config, results and checkpoints stay; the first command still has nothing left to do."""
    words = ["finetune", "task.toml", "--from", "bert", "task.epochs=1"]
    assert run_command(*words) == 0
    contents = {
        name: (folder / "runs/things" / name).read_bytes() for name in ("config.toml", "finetune.toml", "task.json")
    }
    checkpoints = [path.name for path in list_checkpoints(folder / "runs/things/checkpoints")]
    lines = (folder / "train.csv").read_text().splitlines(keepends=True)
    (folder / "fewer.csv").write_text("".join(lines[:100]))
    others = (["task.train=fewer.csv"], ['task.labels=["tool","sharp","animal"]'], ["task.text_pair="])
    for other in others:
        assert run_command(*words, *other) == 2, other
        assert "runs/things" in capfd.readouterr().err
        for name, content in contents.items():
            assert (folder / "runs/things" / name).read_bytes() == content, (other, name)
    assert [path.name for path in list_checkpoints(folder / "runs/things/checkpoints")] == checkpoints
    assert run_command(*words) == 0


def test_predictions_never_replace_the_rows(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run_command("finetune", "task.toml", "--from", "bert", "task.epochs=0.1") == 0
    rows = (folder / "test.jsonl").read_bytes()
    assert run_command("predict", "runs/things", "test.jsonl", "--out", "./test.jsonl") == 2
    assert "the predictions would overwrite the rows: give another file" in capfd.readouterr().err
    assert (folder / "test.jsonl").read_bytes() == rows


def predict_rows(run: Path, file: Path, out: Path) -> bool:
    """Predict the labels of a file; returns whether this rank wrote them."""
    return predict_file(run, str(file), str(out)) is not None


def test_a_stopped_run_equals_an_undisturbed_one(
    workers: Workers, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped within an epoch, it goes on on one process to the same bits, on two to the same figures; three processes
    predict the same of an odd number of rows."""
    lines = (folder / "train.csv").read_text().splitlines(keepends=True)
    (folder / "train.csv").write_text("".join(lines[:121]))  # two epochs of ten steps
    words = ["finetune", "task.toml", "--from", "bert", "task.epochs=2", "train.precision=fp64", "train.micro_batch=2"]
    assert run_command(*words, "name=whole") == 0
    genuine, begun = NativeEngine.forward_backward, 0

    def stop_at_step_5(*args: Any, **options: Any) -> Any:
        nonlocal begun
        begun += 1
        if begun == 5:
            signal.raise_signal(signal.SIGTERM)
        return genuine(*args, **options)

    for name in ("one", "two"):
        begun = 0
        monkeypatch.setattr(NativeEngine, "forward_backward", stop_at_step_5)
        assert run_command(*words, f"name={name}") == EXIT_REQUEUE
        assert not (folder / f"runs/{name}/task.json").exists()
        monkeypatch.setattr(NativeEngine, "forward_backward", genuine)
    config = load_config(folder / "runs/two/finetune.toml", [f"run_dir={folder / 'runs/two'}"])
    assert workers.run(run_training, 2, config) == [0, 0]
    for name in ("one", "two"):
        assert run_command(*words, f"name={name}") == 0
    unstopped, one, two = (folder / f"runs/{name}" for name in ("whole", "one", "two"))
    assert training_curve(one) == training_curve(unstopped)
    losses = [[line["loss"] for line in training_curve(run)] for run in (two, unstopped)]
    assert len(losses[0]) > 10
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)
    for run in (one, two):
        assert (run / "predictions/test.jsonl").read_bytes() == (unstopped / "predictions/test.jsonl").read_bytes()
    assert workers.run(predict_rows, 3, two, folder / "test.jsonl", folder / "three.jsonl") == [True, False, False]
    assert (folder / "three.jsonl").read_bytes() == (two / "predictions/test.jsonl").read_bytes()
