"""megatfm as a model of lm-evaluation-harness: against the harness's own model, and a computation here."""

import importlib
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from megatfm.convert.load import load_generation_fields, load_hf_model
from megatfm.errors import MegatfmError, UsageError
from megatfm.inference.batched_generation import TextRequest, generate_texts
from megatfm.inference.evaluation_tasks import HarnessTasks, evaluate_questions, evaluate_task_files
from megatfm.inference.harness import HarnessRequests, harness_model, run_harness
from megatfm.inference.likelihood import Continuation, encode_continuation, score
from megatfm.inference.text import TextModel, open_text_model
from megatfm.tasks.questions import open_evaluation_task
from tests.support.hf_folders import perturb_parameters, write_gpt2
from tests.support.small_runs import SMALL_DECODER, random_model, write_trained_run

ROWS = [
    {"ask": f"textwrap {number} {'import ' * (number % 4)}", "a": "größer", "b": "if", "c": "東京", "key": number % 3}
    for number in range(11)
]
HARNESS_TASK = """
task: own_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "Question: {{{{ask}}}}\\nAnswer:"
doc_to_target: key
doc_to_choice: "{{{{[a, b, c]}}}}"
metric_list:
  - metric: acc
  - metric: acc_norm
"""
OWN_TASK = """
data = "rows.jsonl"
prompt = "Question: {{ ask }}\\nAnswer:"
choices = ["{{ a }}", "{{ b }}", "{{ c }}"]
answer = "key"
"""


@pytest.fixture
def loaded(tmp_path: Path, tokenizer_model: bytes) -> TextModel:
    """A model of 24 positions at most."""
    config = SMALL_DECODER.with_changes({"position": {"name": "learned", "max_positions": 24}})
    return open_text_model(write_trained_run(tmp_path / "run", tokenizer_model, random_model(config, torch.float32)))


@pytest.fixture
def unlimited(tmp_path: Path, tokenizer_model: bytes) -> TextModel:
    return open_text_model(
        write_trained_run(tmp_path / "other", tokenizer_model, random_model(SMALL_DECODER, torch.float32))
    )


class FakeLM:
    """The base class of models in the harness, as far as it is used."""

    def __init__(self) -> None:
        self._rank, self._world_size = 0, 1


def instances(requests: Sequence[Any]) -> list[SimpleNamespace]:
    return [SimpleNamespace(args=request) for request in requests]


