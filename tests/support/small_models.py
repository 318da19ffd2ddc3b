"""Small Hugging Face folders with a tokenizer of a few words, and files of tasks on these words."""

import csv
import json
import random
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from tokenizers import models, pre_tokenizers, processors

from megatfm import cli

ANIMALS = ["cat", "dog", "horse", "cow", "sheep", "goat"]
TOOLS = ["saw", "hammer", "drill", "rasp", "plane", "file"]
OTHER = ["the", "a", "old", "new", "in", "on", "by"]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def write_model(folder: Path, name: str) -> Any:
    """Write a model of transformers, "bert" or "llama", with its tokenizer; returns the model."""
    vocabulary = [*SPECIAL, *ANIMALS, *TOOLS, *OTHER]
    built = tokenizers.Tokenizer(
        models.WordPiece({word: i for i, word in enumerate(vocabulary)}, unk_token="[UNK]")
    )
    built.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    built.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    names = dict(zip(("pad", "unk", "cls", "sep", "mask"), SPECIAL, strict=True))
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=built, **{f"{key}_token": token for key, token in names.items()}
    )
    torch.manual_seed(0)
    sizes = {
        "vocab_size": len(vocabulary), "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
        "intermediate_size": 64, "max_position_embeddings": 64,
    }  # fmt: skip
    model: Any
    if name == "bert":
        config = transformers.BertConfig(**sizes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        model = transformers.BertForPreTraining(config)
    else:
        llama = transformers.LlamaConfig(**sizes, pad_token_id=0, bos_token_id=2, eos_token_id=3)
        model = transformers.LlamaForCausalLM(llama)
    model.save_pretrained(folder / name)
    fast.save_pretrained(folder / name)
    return model


def write_topics(folder: Path, n: int = 96) -> None:
    """Write train.csv and validation.csv: texts that end in an animal or a tool, as the label says."""
    draw = random.Random(1)
    for name, count in (("train", n), ("validation", 24)):
        with open(folder / f"{name}.csv", "w", newline="") as file:
            writer = csv.DictWriter(file, ["text", "label"])
            writer.writeheader()
            for _ in range(count):
                word = draw.choice(ANIMALS + TOOLS)
                text = " ".join([*draw.sample(OTHER, draw.randint(1, 4)), word])
                writer.writerow({"text": text, "label": "animal" if word in ANIMALS else "tool"})


def write_preferences(folder: Path, n: int = 24) -> None:
    """Write pairs.jsonl: answers that name an animal are preferred to those that name a tool."""
    draw = random.Random(2)
    rows = []
    for _ in range(n):
        chosen, rejected = f"a {draw.choice(ANIMALS)}", f"a {draw.choice(TOOLS)}"
        rows.append({"prompt": f"the {draw.choice(OTHER)}", "chosen": chosen, "rejected": rejected})
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def run_command(*words: str) -> int:
    """Run `megatfm`; returns its exit code."""
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    return int(ended.value.code or 0)
