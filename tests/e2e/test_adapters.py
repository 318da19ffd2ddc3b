"""Adapters and preferences by the commands of a user: train, evaluate, export, merge, and go on."""

import csv
import json
import math
import random
import re
from pathlib import Path

import pytest
import torch
import transformers

import megatfm
from megatfm.checkpoint import find_checkpoint
from tests.support.files import read_lines, write_lines
from tests.support.finetuning_tasks import (
    ANIMALS,
    ANSWERS,
    CHATML,
    OTHER,
    TOOLS,
    conversations,
    save_bert,
    save_chat_llama,
    save_word_tokenizer,
)
from tests.support.forked_commands import run_command

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

TOPICS = """
name = "topics"
task = { train = "train.csv", validation = "validation.csv", epochs = 3 }
model = { lora = { rank = 4, alpha = 8 } }
data = { sequence_length = 32 }
optimizer = { name = "adamw", lr = 1e-2 }
train = { global_batch = 4, micro_batch = 4, precision = "fp32" }
log = { sinks = [] }
"""
PAIRS = (
    TOPICS.replace("train.csv", "pairs.jsonl")
    .replace("validation.csv", "pairs.jsonl")
    .replace("task = {", 'task = { form = "preference",')
)
WORDS = [*ANIMALS, *TOOLS, *OTHER]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "topics.toml").write_text(TOPICS)
    (tmp_path / "pairs.toml").write_text(PAIRS)
    (tmp_path / "plain.toml").write_text(re.sub(r"model = .*\n", "", PAIRS).replace(", epochs = 3", ""))
    return tmp_path


def save_llama(folder: Path) -> transformers.LlamaForCausalLM:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=save_word_tokenizer(folder, WORDS), hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=64, max_position_embeddings=64, pad_token_id=0, bos_token_id=2, eos_token_id=3,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(folder)
    return model