@pytest.fixture
def fake_harness(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("lm_eval", "lm_eval.api", "lm_eval.api.model"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["lm_eval.api.model"].LM = FakeLM  # type: ignore[attr-defined]


def test_the_interface_of_the_harness(loaded: TextModel, fake_harness: None, caplog: pytest.LogCaptureFixture) -> None:
    model = harness_model(loaded, batch_size=3)
    assert isinstance(model, FakeLM)
    assert model.tokenizer_name == loaded.tokenizer.hash

    pairs = [("import", " textwrap"), ("", "größer"), ("import " * 30, "東京")]
    results = model.loglikelihood(instances(pairs))
    for pair, (log_probability, is_greedy) in zip(pairs[:2], results, strict=False):
        (expected,) = score(loaded.model, [encode_continuation(loaded, *pair)])
        assert log_probability == pytest.approx(expected.log_probability, rel=1e-6)
        assert is_greedy == expected.is_greedy
    assert "1 of 3 contexts are cut at their start to 24 tokens" in caplog.text

    prompts = [("import", {"until": "\n", "max_gen_toks": 6}), ("def " * 30, {"until": [], "max_gen_toks": 4})]
    texts = model.generate_until(instances(prompts))
    assert texts[0] == generate_texts(loaded, [TextRequest("import", 6, ("\n",))])[0]
    with_empty = [(prompt, options | {"until": ["", *options["until"]]}) for prompt, options in prompts]
    assert texts == model.generate_until(instances(with_empty)), "it ends none, as in the harness's own models"
    assert "1 of 2 prompts are cut at their start, for positions end at 24" in caplog.text
    with pytest.raises(UsageError, match="generation_kwargs: num_beams is none of"):
        model.generate_until(instances([("a", {"num_beams": 3})]))
    with pytest.raises(UsageError, match=r"an answer of \d+ tokens, but model\.position\.max_positions = 24"):
        model.loglikelihood(instances([("a", " import" * 30)]))
    with pytest.raises(UsageError, match="batch = 0: choose 1 or more prompts at a time"):
        generate_texts(loaded, [], batch_size=0)


def test_a_text_is_predicted_once_in_windows(loaded: TextModel) -> None:
    requests, tokenizer = HarnessRequests(loaded, 4), loaded.tokenizer
    texts = ["", "import", "größer 東京 textwrap import " * 9]
    results = requests.loglikelihood_rolling(texts)
    assert results[0] == 0
    for text, result in zip(texts, results, strict=True):
        tokens, total, done = [tokenizer.bos, *tokenizer.encode(text).tolist()], 0.0, 1
        while done < len(tokens):  # 24 at a time, the last with as much before it as there is room for
            end = min(done + 24, len(tokens))
            first = max(end - 25, 0)
            with torch.no_grad():
                logs = loaded.model(torch.tensor([tokens[first : end - 1]])).logits[0].double().log_softmax(-1)
            total += sum(float(logs[place - 1 - first, tokens[place]]) for place in range(done, end))
            done = end
        assert result == pytest.approx(total, rel=1e-6)


def test_windows_are_the_harness_s(loaded: TextModel) -> None:
    utils = pytest.importorskip("lm_eval.utils")
    requests, tokenizer = HarnessRequests(loaded, 4), loaded.tokenizer
    for n in (1, 5, 9):
        text = "größer 東京 textwrap " * n
        expected = utils.get_rolling_token_windows(tokenizer.encode(text).tolist(), tokenizer.bos, 24, 1)
        windows = [(row.tokens, list(row.targets)) for row in requests._split_windows(text)]
        assert windows == [(inputs, targets) for inputs, targets in expected]


def test_without_the_package(loaded: TextModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", None)
    with pytest.raises(MegatfmError, match=r"pip install megatfm\[harness\]"):
        harness_model(loaded)


@pytest.mark.slow
def test_a_task_of_the_harness_gives_what_the_same_task_gives_here(
    unlimited: TextModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lm_eval")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS))
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks/own.yaml").write_text(HARNESS_TASK.format(rows=rows))
    (tmp_path / "own.toml").write_text(OWN_TASK)
    results = run_harness(unlimited, ["own_choice"], include_path=str(tmp_path / "tasks"))["own_choice"]
    task = evaluate_questions(unlimited, open_evaluation_task(tmp_path / "own.toml"))
    assert results["acc"] == pytest.approx(task.summary["metrics"]["accuracy"])
    by_characters = [
        max(range(3), key=lambda place: record["log_probabilities"][place] / len(row["abc"[place]])) == row["key"]
        for record, row in zip(task.records, ROWS, strict=True)
    ]
    assert results["acc_norm"] == pytest.approx(sum(by_characters) / len(by_characters))
    assert results["sample_len"] == len(ROWS)
    assert 0 < results["acc"] < 1
    with pytest.raises(UsageError, match="--harness nowhere: the harness has no task of this name"):
        run_harness(unlimited, ["nowhere"], include_path=str(tmp_path / "tasks"))
    assert math.isfinite(task.summary["metrics"]["bits_per_byte"])


@pytest.mark.slow
def test_likelihoods_and_texts_are_those_of_the_harness_s_model(tmp_path: Path) -> None:
    """Scores of a GPT-2 that transformers wrote, with its tokenizer, by the harness's class for it."""
    pytest.importorskip("accelerate")
    harness = pytest.importorskip("lm_eval.models.huggingface")
    folder = write_gpt2(tmp_path / "gpt2")
    reference = harness.HFLM(pretrained=str(folder), device="cpu", batch_size=2, dtype="float32")
    model = harness_model(TextModel(load_hf_model(folder), **load_generation_fields(folder)), batch_size=3)
    texts = [row["ask"] for row in ROWS]
    pairs = [(text, answer) for text in texts[:4] for answer in (" größer", "if 東京", " the end")]
    kinds = {
        "loglikelihood": instances([*pairs, ("", "import"), ("trailing ", "space")]),
        "loglikelihood_rolling": instances([(text * 5,) for text in texts]),
        "generate_until": instances([(text, {"until": ["t"], "max_gen_toks": 5}) for text in texts]),
    }
    for kind, requests in kinds.items():
        actual, expected = getattr(model, kind)(requests), getattr(reference, kind)(requests)
        if kind == "generate_until":
            assert actual == expected
            continue
        torch.testing.assert_close(torch.tensor(actual), torch.tensor(expected), rtol=1e-4, atol=1e-4)


CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONVERSATION = [
    {"role": "user", "content": "import größer <s>"},
    {"role": "assistant", "content": " the end "},
    {"role": "user", "content": "東京"},
]


def write_chat_model(folder: Path) -> Path:
    """Write a GPT-2 whose tokenizer has ChatML's marks and template, and another template by name."""
    write_gpt2(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(folder)
    config = transformers.GPT2Config(
        vocab_size=len(tokenizer), n_positions=512, n_embd=24, n_layer=2, n_head=3, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    perturb_parameters(transformers.GPT2LMHeadModel(config)).save_pretrained(folder)
    return folder


def open_chat_model(folder: Path) -> TextModel:
    return TextModel(load_hf_model(folder), **load_generation_fields(folder))


def test_a_chat_template_renders_as_transformers_does(tmp_path: Path, fake_harness: None) -> None:
    """Marks of the template are special tokens; a user's text that spells one stays text in other prompts."""
    loaded = open_chat_model(write_chat_model(tmp_path / "chat"))
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path / "chat")
    model = harness_model(loaded)
    assert model.chat_template(False) is None
    assert model.chat_template(True) == CHATML
    for messages, asks in ((CONVERSATION, True), (CONVERSATION[:2], False), (CONVERSATION[:1], True)):
        text = model.apply_chat_template(messages, add_generation_prompt=asks)
        options = {"add_generation_prompt": asks, "continue_final_message": not asks}
        assert text == reference.apply_chat_template(messages, tokenize=False, **options)
        ids = reference(text, add_special_tokens=False)["input_ids"]
        n_context = len(reference(text.rstrip(), add_special_tokens=False)["input_ids"])
        joined = reference(f"{text} größer", add_special_tokens=False)["input_ids"]
        ((log_probability, _),) = model.loglikelihood(instances([(text, " größer")]))
        (expected,) = score(loaded.model, [Continuation(joined[:n_context], joined[n_context:])])
        assert log_probability == pytest.approx(expected.log_probability, rel=1e-5)
        (generated,) = model.generate_until(instances([(text, {"until": ["t"], "max_gen_toks": 5})]))
        assert generated == generate_texts(loaded, [TextRequest(ids, 5, ("t",))])[0]
    spelled = [("<|im_start|>user", " größer")]
    (expected,) = score(loaded.model, [encode_continuation(loaded, *spelled[0])])
    assert model.loglikelihood(instances(spelled))[0][0] == pytest.approx(expected.log_probability)


def test_a_model_without_a_chat_template_is_refused(loaded: TextModel, tmp_path: Path, fake_harness: None) -> None:
    with pytest.raises(UsageError, match=r"a chat template needs a decoder with a tokenizer.json"):
        harness_model(loaded).chat_template(True)
    with pytest.raises(UsageError, match=r"the tokenizer has no chat template \(chat_template.jinja"):
        harness_model(open_chat_model(write_gpt2(tmp_path / "plain"))).chat_template(True)


def test_data_that_cannot_be_downloaded_are_one_line(
    loaded: TextModel, fake_harness: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def simple_evaluate(**_: object) -> None:
        raise ConnectionError("Couldn't reach 'cais/mmlu' on the Hub\nRetried 5 times")

    tasks = ModuleType("lm_eval.tasks")
    tasks.TaskManager = lambda **_: SimpleNamespace(match_tasks=list)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", tasks)
    sys.modules["lm_eval"].simple_evaluate = simple_evaluate  # type: ignore[attr-defined]
    with pytest.raises(MegatfmError, match=r"^--harness mmlu: .* reach 'cais/mmlu' on the Hub: .* HF_HOME names$"):
        run_harness(loaded, ["mmlu"])


def test_a_task_file_with_the_name_of_a_harness_task_is_refused() -> None:
    """One result would replace the other."""
    with pytest.raises(UsageError, match=r"--harness piqa: a task file has this name.* --task NAME=my/piqa\.toml"):
        evaluate_task_files(lambda _: pytest.fail("opened"), {"piqa": "my/piqa.toml"}, HarnessTasks(["arc", "piqa"]))


@pytest.mark.slow
@pytest.mark.parametrize("shots", [0, 2])
def test_chat_tasks_equal_the_harness_s_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shots: int) -> None:
    """Choices and texts of two offline tasks, with solved examples as earlier turns: prompts and results alike."""
    pytest.importorskip("accelerate")
    harness = pytest.importorskip("lm_eval.models.huggingface")
    lm_eval = pytest.importorskip("lm_eval")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = write_chat_model(tmp_path / "chat")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({**row, "ask": row["ask"][:9]}) + "\n" for row in ROWS))
    (tmp_path / "tasks").mkdir()
    choice = HARNESS_TASK.format(rows=tmp_path / "rows.jsonl")
    generation = choice.replace("own_choice", "own_text").replace("multiple_choice", "generate_until")
    generation = generation.partition("doc_to_choice")[0].replace("doc_to_target: key", 'doc_to_target: "{{a}}"')
    generation += "gen_prefix: the\ngeneration_kwargs: {until: [t], max_gen_toks: 4}\n"
    generation += "metric_list: [{metric: exact_match}]\n"
    (tmp_path / "tasks/choice.yaml").write_text(choice)
    (tmp_path / "tasks/text.yaml").write_text(generation)
    manager = importlib.import_module("lm_eval.tasks").TaskManager(include_path=str(tmp_path / "tasks"))

    def evaluate(model: Any) -> Any:
        return lm_eval.simple_evaluate(
            model=model, tasks=["own_choice", "own_text"], num_fewshot=shots, task_manager=manager,
            bootstrap_iters=0, apply_chat_template=True, fewshot_as_multiturn=True, log_samples=True,
        )  # fmt: skip

    actual_results = evaluate(harness_model(open_chat_model(folder), batch_size=3))
    hf_results = evaluate(harness.HFLM(pretrained=str(folder), device="cpu", batch_size=2, dtype="float32"))
    assert actual_results["config"] is not None
    for task in ("own_choice", "own_text"):
        for sample, expected in zip(actual_results["samples"][task], hf_results["samples"][task], strict=True):
            assert sample["arguments"] == expected["arguments"]
            assert "<|im_start|>" in str(sample["arguments"])
            if task == "own_text":
                assert sample["filtered_resps"] == expected["filtered_resps"]
                continue
            actual, reference = (
                torch.tensor([response[0] for response in result["filtered_resps"]]) for result in (sample, expected)
            )
            torch.testing.assert_close(actual, reference, rtol=1e-4, atol=1e-4)
    results = run_harness(
        open_chat_model(folder), ["own_choice"], include_path=str(tmp_path / "tasks"), shots=shots,
        chat_template=True,
    )  # fmt: skip
    assert results["own_choice"]["acc"] == pytest.approx(hf_results["results"]["own_choice"]["acc,none"])
