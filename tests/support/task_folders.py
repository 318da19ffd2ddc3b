"""A small tokenizer and encoder in the Hugging Face format, and files of tasks that they can learn."""

import json
import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from tokenizers import models, pre_tokenizers, processors

TOWNS = ("Rome", "Oslo", "Kyiv", "Bern", "Lyon", "東京")
NAMES = ("Anna", "Emil", "Dora", "Gustav")
FILLERS = ("the", "old", "lamp", "was", "red", "and", "new", ".")
MARKS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write JSON lines."""
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def save_bert(folder: Path, words: Sequence[str], **options: Any) -> None:
    """Save a BERT of two layers with random weights, and its tokenizer of whole words."""
    vocabulary = [*MARKS, *dict.fromkeys(words)]
    built = tokenizers.Tokenizer(
        models.WordPiece({word: i for i, word in enumerate(vocabulary)}, unk_token="[UNK]")
    )
    built.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    built.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=built, unk_token="[UNK]", pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]",
        mask_token="[MASK]",
    )  # fmt: skip
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(vocabulary), hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **options,
    )  # fmt: skip
    transformers.BertForPreTraining(config).save_pretrained(folder)
    fast.save_pretrained(folder)


def questions(n: int, seed: int, *, no_answer: float = 0.0) -> list[dict[str, Any]]:
    """Where someone was: the one town of a text of 30 words or so, or none in a share of them."""
    draw, rows = random.Random(seed), []
    for number in range(n):
        words = [draw.choice(FILLERS + NAMES) for _ in range(draw.randint(20, 35))]
        has_answer, place = draw.random() >= no_answer, draw.randrange(len(words))
        if has_answer:
            words[place] = draw.choice(TOWNS)
        answers = [{"text": words[place], "answer_start": len(" ".join([*words[:place], ""]))}]
        question = f"where was {draw.choice(NAMES)} ?"
        row = {"id": f"q{seed}-{number}", "question": question, "context": " ".join(words)}
        rows.append(row | {"answers": answers if has_answer else []})
    return rows


WORDS_OF_QUESTIONS = (*TOWNS, *NAMES, *FILLERS, "where", "was", "?")
