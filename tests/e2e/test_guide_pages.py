"""The pages on fine-tuning and on adapters, followed in one folder: their configs and commands, on small files."""

import csv
import random
import shlex
from pathlib import Path

import peft
import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from tests.support.documentation import FENCE, ROOT
from tests.support.forked_commands import last_of_each_key, megatfm
from tests.support.task_folders import (
    FILLERS,
    NAMES,
    TOWNS,
    WORDS_OF_QUESTIONS,
    questions,
    save_bert,
    write_lines,
)

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|> {{ m.role }} {{ m.content }} <|im_end|> {% endfor %}"
    "{% if add_generation_prompt %}<|im_start|> assistant {% endif %}"
)
ANSWER = "the Tiber"
LESS = {
    "topics.toml": "data.sequence_length=32 task.epochs=1",
    "squad.toml": "data.sequence_length=48 train.global_batch=8 task.epochs=1 task.train=train-v2.0.jsonl"
    " task.validation=dev-v2.0.jsonl",
    "chat.toml": "data.sequence_length=64 task.epochs=1",
    "lora.toml": "data.sequence_length=32 task.epochs=1",
    "preferences.toml": "data.sequence_length=64",
}
"""Shorter rows and fewer passes than the pages say."""


def save_llama(folder: Path) -> None:
    """A small Llama of random weights, whose tokenizer has a chat template."""
    special = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    words = [*special, *dict.fromkeys([*WORDS_OF_QUESTIONS, *ANSWER.split(), "user", "assistant"])]
    built = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    built.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    built.add_special_tokens(special)
    names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=built, **names)
    fast.chat_template = CHAT_TEMPLATE
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(words), hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=64, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    fast.save_pretrained(folder)
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
    adapted = peft.get_peft_model(transformers.LlamaForCausalLM.from_pretrained(folder), lora)
    adapted.save_pretrained(folder.parent / "peft-adapter")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The models and files that the pages name."""
    folder, draw = tmp_path_factory.mktemp("pages"), random.Random(0)
    save_bert(folder / "runs/bert", WORDS_OF_QUESTIONS)
    save_llama(folder / "llama")
    for split in ("train", "validation", "test"):
        words = [draw.choice(TOWNS + NAMES) for _ in range(24)]
        rows = [(" ".join([*draw.choices(FILLERS, k=9), word]), str(word in TOWNS)) for word in words]
        with open(folder / f"topics.{split}.csv", "w", newline="") as file:
            csv.writer(file).writerows([("text", "label"), *rows])
    (folder / "new.csv").write_text("text\nthe old lamp Rome\n")
    for name, seed in (("train", 1), ("dev", 2)):
        write_lines(folder / f"{name}-v2.0.jsonl", questions(16, seed, no_answer=0.3))
    chats = [
        {"messages": [{"role": "user", "content": town}, {"role": "assistant", "content": ANSWER}]}
        for town in TOWNS
    ]
    write_lines(folder / "chats.jsonl", chats * 3)
    write_lines(
        folder / "pairs.jsonl", [{"prompt": "the", "chosen": town, "rejected": "."} for town in TOWNS]
    )
    return folder


@pytest.mark.slow  # test_finetuning.py, test_chat_models.py and test_adapters.py have the commands one by one
def test_the_pages_are_followed_from_top_to_bottom(folder: Path) -> None:
    followed = []
    for page in ("finetuning.md", "adapters.md"):
        for language, title, text in FENCE.findall((ROOT / "docs/guide" / page).read_text(encoding="utf-8")):
            if title:
                (folder / title).write_text(text, encoding="utf-8")
            for line in text.splitlines() if language == "console" else ():
                words = shlex.split(line, comments=True)[1:]
                less = LESS.get(words[1], "").split()
                output = megatfm(*last_of_each_key([*words, *less]), output=folder / "said", cwd=folder)
                assert "Traceback" not in output, line
                followed.append(words[0])
    finetuned = ["finetune", "predict", "finetune", "finetune", "generate", "finetune", "launch", "verify"]
    assert followed == [*finetuned, "finetune", *["convert"] * 4, "finetune"]
    transformers.AutoModelForSequenceClassification.from_pretrained(folder / "topics-hf")
    transformers.AutoModelForSequenceClassification.from_pretrained(folder / "merged")
    assert (folder / "runs/preferences/task.json").is_file()