def write_topics(folder: Path) -> None:
    """Write train.csv and validation.csv: texts that end in an animal or a tool, as the label says."""
    draw = random.Random(1)
    for name, count in (("train", 96), ("validation", 24)):
        with open(folder / f"{name}.csv", "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["text", "label"])
            for _ in range(count):
                word = draw.choice(ANIMALS + TOOLS)
                text = " ".join([*draw.sample(OTHER, draw.randint(1, 4)), word])
                writer.writerow([text, "animal" if word in ANIMALS else "tool"])


def write_preferences(folder: Path) -> None:
    """Write pairs.jsonl: answers that name an animal are preferred to those that name a tool."""
    draw = random.Random(2)
    pairs = [(f"a {draw.choice(ANIMALS)}", f"a {draw.choice(TOOLS)}", f"the {draw.choice(OTHER)}") for _ in range(24)]
    rows = [{"prompt": prompt, "chosen": chosen, "rejected": rejected} for chosen, rejected, prompt in pairs]
    write_lines(folder / "pairs.jsonl", rows)


def test_adapters_of_an_encoder_and_its_head(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    save_bert(folder / "bert", WORDS)
    write_topics(folder)
    assert run_command("finetune", "topics.toml", "--from", "bert", "--export", "merged") == 0
    rows = read_lines(folder / "runs/topics/predictions/validation.jsonl")
    expected = torch.tensor([list(row["probabilities"].values()) for row in rows])
    texts = [line.rpartition(",")[0] for line in (folder / "validation.csv").read_text().splitlines()[1:]]
    tokens = transformers.AutoTokenizer.from_pretrained(folder / "merged")(texts, padding=True, return_tensors="pt")
    merged = transformers.AutoModelForSequenceClassification.from_pretrained(folder / "merged").eval()
    with torch.no_grad():
        torch.testing.assert_close(merged(**tokens).logits.softmax(-1), expected, rtol=0, atol=2e-6)

    # What PEFT makes of the adapter and the base: head and pooler are in it.
    assert run_command("convert", "runs/topics", "adapter", "--to", "peft") == 0
    config = json.loads((folder / "adapter/adapter_config.json").read_text())
    assert (config["task_type"], config["r"], config["lora_alpha"]) == ("SEQ_CLS", 4, 8.0)
    assert (folder / "adapter/adapter_model.safetensors").stat().st_size < 60_000
    import peft

    assert config["base_model_name_or_path"] == str(folder / "bert"), "so that PEFT opens both"
    adapted = peft.AutoPeftModelForSequenceClassification.from_pretrained(folder / "adapter", num_labels=2).eval()
    with torch.no_grad():
        torch.testing.assert_close(adapted(**tokens).logits.softmax(-1), expected, rtol=0, atol=2e-6)
    assert run_command("convert", "runs/topics", "again", "--to", "peft") == 0
    assert run_command("convert", "bert", "none", "--to", "peft") == 2
    assert "in the Hugging Face format" in capfd.readouterr().err
    save_bert(folder / "bert", WORDS, num_hidden_layers=1)
    assert run_command("convert", "runs/topics", "later", "--to", "peft") == 0
    base = json.loads((folder / "later/adapter_config.json").read_text())["base_model_name_or_path"]
    assert find_checkpoint(base) == Path(base), "our copy of the base, since another model has its place"


def test_preferences_from_pairs_to_a_merged_model(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    save_llama(folder / "llama")
    write_preferences(folder)
    assert run_command("finetune", "pairs.toml", "--from", "llama", "train.seed=3") == 0
    curve = read_lines(folder / "runs/topics/metrics.jsonl")
    assert curve[0]["loss"] == pytest.approx(math.log(2), abs=1e-6), "at the start the model is the reference"
    validation = json.loads((folder / "runs/topics/task.json").read_text())["sets"]["validation"]
    assert validation["metrics"]["reward_accuracy"] > 0.7
    assert validation["metrics"]["reward_margin"] > 0
    assert validation["loss"] < math.log(2)

    # The adapter as a start: the same model without training, whose reference it is then itself.
    assert run_command("convert", "runs/topics", "plain", "--to", "megatfm") == 0
    assert run_command("finetune", "plain.toml", "--from", "plain", "name=next", "train.steps=1") == 0
    assert read_lines(folder / "runs/next/metrics.jsonl")[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert run_command("finetune", "pairs.toml", "name=alone", "data.tokenizer=llama", 'model={family="decoder"}') == 2
    capfd.readouterr()
    assert run_command("finetune", "pairs.toml", "--from", "llama", "name=short", "data.sequence_length=5") == 2
    assert "pairs are not cut" in capfd.readouterr().err


def test_a_peft_adapter_is_trained_on(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = save_llama(folder / "llama")
    write_preferences(folder)
    import peft

    options = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(model, options)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.3)
    adapted.save_pretrained(folder / "theirs")
    assert run_command("convert", "theirs", "ours", "--to", "megatfm") == 2
    assert "--base" in capfd.readouterr().err
    assert run_command("convert", "theirs", "ours", "--to", "megatfm", "--base", "llama") == 0
    assert run_command("finetune", "plain.toml", "--from", "ours", "name=on", "train.steps=1") == 0
    assert read_lines(folder / "runs/on/metrics.jsonl")[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert run_command("convert", "runs/on", "back", "--to", "peft") == 0
    config = json.loads((folder / "back/adapter_config.json").read_text())
    assert (config["r"], config["target_modules"]) == (2, ["q_proj", "v_proj"])


CONFIG = """
name = "chat"
task = { form = "chat", train = "chats.jsonl", validation = "chats.jsonl", epochs = 30 }
data = { sequence_length = 16 }
optimizer = { name = "adamw", lr = 1e-2 }
train = { global_batch = 4, micro_batch = 4, precision = "fp32" }
log = { sinks = [] }
"""


@pytest.mark.parametrize("own_template", [True, False], ids=["the tokenizer's template", "a file"])
def test_answers_end_where_the_template_ends_them(
    own_template: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    save_chat_llama(tmp_path / "start", CHATML if own_template else None)
    write_lines(tmp_path / "chats.jsonl", conversations())
    (tmp_path / "chat.toml").write_text(CONFIG)
    (tmp_path / "own.jinja").write_text(CHATML)
    words = [] if own_template else ["task.chat_template=own.jinja"]
    assert run_command("finetune", "chat.toml", "--from", "start", "--export", "exported", *words) == 0

    options = ("--temperature", "0", "--max-tokens", "9")
    capfd.readouterr()
    assert run_command("generate", "runs/chat", "--chat", "--prompt", "oslo", *options) == 0
    prompt_line, answer = capfd.readouterr().out.splitlines()
    assert (prompt_line, answer.strip()) == ("oslo", "old lamp")
    assert "an answer ends at <|im_end|>, the chat template's end of a turn" in caplog.text
    opened = megatfm.load(tmp_path / "exported")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "exported")
    assert model.generation_config.eos_token_id == [3, 5]
    for city, answer in ANSWERS.items():
        assert opened.generate(city, chat=True, temperature=0, max_tokens=9).split() == answer.split()
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": city}], add_generation_prompt=True, return_tensors="pt"
        )
        ids = prompt["input_ids"]
        tokens = model.generate(**prompt, max_new_tokens=9, do_sample=False)[0, ids.shape[1] :]
        assert tokenizer.convert_ids_to_tokens(tokens.tolist()) == [*answer.split(), "<|im_end|>"]


def test_a_chat_with_a_model_without_a_template_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    save_chat_llama(tmp_path / "start", None)
    assert run_command("generate", str(tmp_path / "start"), "--chat", "--prompt", "oslo") == 2
    assert "the tokenizer has no chat template" in capfd.readouterr().err
    save_chat_llama(tmp_path / "other")
    assert run_command("generate", str(tmp_path / "other"), "--chat", "--prompt", "oslo <|im_end|>") == 2
    assert "the prompt spells the special token '<|im_end|>': take it out" in capfd.readouterr().err
    assert run_command("generate", str(tmp_path / "other"), "--chat", "--bos", "none", "--prompt", "oslo") == 2
    assert "leave bos out" in capfd.readouterr().err
